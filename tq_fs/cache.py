"""A byte-bounded LRU of decoded chunks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Any

import numpy.typing as npt

from tq_fs.metrics import Sample

Array = npt.NDArray[Any]


class ChunkCache:
    """Keeps decoded chunks in their stored type. Safe to call from many threads.

    Parameters
    ----------
    limit_bytes
        Bound of the arrays' bytes; 0 keeps nothing.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.hits = 0
        self.misses = 0
        self._used = 0
        self._chunks: OrderedDict[Hashable, Array] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes kept now."""
        return self._used

    def get(self, key: Hashable) -> Array | None:
        """Return a chunk, read-only, and make it the youngest; None where it is not kept."""
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is None:
                self.misses += 1
                return None
            self.hits += 1
            self._chunks.move_to_end(key)
            return chunk

    def put(self, key: Hashable, chunk: Array) -> None:
        """Keep a copy of a chunk, letting go of the oldest ones; too large a one is not kept."""
        if chunk.nbytes > self.limit_bytes:
            return
        copy = chunk.copy()
        copy.flags.writeable = False
        with self._lock:
            if key in self._chunks:
                return
            self._chunks[key] = copy
            self._used += copy.nbytes
            while self._used > self.limit_bytes:
                self._used -= self._chunks.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._chunks.clear()
            self._used = 0

    def samples(self) -> Iterator[Sample]:
        """Yield what :meth:`tq_fs.metrics.Metrics.watch` wants to know."""
        yield Sample("tqfs_cache_hits_total", self.hits)
        yield Sample("tqfs_cache_misses_total", self.misses)
        yield Sample("tqfs_cache_bytes", self._used)
        yield Sample("tqfs_cache_limit_bytes", self.limit_bytes)
