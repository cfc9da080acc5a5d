"""Memory that a GPU can copy from by itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def pinned_empty(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return uninitialised page-locked memory, an allocator for :class:`tq_fs.Arena`.

    Untested: no machine with a GPU was at hand. Where slime's replay is given pinned, contiguous
    rows it keeps them as they are, instead of copying them into pinned memory of its own.
    """
    import torch  # noqa: PLC0415  # the package loads without it

    found: npt.NDArray[np.uint8] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return found
