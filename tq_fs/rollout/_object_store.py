"""How much Ray's object stores hold, as the raylets report it to everybody."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from ray._private import state

_RESOURCE = "object_store_memory"
_EVERY_S = 0.02
_REPORT_S = 0.25  # raylets report every 0.1 s


def object_store_bytes() -> dict[str, int]:
    """Return the bytes that each node's object store holds, by node id.

    Of copies that were fetched from another node Ray counts none, unless its cluster was started
    with ``_system_config={"scheduler_report_pinned_bytes_only": False}``.
    """
    total = state.total_resources_per_node()  # type: ignore[no-untyped-call]
    free = state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return {
        node: int(total[node].get(_RESOURCE, 0) - have.get(_RESOURCE, 0))
        for node, have in free.items()
        if node in total
    }


class ObjectStoreWatch:
    """Samples Ray's object stores until the block is left; a context manager.

    Growth is the largest rise from any earlier level: what was there before and goes away hides
    nothing. What other programs on the cluster do is seen too, and what comes and goes between two
    reports of a raylet, 0.1 s apart, is not.
    """

    def __init__(self) -> None:
        self._total = _Rise()
        self._nodes: dict[str, _Rise] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tq-fs-watch", daemon=True)

    @property
    def growth_bytes(self) -> int:
        """Return the growth of all nodes together."""
        return self._total.most

    @property
    def growth_by_node(self) -> Mapping[str, int]:
        """Return the growth of each node by itself, by its id."""
        return {node: rise.most for node, rise in self._nodes.items()}

    def _look(self) -> None:
        found = object_store_bytes()
        self._total.take(sum(found.values()))
        for node, nbytes in found.items():
            self._nodes.setdefault(node, _Rise()).take(nbytes)

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self._look()

    def __enter__(self) -> ObjectStoreWatch:
        """Begin."""
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """End, once the raylets have reported what is there now."""
        self._ended.wait(_REPORT_S)
        self._ended.set()
        self._thread.join()


class _Rise:
    """The largest rise of a level from an earlier one."""

    def __init__(self) -> None:
        self.most = 0
        self._lowest: int | None = None

    def take(self, level: int) -> None:
        self._lowest = level if self._lowest is None else min(level, self._lowest)
        self.most = max(self.most, level - self._lowest)
