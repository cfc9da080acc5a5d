"""A finalized session's resident fields as one document, to lie beside its manifest.

It holds the StepRecords, from which Segments are built anew by the same functions that built them
first. msgpack, because tokens are binary; sealed with a CRC-32C, as all documents are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np

from tq_fs.errors import InvalidField, ManifestCorrupt
from tq_fs.fields import FieldSpec
from tq_fs.keys import Incarnation
from tq_fs.manifests import Mode, View, seal, unseal
from tq_fs.steps import StepEntry, check_schema
from tq_fs.trajectory._closed import ClosedSession
from tq_fs.trajectory._records import Array, StepKind, StepRecord

TRAJECTORY_SCHEMA = "tq-fs/trajectory/2"
_SCHEMA_1 = "tq-fs/trajectory/1"  # one weight version for each Step
_TOKENS = np.dtype("<i4")


class FieldDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A declared field: what its rows stand for, and where its values are.

    Attributes
    ----------
    name, dtype, rows
        As in :class:`tq_fs.FieldSpec`.
    resident
        Whether its values lie in this document.
    """

    name: str
    dtype: str
    rows: Literal["tokens", "transitions"]
    resident: bool

    def spec(self) -> FieldSpec:
        """Return it as a declaration, with rows of any shape."""
        return FieldSpec(name=self.name, dtype=self.dtype, rows=self.rows, inner=None)


class ArrayDocument(msgspec.Struct, frozen=True, kw_only=True):
    """An array: C order, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _StepFields(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    kind: StepKind
    parent: int | None
    prefix: int
    tokens: bytes
    response: int
    reason: str
    arrays: dict[str, ArrayDocument]


class StepDocument(_StepFields, frozen=True, kw_only=True):
    """A StepRecord without what is stored elsewhere; `tokens` are little-endian int32."""

    versions: tuple[tuple[str, int], ...]


class _TrajectoryFields(msgspec.Struct, frozen=True, kw_only=True):
    schema: str
    store_id: str
    partition: str
    session_id: str
    incarnation_id: str
    mode: Mode
    views: tuple[View, ...]
    consumers: tuple[str, ...]
    fields: tuple[FieldDocument, ...]
    extra: dict[str, Any]


class TrajectoryDocument(_TrajectoryFields, frozen=True, kw_only=True):
    """What a session was, but for its stored fields.

    Attributes
    ----------
    schema
        ``tq-fs/trajectory/2``.
    store_id, partition, session_id, incarnation_id
        Whose it is.
    mode, views, consumers
        As given when the session began and was finalized.
    fields
        All declared fields.
    steps
        All recorded Steps.
    extra
        What the caller wanted to be kept: messages, tools, a label.
    """

    steps: tuple[StepDocument, ...]

    @property
    def incarnation(self) -> Incarnation:
        """The session incarnation."""
        return Incarnation(self.partition, self.session_id, self.incarnation_id)

    def closed(self, stored: Mapping[int, StepEntry] | None = None) -> ClosedSession:
        """Return the session; `stored` is what the store says of its Steps, where that matters."""
        entries = stored or {}
        return ClosedSession(
            incarnation=self.incarnation,
            mode=self.mode,
            views=self.views,
            consumers=self.consumers,
            records=[_record(step, entries.get(step.index)) for step in self.steps],
            stored=[field.spec() for field in self.fields if not field.resident],
            resident=[field.spec() for field in self.fields if field.resident],
            extra=self.extra,
        )


class _Head(msgspec.Struct):
    schema: str


class _Step1(_StepFields, frozen=True, kw_only=True):
    version: str


class _Trajectory1(_TrajectoryFields, frozen=True, kw_only=True):
    steps: tuple[_Step1, ...]


def trajectory_document(store_id: str, session: ClosedSession) -> TrajectoryDocument:
    """Describe a session that is being finalized."""
    where = session.incarnation
    fields = [
        FieldDocument(name=s.name, dtype=s.dtype, rows=s.rows, resident=specs is session.resident)
        for specs in (session.stored, session.resident)
        for s in specs
    ]
    return TrajectoryDocument(
        schema=TRAJECTORY_SCHEMA,
        store_id=store_id,
        partition=where.partition,
        session_id=where.session_id,
        incarnation_id=where.incarnation_id,
        mode=session.mode,
        views=session.views,
        consumers=session.consumers,
        fields=tuple(fields),
        steps=tuple(_step(record) for record in session.records),
        extra=dict(session.extra),
    )


def encode_trajectory(document: TrajectoryDocument) -> bytes:
    """Return a document as msgpack: ``[CRC-32C of the body, body]``.

    Raises
    ------
    InvalidField
        `extra` holds something that msgpack has no form for.
    """
    try:
        extra = msgspec.msgpack.encode(document.extra)
        msgspec.msgpack.decode(extra, type=dict[str, Any])  # what is written can be read
        body = msgspec.msgpack.encode(document)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidField(
            f"cannot be kept: {error}",
            subject=f"extra of {document.incarnation}",
            remedy="give text, numbers, lists and mappings",
        ) from error
    return seal(body)


def decode_trajectory(data: bytes, subject: str) -> TrajectoryDocument:
    """Read a document back; one of an earlier schema comes as it would be written today.

    Raises
    ------
    FormatTooNew
        Written by a later version.
    ManifestCorrupt
        Its checksum differs, or it is no such document.
    """
    body = unseal(data, subject)
    try:
        head = msgspec.msgpack.decode(body, type=_Head)
        if head.schema == _SCHEMA_1:
            document = _of_schema_1(msgspec.msgpack.decode(body, type=_Trajectory1))
        else:
            check_schema(head.schema, TRAJECTORY_SCHEMA, subject)
            document = msgspec.msgpack.decode(body, type=TrajectoryDocument)
    except msgspec.DecodeError as error:
        raise ManifestCorrupt(f"cannot be read: {error}", subject=subject) from error
    for step in document.steps:
        _check_runs(step, subject)
    return document


def _of_schema_1(old: _Trajectory1) -> TrajectoryDocument:
    steps = [
        StepDocument(
            **{name: getattr(step, name) for name in _StepFields.__struct_fields__},
            versions=((step.version, len(step.tokens) // _TOKENS.itemsize),),
        )
        for step in old.steps
    ]
    same = {name: getattr(old, name) for name in _TrajectoryFields.__struct_fields__}
    return TrajectoryDocument(**{**same, "schema": TRAJECTORY_SCHEMA}, steps=tuple(steps))


def _check_runs(step: StepDocument, subject: str) -> None:
    """Refuse a Step whose weight versions are not those of its tokens."""
    told = sum(tokens for _, tokens in step.versions)
    sound = bool(step.versions) and all(tokens >= 0 for _, tokens in step.versions)
    if not sound or told * _TOKENS.itemsize != len(step.tokens):
        raise ManifestCorrupt(
            f"tells the weight versions of {told} tokens of Step {step.index}, which holds "
            f"{len(step.tokens) / _TOKENS.itemsize:g}",
            subject=subject,
        )


def _step(record: StepRecord) -> StepDocument:
    return StepDocument(
        index=record.index,
        kind=record.kind,
        parent=record.parent,
        prefix=record.prefix,
        tokens=record.tokens.astype(_TOKENS, copy=False).tobytes(),
        response=record.response,
        versions=record.versions,
        reason=record.reason,
        arrays={name: _array(array) for name, array in record.arrays.items()},
    )


def _array(array: Array) -> ArrayDocument:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return ArrayDocument(dtype=array.dtype.name, shape=array.shape, data=little.tobytes())


def _record(step: StepDocument, stored: StepEntry | None) -> StepRecord:
    return StepRecord(
        index=step.index,
        kind=step.kind,
        parent=step.parent,
        prefix=step.prefix,
        tokens=np.frombuffer(step.tokens, _TOKENS).astype(np.int32),
        response=step.response,
        versions=step.versions,
        reason=step.reason,
        arrays={name: _values(array) for name, array in step.arrays.items()},
        stored=stored,
    )


def _values(array: ArrayDocument) -> Array:
    dtype = np.dtype(array.dtype)
    flat = np.frombuffer(array.data, dtype.newbyteorder("<"))
    values: Array = flat.astype(dtype).reshape(array.shape)  # a copy: writable, and its own
    return values
