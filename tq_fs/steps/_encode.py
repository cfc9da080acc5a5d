"""One Step's arrays into the objects of its Zarr group."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tq_fs import narrow
from tq_fs.fields import UNKNOWN, FieldSpec
from tq_fs.keys import StepKey
from tq_fs.memory import align, aligned_empty
from tq_fs.steps import _codecs
from tq_fs.steps._entry import MASK_SUFFIX, ArrayEntry, StepEntry, attributes_json
from tq_fs.steps._layout import CHECKSUM_BYTES, ArrayLayout, known_layout, layout_for
from tq_fs.steps._metadata import array_json, group_json

Array = npt.NDArray[Any]
Buffer = bytes | Array

GROUP = "zarr.json"
_MAX_UNKNOWN_RUNS = 64
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


class FieldArray(NamedTuple):
    """A field of a Step before it is encoded: its declaration and its checked values."""

    spec: FieldSpec
    values: Array


@dataclass(frozen=True, slots=True)
class EncodedStep:
    """A Step ready to be published.

    Attributes
    ----------
    members
        Objects of the group by name; the group's own ``zarr.json`` comes last.
    entry
        What a manifest says of the Step.
    """

    members: Mapping[str, Sequence[Buffer]]
    entry: StepEntry


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


def encode_step(
    store_id: str,
    key: StepKey,
    tokens: int,
    arrays: Sequence[FieldArray],
    options: EncodeOptions,
    scratch: Scratch,
) -> EncodedStep:
    """Check, narrow and lay out the stored fields of one Step.

    Nothing is copied that can be written from where it lies. The buffers returned may lie in
    `arrays` and in `scratch` and are valid until either changes.

    Parameters
    ----------
    tokens
        Number of tokens the Step recorded.
    arrays
        Fields, each ``[rows, *inner]`` of its memory type, rows checked.

    Raises
    ------
    ValueOutOfRange
        An id does not fit; no byte was written.
    """
    members: dict[str, Sequence[Buffer]] = {}
    entries: dict[str, ArrayEntry] = {}
    forms: dict[str, Form] = {}
    for spec, values in arrays:
        form = form_of(spec, values, options)
        entries[spec.name], more = _encode_field(spec, values, form, scratch, members, key)
        forms[spec.name] = form
        forms.update(more)
    if not options.compact:
        for form in forms.values():
            members[form.json_member] = form.json
    step = StepEntry(index=key.step_index, tokens=tokens, fields=entries)
    layouts = tuple((name, form.layout) for name, form in forms.items())
    members[GROUP] = (group_json(layouts, attributes_json(store_id, key, step)),)
    return EncodedStep(members, step)


# ---------------------------------------------------------------- what does not change


@dataclass(frozen=True, slots=True)
class Form:
    """What all arrays of one name, shape and type have in common; made once and kept.

    Attributes
    ----------
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

    layout: ArrayLayout
    member: str
    json_member: str
    json: tuple[bytes]
    entry: ArrayEntry
    index: bytes


def form_of(spec: FieldSpec, values: Array, options: EncodeOptions) -> Form:
    """Return the form of a field's array."""
    dtype = narrow.stored_type(spec, values)
    codec = spec.codec if spec.codec != "auto" else default_codec(dtype)
    groups = options.layer_groups if spec.layered else 1
    return _form(
        spec.name, values.shape, dtype, spec.dtype, codec, options.checksum, spec.layered, groups
    )


@functools.cache
def default_codec(dtype: str) -> str:
    """Return the codec of a stored type, by measurement (docs/design/0003)."""
    kind = np.dtype(dtype)
    return "lz4" if kind.kind in "iu" and kind.itemsize > 1 else "none"


@functools.lru_cache(1024)
def _form(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    memory: str,
    codec: str,
    checksum: bool,
    layered: bool,
    layer_groups: int,
) -> Form:
    layout = layout_for(shape, dtype, codec, checksum=checksum, layer_groups=layer_groups)
    return _form_of_layout(name, layout, memory, layered)


def _form_of_layout(name: str, layout: ArrayLayout, memory: str, layered: bool) -> Form:
    index = _shard_index(layout, None) if layout.sharded else b""
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
    return Form(layout, member, f"{name}/{GROUP}", (array_json(layout),), entry, index)


def _shard_index(layout: ArrayLayout, sizes: Sequence[int] | None) -> bytes:
    """Return the Zarr shard index: (offset, length) of each chunk in C order, and a CRC-32C."""
    blocks, groups = layout.grid
    offsets = layout.offsets(sizes)
    places = [group * blocks + block for block in range(blocks) for group in range(groups)]
    index = b"".join(_INDEX_ENTRY.pack(offsets[p], layout.stored_nbytes(p, sizes)) for p in places)
    return index + _codecs.checksum(np.frombuffer(index, np.uint8))


# ---------------------------------------------------------------- what does


def _encode_field(
    spec: FieldSpec,
    values: Array,
    form: Form,
    scratch: Scratch,
    members: dict[str, Sequence[Buffer]],
    key: StepKey,
) -> tuple[ArrayEntry, dict[str, Form]]:
    """Add a field's objects to `members`; return its entry and the arrays beside it."""
    mask = None
    chunks = _chunks(spec, values, form.layout, scratch)
    if chunks is None:
        bound = narrow.id_bound(spec, form.layout.dtype)
        values, mask = narrow.split_unknown(spec, values, bound, str(key))
        chunks = _chunks(spec, values, form.layout, scratch)
        assert chunks is not None
    entry, buffers = _seal(form, chunks)
    if form.layout.chunks:
        members[form.member] = buffers
    if mask is None:
        return entry, {}
    return _note_unknown(spec.name, entry, mask, members)


class _Chunk(NamedTuple):
    """One chunk's values, flat, and its CRC-32C where that was cheap to take on the way."""

    data: Array
    crc: int | None = None


def _chunks(
    spec: FieldSpec, values: Array, layout: ArrayLayout, scratch: Scratch
) -> list[_Chunk] | None:
    """Return the chunks in the order of the object; None if an id is not plain."""
    same = layout.dtype == spec.dtype
    if same and spec.narrowable and not _ids_plain(spec, values, layout.dtype):
        return None
    in_place = same and layout.grid[1] == 1 and values.flags.c_contiguous
    out = []
    for block in _blocks(values, layout, together=in_place and layout.seamless):
        if in_place and len(block) % layout.chunk[0] == 0:
            out.append(_Chunk(block.reshape(-1).view(np.uint8)))
            continue
        chunk = _copied(spec, block, layout, scratch)
        if chunk is None:
            return None
        out.append(chunk)
    return out


def _blocks(values: Array, layout: ArrayLayout, *, together: bool) -> Iterator[Array]:
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


def _ids_plain(spec: FieldSpec, values: Array, dtype: str) -> bool:
    """Tell whether all ids can be stored as they are; -1 can, in the memory type."""
    if values.size == 0:
        return True
    if not spec.unknown and spec.limit is None:
        return True  # numbers, not ids
    low, high = int(values.min()), int(values.max())
    return high < narrow.id_bound(spec, dtype) and low >= (UNKNOWN if spec.unknown else 0)


def _copied(spec: FieldSpec, block: Array, layout: ArrayLayout, scratch: Scratch) -> _Chunk | None:
    """Return a block as a whole chunk in scratch memory, padded with zeros; None as above."""
    flat = scratch.take(layout.chunk_nbytes)
    chunk = flat.view(layout.dtype).reshape(layout.chunk)
    inside = chunk
    if block.shape != chunk.shape:
        inside = chunk[tuple(slice(n) for n in block.shape)]
        chunk[len(block) :] = 0
        if chunk.ndim > 1:
            chunk[:, block.shape[1] :] = 0
    if layout.dtype == spec.dtype:
        np.copyto(inside, block)
        return _Chunk(flat)
    if not narrow.narrow_into(block, inside, narrow.id_bound(spec, layout.dtype)):
        return None
    # Now, while the chunk lies in the cache.
    crc = _codecs.crc(flat) if layout.checksum and layout.plain else None
    return _Chunk(flat, crc)


def _seal(form: Form, chunks: Sequence[_Chunk]) -> tuple[ArrayEntry, Sequence[Buffer]]:
    """Compress, checksum and index the chunks of one object."""
    layout = form.layout
    if layout.plain:
        return form.entry, _buffers(layout, chunks, form.index)
    compressed = [_Chunk(_codecs.compress(chunk.data, layout)) for chunk in chunks]
    extra = CHECKSUM_BYTES if layout.checksum else 0
    sizes = tuple(chunk.data.size + extra for chunk in compressed)
    index = _shard_index(layout, sizes) if layout.sharded else b""
    entry = msgspec.structs.replace(form.entry, nbytes=sum(sizes) + len(index), sizes=sizes)
    return entry, _buffers(layout, compressed, index)


def _buffers(layout: ArrayLayout, chunks: Sequence[_Chunk], index: bytes) -> list[Buffer]:
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


def _note_unknown(
    name: str, entry: ArrayEntry, mask: Array, members: dict[str, Sequence[Buffer]]
) -> tuple[ArrayEntry, dict[str, Form]]:
    """Record unknown values beside the array: as row ranges where those say it all."""
    rows = mask.reshape(len(mask), -1)
    whole = np.asarray(rows.all(axis=1))
    runs = narrow.runs_of(whole)
    if len(runs) <= _MAX_UNKNOWN_RUNS and not rows[~whole].any():
        return msgspec.structs.replace(entry, unknown=tuple(runs)), {}
    layout = known_layout(entry.shape, "uint8", entry.chunk, "lz4", checksum=entry.checksum)
    form = _form_of_layout(name + MASK_SUFFIX, layout, "bool", entry.layered)
    spec = FieldSpec(name="mask", dtype="uint8", stored="uint8")
    chunks = _chunks(spec, mask.view(np.uint8), layout, Scratch())
    assert chunks is not None
    mine, buffers = _seal(form, chunks)
    members[form.member] = buffers
    return msgspec.structs.replace(entry, mask=mine), {name + MASK_SUFFIX: form}
