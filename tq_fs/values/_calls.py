"""What processes ask of the keeper of values, and how that goes over the channel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from tq_fs.channel import ChannelBackend
from tq_fs.errors import ProtocolMismatch
from tq_fs.values._entry import Found, NamedEntry, Place, StoredGroup

T = TypeVar("T")
Sample = tuple[str, int]
_encode = msgspec.msgpack.Encoder().encode


class ValueCalls(Protocol):
    """The index as clients use it. Safe to call from many threads; each call may come twice."""

    def put(self, partition: str, groups: Sequence[StoredGroup]) -> tuple[int, list[Place]]:
        """Let names stand for new values; return the generation and unneeded groups."""

    def find(self, samples: Sequence[Sample], fields: Sequence[str]) -> list[list[Found | None]]:
        """Return what names stand for; for each field, in the order of the samples."""

    def clear(self, samples: Sequence[tuple[str, int, int]]) -> list[Place]:
        """Forget samples born up to a generation; return unneeded groups."""

    def forget(self, places: Sequence[Place]) -> None:
        """Hear that unneeded groups are deleted."""

    def now(self) -> int:
        """Return the last put's generation."""

    def save(self, folder: str) -> str:
        """Write a checkpoint into a folder; return its id."""

    def load(self, folder: str) -> str:
        """Become what a checkpoint in a folder says; return its id."""

    def totals(self) -> dict[str, int]:
        """Return how much there is."""


class Note(NamedTuple):
    """What the index is told of a group: its bytes, and what lies in it."""

    nbytes: int
    values: tuple[NamedEntry, ...]


class _Noted(msgspec.Struct, array_like=True):
    partition: str
    note: Note


_decode_note = msgspec.msgpack.Decoder(_Noted).decode
_decode_int = msgspec.msgpack.Decoder(int).decode


def encode_note(partition: str, note: Note) -> bytes:
    """Return what goes with a group that names are to stand for at once."""
    return _encode(_Noted(partition, note))


def decode_noted(answer: bytes) -> int:
    """Return the generation that the keeper answers a note with.

    Raises
    ------
    ProtocolMismatch
    """
    try:
        return _decode_int(answer)
    except msgspec.MsgspecError as error:
        raise ProtocolMismatch(f"no generation: {error}", subject="an answer") from error


def serve_notes(put: Callable[[str, StoredGroup], int]) -> Callable[[str, bytes], bytes]:
    """Return what a channel's server tells of groups that come with a note.

    Parameters
    ----------
    put
        Takes a partition and a group, and returns the generation.
    """

    def noted(place: str, body: bytes) -> bytes:
        try:
            asked = _decode_note(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ProtocolMismatch(f"no such note: {error}", subject=place) from error
        group = StoredGroup("", place, asked.note.nbytes, asked.note.values)
        return _encode(put(asked.partition, group))

    return noted


class _Put(msgspec.Struct, array_like=True):
    partition: str
    groups: list[StoredGroup]


class _Find(msgspec.Struct, array_like=True):
    samples: list[Sample]
    fields: list[str]


_ARGUMENTS: dict[str, Any] = {
    "put": _Put,
    "find": _Find,
    "clear": list[tuple[str, int, int]],
    "forget": list[Place],
    "now": None,
    "save": str,
    "load": str,
    "totals": None,
}
_LONG = {"save", "load"}
_decoders = {name: msgspec.msgpack.Decoder(kind) for name, kind in _ARGUMENTS.items()}


def serve(calls: ValueCalls) -> Mapping[str, Callable[[bytes], bytes]]:
    """Return what a channel's server answers calls with."""
    return {name: _answer(name, calls) for name in _ARGUMENTS}


def _answer(name: str, calls: ValueCalls) -> Callable[[bytes], bytes]:
    decode = _decoders[name].decode
    method = getattr(calls, name)

    def answer(body: bytes) -> bytes:
        try:
            asked = decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ProtocolMismatch(f"no such call: {error}", subject=name) from error
        arguments = () if asked is None else (asked,)
        if isinstance(asked, msgspec.Struct):
            arguments = msgspec.structs.astuple(asked)
        try:
            return _encode(method(*arguments))
        except OverflowError as error:
            raise ProtocolMismatch(f"a number is out of range: {error}", subject=name) from error

    return answer


class ValueClient:
    """:class:`ValueCalls` of another process.

    Parameters
    ----------
    channel
        The way there; stays the caller's.
    """

    def __init__(self, channel: ChannelBackend) -> None:
        self._channel = channel

    def put(self, partition: str, groups: Sequence[StoredGroup]) -> tuple[int, list[Place]]:
        """Let names stand for new values; return the generation and unneeded groups."""
        return self._call("put", _Put(partition, list(groups)), tuple[int, list[Place]])

    def find(self, samples: Sequence[Sample], fields: Sequence[str]) -> list[list[Found | None]]:
        """Return what names stand for; for each field, in the order of the samples."""
        asked = _Find(list(samples), list(fields))
        return self._call("find", asked, list[list[Found | None]])

    def clear(self, samples: Sequence[tuple[str, int, int]]) -> list[Place]:
        """Forget samples born up to a generation; return unneeded groups."""
        return self._call("clear", list(samples), list[Place])

    def forget(self, places: Iterable[Place]) -> None:
        """Hear that unneeded groups are deleted."""
        self._call("forget", list(places), object)

    def now(self) -> int:
        """Return the last put's generation."""
        return self._call("now", None, int)

    def save(self, folder: str) -> str:
        """Write a checkpoint into a folder; return its id."""
        return self._call("save", folder, str)

    def load(self, folder: str) -> str:
        """Become what a checkpoint in a folder says; return its id."""
        return self._call("load", folder, str)

    def totals(self) -> dict[str, int]:
        """Return how much there is."""
        return self._call("totals", None, dict[str, int])

    def _call(self, name: str, asked: object, answer: type[T]) -> T:
        data = self._channel.call(name, _encode(asked), long=name in _LONG)
        try:
            return msgspec.msgpack.decode(data, type=answer)
        except msgspec.MsgspecError as error:
            raise ProtocolMismatch(f"no answer: {error}", subject=name) from error
