"""One chat request, from its messages to the recorded Step.

::

    admit ─► begin ─► generate ─► read ─► record ─► answer
             thread   engine      thread  thread

*begin* decides how the request hangs on earlier Steps and tokenizes what is new; *read* checks the
routing and turns tokens into a message. Until *record* begins, breaking off leaves nothing; from
then on the Step is recorded, whoever still waits.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from time import perf_counter
from typing import Any

import msgspec
import numpy.typing as npt

from tq_fs import errors, fields
from tq_fs.errors import ContextOverflow, InvalidRequest, ReplyInvalid
from tq_fs.logs import log_context
from tq_fs.proxy._answers import chat_answer, cut_at
from tq_fs.proxy._entry import Asked, Entry, Live
from tq_fs.proxy._generate import Generated, generate
from tq_fs.proxy._headers import TURN, Origin
from tq_fs.proxy._parts import Parts, check_specs
from tq_fs.proxy._room import Lease
from tq_fs.proxy._sessions import Sessions
from tq_fs.proxy._settings import ProxySettings
from tq_fs.proxy._threads import in_thread
from tq_fs.proxy._tool_calls import parse_reply
from tq_fs.proxy._wanted import Wanted
from tq_fs.proxy._wire import ChatAnswer, ChatRequest, Message, sampling_of
from tq_fs.trajectory import StepInput, Turn, VersionRule


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Read:
    """A generation that was checked and read."""

    step: StepInput
    reply: Message
    finish: str
    versions: Sequence[tuple[str, int]]


class Turns:
    """Answers chat requests. Of one event loop."""

    def __init__(self, settings: ProxySettings, sessions: Sessions, parts: Parts) -> None:
        self._settings = settings
        self._sessions = sessions
        self._parts = parts
        self._routing = check_specs(parts.specs)
        self._rule = VersionRule(
            partial_rollout=settings.partial_rollout, max_span=settings.max_version_span
        )
        self._seconds = {
            stage: parts.metrics.histogram("tqfs_proxy_stage_seconds", stage=stage)
            for stage in ("begin", "generate", "read", "record")
        }

    # ------------------------------------------------------------ admit

    async def answer(self, request: ChatRequest, origin: Origin) -> ChatAnswer:
        """Generate, record and answer; a turn id that was answered before gives that answer.

        Cancelling leaves nothing behind, or the Step is recorded.

        Raises
        ------
        TqFsError
            Nothing was recorded.
        """
        with log_context(session=origin.session_id):
            if origin.turn_id is not None:
                return await self._once(request, origin, origin.turn_id)
            async with self._sessions.request(origin.session_id, origin.instance_id) as entry:
                return await self._turn(entry, request, None)

    async def _once(self, request: ChatRequest, origin: Origin, turn_id: str) -> ChatAnswer:
        digest = _digest(request)
        for entry in self._sessions.ended(origin.session_id):
            asked = entry.turns.get(turn_id)
            if asked is not None and (known := await _heard(asked, digest)) is not None:
                return known
        async with self._sessions.request(origin.session_id, origin.instance_id) as entry:
            while (asked := entry.turns.get(turn_id)) is not None:
                if (known := await _heard(asked, digest)) is not None:
                    return known
            return await self._first(entry, request, turn_id, Asked(digest))

    async def _first(
        self, entry: Entry, request: ChatRequest, turn_id: str, asked: Asked
    ) -> ChatAnswer:
        entry.turns[turn_id] = asked
        try:
            return await self._turn(entry, request, asked)
        except BaseException as error:
            if not asked.recording:
                del entry.turns[turn_id]
                asked.fail(error)
            raise

    # ------------------------------------------------------------ begin, generate, read

    async def _turn(self, entry: Entry, request: ChatRequest, asked: Asked | None) -> ChatAnswer:
        assert entry.opening is not None
        live = await asyncio.shield(entry.opening)
        turn = await self._begun(live, request)
        lease = self._parts.engine.room.lease()
        try:
            wanted = self._wanted(entry, request, turn)
            generated = await self._generated(wanted, lease)
            read = await self._read(request, turn, generated)
        except BaseException:
            live.conversation.cancel(turn)
            lease.keep(0)
            raise
        del generated
        recording = asyncio.create_task(self._recorded(live, turn, read, lease))
        entry.record(recording, asked)
        return await asyncio.shield(recording)

    async def _begun(self, live: Live, request: ChatRequest) -> Turn:
        def begin() -> Turn:
            return live.conversation.begin(
                request.messages, request.tools, options=request.chat_template_kwargs or {}
            )

        since = perf_counter()
        turn = await in_thread(self._parts.workers, begin, undo=live.conversation.cancel)
        self._seconds["begin"].observe(perf_counter() - since)
        return turn

    def _wanted(self, entry: Entry, request: ChatRequest, turn: Turn) -> Wanted:
        stop_ids = [int(i) for i in self._parts.template.stop_ids]
        sampling = {"stop_token_ids": stop_ids, **self._settings.sampling, **sampling_of(request)}
        return Wanted(
            rid=uuid.uuid4().hex,
            session_id=entry.session_id,
            input_ids=turn.input_ids,
            sampling=sampling,
            max_new_tokens=self._max_new_tokens(request, len(turn.input_ids)),
            start_row=turn.first_row,
            routing=self._routing,
        )

    def _max_new_tokens(self, request: ChatRequest, prompt: int) -> int:
        """Return the bound of the answer, which the context has room for."""
        context = self._settings.context_length
        wanted = request.wanted_tokens
        default = self._settings.max_new_tokens
        if context is None:
            assert default is not None
            return wanted or default
        left = context - prompt
        if left < (wanted or 1):
            raise ContextOverflow(
                f"{prompt} tokens of prompt and {wanted or 1} to generate, of {context} together",
                subject="the conversation",
                remedy="shorten it, or ask for fewer tokens",
            )
        return wanted or min(left, default or left)

    async def _generated(self, wanted: Wanted, lease: Lease) -> Generated:
        since = perf_counter()
        generated = await generate(
            self._parts.engine,
            self._parts.gate,
            wanted,
            partial_rollout=self._settings.partial_rollout,
            rule=self._rule,
            lease=lease,
        )
        self._seconds["generate"].observe(perf_counter() - since)
        return generated

    async def _read(self, request: ChatRequest, turn: Turn, generated: Generated) -> _Read:
        def read() -> _Read:
            values: dict[str, npt.ArrayLike] = {fields.LOGPROBS: generated.logprobs}
            if self._routing is not None:
                rows = generated.routed_experts
                assert rows is not None
                self._parts.check.check(rows, f"the reply to a request of {len(turn.input_ids)}")
                values[fields.ROUTED_EXPERTS] = rows
            return _Read(
                step=turn.step(generated.response, values, versions=generated.versions),
                reply=self._reply(request, generated),
                finish=generated.finish,
                versions=generated.versions,
            )

        since = perf_counter()
        done = await in_thread(self._parts.workers, read)
        self._seconds["read"].observe(perf_counter() - since)
        return done

    def _reply(self, request: ChatRequest, generated: Generated) -> Message:
        text = self._parts.template.text_of(generated.response)
        if generated.finish == "stop":
            text = cut_at(text, request.stops)
        tools = bool(request.tools) and request.tool_choice != "none"
        # Ids of calls have to differ within a conversation, and to be the same in every run.
        return parse_reply(text, tools=tools, prefix=f"call_{len(request.messages)}")

    # ------------------------------------------------------------ record

    async def _recorded(self, live: Live, turn: Turn, read: _Read, lease: Lease) -> ChatAnswer:
        def record() -> ChatAnswer:
            try:
                recorded = _record(live, read.step)
                live.conversation.commit(turn, recorded, read.reply)
            finally:
                live.conversation.cancel(turn)
            return chat_answer(
                live.session,
                recorded,
                read.reply,
                model=self._settings.model,
                prompt_tokens=len(turn.input_ids),
                finish=read.finish,
                versions=read.versions,
            )

        since = perf_counter()
        try:
            answer = await in_thread(self._parts.recorders, record)
        finally:
            lease.keep(0)  # the reply's arrays are let go
        self._seconds["record"].observe(perf_counter() - since)
        return answer


_REPLYS_FAULT = (
    errors.InvalidField,
    errors.RowCountMismatch,
    errors.ValueOutOfRange,
    errors.WidthChanged,
)


def _record(live: Live, step: StepInput) -> Any:
    try:
        return live.session.record(step)
    except _REPLYS_FAULT as error:
        raise ReplyInvalid(
            str(error),
            subject="the engine's reply",
            remedy="see that the engine serves the model that the Proxy was configured for",
        ) from error


def _digest(request: ChatRequest) -> bytes:
    return sha256(msgspec.json.encode((request.messages, request.tools))).digest()


async def _heard(asked: Asked, digest: bytes) -> ChatAnswer | None:
    """Return the answer to the same request; None where that was broken off."""
    if asked.digest != digest:
        raise InvalidRequest(
            "names another request of this session, with other messages or tools",
            subject=TURN,
            remedy="give each turn an id of its own",
        )
    return await asyncio.shield(asked.answer)
