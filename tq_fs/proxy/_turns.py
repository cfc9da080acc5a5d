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
from concurrent.futures import Executor
from dataclasses import dataclass
from hashlib import sha256
from time import perf_counter
from typing import Any, Protocol

import msgspec
import numpy.typing as npt

from tq_fs import errors, fields
from tq_fs.errors import ContextOverflow, InvalidConfig, InvalidRequest, ReplyInvalid
from tq_fs.fields import FieldSpec
from tq_fs.ingest import RoutingCheck
from tq_fs.logs import log_context
from tq_fs.metrics import Metrics
from tq_fs.proxy._answers import chat_answer, cut_at
from tq_fs.proxy._engine import Wanted
from tq_fs.proxy._entry import Asked, Entry, Live
from tq_fs.proxy._gate import Gate
from tq_fs.proxy._generate import Engine, Generated, generate
from tq_fs.proxy._headers import TURN, Origin
from tq_fs.proxy._sessions import Sessions
from tq_fs.proxy._settings import ProxySettings
from tq_fs.proxy._threads import in_thread
from tq_fs.proxy._tool_calls import parse_reply
from tq_fs.proxy._wire import ChatAnswer, ChatRequest, Message, sampling_of
from tq_fs.trajectory import Renderer, StepInput, Turn, VersionRule


class Template(Renderer, Protocol):
    """A renderer that knows how replies end."""

    @property
    def stop_ids(self) -> Sequence[int]:
        """Tokens that end a reply."""

    def text_of(self, output_ids: npt.ArrayLike) -> str:
        """Return the text of a reply without the stop token that ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What turns are made with; all stay their owner's.

    Attributes
    ----------
    engine, gate
        Generate, and hold up.
    template
        Renders, and reads replies.
    check
        Of routing rows.
    specs
        Declared fields.
    workers
        Threads that compute.
    recorders
        Threads that wait for Steps to be stored.
    metrics
        Counts seconds by stage.
    """

    engine: Engine
    gate: Gate
    template: Template
    check: RoutingCheck
    specs: Sequence[FieldSpec]
    workers: Executor
    recorders: Executor
    metrics: Metrics


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
            known = await self._answered(request, origin)
            if known is not None:
                return known
            async with self._sessions.request(origin.session_id, origin.instance_id) as entry:
                if origin.turn_id is None:
                    return await self._turn(entry, request, None)
                return await self._once(entry, request, origin.turn_id)

    async def _answered(self, request: ChatRequest, origin: Origin) -> ChatAnswer | None:
        """Return the answer of a finalized session's turn, where the request repeats one."""
        if origin.turn_id is None:
            return None
        for entry in self._sessions.kept(origin.session_id):
            asked = entry.turns.get(origin.turn_id)
            if asked is not None:
                _check_same(asked, request)
                return await asyncio.shield(asked.answer)
        return None

    async def _once(self, entry: Entry, request: ChatRequest, turn_id: str) -> ChatAnswer:
        while (asked := entry.turns.get(turn_id)) is not None:
            _check_same(asked, request)
            answer = await asyncio.shield(asked.answer)
            if answer is not None:
                return answer
        asked = entry.turns[turn_id] = Asked(_digest(request))
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
        try:
            wanted = self._wanted(entry, request, turn)
            generated = await self._generated(wanted)
            read = await self._read(request, turn, generated)
        except BaseException:
            live.conversation.cancel(turn)
            raise
        del generated
        recording = asyncio.create_task(self._recorded(live, turn, read))
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

    async def _generated(self, wanted: Wanted) -> Generated:
        since = perf_counter()
        generated = await generate(
            self._parts.engine,
            self._parts.gate,
            wanted,
            partial_rollout=self._settings.partial_rollout,
            rule=self._rule,
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
        return parse_reply(text, tools=tools)

    # ------------------------------------------------------------ record

    async def _recorded(self, live: Live, turn: Turn, read: _Read) -> ChatAnswer:
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
        answer = await in_thread(self._parts.recorders, record)
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


def check_specs(specs: Sequence[FieldSpec]) -> FieldSpec | None:
    """Return the declaration of routing, if there is one.

    Raises
    ------
    InvalidConfig
        A field is declared that no reply carries, or logprobs are not, or routing without the
        shape of its rows.
    """
    by_name = {spec.name: spec for spec in specs}
    routing = by_name.get(fields.ROUTED_EXPERTS)
    others = set(by_name) - {fields.LOGPROBS, fields.ROUTED_EXPERTS}
    if others or fields.LOGPROBS not in by_name:
        raise InvalidConfig(
            f"{sorted(by_name)} where logprobs, and routed_experts or nothing, belong",
            subject="fields of the Proxy's store",
        )
    if routing is not None and routing.inner is None:
        raise InvalidConfig(
            "layers and topk are not known",
            subject=fields.ROUTED_EXPERTS,
            remedy="declare them, or use tq_fs.routed_experts_of_model",
        )
    return routing


def _digest(request: ChatRequest) -> bytes:
    return sha256(msgspec.json.encode((request.messages, request.tools))).digest()


def _check_same(asked: Asked, request: ChatRequest) -> None:
    if asked.digest != _digest(request):
        raise InvalidRequest(
            "names another request of this session, with other messages or tools",
            subject=TURN,
            remedy="give each turn an id of its own",
        )
