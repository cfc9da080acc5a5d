"""Whether two paths gave the same tensors: dtype, shape and every bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tq_fs.trajectory import Segment

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, Sequence["torch.Tensor"]]


def name_of(segment: Segment, field: str) -> str:
    """Return how a report names one tensor."""
    return f"{segment.session_id}, {segment.view} Segment {segment.index}, {field}"


def differences(segments: Sequence[Segment], ours: Tensors, theirs: Tensors) -> Iterator[str]:
    """Yield what differs between two hydrated batches of the same Segments."""
    for field in sorted(ours.keys() | theirs.keys()):
        rows = zip(segments, ours[field], theirs[field], strict=True)
        for segment, mine, other in rows:
            difference = _difference(mine, other)
            if difference:
                yield f"{name_of(segment, field)}: {difference}"


def _difference(mine: torch.Tensor, other: torch.Tensor) -> str:
    if mine.dtype != other.dtype or mine.shape != other.shape:
        return f"{mine.dtype} {list(mine.shape)} and {other.dtype} {list(other.shape)}"
    a, b = (np.ascontiguousarray(t.numpy()).reshape(-1) for t in (mine, other))
    bits = f"u{a.itemsize}"  # equal floats can differ (0.0, -0.0), and a NaN equals no other
    wrong = np.flatnonzero(a.view(bits) != b.view(bits))
    if not wrong.size:
        return ""
    at = [int(i) for i in np.unravel_index(wrong[0], mine.shape)]
    return f"{wrong.size} of {a.size} values, first at {at}: {a[wrong[0]]} and {b[wrong[0]]}"


def digest(tensor: torch.Tensor) -> str:
    """Return a digest of dtype, shape and bytes, to compare tensors of different processes."""
    array = np.ascontiguousarray(tensor.numpy())
    digest = hashlib.blake2b(f"{array.dtype.str} {array.shape} ".encode(), digest_size=16)
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def digests_differ(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of tensors whose digests differ, or that one side lacks."""
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            missing = "" if name in ours and name in theirs else " (on one path only)"
            yield name + missing
