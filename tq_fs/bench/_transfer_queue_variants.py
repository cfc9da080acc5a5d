"""TransferQueue with one backend after another, each in a process tree of its own."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tq_fs.bench._child import Child, running

OURS, SIMPLE, SSD = "tq_fs", "simple", "ssd"
_SSD_THRESHOLD_BYTES = 65536  # below the 0.66 MB of a Step's routing, above its logprobs
_CHILD = "tq_fs.bench._transfer_queue_child"


class Variant(NamedTuple):
    """A backend.

    Attributes
    ----------
    backend
        Its section of the configuration, for a folder.
    module
        What registers it, where TransferQueue does not know it.
    """

    backend: Callable[[Path], Mapping[str, Any]]
    module: str | None = None


def _simple(folder: Path) -> Mapping[str, Any]:  # noqa: ARG001  # keeps nothing there
    return {"storage_backend": "SimpleStorage"}


def _ssd(folder: Path) -> Mapping[str, Any]:
    offload = {"enabled": True, "path": str(folder), "threshold_bytes": _SSD_THRESHOLD_BYTES}
    return {"storage_backend": "SimpleStorage", "SimpleStorage": {"ssd_offload": offload}}


def _ours(folder: Path) -> Mapping[str, Any]:
    section = {"url": folder.absolute().as_uri(), "store_id": "bench"}
    return {"storage_backend": "TqFs", "TqFs": section}


VARIANTS: Mapping[str, Variant] = {
    SIMPLE: Variant(_simple),
    SSD: Variant(_ssd),
    OURS: Variant(_ours, "tq_fs.integrations.transfer_queue"),
}


@contextmanager
def queue_with(name: str, folder: Path) -> Iterator[Child]:
    """Start a TransferQueue with a backend of :data:`VARIANTS`; what it stored is gone afterwards.

    Raises
    ------
    StorageFailed
        It could not be started or ended; with the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=folder) as own:
        values = Path(own) / "values"
        values.mkdir()
        variant = VARIANTS[name]
        queue = Child(
            _CHILD,
            [json.dumps(variant.backend(values)), *filter(None, [variant.module])],
            log=Path(own) / "log",
            subject=f"TransferQueue with {name}",
            environment={"TQ_LOGGING_LEVEL": "ERROR"},  # on few cores each put warns
        )
        with running(queue):
            yield queue
