"""JSON that comes in pieces: readers that wait wherever it breaks off.

A reader is a generator that yields when it needs more bytes, and returns what it has read. Nothing
is kept but what the reader asks for, so that long arrays and strings pass through. A piece is at
most :data:`PIECE_BYTES` long; that bounds the time that one call into :mod:`re`, :mod:`msgspec` or
:mod:`numpy` holds the interpreter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

import msgspec

from tq_fs.ingest._reply import Asked

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]

PIECE_BYTES = 65536
_KEY_BYTES = 1024
_ELEMENT_BYTES = 16384
_DEPTH = 64

_SPACE = re.compile(rb"[ \t\n\r]*+")
_SCALAR = re.compile(rb'[^ \t\n\r,:"\[\]{}]*+')
_FLAT = re.compile(rb'[^"\[\]{}]*+')
# Characters of a string: all but an escape that is not there whole (of a pair: both of it).
_UNITS = re.compile(
    rb'(?:[^"\\]++|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*+",
    re.DOTALL,
)
_LONGEST_UNIT = 12
# Elements of an array that are there whole: each is followed by a comma or the array's end.
NUMBERS = re.compile(rb'(?:[^,"\[\]{}]++(?:,|(?=\])))*+')
ENTRIES = re.compile(
    rb"(?:[ \t\n\r]*+\[[^\"\[\]{}]*+(?:\"(?:[^\"\\]++|\\.)*+\"[^\"\[\]{}]*+)?+\][ \t\n\r]*+"
    rb"(?:,|(?=\])))*+",
    re.DOTALL,
)

_words = msgspec.json.Decoder(str)
_any = msgspec.json.Decoder(msgspec.Raw)  # looks at the grammar, not at the characters
QUOTE, COMMA = ord('"'), ord(",")


class JsonText:
    """The bytes that have come and are not read yet, and the readers of them.

    Parameters
    ----------
    asked
        Names the reply in errors.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._data = b""
        self._at = 0
        self._gone = 0
        self._ended = False

    def add(self, piece: bytes) -> None:
        """Take bytes that have come, at most :data:`PIECE_BYTES`; then go on with the reader."""
        self._gone += self._at
        self._data = self._data[self._at :] + piece
        self._at = 0

    def end(self) -> None:
        """Say that no more will come; then go on with the reader."""
        self._ended = True

    # ------------------------------------------------------------ marks

    def peek(self) -> Reading[int]:
        """Return the next byte that is no space, and leave it there."""
        while True:
            match = _SPACE.match(self._data, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._data):
                return self._data[self._at]
            yield from self._more()

    def take(self, marks: bytes) -> Reading[int]:
        """Take the next byte that is no space, which must be one of `marks`."""
        found = yield from self.peek()
        if found not in marks:
            raise self.malformed(f"{chr(found)!r} where one of {marks.decode()} is expected")
        self._at += 1
        return found

    def nothing(self) -> Reading[None]:
        """Take spaces until the end, and nothing else."""
        while not self._ended or self._at < len(self._data):
            match = _SPACE.match(self._data, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._data):
                raise self.malformed("more follows after the end of the reply")
            if not self._ended:
                yield

    # ------------------------------------------------------------ values

    def members(self, where: str, read: Callable[[str], Reading[None]]) -> Reading[None]:
        """Read an object; `read` reads the value of each key, which it is given."""
        if (yield from self.peek()) != ord("{"):
            raise self.malformed(f"{where} is no object")
        self._at += 1
        if (yield from self.peek()) == ord("}"):
            self._at += 1
            return
        while True:
            key = yield from self.value(_KEY_BYTES, "a key")
            if not key.startswith(b'"'):
                raise self.malformed("a key is no string")
            yield from self.take(b":")
            yield from read(self.decoded(_words.decode, key, "a key"))
            if (yield from self.take(b",}")) != COMMA:
                return

    def value(self, limit: int, where: str) -> Reading[bytes]:
        """Return a value as it is written, of at most `limit` bytes."""
        first = yield from self.peek()
        kept = bytearray()

        def keep(part: bytes) -> None:
            kept.extend(part)
            if len(kept) > limit:
                raise self._asked.invalid(
                    f"is longer than {limit} bytes",
                    at=where,
                    remedy="ask the engine for nothing but logprobs and routed experts",
                )

        if first == QUOTE:
            yield from self._quoted(keep)
        elif first in b"[{":
            yield from self._nested(keep)
        else:
            yield from self._scalar(keep)
        return bytes(kept)

    def skip(self, limit: int, where: str) -> Reading[None]:
        """Read a value of which nothing is wanted but that it is JSON."""
        raw = yield from self.value(limit, where)
        self.decoded(_any.decode, raw, where)
        self.decoded(bytes.decode, raw, where)

    def null(self) -> Reading[bool]:
        """Take ``null`` if that is what follows, and tell."""
        if (yield from self.peek()) != ord("n"):
            return False
        if (word := (yield from self.value(16, "null"))) != b"null":
            raise self.malformed(f"{word.decode(errors='replace')} is no value")
        return True

    def _quoted(self, keep: Callable[[bytes], None]) -> Reading[None]:
        keep(b'"')
        yield from self.characters(keep)
        keep(b'"')

    def _scalar(self, keep: Callable[[bytes], None]) -> Reading[None]:
        while True:
            match = _SCALAR.match(self._data, self._at)
            assert match is not None
            keep(match[0])
            self._at = match.end()
            if self._at < len(self._data):
                break
            yield from self._more()

    def _nested(self, keep: Callable[[bytes], None]) -> Reading[None]:
        depth = 0
        while True:
            match = _FLAT.match(self._data, self._at)
            assert match is not None
            keep(match[0])
            self._at = match.end()
            if self._at == len(self._data):
                yield from self._more()
                continue
            if (mark := self._data[self._at]) == QUOTE:
                yield from self._quoted(keep)
                continue
            keep(bytes((mark,)))
            self._at += 1
            depth += 1 if mark in b"[{" else -1
            if depth > _DEPTH:
                raise self.malformed(f"values are nested more than {_DEPTH} deep")
            if depth == 0:
                return

    # ------------------------------------------------------------ what may be long

    def characters(self, give: Callable[[bytes], None]) -> Reading[None]:
        """Read a string, and give what is between its quotes in pieces, as it is written.

        Neither an escape nor a character of several bytes is cut.
        """
        yield from self.take(b'"')
        while True:
            end = self._units_end()
            if end > self._at:
                part, self._at = self._data[self._at : end], end
                give(part)
            elif self._at < len(self._data) and self._data[self._at] == QUOTE:
                self._at += 1
                return
            elif len(self._data) - self._at >= _LONGEST_UNIT:
                raise self.malformed("no character of a string")
            else:
                yield from self._more()

    def _units_end(self) -> int:
        """Return where the characters that are there whole end; the fast way without escapes."""
        data = self._data
        end = data.find(b'"', self._at)
        if data.find(b"\\", self._at, end if end >= 0 else len(data)) >= 0:
            match = _UNITS.match(data, self._at)
            assert match is not None
            end = match.end()
        elif end < 0:
            end = len(data)
        if end == len(data):
            while end > self._at and len(data) - end < 3 and data[end - 1] & 0xC0 == 0x80:
                end -= 1
            if end > self._at and data[end - 1] >= 0xC0:
                end -= 1
        return end

    def elements(
        self, pattern: re.Pattern[bytes], where: str, give: Callable[[bytes], None]
    ) -> Reading[None]:
        """Read an array, and give runs of its elements, each as an array.

        Parameters
        ----------
        pattern
            :data:`NUMBERS` or :data:`ENTRIES`.
        """
        if (yield from self.peek()) != ord("["):
            raise self.malformed(f"{where} is no array")
        self._at += 1
        ended = (yield from self.peek()) == ord("]")
        while not ended:
            match = pattern.match(self._data, self._at)
            assert match is not None
            run, self._at = match[0], match.end()
            if not run:
                if len(self._data) - self._at > _ELEMENT_BYTES:
                    raise self.malformed(f"no element of {where}")
                yield from self._more()
                continue
            ended = run[-1] != COMMA
            give(b"[%b]" % (run if ended else run[:-1]))
        yield from self.take(b"]")

    # ------------------------------------------------------------ errors

    def decoded(self, decode: Callable[[bytes], T], raw: bytes, where: str) -> T:
        """Decode a value, or refuse the reply."""
        try:
            return decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._asked.invalid(
                f"cannot be read ({error})",
                at=where,
                remedy="check that the engine speaks SGLang's /generate",
            ) from error

    def malformed(self, problem: str) -> Exception:
        """Return the error for what is no JSON, or none that is expected, at this byte."""
        return self._asked.invalid(
            problem,
            at=f"byte {self._gone + self._at}",
            remedy="check that the engine speaks SGLang's /generate",
        )

    def _more(self) -> Reading[None]:
        if self._ended:
            raise self._asked.invalid(
                f"ends after {self._gone + len(self._data)} bytes, in the middle",
                remedy="generate again; if it happens often, look at what is between here and the "
                "engine",
            )
        yield
