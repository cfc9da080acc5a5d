"""How one field of one Step is cut into chunks, and where each chunk lies in its object.

A field is always one object. Up to 2,048 rows it is one Zarr chunk; beyond that it is one shard of
inner chunks of about 1,024 rows, balanced so that next to nothing is padded. Layer groups split
the layer axis for pipeline-parallel readers. Inside a shard the chunks of one layer group lie one
after the other, so that a quarter of the layers is one read and a quarter of the tokens is one
read per group; the Zarr shard index says so to every other reader.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from tq_fs.memory import align

WHOLE_ROWS = 2048
INNER_ROWS = 1024
CHUNK_BYTES = 4 * 1024 * 1024
CHECKSUM_BYTES = 4


class Part(NamedTuple):
    """What a selection needs of one chunk.

    Attributes
    ----------
    position
        Place of the chunk in its object, from 0.
    rows, layers
        Half-open ranges, in the coordinates of the whole array.
    origin
        First row and layer of the chunk.
    """

    position: int
    rows: tuple[int, int]
    layers: tuple[int, int]
    origin: tuple[int, int]


@dataclass(frozen=True, eq=False)  # the factories below give equal layouts as one object
class ArrayLayout:
    """Shape, type and chunking of one stored array.

    Attributes
    ----------
    shape
        ``(rows, *inner)``.
    dtype
        Stored type, a numpy name.
    chunk
        Shape of one (inner) chunk; edge chunks are padded to it.
    codec
        ``none``, ``lz4`` or ``zstd``.
    checksum
        Whether each chunk is followed by its CRC-32C.
    """

    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    codec: str
    checksum: bool

    @functools.cached_property
    def layers(self) -> int:
        """Length of the layer axis; 1 for fields without one."""
        return self.shape[1] if len(self.shape) > 1 else 1

    @functools.cached_property
    def grid(self) -> tuple[int, int]:
        """Number of chunks along rows and along layers."""
        across = self.chunk[1] if len(self.chunk) > 1 else 1
        return -(-self.shape[0] // self.chunk[0]), -(-self.layers // across)

    @functools.cached_property
    def chunks(self) -> int:
        """Number of chunks; 0 for an array without rows, which has no object."""
        return prod(self.grid)

    @functools.cached_property
    def sharded(self) -> bool:
        """Whether the object is a shard with an index behind its chunks."""
        return self.chunks > 1

    @functools.cached_property
    def itemsize(self) -> int:
        """Bytes of one stored value."""
        return np.dtype(self.dtype).itemsize

    @functools.cached_property
    def chunk_nbytes(self) -> int:
        """Decoded bytes of one chunk."""
        return prod(self.chunk) * self.itemsize

    @functools.cached_property
    def row_nbytes(self) -> int:
        """Decoded bytes of one row."""
        return prod(self.shape[1:]) * self.itemsize

    @functools.cached_property
    def object_name(self) -> str:
        """Zarr key of the only chunk or shard: ``c.0.0.0`` for three axes."""
        return ".".join(["c", *["0"] * len(self.shape)])

    @functools.cached_property
    def plain(self) -> bool:
        """Whether chunks lie uncompressed, so that their places follow from the layout."""
        return self.codec == "none"

    @functools.cached_property
    def gap(self) -> int:
        """Unused bytes behind each chunk of a shard.

        They keep chunks at multiples of 64 bytes, where the kernel copies them fastest.
        """
        stored = self.stored_nbytes(0, None)
        return align(stored) - stored if self.plain and self.sharded else 0

    @functools.cached_property
    def seamless(self) -> bool:
        """Whether chunks follow each other in the object as their rows do in memory."""
        return self.plain and not self.checksum and not self.gap and self.grid[1] == 1

    def stored_nbytes(self, position: int, sizes: Sequence[int] | None) -> int:
        """Return the stored bytes of a chunk, its checksum included."""
        if sizes is not None:
            return sizes[position]
        return self.chunk_nbytes + (CHECKSUM_BYTES if self.checksum else 0)

    def offsets(self, sizes: Sequence[int] | None) -> Sequence[int]:
        """Return where each chunk starts and the last one, with its gap, ends.

        Parameters
        ----------
        sizes
            Stored bytes of each chunk; None where :attr:`plain`.
        """
        if sizes is not None:
            return list(itertools.accumulate(sizes, initial=0))
        return self._plain_offsets

    @functools.cached_property
    def _plain_offsets(self) -> Sequence[int]:
        slot = self.stored_nbytes(0, None) + self.gap
        return range(0, slot * self.chunks + 1, slot)

    def parts(self, rows: tuple[int, int], layers: tuple[int, int] | None = None) -> Iterator[Part]:
        """Yield what half-open ranges of rows and layers need, in the order of the object."""
        first, last = layers or (0, self.layers)
        if rows[0] >= rows[1] or first >= last:
            return
        tall = self.chunk[0]
        wide = self.chunk[1] if len(self.chunk) > 1 else 1
        per_group = self.grid[0]
        for group in range(first // wide, -(-last // wide)):
            across = (max(first, group * wide), min(last, (group + 1) * wide))
            for block in range(rows[0] // tall, -(-rows[1] // tall)):
                down = (max(rows[0], block * tall), min(rows[1], (block + 1) * tall))
                yield Part(group * per_group + block, down, across, (block * tall, group * wide))

    def chunk_range(self, rows: tuple[int, int]) -> tuple[int, int]:
        """Return the half-open range of token chunks that cover `rows`."""
        if rows[0] >= rows[1]:
            return (0, 0)
        return rows[0] // self.chunk[0], -(-rows[1] // self.chunk[0])


@functools.lru_cache(4096)
def layout_for(
    shape: tuple[int, ...], dtype: str, codec: str, *, checksum: bool, layer_groups: int
) -> ArrayLayout:
    """Choose the chunking of an array; equal arguments give the same object.

    Parameters
    ----------
    shape
        ``(rows, *inner)``.
    layer_groups
        How many groups to split the layer axis into, where there is one.
    """
    inner = shape[1:]
    if inner:
        inner = (-(-inner[0] // min(layer_groups, inner[0])), *inner[1:])
    rows = shape[0]
    most = max(1, CHUNK_BYTES // (prod(inner) * np.dtype(dtype).itemsize))
    blocks = 1 if rows <= min(WHOLE_ROWS, most) else -(-rows // min(INNER_ROWS, most))
    tall = max(1, -(-rows // blocks))
    return known_layout(shape, dtype, (tall, *inner), codec, checksum=checksum)


@functools.lru_cache(4096)
def known_layout(
    shape: tuple[int, ...], dtype: str, chunk: tuple[int, ...], codec: str, *, checksum: bool
) -> ArrayLayout:
    """Return the layout with these values; equal arguments give the same object."""
    return ArrayLayout(shape, dtype, chunk, codec, checksum)
