"""What a Step says of itself: the attributes of its Zarr group, and its entry in a manifest."""

from __future__ import annotations

import functools
from typing import Generic, Literal, TypeVar

import msgspec

from tq_fs.errors import FormatTooNew, ManifestCorrupt
from tq_fs.keys import Incarnation, StepKey, step_path
from tq_fs.steps._layout import ArrayLayout, known_layout

STEP_SCHEMA = "tq-fs/step/1"
ATTRIBUTE = "tq_fs"
MASK_SUFFIX = "_unknown"


class ArrayEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """One field of one Step as it is stored.

    Attributes
    ----------
    shape
        ``[rows, *inner]``.
    dtype, memory
        Stored type and type in memory.
    chunk
        Shape of one (inner) chunk.
    codec, checksum
        How a chunk is encoded.
    layered
        Whether the second axis is layers.
    nbytes
        Bytes of the object, index and checksums included.
    sizes
        Stored bytes of each chunk in the order of the object; None where they are uncompressed.
    unknown
        Row ranges that are -1 as a whole.
    mask
        Entry of the array ``<field>_unknown``, which says what values are -1 where row ranges
        cannot.
    """

    shape: tuple[int, ...]
    dtype: str
    memory: str
    chunk: tuple[int, ...]
    codec: Literal["none", "lz4", "zstd"] = "none"
    checksum: bool = True
    layered: bool = False
    nbytes: int = 0
    sizes: tuple[int, ...] | None = None
    unknown: tuple[tuple[int, int], ...] = ()
    mask: ArrayEntry | None = None

    @functools.cached_property
    def layout(self) -> ArrayLayout:
        """The array's chunking."""
        return known_layout(self.shape, self.dtype, self.chunk, self.codec, checksum=self.checksum)


class StepEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One Step: how many tokens it recorded and its stored fields.

    Attributes
    ----------
    index
        The Step's index in its session.
    tokens
        Tokens the Step recorded itself: all of them where it opens a chain, else the new ones.
    fields
        Stored fields by name.
    unit
        Name of the StorageUnit that took it.
    attempt
        Path component below the Step's own where its group lies: object stores have one for each
        try. Empty where the group lies at the Step's own path.
    """

    index: int
    tokens: int
    fields: dict[str, ArrayEntry]
    unit: str = "local"
    attempt: str = ""

    def place(self, incarnation_path: str) -> str:
        """Return where the Step's group lies."""
        path = step_path(incarnation_path, self.index)
        return f"{path}/{self.attempt}" if self.attempt else path

    def objects(self) -> dict[str, int]:
        """Return name and size of each object that holds values."""
        arrays = {**self.fields, **self._masks()}
        return {
            f"{name}/{array.layout.object_name}": array.nbytes
            for name, array in arrays.items()
            if array.layout.chunks
        }

    def _masks(self) -> dict[str, ArrayEntry]:
        return {n + MASK_SUFFIX: a.mask for n, a in self.fields.items() if a.mask is not None}

    @property
    def nbytes(self) -> int:
        """Stored bytes of all fields."""
        return sum(f.nbytes + (f.mask.nbytes if f.mask else 0) for f in self.fields.values())


class StepAttributes(msgspec.Struct, frozen=True, kw_only=True):
    """The value under ``tq_fs`` in the attributes of a Step's group.

    Holds the ids as the user gave them, so that a path with a hashed component can be read back,
    and nothing that differs between two writes of the same content.
    """

    schema: str
    store_id: str
    partition: str
    session_id: str
    incarnation_id: str
    step: StepEntry

    @property
    def key(self) -> StepKey:
        """The Step's identity."""
        where = Incarnation(self.partition, self.session_id, self.incarnation_id)
        return StepKey(where, self.step.index)


_Document = TypeVar("_Document")


class _Head(msgspec.Struct):
    schema: str


class _Attributes(msgspec.Struct, Generic[_Document]):
    tq_fs: _Document


class _Group(msgspec.Struct, Generic[_Document]):
    attributes: _Attributes[_Document]


_decode_head = msgspec.json.Decoder(_Group[_Head]).decode  # a later version may differ in the rest
_decode_group = msgspec.json.Decoder(_Group[StepAttributes]).decode
_encode = msgspec.json.Encoder().encode


def attributes_json(store_id: str, key: StepKey, entry: StepEntry) -> bytes:
    """Return the JSON value of a Step's attributes."""
    where = key.incarnation
    mine = StepAttributes(
        schema=STEP_SCHEMA,
        store_id=store_id,
        partition=where.partition,
        session_id=where.session_id,
        incarnation_id=where.incarnation_id,
        step=entry,
    )
    return _encode({ATTRIBUTE: mine})


def read_attributes(group_json: bytes, subject: str) -> StepAttributes:
    """Read what a Step says of itself from its group's ``zarr.json``.

    Raises
    ------
    FormatTooNew
        Written by a later version.
    ManifestCorrupt
        Not the metadata of a Step.
    """
    try:
        check_schema(_decode_head(group_json).attributes.tq_fs.schema, STEP_SCHEMA, subject)
        found = _decode_group(group_json).attributes.tq_fs
        found.step.objects()
    except msgspec.DecodeError as error:
        raise ManifestCorrupt(f"not a Step's metadata: {error}", subject=subject) from error
    except (ArithmeticError, IndexError, TypeError, ValueError) as error:
        raise ManifestCorrupt(f"arrays that cannot be: {error}", subject=subject) from error
    return found


def check_schema(have: str, want: str, subject: str) -> None:
    """Refuse a document of another kind or of a later version.

    Raises
    ------
    FormatTooNew, ManifestCorrupt
    """
    if have == want:
        return
    kind, _, version = have.rpartition("/")
    if kind == want.rpartition("/")[0] and version.isdigit():
        raise FormatTooNew(
            f"has format {have}, this version reads {want}",
            subject=subject,
            remedy="upgrade tq-fs",
        )
    raise ManifestCorrupt(f"has format {have!r} where {want} belongs", subject=subject)
