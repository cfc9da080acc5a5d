"""One Step's arrays into the objects of its Zarr group."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tq_fs import fields as f
from tq_fs.fields import FieldSpec
from tq_fs.keys import StepKey
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
_NO_CHUNK = 2**64 - 1


class Scratch:
    """Memory that one thread encodes into, Step after Step, so that pages are touched once.

    Not thread-safe. What :meth:`take` gave is valid until :meth:`reset`. At most 16 MiB stay
    allocated between Steps.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._used = 0
        self._asked = 0

    def reset(self) -> None:
        """Forget what was taken, and grow towards what the last Step asked for."""
        want = min(self._asked, _KEEP_BYTES)
        if want > self._memory.size:
            self._memory = np.empty(want, np.uint8)
        self._used = self._asked = 0

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return `nbytes` of uninitialised memory."""
        self._asked += nbytes
        start, self._used = self._used, self._used + nbytes
        if self._used <= self._memory.size:
            return self._memory[start : self._used]
        self._used = start
        return np.empty(nbytes, np.uint8)


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
    """

    checksum: bool = True
    layer_groups: int = 1


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
    stored: dict[str, ArrayLayout] = {}
    members: dict[str, Sequence[Buffer]] = {}
    entries: dict[str, ArrayEntry] = {}
    for field in arrays:
        entry, parts = _encode_field(field, options, scratch, str(key))
        for suffix, layout, buffers in parts:
            name = field.spec.name + suffix
            stored[name] = layout
            if layout.chunks:
                members[f"{name}/{layout.object_name}"] = buffers
        entries[field.spec.name] = entry
    step = StepEntry(index=key.step_index, tokens=tokens, fields=entries)
    for name, layout in stored.items():
        members[f"{name}/{GROUP}"] = (array_json(layout),)
    members[GROUP] = (group_json(stored, attributes_json(store_id, key, step)),)
    return EncodedStep(members, step)


_Part = tuple[str, ArrayLayout, Sequence[Buffer]]


def _encode_field(
    field: FieldArray, options: EncodeOptions, scratch: Scratch, subject: str
) -> tuple[ArrayEntry, list[_Part]]:
    spec, values = field
    dtype = f.stored_type(spec, values)
    layout = layout_for(
        values.shape,
        dtype,
        _codec(spec, dtype),
        checksum=options.checksum,
        layer_groups=options.layer_groups,
    )
    mask = None
    chunks = list(_fill_chunks(spec, values, layout, scratch))
    if any(chunk is None for chunk in chunks):
        bound = f.id_bound(spec, dtype)
        values, mask = f.split_unknown(spec, values, bound, subject)
        chunks = list(_fill_chunks(spec, values, layout, scratch))
    entry, buffers = _seal(layout, spec.dtype, [c for c in chunks if c is not None])
    parts: list[_Part] = [("", layout, buffers)]
    if mask is not None:
        entry, part = _note_unknown(entry, mask)
        parts += part
    return entry, parts


def _codec(spec: FieldSpec, dtype: str) -> str:
    """Return the codec, by measurement where it is left open (docs/design/0003)."""
    if spec.codec != "auto":
        return spec.codec
    kind = np.dtype(dtype)
    return "lz4" if kind.kind in "iu" and kind.itemsize > 1 else "none"


def _fill_chunks(
    spec: FieldSpec, values: Array, layout: ArrayLayout, scratch: Scratch
) -> Iterator[Array | None]:
    """Yield each chunk's values in the order of the object; None where an id is not plain."""
    ids = spec.narrowable
    bound = f.id_bound(spec, layout.dtype) if ids else 0
    whole = layout.grid[1] == 1
    for part in layout.parts((0, layout.shape[0])):
        block = values[part.rows[0] : part.rows[1]]
        if not whole:
            block = block[:, part.layers[0] : part.layers[1]]
        if whole and len(block) == layout.chunk[0] and layout.dtype == spec.dtype:
            yield block if not ids or _ids_plain(spec, block, bound) else None
            continue
        chunk = scratch.take(layout.chunk_nbytes).view(layout.dtype).reshape(layout.chunk)
        yield chunk if _fill(spec, block, chunk, bound) else None


def _ids_plain(spec: FieldSpec, block: Array, bound: int) -> bool:
    """Tell whether all ids can be stored as they are; -1 can, in the memory type."""
    if block.size == 0:
        return True
    low, high = int(block.min()), int(block.max())
    return high < bound and low >= (f.UNKNOWN if spec.unknown else 0)


def _fill(spec: FieldSpec, block: Array, chunk: Array, bound: int) -> bool:
    """Copy a block into its chunk and pad the rest with zeros."""
    inside = chunk[tuple(slice(n) for n in block.shape)]
    if block.shape != chunk.shape:
        chunk[len(block) :] = 0
        if block.shape[1:] != chunk.shape[1:]:
            chunk[:, block.shape[1] :] = 0
    if not spec.narrowable or chunk.dtype == block.dtype:
        np.copyto(inside, block)
        return not spec.narrowable or _ids_plain(spec, block, bound)
    return f.narrow_into(block, inside, bound)


def _seal(
    layout: ArrayLayout, memory: str, chunks: Sequence[Array]
) -> tuple[ArrayEntry, Sequence[Buffer]]:
    """Compress, checksum and index the chunks of one object."""
    buffers: list[Buffer] = []
    sizes: list[int] = []
    for chunk in chunks:
        data: Array = chunk.reshape(-1).view(np.uint8)
        if not layout.plain:
            data = np.frombuffer(_codecs.compress(data, layout), np.uint8)
        buffers.append(data)
        if layout.checksum:
            buffers.append(_codecs.checksum(data))
        sizes.append(data.size + (CHECKSUM_BYTES if layout.checksum else 0))
    kept = None if layout.plain else tuple(sizes)
    total = sum(sizes)
    if layout.sharded:
        index = _shard_index(layout, layout.offsets(kept))
        buffers.append(index)
        total += len(index)
    entry = ArrayEntry(
        shape=layout.shape,
        dtype=layout.dtype,
        memory=memory,
        chunk=layout.chunk,
        codec=layout.codec,  # type: ignore[arg-type]
        checksum=layout.checksum,
        nbytes=total,
        sizes=kept,
    )
    return entry, buffers


def _shard_index(layout: ArrayLayout, offsets: Sequence[int]) -> bytes:
    """Return the Zarr shard index: (offset, length) of each chunk in C order, and a CRC-32C."""
    blocks, groups = layout.grid
    places = [group * blocks + block for block in range(blocks) for group in range(groups)]
    spans = [(offsets[p], offsets[p + 1] - offsets[p]) for p in places]
    index = b"".join(_INDEX_ENTRY.pack(*span) for span in spans)
    return index + _codecs.checksum(np.frombuffer(index, np.uint8))


def _note_unknown(entry: ArrayEntry, mask: Array) -> tuple[ArrayEntry, list[_Part]]:
    """Record unknown values beside the array: as row ranges where those say it all."""
    rows = mask.reshape(len(mask), -1)
    whole = rows.all(axis=1)
    runs = f.runs_of(np.asarray(whole))
    if len(runs) <= _MAX_UNKNOWN_RUNS and not rows[~whole].any():
        return msgspec.structs.replace(entry, unknown=tuple(runs)), []
    layout = known_layout(entry.shape, "uint8", entry.chunk, "lz4", checksum=entry.checksum)
    spec = FieldSpec(name="mask", dtype="uint8", stored="uint8")
    chunks = [
        c for c in _fill_chunks(spec, mask.view(np.uint8), layout, Scratch()) if c is not None
    ]
    mine, buffers = _seal(layout, "bool", chunks)
    return msgspec.structs.replace(entry, mask=mine), [(MASK_SUFFIX, layout, buffers)]
