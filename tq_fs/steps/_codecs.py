"""Bytes of one chunk: compression by numcodecs, checksum by the crc32c package."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from crc32c import crc32c
from numcodecs import Blosc, Zstd

from tq_fs.errors import ChunkCorrupt
from tq_fs.steps._layout import CHECKSUM_BYTES, ArrayLayout
from tq_fs.steps._metadata import BLOSC_LEVEL, ZSTD_LEVEL

Bytes = npt.NDArray[np.uint8]


# numpy arrays are buffers, which Python 3.11 has no type for
crc: Callable[..., int] = crc32c


def checksum(data: Bytes) -> bytes:
    """Return the CRC-32C of `data` as the Zarr codec stores it: four bytes, little-endian."""
    return sealed(crc(data))


def sealed(value: int) -> bytes:
    """Return a CRC-32C as the Zarr codec stores it."""
    return value.to_bytes(CHECKSUM_BYTES, "little")


@functools.cache
def _compressor(codec: str, itemsize: int) -> Blosc | Zstd:
    if codec == "lz4":
        return Blosc("lz4", clevel=BLOSC_LEVEL, shuffle=Blosc.BITSHUFFLE, typesize=itemsize)
    return Zstd(level=ZSTD_LEVEL)


def compress(data: Bytes, layout: ArrayLayout) -> Bytes:
    """Return one chunk compressed as its layout says."""
    stored = _compressor(layout.codec, layout.itemsize).encode(data)
    return np.frombuffer(stored, np.uint8)


def decode(stored: Bytes, layout: ArrayLayout, scratch: Callable[[int], Bytes]) -> Bytes:
    """Check and decompress one chunk.

    Parameters
    ----------
    stored
        The chunk's bytes, checksum included.
    scratch
        Gives a buffer of so many bytes, for decompressing into.

    Returns
    -------
    uint8 array
        The chunk's decoded bytes, in `stored` or in the scratch buffer.

    Raises
    ------
    ChunkCorrupt
        The checksum differs, or the bytes do not decode to a chunk.
    """
    if layout.checksum:
        stored = verify(stored)
    if layout.plain:
        return stored
    try:
        return _decompress(stored, layout, scratch)
    except (RuntimeError, ValueError) as error:
        raise ChunkCorrupt(f"does not decompress ({error})", remedy=_REMEDY) from error


def _decompress(stored: Bytes, layout: ArrayLayout, scratch: Callable[[int], Bytes]) -> Bytes:
    compressor = _compressor(layout.codec, layout.itemsize)
    if layout.codec == "lz4":
        # Blosc believes its header: a lying one would have it read past the chunk, and a shorter
        # chunk would leave old bytes behind it in the scratch buffer.
        if int.from_bytes(stored[12:16].tobytes(), "little") != len(stored):
            raise ValueError("the length in its header is not its own")
        size = int.from_bytes(stored[4:8].tobytes(), "little")  # the Blosc header's nbytes
        target = scratch(layout.chunk_nbytes)
        if size == len(target):
            compressor.decode(stored, out=target)
            return target
    else:
        target = np.frombuffer(compressor.decode(stored), np.uint8)
        size = len(target)
        if size == layout.chunk_nbytes:
            return target
    raise ValueError(f"{size} bytes where a chunk has {layout.chunk_nbytes}")


def verify(stored: Bytes) -> Bytes:
    """Return a chunk's bytes without the checksum behind them, once it agrees.

    Raises
    ------
    ChunkCorrupt
    """
    body = stored[:-CHECKSUM_BYTES]
    check(body, stored[-CHECKSUM_BYTES:])
    return body


def check(body: Bytes, tail: bytes | bytearray | Bytes) -> None:
    """Compare a chunk's bytes with the checksum stored behind them.

    Raises
    ------
    ChunkCorrupt
    """
    want = int.from_bytes(tail, "little")
    have = crc(body)
    if have != want:
        raise ChunkCorrupt(
            f"checksum {have:08x} where {want:08x} was stored over {len(body)} bytes",
            remedy=_REMEDY,
        )


_REMEDY = "the bytes changed on the device: restore the Step or discard its session"
