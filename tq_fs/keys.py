"""Who a Step and a Segment are, and how those identities become paths.

Ids come from users and may be any text. Each id becomes one path component that is safe on
POSIX file systems and in S3 keys:

* ``A-Z a-z 0-9 - .`` stand for themselves (a leading dot does not);
* ``_`` is written ``__``, every other byte of the UTF-8 form ``_xx`` in lower-case hex;
* the empty id is a lone ``_``;
* where that is longer than 200 bytes: up to 64 bytes of it, ``_h`` and the SHA-256 of the id. The
  id itself then stands in the metadata (manifest and Step attributes).

The three forms after ``_`` cannot be mistaken for each other, so the encoding is unique.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from dataclasses import dataclass

from tq_fs.errors import InvalidKey

MAX_ID_BYTES = 1000
MAX_COMPONENT_BYTES = 200
_KEPT_OF_LONG = 64
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-.")
_AS_IT_IS = re.compile(r"[A-Za-z0-9-][A-Za-z0-9.-]*")  # most ids; the rest is for the others
_ESCAPES = re.compile(r"_(?:_|[0-9a-f]{2})")
_ESCAPED = re.compile(r"(?:[^_]|__|_[0-9a-f]{2})*")  # up to where an escape is cut
_TIMED = re.compile(r"([0-9a-f]{16})[0-9a-f]{8}(?:\Z|\.)")
_INDEX = re.compile(r"0|[1-9][0-9]{0,17}")
_SCHEME = "tqfs1"


def _utf8(text: str) -> bytes:
    if not isinstance(text, str):
        raise InvalidKey(f"an id is text, not {type(text).__name__}", subject=repr(text)[:80])
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidKey(
            "the id holds a lone surrogate, which is no Unicode text", subject=repr(text[:80])
        ) from error
    if len(raw) > MAX_ID_BYTES:
        raise InvalidKey(
            f"the id has {len(raw)} bytes, {MAX_ID_BYTES} are allowed",
            subject=repr(text[:40]) + "…",
            remedy="use a shorter id, or a hash of it",
        )
    return raw


def escape(text: str) -> str:
    """Return the reversible form of an id, of any length.

    Raises
    ------
    InvalidKey
        The id is no text, or longer than 1,000 bytes.
    """
    raw = _utf8(text)
    if _AS_IT_IS.fullmatch(text):
        return text
    if not raw:
        return "_"
    body = "".join(chr(b) if b in _PLAIN else "__" if b == 0x5F else f"_{b:02x}" for b in raw)
    return "_2e" + body[1:] if body[0] == "." else body


def unescape(component: str) -> str:
    """Undo :func:`escape`.

    Raises
    ------
    InvalidKey
        `component` is not something :func:`escape` returns.
    """
    if len(component) <= MAX_ID_BYTES and _AS_IT_IS.fullmatch(component):
        return component
    if component == "_":
        return ""
    out = bytearray()
    at = 0
    try:
        for match in _ESCAPES.finditer(component):
            out += component[at : match.start()].encode()
            out += b"_" if match[0] == "__" else bytes.fromhex(match[0][1:])
            at = match.end()
        out += component[at:].encode()
        text = out.decode()
    except UnicodeError as error:
        raise InvalidKey("not an encoded id", subject=component) from error
    if escape(text) != component:
        raise InvalidKey("not an encoded id", subject=component)
    return text


@functools.lru_cache(4096)
def component(text: str) -> str:
    """Return the path component of an id: at most 200 bytes, hashed where it must be."""
    full = escape(text)
    if len(full) <= MAX_COMPONENT_BYTES:
        return full
    kept = _ESCAPED.match(full, 0, _KEPT_OF_LONG)
    assert kept is not None
    return f"{kept[0]}_h{hashlib.sha256(text.encode()).hexdigest()}"


@dataclass(frozen=True, slots=True, order=True)
class Incarnation:
    """One use of a session id: what Steps and a manifest belong to.

    Attributes
    ----------
    partition
        Namespace in the store, such as ``train`` or ``eval``.
    session_id
        The user's id of the rollout session.
    incarnation_id
        New whenever the session id is used again, so that a late delete cannot hit newer data.
    """

    partition: str
    session_id: str
    incarnation_id: str

    @classmethod
    def new(cls, partition: str, session_id: str, now_ns: int, home: str = "") -> Incarnation:
        """Return one that was never used, whose id sorts behind those of the session's past.

        Parameters
        ----------
        now_ns
            Nanoseconds since 1970 on the Controller's clock.
        home
            The StorageUnit that keeps the session's manifest; empty where the store does.
        """
        name = f"{now_ns:016x}{os.urandom(4).hex()}"
        return cls(partition, session_id, f"{name}.{home}" if home else name)

    @property
    def home(self) -> str:
        """The StorageUnit that keeps its manifest; empty where the store itself does."""
        return self.incarnation_id.partition(".")[2]

    @property
    def opened_ns(self) -> int:
        """When it began on its Controller's clock; 0 where its id does not say that."""
        found = _TIMED.match(self.incarnation_id)
        return int(found[1], 16) if found else 0

    @property
    def path(self) -> str:
        """Path below ``steps/`` and ``manifests/``."""
        return "/".join(map(component, (self.partition, self.session_id, self.incarnation_id)))

    def __str__(self) -> str:
        """Return a readable name for messages."""
        return f"session {self.session_id!r} ({self.partition}, {self.incarnation_id})"


@dataclass(frozen=True, slots=True, order=True)
class StepKey:
    """Identity of one Step: an incarnation and the Step's index in it."""

    incarnation: Incarnation
    step_index: int

    @property
    def path(self) -> str:
        """Prefix of the Step's objects in its store."""
        return step_path(self.incarnation.path, self.step_index)

    def __str__(self) -> str:
        """Return a readable name for messages."""
        return f"Step {self.step_index} of {self.incarnation}"


def step_path(incarnation_path: str, step_index: int) -> str:
    """Return ``steps/<partition>/<session>/<incarnation>/<000007>``."""
    return f"steps/{incarnation_path}/{step_index:06d}"


@dataclass(frozen=True, slots=True, order=True)
class SegmentRef:
    """Identity of one Segment; its string form is all that a Sample carries.

    Attributes
    ----------
    store_id
        The run the Segment belongs to.
    incarnation
        The session and its incarnation.
    view
        How Steps were arranged: ``lineage`` or ``timeline``.
    index
        Position among the view's Segments, from 0.
    """

    store_id: str
    incarnation: Incarnation
    view: str
    index: int

    def __str__(self) -> str:
        """Return the short string that travels: ``tqfs1:store/partition/session/…``."""
        parts = (self.store_id, self.incarnation.partition, self.incarnation.session_id)
        ids = "/".join(map(escape, (*parts, self.incarnation.incarnation_id, self.view)))
        return f"{_SCHEME}:{ids}/{self.index}"

    @classmethod
    def parse(cls, text: str) -> SegmentRef:
        """Read the string form back.

        Raises
        ------
        InvalidKey
            `text` is no reference of this package.
        """
        return _parse(text) if isinstance(text, str) else _parse("")


@functools.lru_cache(4096)
def _parse(text: str) -> SegmentRef:
    scheme, _, body = text.partition(":")
    parts = body.split("/")
    if scheme != _SCHEME or len(parts) != 6 or not _INDEX.fullmatch(parts[5]):
        raise InvalidKey(
            f"not a reference of the form {_SCHEME}:store/partition/session/incarnation/view/n",
            subject=repr(text)[:120],
        )
    store_id, partition, session_id, incarnation_id, view = map(unescape, parts[:5])
    incarnation = Incarnation(partition, session_id, incarnation_id)
    return SegmentRef(store_id, incarnation, view, int(parts[5]))
