"""One array into the bytes of its object: chunks, checksums, shard index."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tq_fs.memory import align, aligned_empty
from tq_fs.steps import _codecs
from tq_fs.steps._entry import ArrayEntry
from tq_fs.steps._layout import CHECKSUM_BYTES, ArrayLayout, layout_for
from tq_fs.steps._metadata import array_json

Array = npt.NDArray[Any]
Buffer = bytes | Array

GROUP = "zarr.json"
_KEEP_BYTES = 16 * 1024 * 1024
_INDEX_ENTRY = struct.Struct("<QQ")


class Scratch:
    """Memory that one thread encodes into, Step after Step, so that pages are touched once.

    Not thread-safe. What :meth:`take` gave is valid until :meth:`reset`. At most 16 MiB stay
    allocated between Steps.
    """

    def __init__(self) -> None:
        self._memory = aligned_empty(0)
        self._used = 0
        self._asked = 0

    def reset(self) -> None:
        """Forget what was taken, and grow towards what the last Step asked for."""
        want = min(self._asked, _KEEP_BYTES)
        if want > self._memory.size:
            self._memory = aligned_empty(want)
        self._used = self._asked = 0

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return `nbytes` of uninitialised, aligned memory."""
        self._asked += align(nbytes)
        start = self._used
        if start + nbytes > self._memory.size:
            return aligned_empty(nbytes)
        self._used += align(nbytes)
        return self._memory[start : start + nbytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeOptions:
    """Settings of encoding.

    Attributes
    ----------
    checksum
        Follow each chunk with its CRC-32C.
    layer_groups
        Groups to split the layer axis into; the pipeline-parallel size of the readers.
    compact
        Leave out the arrays' own ``zarr.json``: the group's holds them all.
    """

    checksum: bool = True
    layer_groups: int = 1
    compact: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """What all arrays of one name, shape and type have in common; made once and kept.

    Attributes
    ----------
    name
        The array's name.
    layout
        The chunking.
    member, json_member
        Names of the chunk object and of the metadata in the group.
    json
        The metadata.
    entry
        The manifest's entry, exact where chunks are not compressed.
    index
        The shard index, likewise; empty without shard.
    """

    name: str
    layout: ArrayLayout
    member: str
    json_member: str
    json: tuple[bytes]
    entry: ArrayEntry
    index: bytes


@functools.cache
def default_codec(dtype: str) -> str:
    """Return the codec of a stored type, by measurement (docs/design/0003)."""
    kind = np.dtype(dtype)
    return "lz4" if kind.kind in "iu" and kind.itemsize > 1 else "none"


@functools.lru_cache(1024)
def array_form(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    memory: str,
    codec: str,
    checksum: bool,
    layered: bool,
    layer_groups: int,
) -> Form:
    """Return the form of arrays of a name, shape and type."""
    layout = layout_for(shape, dtype, codec, checksum=checksum, layer_groups=layer_groups)
    return form_of_layout(name, layout, memory, layered)


def form_of_layout(name: str, layout: ArrayLayout, memory: str, layered: bool) -> Form:
    """Return the form of arrays of a name and a layout."""
    index = shard_index(layout, None) if layout.sharded else b""
    entry = ArrayEntry(
        shape=layout.shape,
        dtype=layout.dtype,
        memory=memory,
        chunk=layout.chunk,
        codec=layout.codec,  # type: ignore[arg-type]
        checksum=layout.checksum,
        layered=layered,
        nbytes=layout.offsets(None)[-1] + len(index),
    )
    member = f"{name}/{layout.object_name}"
    return Form(name, layout, member, f"{name}/{GROUP}", (array_json(layout),), entry, index)


def shard_index(layout: ArrayLayout, sizes: Sequence[int] | None) -> bytes:
    """Return the Zarr shard index: (offset, length) of each chunk in C order, and a CRC-32C."""
    blocks, groups = layout.grid
    offsets = layout.offsets(sizes)
    places = [group * blocks + block for block in range(blocks) for group in range(groups)]
    index = b"".join(_INDEX_ENTRY.pack(offsets[p], layout.stored_nbytes(p, sizes)) for p in places)
    return index + _codecs.checksum(np.frombuffer(index, np.uint8))


class Chunk(NamedTuple):
    """One chunk's values, flat, and its CRC-32C where that was cheap to take on the way."""

    data: Array
    crc: int | None = None


def blocks(values: Array, layout: ArrayLayout, *, together: bool) -> Iterator[Array]:
    """Yield the part of an array that each chunk holds; all whole chunks as one if `together`."""
    if layout.grid[1] == 1:
        tall = layout.chunk[0]
        whole = len(values) - len(values) % tall if together else 0
        if whole:
            yield values[:whole]
        yield from (values[i : i + tall] for i in range(whole, len(values), tall))
        return
    for part in layout.parts((0, len(values))):
        yield values[part.rows[0] : part.rows[1], part.layers[0] : part.layers[1]]


def seal(form: Form, chunks: Sequence[Chunk]) -> tuple[ArrayEntry, Sequence[Buffer]]:
    """Compress, checksum and index the chunks of one object."""
    layout = form.layout
    if layout.plain:
        return form.entry, _buffers(layout, chunks, form.index)
    compressed = [Chunk(_codecs.compress(chunk.data, layout)) for chunk in chunks]
    extra = CHECKSUM_BYTES if layout.checksum else 0
    sizes = tuple(chunk.data.size + extra for chunk in compressed)
    index = shard_index(layout, sizes) if layout.sharded else b""
    entry = msgspec.structs.replace(form.entry, nbytes=sum(sizes) + len(index), sizes=sizes)
    return entry, _buffers(layout, compressed, index)


def _buffers(layout: ArrayLayout, chunks: Sequence[Chunk], index: bytes) -> list[Buffer]:
    """Return what one object consists of: chunks, checksums, gaps, shard index."""
    buffers: list[Buffer] = []
    for data, crc in chunks:
        buffers.append(data)
        if layout.checksum:
            buffers.append(_codecs.checksum(data) if crc is None else _codecs.sealed(crc))
        if layout.gap:
            buffers.append(bytes(layout.gap))
    if index:
        buffers.append(index)
    return buffers


def encode_array(
    form: Form, values: Array, scratch: Scratch, members: dict[str, Sequence[Buffer]]
) -> ArrayEntry:
    """Add the object of an array that is stored as it is to `members`; return its entry.

    Parameters
    ----------
    form
        Of the array's name, shape and type.
    values
        ``[rows, *inner]`` of the stored type; what is contiguous is written from where it lies.
    """
    layout = form.layout
    in_place = layout.grid[1] == 1 and values.flags.c_contiguous
    chunks = []
    for block in blocks(values, layout, together=in_place and layout.seamless):
        if in_place and len(block) % layout.chunk[0] == 0:
            chunks.append(Chunk(block.reshape(-1).view(np.uint8)))
        else:
            chunks.append(Chunk(_padded(block, layout, scratch)))
    entry, buffers = seal(form, chunks)
    if layout.chunks:
        members[form.member] = buffers
    return entry


def _padded(block: Array, layout: ArrayLayout, scratch: Scratch) -> Array:
    flat = scratch.take(layout.chunk_nbytes)
    chunk = flat.view(layout.dtype).reshape(layout.chunk)
    if block.shape != chunk.shape:
        flat[:] = 0
    chunk[tuple(slice(n) for n in block.shape)] = block
    return flat
