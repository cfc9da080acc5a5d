"""SGLang's answer to ``/generate``, taken as it comes off the socket."""

from __future__ import annotations

from array import array
from typing import Annotated, TypeAlias

import msgspec
import numpy as np

from tq_fs.errors import ReplyInvalid
from tq_fs.ingest._checks import Parts, checked
from tq_fs.ingest._json import ENTRIES, NUMBERS, PIECE_BYTES, JsonText, Reading
from tq_fs.ingest._reply import Asked, GenerateReply
from tq_fs.ingest._rows import RowBuffer

_VALUE_BYTES = 1 << 20
_TEXT_BYTES = 1024  # of one token's text, escapes included, on average

TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Entry(msgspec.Struct, array_like=True, gc=False):
    """What the engine says of a token."""

    logprob: float
    token: TokenId
    text: str | None = None


class _PromptEntry(msgspec.Struct, array_like=True, gc=False):
    """The same of a token of the prompt, of which the first has no logprob."""

    logprob: float | None
    token: int
    text: str | None = None


class _Finish(msgspec.Struct):
    type: str


_ids = msgspec.json.Decoder(list[TokenId])
_entries = msgspec.json.Decoder(list[_Entry])
_prompt_entries = msgspec.json.Decoder(list[_PromptEntry])
_finish = msgspec.json.Decoder(_Finish | None)
_count = msgspec.json.Decoder(int | None)
_words = msgspec.json.Decoder(str)


class ReplyParser:
    """Parses one reply, of which it keeps what is wanted and never the body.

    The body may be cut anywhere. Routing goes from base64 into the array that is returned, and
    logprobs and ids into compact arrays, some :data:`~tq_fs.ingest._json.PIECE_BYTES` at a time: no
    call into C holds the interpreter for more than about a millisecond, so that an event loop in
    another thread goes on. What the reply may take in memory is bounded by what was asked.

    One thread at a time. After an error the parser is of no use any more; it says the same again.

    Parameters
    ----------
    asked
        The request that the reply answers.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._json = JsonText(asked)
        self._parts = Parts()
        self._seen: set[str] = set()
        self._failed: ReplyInvalid | None = None
        self._reading = self._body()
        next(self._reading)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes of the body, any number of them.

        Raises
        ------
        ReplyInvalid
            What has come so far is no reply to what was asked.
        """
        for start in range(0, len(data), PIECE_BYTES):
            self._json.add(bytes(data[start : start + PIECE_BYTES]))
            self._go_on()

    def close(self) -> GenerateReply:
        """Say that the body has ended, and return the reply.

        Raises
        ------
        ReplyInvalid
            It is short, no JSON, or contradicts itself or what was asked: token and row counts,
            row width, base64 length, version, logprobs.
        """
        self._json.end()
        self._go_on()
        return checked(self._asked, self._parts)

    def _go_on(self) -> None:
        if self._failed is not None:
            raise self._failed
        try:
            next(self._reading, None)
        except ReplyInvalid as error:
            self._failed = error
            raise

    # ------------------------------------------------------------ the reply's parts

    def _body(self) -> Reading[None]:
        if (yield from self._json.peek()) == ord("["):
            raise self._asked.invalid(
                "is a list of replies",
                remedy="send one sequence a request: input_ids as a flat list, and no n above 1",
            )
        yield from self._json.members("the reply", self._of_reply)
        yield from self._json.nothing()

    def _of_reply(self, key: str) -> Reading[None]:
        read = {
            "text": self._text,
            "output_ids": self._output_ids,
            "meta_info": self._meta_info,
        }.get(key)
        if read is None:
            yield from self._json.skip(_VALUE_BYTES, key)
            return
        self._once(key)
        yield from read()

    def _meta_info(self) -> Reading[None]:
        yield from self._json.members("meta_info", self._of_meta_info)

    def _of_meta_info(self, key: str) -> Reading[None]:
        read = {
            "output_token_logprobs": self._logprobs,
            "input_token_logprobs": self._prompt_logprobs,
            "routed_experts": self._routed_experts,
            "weight_version": self._version,
            "finish_reason": self._finish_reason,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
        }.get(key)
        where = f"meta_info.{key}"
        if read is None:
            yield from self._json.skip(_VALUE_BYTES, where)
            return
        self._once(where)
        yield from read()

    def _once(self, where: str) -> None:
        if where in self._seen:
            raise self._asked.invalid(
                "is there twice", at=where, remedy="check that the engine speaks SGLang's /generate"
            )
        self._seen.add(where)

    # ------------------------------------------------------------ each of them

    def _text(self) -> Reading[None]:
        limit = _VALUE_BYTES + _TEXT_BYTES * self._asked.most_tokens
        length = 0

        def give(part: bytes) -> None:
            nonlocal length
            length += len(part)
            if length > limit:
                raise self._asked.invalid(
                    f"is longer than {limit} bytes",
                    at="text",
                    remedy="check that the engine speaks SGLang's /generate",
                )
            self._parts.text.append(self._json.decoded(_words.decode, b'"%b"' % part, "text"))

        if not (yield from self._json.null()):
            yield from self._json.characters(give)

    def _output_ids(self) -> Reading[None]:
        ids = array("i")

        def give(run: bytes) -> None:
            ids.extend(self._json.decoded(_ids.decode, run, "output_ids"))
            self._bound(len(ids), "output_ids")

        yield from self._json.elements(NUMBERS, "output_ids", give)
        self._parts.output_ids = np.frombuffer(ids, np.int32)

    def _logprobs(self) -> Reading[None]:
        where = "meta_info.output_token_logprobs"
        logprobs, ids = array("d"), array("i")

        def give(run: bytes) -> None:
            entries = self._json.decoded(_entries.decode, run, where)
            logprobs.extend([entry.logprob for entry in entries])
            ids.extend([entry.token for entry in entries])
            self._bound(len(ids), where)

        if (yield from self._json.null()):
            return
        yield from self._json.elements(ENTRIES, where, give)
        with np.errstate(over="ignore"):
            self._parts.logprobs = np.frombuffer(logprobs, np.float64).astype(np.float32)
        self._parts.logprob_ids = np.frombuffer(ids, np.int32)

    def _prompt_logprobs(self) -> Reading[None]:
        where = "meta_info.input_token_logprobs"

        def give(run: bytes) -> None:
            self._json.decoded(_prompt_entries.decode, run, where)

        if not (yield from self._json.null()):
            yield from self._json.elements(ENTRIES, where, give)

    def _routed_experts(self) -> Reading[None]:
        if (yield from self._json.null()):
            return
        if self._asked.routing is None:
            yield from self._json.characters(_drop)
            return
        ids = self._parts.output_ids
        rows = RowBuffer(self._asked, None if ids is None else len(ids))

        def give(part: bytes) -> None:
            if b"\\" in part:
                words = self._json.decoded(
                    _words.decode, b'"%b"' % part, "meta_info.routed_experts"
                )
                part = words.encode()
            rows.write(part)

        yield from self._json.characters(give)
        self._parts.rows = rows

    def _version(self) -> Reading[None]:
        raw = yield from self._json.value(_VALUE_BYTES, "meta_info.weight_version")
        if raw != b"null":
            self._parts.version = self._json.decoded(_words.decode, raw, "meta_info.weight_version")

    def _finish_reason(self) -> Reading[None]:
        raw = yield from self._json.value(_VALUE_BYTES, "meta_info.finish_reason")
        found = self._json.decoded(_finish.decode, raw, "meta_info.finish_reason")
        self._parts.finish = None if found is None else found.type

    def _prompt_tokens(self) -> Reading[None]:
        self._parts.prompt_tokens = yield from self._number("meta_info.prompt_tokens")

    def _completion_tokens(self) -> Reading[None]:
        self._parts.completion_tokens = yield from self._number("meta_info.completion_tokens")

    def _number(self, where: str) -> Reading[int | None]:
        raw = yield from self._json.value(64, where)
        return self._json.decoded(_count.decode, raw, where)

    def _bound(self, tokens: int, where: str) -> None:
        if tokens > self._asked.most_tokens:
            raise self._asked.invalid(
                f"{tokens} tokens or more where {self._asked.max_new_tokens} were asked for",
                at=where,
                remedy="check that the reply is that of this request",
            )


def _drop(part: bytes) -> None:
    """Take nothing of it."""


def parse_reply(asked: Asked, body: bytes | bytearray | memoryview) -> GenerateReply:
    """Parse a body that is there whole.

    Raises
    ------
    ReplyInvalid
        As :class:`ReplyParser`.
    """
    parser = ReplyParser(asked)
    parser.feed(body)
    return parser.close()
