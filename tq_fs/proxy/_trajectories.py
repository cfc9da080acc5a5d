"""Finalized Segments as the body of an answer, piece by piece, and back.

``{"sessions": […], "segments": […]}``: a session's `extra` is said once, however many Segments it
has. An array is ``{"dtype", "shape", "data"}``, its data little-endian in C order: base64 in JSON,
binary in msgpack. Bodies are made in pieces, which keeps both memory and the time that the
interpreter is held small, whatever the size of the arrays.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tq_fs.errors import ReplyInvalid
from tq_fs.manifests import View
from tq_fs.proxy._entry import Entry
from tq_fs.trajectory import Segment

JSON = "application/json"
MSGPACK = "application/msgpack"

_SLICE = 3 * 256 * 1024  # bytes of an array in one piece; base64 goes by threes

Array = npt.NDArray[Any]
Pairs = Iterator[tuple[str, Any]]


class ArrayBody(msgspec.Struct, kw_only=True, frozen=True):
    """An array: little-endian, C order."""

    dtype: str
    shape: list[int]
    data: bytes

    def array(self) -> Array:
        """Return it as numpy's, read-only.

        Raises
        ------
        ReplyInvalid
            Its data are not of its shape.
        """
        try:
            dtype = np.dtype(self.dtype).newbyteorder("<")
            return np.frombuffer(self.data, dtype).reshape(self.shape)
        except (TypeError, ValueError) as error:
            raise ReplyInvalid(f"no array: {error}", subject="the Proxy's answer") from error


class SessionBody(msgspec.Struct, kw_only=True, frozen=True):
    """A finalized incarnation; `steps` is the number of its Steps."""

    session_id: str
    incarnation_id: str
    instance_id: str | None
    steps: int
    extra: dict[str, Any]


class SegmentBody(msgspec.Struct, kw_only=True, frozen=True):
    """A Segment; see :class:`tq_fs.Segment`."""

    session_id: str
    incarnation_id: str
    ref: str | None
    view: View
    index: int
    steps: list[int]
    versions: list[tuple[str, int]]
    response_length: int
    tokens: ArrayBody
    loss_mask: ArrayBody
    arrays: dict[str, ArrayBody]

    def segment(self, extra: Mapping[str, Any]) -> Segment:
        """Return it as what it was."""
        return Segment(
            ref=self.ref,
            session_id=self.session_id,
            view=self.view,
            index=self.index,
            steps=tuple(self.steps),
            tokens=self.tokens.array(),
            loss_mask=self.loss_mask.array(),
            versions=tuple(self.versions),
            response_length=self.response_length,
            arrays={name: body.array() for name, body in self.arrays.items()},
            extra=extra,
        )


class ReadAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """``POST /trajectory/read``."""

    sessions: list[SessionBody]
    segments: list[SegmentBody]


def segments_of(answer: ReadAnswer) -> list[Segment]:
    """Return the Segments of an answer, with their sessions' `extra`."""
    extra = {(s.session_id, s.incarnation_id): s.extra for s in answer.sessions}
    return [s.segment(extra[s.session_id, s.incarnation_id]) for s in answer.segments]


# ---------------------------------------------------------------- what is said


def _sessions(entries: Sequence[Entry]) -> Iterator[dict[str, Any]]:
    for entry in entries:
        assert entry.answer is not None
        yield {
            "session_id": entry.session_id,
            "incarnation_id": entry.answer.incarnation_id,
            "instance_id": entry.instance_id,
            "steps": entry.answer.steps,
            "extra": entry.extra,
        }


def _segments(entries: Sequence[Entry]) -> Iterator[Pairs]:
    for entry in entries:
        assert entry.answer is not None
        for segment in entry.segments:
            yield _pairs(segment, entry.answer.incarnation_id)


def _pairs(segment: Segment, incarnation_id: str) -> Pairs:
    yield "session_id", segment.session_id
    yield "incarnation_id", incarnation_id
    yield "ref", segment.ref
    yield "view", segment.view
    yield "index", segment.index
    yield "steps", segment.steps
    yield "versions", segment.versions
    yield "response_length", segment.response_length
    yield "tokens", segment.tokens
    yield "loss_mask", segment.loss_mask
    yield "arrays", dict(segment.arrays)


# ---------------------------------------------------------------- JSON


def json_pieces(entries: Sequence[Entry]) -> Iterator[bytes]:
    """Yield the answer as JSON."""
    yield b'{"sessions":['
    yield from _between(b",", map(_once(msgspec.json.encode), _sessions(entries)))
    yield b'],"segments":['
    yield from _between(b",", map(_json_map, _segments(entries)))
    yield b"]}"


def _json_map(pairs: Pairs) -> Iterator[bytes]:
    yield b"{"
    yield from _between(b",", (_json_pair(name, value) for name, value in pairs))
    yield b"}"


def _json_pair(name: str, value: Any) -> Iterator[bytes]:
    yield msgspec.json.encode(name) + b":"
    if isinstance(value, dict):
        yield from _json_map(iter(value.items()))
    elif isinstance(value, np.ndarray):
        dtype, shape = value.dtype.name, list(value.shape)
        yield msgspec.json.encode({"dtype": dtype, "shape": shape})[:-1] + b',"data":"'
        yield from (binascii.b2a_base64(part, newline=False) for part in _slices(value))
        yield b'"}'
    else:
        yield msgspec.json.encode(value)


def _between(separator: bytes, parts: Iterator[Iterator[bytes]]) -> Iterator[bytes]:
    for place, part in enumerate(parts):
        if place:
            yield separator
        yield from part


def _once(encode: Callable[[Any], bytes]) -> Callable[[Any], Iterator[bytes]]:
    return lambda value: iter((encode(value),))


# ---------------------------------------------------------------- msgpack


def msgpack_pieces(entries: Sequence[Entry]) -> Iterator[bytes | memoryview]:
    """Yield the answer as msgpack."""
    encode = msgspec.msgpack.encode
    yield b"\x82" + encode("sessions") + _head(b"\xdd", len(entries))
    yield from map(encode, _sessions(entries))
    yield encode("segments") + _head(b"\xdd", sum(len(entry.segments) for entry in entries))
    for pairs in _segments(entries):
        yield from _msgpack_map(dict(pairs))


def _msgpack_map(values: Mapping[str, Any]) -> Iterator[bytes | memoryview]:
    yield _head(b"\xdf", len(values))
    for name, value in values.items():
        yield msgspec.msgpack.encode(name)
        if isinstance(value, dict):
            yield from _msgpack_map(value)
        elif isinstance(value, np.ndarray):
            said = {"dtype": value.dtype.name, "shape": list(value.shape)}
            yield b"\x83" + msgspec.msgpack.encode(said)[1:] + msgspec.msgpack.encode("data")
            yield _head(b"\xc6", value.nbytes)
            yield from _slices(value)
        else:
            yield msgspec.msgpack.encode(value)


def _head(kind: bytes, count: int) -> bytes:
    """Return the head of an array, map or binary of 32-bit length."""
    return kind + count.to_bytes(4, "big")


def _slices(array: Array) -> Iterator[memoryview]:
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    whole = little.reshape(-1).view(np.uint8).data
    return (whole[at : at + _SLICE] for at in range(0, len(whole), _SLICE))


# ---------------------------------------------------------------- pieces


def gathered(pieces: Iterator[bytes | memoryview]) -> Iterator[bytes]:
    """Yield pieces of some size: small ones put together."""
    waiting: list[bytes | memoryview] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= _SLICE:
            yield b"".join(waiting)
            waiting, size = [], 0
    yield b"".join(waiting)
