"""What goes over the channel: sizes, a header of msgpack, then the bytes as they lie. No pickle.

A lane has one request under way, and its answer comes next. Headers are decoded into the types
below, and nothing else: what does not fit is malformed, whoever sent it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from tq_fs import errors
from tq_fs.backends import Buffer
from tq_fs.errors import ProtocolMismatch, StorageFailed, TqFsError

VERSION = 1
MiB = 1024**2
PREFIX = struct.Struct("<4sIQ")  # magic, bytes of the header, bytes behind it
MAGIC = b"tqf1"
MOST_HEADER = 8 * MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a unit takes at a time.

    Attributes
    ----------
    budget_bytes
        Bytes of writes that were received and are not stored yet, of all lanes together.
    deadline_s
        Seconds that a write waits for its part of the budget before it fails.
    writers
        Writes that go to the disk at once.
    lanes
        Connections that are open at once.
    piece_bytes
        Buffer of a lane that sends what is no local file; encrypted, one has three of half a MiB.
    quiet_s
        Seconds without a byte in the middle of a message after which a lane is given up.
    """

    budget_bytes: int = 512 * MiB
    deadline_s: float = 60.0
    writers: int = 4
    lanes: int = 256
    piece_bytes: int = 1 * MiB
    quiet_s: float = 30.0


# ---------------------------------------------------------------- requests


class Request(msgspec.Struct, frozen=True, array_like=True):
    """Any request."""


class Hello(Request, frozen=True, array_like=True, tag=1):
    """Open a lane; a Controller says its epoch, and which of those that claim it has it."""

    version: int
    store_id: str
    epoch: int = 0
    holder: str = ""
    unit: str = ""  # which one is wanted; empty for whichever answers


class Publish(Request, frozen=True, array_like=True, tag=2):
    """Publish a group of members, whose bytes follow each other behind the header.

    With a note, somebody beside the backend is told of the group, and answers as well.
    """

    prefix: str
    members: list[tuple[str, int]]
    fresh: bool
    note: bytes = b""


class Put(Request, frozen=True, array_like=True, tag=3):
    """Write one object, whose bytes are behind the header."""

    key: str
    urgent: bool


class Get(Request, frozen=True, array_like=True, tag=4):
    """Read a small object whole."""

    key: str


class Read(Request, frozen=True, array_like=True, tag=5):
    """Read bytes of an object."""

    key: str
    offset: int
    nbytes: int


class List(Request, frozen=True, array_like=True, tag=6):
    """Begin to list names (`deep`: keys and sizes) below a prefix."""

    prefix: str
    deep: bool


class More(Request, frozen=True, array_like=True, tag=7):
    """Go on with the lane's listing."""


class Delete(Request, frozen=True, array_like=True, tag=8):
    """Remove an object or what lies below a prefix."""

    prefix: str


class Distrust(Request, frozen=True, array_like=True, tag=9):
    """Say that an object came damaged."""

    key: str


class Cool(Request, frozen=True, array_like=True, tag=10):
    """Say that groups will hardly be read again."""

    prefixes: list[str]


class Settle(Request, frozen=True, array_like=True, tag=11):
    """Wait until what lies below a prefix lies where it belongs."""

    prefix: str


class Sync(Request, frozen=True, array_like=True, tag=12):
    """Wait until everything is durable."""


class Stamps(Request, frozen=True, array_like=True, tag=13):
    """Begin to list keys and stamps below a prefix."""

    prefix: str


class Stamp(Request, frozen=True, array_like=True, tag=14):
    """Ask for an object's stamp."""

    key: str


class Call(Request, frozen=True, array_like=True, tag=15):
    """Call something by name with the bytes behind the header; it may take `long`."""

    name: str
    long: bool = False


AnyRequest: TypeAlias = (
    Hello
    | Publish
    | Put
    | Get
    | Read
    | List
    | More
    | Delete
    | Distrust
    | Cool
    | Settle
    | Sync
    | Stamps
    | Stamp
    | Call
)

# ---------------------------------------------------------------- answers


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Any answer."""


class Welcome(Answer, frozen=True, array_like=True, tag=1):
    """A lane is open; a write may wait so long for room."""

    unit: str
    deadline_s: float


class Done(Answer, frozen=True, array_like=True, tag=2):
    """It is done; with a flag or a place, or with the place and what the noted one answers."""

    value: bool | str | None = None
    answer: bytes = b""


class Data(Answer, frozen=True, array_like=True, tag=3):
    """The bytes are behind the header."""


class Listed(Answer, frozen=True, array_like=True, tag=4):
    """Names with sizes (-1 where only names were asked for), or with stamps."""

    names: list[tuple[str, int | str]]
    last: bool


class Failed(Answer, frozen=True, array_like=True, tag=5):
    """An error of ours, by its code."""

    code: str
    problem: str
    subject: str
    remedy: str


class Busy(Answer, frozen=True, array_like=True, tag=6):
    """It is being done; the answer itself follows."""


AnyAnswer: TypeAlias = Welcome | Done | Data | Listed | Failed | Busy

encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(AnyRequest)
_answers = msgspec.msgpack.Decoder(AnyAnswer)


def decode_request(header: Buffer) -> AnyRequest:
    """Return what a header asks for.

    Raises
    ------
    ProtocolMismatch
        It is no request of this version.
    """
    try:
        found: AnyRequest = _requests.decode(header)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolMismatch(f"no request: {error}", subject="a message") from error
    return found


def decode_answer(header: Buffer, subject: str) -> AnyAnswer:
    """Return what a header answers.

    Raises
    ------
    ProtocolMismatch
        It is no answer of this version.
    """
    try:
        found: AnyAnswer = _answers.decode(header)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolMismatch(f"no answer: {error}", subject=subject) from error
    return found


# ---------------------------------------------------------------- errors


def failed(error: TqFsError) -> Failed:
    """Return an error as an answer."""
    return Failed(
        code=error.code,
        problem=error.problem,
        subject=error.subject,
        remedy=error.remedy,
    )


def error_of(answer: Failed) -> TqFsError:
    """Return the error that an answer tells of; StorageFailed for a code that is not known."""
    kind = _kinds().get(answer.code, StorageFailed)
    return kind(answer.problem, subject=answer.subject, remedy=answer.remedy)


def _kinds() -> dict[str, type[TqFsError]]:
    found = (kind for kind in vars(errors).values() if isinstance(kind, type))
    return {kind.code: kind for kind in found if issubclass(kind, TqFsError)}
