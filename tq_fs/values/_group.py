"""Values of one put into groups that are published whole.

What has large arrays is a group with all that its sample brought, so that it goes when the sample
does. The rest is packed: many values to a group, in one array of bytes called ``small``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from tq_fs.steps import (
    GROUP,
    ArrayEntry,
    ArrayLayout,
    Buffer,
    EncodeOptions,
    Form,
    Scratch,
    default_codec,
    encode_array,
    form_of_layout,
    group_json,
    known_layout,
)
from tq_fs.values._entry import SMALL, VALUES_SCHEMA, GroupAttributes, NamedEntry, ValueEntry
from tq_fs.values.codec import EncodedValue

PACK_BYTES = 1024 * 1024
_INLINE = 512  # bytes of a head that stay in its entry
_CHUNK_ROWS = 1024
_CHUNK_BYTES = 64 * 1024, 4 * 1024 * 1024  # of a chunk, at least and at most
_LAYERED = 3  # axes: rows, layers, top-k

Array = npt.NDArray[Any]

_encode = msgspec.json.Encoder().encode


class NamedValue(NamedTuple):
    """A value, encoded, with its sample's index and its field's name."""

    sample: int
    field: str
    value: EncodedValue


class Group(NamedTuple):
    """A group ready to be published; its buffers may lie in the values themselves."""

    members: Mapping[str, Sequence[Buffer]]
    values: tuple[NamedEntry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its objects."""
        return sum(
            part.nbytes if isinstance(part, np.ndarray) else len(part)
            for parts in self.members.values()
            for part in parts
        )


def cut(values: Sequence[NamedValue]) -> Iterator[list[NamedValue]]:
    """Yield the values of each group.

    Those of a sample with large arrays stay together, small ones included; others share packs.
    """
    samples: dict[int, list[NamedValue]] = {}
    for value in values:
        samples.setdefault(value.sample, []).append(value)
    pack: list[NamedValue] = []
    nbytes = 0
    for sample in samples.values():
        if any(v.value.arrays for v in sample):
            yield sample
            continue
        size = sum(len(v.value.head) for v in sample)
        if pack and nbytes + size > PACK_BYTES:
            yield pack
            pack, nbytes = [], 0
        pack = pack + sample
        nbytes += size
    if pack:
        yield pack


def encode_group(
    store_id: str,
    run: str,
    partition: str,
    values: Sequence[NamedValue],
    options: EncodeOptions,
    scratch: Scratch,
) -> Group:
    """Lay out the values of one group; valid until `scratch` is reset or a value changes."""
    build = _Build(options, scratch)
    entries = tuple(NamedEntry(v.sample, v.field, build.add(v.value)) for v in values)
    build.close()
    attributes = GroupAttributes(
        schema=VALUES_SCHEMA, store_id=store_id, run=run, partition=partition, values=entries
    )
    members = build.members
    if not options.compact:
        members.update(build.json)
    text = _encode({"tq_fs": attributes})
    members[GROUP] = (group_json(tuple(build.layouts), text),)
    return Group(members, entries)


class _Build:
    """A group in the making."""

    def __init__(self, options: EncodeOptions, scratch: Scratch) -> None:
        self._options = options
        self._scratch = scratch
        self._small = bytearray()
        self._count = 0
        self.members: dict[str, Sequence[Buffer]] = {}
        self.json: dict[str, Sequence[Buffer]] = {}
        self.layouts: list[tuple[str, ArrayLayout]] = []

    def add(self, value: EncodedValue) -> ValueEntry:
        """Lay out a value; return its entry."""
        first = self._count
        arrays = tuple(self._array(array) for array in value.arrays)
        head = value.head
        if arrays and len(head) <= _INLINE:
            return ValueEntry(head=head, first=first, arrays=arrays)
        at = len(self._small)
        self._small += head
        return ValueEntry(at=at, nbytes=len(head), crc=crc32c(head), first=first, arrays=arrays)

    def _array(self, array: Array) -> ArrayEntry:
        name = f"a{self._count}"
        self._count += 1
        groups = self._options.layer_groups if array.ndim == _LAYERED else 1
        checksum = self._options.checksum
        return self._put(_form(name, array.shape, array.dtype.name, checksum, groups), array)

    def _put(self, form: Form, array: Array) -> ArrayEntry:
        self.layouts.append((form.name, form.layout))
        self.json[form.json_member] = form.json
        return encode_array(form, array, self._scratch, self.members)

    def close(self) -> None:
        """Add the array of what is small, one chunk; there each value has a checksum of its own."""
        if self._small:
            shape = (len(self._small),)
            layout = known_layout(shape, "uint8", shape, "none", checksum=False)
            form = form_of_layout(SMALL, layout, "uint8", layered=False)
            self._put(form, np.frombuffer(self._small, np.uint8))


@functools.lru_cache(1024)
def _form(name: str, shape: tuple[int, ...], dtype: str, checksum: bool, groups: int) -> Form:
    """Return the form of a large array: in chunks of 64 KiB at least and of 1,024 rows."""
    rows, *inner = shape
    if len(shape) == _LAYERED:
        inner[0] = -(-inner[0] // min(groups, inner[0]))
    row_nbytes = prod(inner) * np.dtype(dtype).itemsize
    least, most = (max(1, nbytes // row_nbytes) for nbytes in _CHUNK_BYTES)
    tall = min(max(_CHUNK_ROWS, least), most)
    blocks = 1 if rows <= min(2 * tall, most) else -(-rows // tall)
    chunk = (-(-rows // blocks), *inner)
    layout = known_layout(shape, dtype, chunk, default_codec(dtype), checksum=checksum)
    return form_of_layout(name, layout, dtype, layered=len(shape) == _LAYERED)
