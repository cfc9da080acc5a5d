"""One Step's arrays into the objects of its Zarr group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from tq_fs import narrow
from tq_fs.fields import FieldSpec
from tq_fs.keys import StepKey
from tq_fs.steps import _codecs
from tq_fs.steps._arrays import (
    GROUP,
    Array,
    Buffer,
    Chunk,
    EncodeOptions,
    Form,
    Scratch,
    array_form,
    blocks,
    default_codec,
    form_of_layout,
    seal,
)
from tq_fs.steps._entry import MASK_SUFFIX, ArrayEntry, StepEntry, attributes_json
from tq_fs.steps._layout import ArrayLayout, known_layout
from tq_fs.steps._metadata import group_json

_MAX_UNKNOWN_RUNS = 64


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


def form_of(spec: FieldSpec, values: Array, options: EncodeOptions) -> Form:
    """Return the form of a field's array."""
    dtype = narrow.stored_type(spec, values)
    codec = spec.codec if spec.codec != "auto" else default_codec(dtype)
    groups = options.layer_groups if spec.layered else 1
    return array_form(
        spec.name, values.shape, dtype, spec.dtype, codec, options.checksum, spec.layered, groups
    )


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
    entry, buffers = seal(form, chunks)
    if form.layout.chunks:
        members[form.member] = buffers
    if mask is None:
        return entry, {}
    return _note_unknown(spec.name, entry, mask, members)


def _chunks(
    spec: FieldSpec, values: Array, layout: ArrayLayout, scratch: Scratch
) -> list[Chunk] | None:
    """Return the chunks in the order of the object; None if an id is not plain."""
    same = layout.dtype == spec.dtype
    if same and spec.narrowable:
        bound = narrow.id_bound(spec, layout.dtype)
        if not narrow.ids_plain(spec, values, bound):
            return None
    in_place = same and layout.grid[1] == 1 and values.flags.c_contiguous
    out = []
    for block in blocks(values, layout, together=in_place and layout.seamless):
        if in_place and len(block) % layout.chunk[0] == 0:
            out.append(Chunk(block.reshape(-1).view(np.uint8)))
            continue
        chunk = _copied(spec, block, layout, scratch)
        if chunk is None:
            return None
        out.append(chunk)
    return out


def _copied(spec: FieldSpec, block: Array, layout: ArrayLayout, scratch: Scratch) -> Chunk | None:
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
        return Chunk(flat)
    if not narrow.narrow_into(block, inside, narrow.id_bound(spec, layout.dtype)):
        return None
    # Now, while the chunk lies in the cache.
    crc = _codecs.crc(flat) if layout.checksum and layout.plain else None
    return Chunk(flat, crc)


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
    form = form_of_layout(name + MASK_SUFFIX, layout, "bool", entry.layered)
    spec = FieldSpec(name="mask", dtype="uint8", stored="uint8")
    chunks = _chunks(spec, mask.view(np.uint8), layout, Scratch())
    assert chunks is not None
    mine, buffers = seal(form, chunks)
    members[form.member] = buffers
    return msgspec.structs.replace(entry, mask=mine), {name + MASK_SUFFIX: form}
