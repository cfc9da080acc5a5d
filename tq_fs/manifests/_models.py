"""The documents of a store: one manifest for each finalized session incarnation, and its state.

A manifest is written once, at finalize. What changes afterwards, namely which consumer has
released which Segment, is a small document beside it. Both are JSON, named by a schema and a
version, and described by JSON Schema in ``schemas/``.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec
from crc32c import crc32c

from tq_fs.errors import ManifestCorrupt
from tq_fs.keys import Incarnation, SegmentRef
from tq_fs.steps import StepEntry, check_schema

MANIFEST_SCHEMA = "tq-fs/manifest/1"
STATE_SCHEMA = "tq-fs/state/1"
STORE_SCHEMA = "tq-fs/store/1"
TOMBSTONE_SCHEMA = "tq-fs/tombstone/1"

View = Literal["lineage", "timeline"]
Mode = Literal["tito", "snapshot"]


class Fragment(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run of rows of one Step inside one Segment.

    Attributes
    ----------
    step
        Index of the Step that holds the rows.
    source, target
        Half-open row ranges: in the Step's array, and in the Segment's field.
    chunks
        Half-open range of the array's chunks along rows that cover `source`.
    """

    step: int
    source: tuple[int, int]
    target: tuple[int, int]
    chunks: tuple[int, int]


class SegmentEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One trainable Segment, by reference only.

    Attributes
    ----------
    view, index
        How its Steps were arranged, and its place among the view's Segments.
    tokens
        Its length T in tokens.
    response_tokens
        Tokens from the first generated one to the end.
    fields
        For each stored field the fragments that make it up, in order and without gaps.
    """

    view: View
    index: int
    tokens: int
    response_tokens: int
    fields: dict[str, tuple[Fragment, ...]]


class SessionManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a finalized session incarnation consists of.

    Attributes
    ----------
    schema
        ``tq-fs/manifest/1``.
    store_id, partition, session_id, incarnation_id
        Whose it is; ids as the user gave them.
    epoch
        Epoch of the Controller that wrote it.
    created_ns
        Time of finalize, nanoseconds since 1970 on the Controller's clock.
    mode
        How Steps hold tokens: ``tito`` or ``snapshot``.
    consumers
        Who must release each Segment before its Steps are deleted.
    steps
        The Steps that some Segment refers to.
    segments
        All Segments of all views.
    """

    schema: str
    store_id: str
    partition: str
    session_id: str
    incarnation_id: str
    epoch: int
    created_ns: int
    mode: Mode
    consumers: tuple[str, ...]
    steps: tuple[StepEntry, ...]
    segments: tuple[SegmentEntry, ...]

    @property
    def incarnation(self) -> Incarnation:
        """The session incarnation."""
        return Incarnation(self.partition, self.session_id, self.incarnation_id)

    def ref(self, segment: SegmentEntry) -> SegmentRef:
        """Return the reference of one of its Segments."""
        return SegmentRef(self.store_id, self.incarnation, segment.view, segment.index)


class SessionState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What has happened to a manifest's Segments since.

    Attributes
    ----------
    schema
        ``tq-fs/state/1``.
    epoch
        Epoch of the Controller that wrote it.
    released
        For each consumer the Segments it has released, as ``view/index``.
    held
        For each consumer, by rollout, the Segments it will have released once the model checkpoint
        of that rollout, or of a later one, is saved.
    """

    schema: str
    epoch: int
    released: dict[str, tuple[str, ...]]
    held: dict[str, dict[int, tuple[str, ...]]] = {}


class TombstoneDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A session of which nobody needs anything, while it is being deleted.

    Attributes
    ----------
    schema
        ``tq-fs/tombstone/1``.
    epoch
        Epoch of the Controller that wrote it.
    partition, session_id, incarnation_id
        Which session it is; ids as the user gave them.
    units
        The StorageUnits on which something of it may be left.
    """

    schema: str
    epoch: int
    partition: str
    session_id: str
    incarnation_id: str
    units: tuple[str, ...]

    @property
    def incarnation(self) -> Incarnation:
        """The session incarnation."""
        return Incarnation(self.partition, self.session_id, self.incarnation_id)


class StoreDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What makes a folder a store.

    Attributes
    ----------
    schema
        ``tq-fs/store/1``.
    store_id
        The run it belongs to.
    epoch
        Raised by each Controller that takes the store for writing.
    before
        URL of the store that the folder is the front of; empty where it is the store itself.
    unit
        Name of the StorageUnit of a cluster whose folder it is; empty for a store of its own.
    holder
        Of the epoch: which of several Controllers that claimed the same one has it.
    """

    schema: str
    store_id: str
    epoch: int
    before: str = ""
    unit: str = ""
    holder: str = ""


SCHEMAS: dict[str, type[msgspec.Struct]] = {
    MANIFEST_SCHEMA: SessionManifest,
    STATE_SCHEMA: SessionState,
    STORE_SCHEMA: StoreDocument,
    TOMBSTONE_SCHEMA: TombstoneDocument,
}

_SEAL_SCHEMA = {
    "type": "string",
    "pattern": "^[0-9a-f]{8}$",
    "description": "CRC-32C of all bytes behind this value's comma; comes first",
}

Document = TypeVar("Document", SessionManifest, SessionState, StoreDocument, TombstoneDocument)


class _Head(msgspec.Struct):
    schema: str


_SEAL = b'{"crc32c":"'
_SEAL_BYTES = len(_SEAL) + 8 + len(b'",')


def encode(
    document: SessionManifest | SessionState | StoreDocument | TombstoneDocument,
) -> bytes:
    """Return a document as JSON that begins with the CRC-32C of all that follows."""
    body = msgspec.json.encode(document)[1:]
    return b'%s%08x",%s' % (_SEAL, crc32c(body), body)


def _unsealed(data: bytes, subject: str) -> bytes:
    """Return a document's JSON without its checksum, once it agrees."""
    body = data[_SEAL_BYTES:]
    if data[:_SEAL_BYTES] != b'%s%08x",' % (_SEAL, crc32c(body)):
        raise ManifestCorrupt(
            f"does not begin with the checksum of its {len(body)} bytes",
            subject=subject,
            remedy="the bytes changed on the device, or were edited: restore the file",
        )
    return b"{" + body


def decode(data: bytes, kind: type[Document], subject: str) -> Document:
    """Read a document back.

    Raises
    ------
    FormatTooNew
        Written by a later version.
    ManifestCorrupt
        Its checksum differs, or it is no document of this kind.
    """
    plain = _unsealed(data, subject)
    want = next(name for name, known in SCHEMAS.items() if known is kind)
    try:
        check_schema(msgspec.json.decode(plain, type=_Head).schema, want, subject)
        return msgspec.json.decode(plain, type=kind)
    except msgspec.DecodeError as error:
        raise ManifestCorrupt(f"cannot be read: {error}", subject=subject) from error


def json_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a document, as it lies in ``schemas/``."""
    schema = msgspec.json.schema(SCHEMAS[name])
    top = schema["$defs"][SCHEMAS[name].__name__]
    top["properties"] = {"crc32c": _SEAL_SCHEMA, **top["properties"]}
    top["required"] = ["crc32c", *top["required"]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name, **schema}
