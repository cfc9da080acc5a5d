"""Memory that writes are received into: used again, because fresh pages are slow."""

from __future__ import annotations

import threading

_PAGE_BITS = 12
_FINE_BITS = 4  # sizes are rounded up by an eighth at most


class Buffers:
    """Buffers of any size. Safe to call from many threads.

    Parameters
    ----------
    limit_bytes
        What is in use and what is kept for later stay below it together, and above it only where
        what is in use alone does.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._free: dict[int, list[bytearray]] = {}
        self._free_bytes = 0
        self._used_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes in use and kept."""
        return self._used_bytes + self._free_bytes

    def take(self, nbytes: int) -> bytearray:
        """Return a buffer of at least `nbytes`, whatever it holds."""
        size = size_of(nbytes)
        with self._lock:
            self._used_bytes += size
            same = self._free.get(size)
            if same:
                self._free_bytes -= size
                return same.pop()
            self._shrink()
        return bytearray(size)

    def give(self, buffer: bytearray) -> None:
        """Give a buffer back."""
        size = len(buffer)
        with self._lock:
            self._used_bytes -= size
            self._free_bytes += size
            self._free.setdefault(size, []).append(buffer)
            self._shrink()

    def _shrink(self) -> None:
        while self._free_bytes and self.nbytes > self._limit:
            size, same = next(iter(self._free.items()))
            if same:
                same.pop()
                self._free_bytes -= size
            else:
                del self._free[size]


def size_of(nbytes: int) -> int:
    """Return the size of the buffer for so many bytes: one that others are likely to want too."""
    step = 1 << max(_PAGE_BITS, nbytes.bit_length() - _FINE_BITS)
    return -(-nbytes // step) * step
