"""A rollout engine for tests: SGLang's wire format, answers at once, fails on schedule.

It runs in the test's process, in a thread of its own. Tokens, logprobs and routing are functions
of what was asked (`_engine_replies`), so that a test can say what must have been recorded.

    with FakeEngine() as engine:
        engine.answer("<tool_call>...", stop=True)    # what the next request is answered
        engine.fault("error-500")                     # what happens to the next request
        engine.fault("hold", after=3)                 # 3 tokens, then wait for abort or release()
        ... ask engine.url ...
        engine.asked[-1].input_ids
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
from aiohttp import web

from tests._engine_replies import Ids, logprobs_of, new_ids, reply_body, rows_of
from tq_fs.demo.http_thread import HttpThread

Fault = Literal[
    "ok",  # nothing, to let one pass
    "error-400",  # a request that the engine does not take
    "error-context",  # 400: longer than the model's context
    "error-429",
    "error-500",
    "error-502-html",  # a gateway's page
    "error-503",
    "hang",  # no answer, until the client goes away or the engine stops
    "hold",  # `after` tokens, then waits for an abort or release()
    "reset",  # the connection breaks before an answer
    "broken-body",  # the connection breaks half-way through the body
    "slow-body",  # the body comes in pieces over a quarter of a second
    "cut-json",  # a whole HTTP answer whose JSON ends half-way
    "not-json",
    "abort",  # finish reason abort after `after` tokens, unasked
    "wrong-width",  # rows of one layer more
    "short-base64",  # the last characters of the base64 are missing
    "bad-base64",  # characters that are none of base64's
    "full-rows",  # all rows, where only those from some row on were asked for
    "row-short",  # the last row is missing
    "row-more",  # one row too many
    "no-routing",
    "one-id",  # rows that are all zero
    "repeat-id",  # an id twice in a row
    "unknown-rows",  # -1 everywhere
    "expert-out-of-range",
    "no-version",
    "version-number",  # a number, where text is due
    "no-logprobs",
    "nan-logprob",  # NaN, which is no JSON, but some servers write it
    "null-logprob",
    "fewer-logprobs",  # one less than ids
    "other-ids",  # logprobs of other ids than those of output_ids
    "no-ids",
]
FAULTS: tuple[Fault, ...] = get_args(Fault)
HOLD_S = 0.002  # between two looks whether a held request may go on
SLOW_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRequest:
    """One request as it came.

    Attributes
    ----------
    body
        Its JSON.
    arrived
        Seconds, of `time.monotonic`.
    """

    body: Mapping[str, Any]
    arrived: float = field(default_factory=time.monotonic)

    @property
    def rid(self) -> str:
        return str(self.body.get("rid", ""))

    @property
    def input_ids(self) -> list[int]:
        return list(self.body["input_ids"])

    @property
    def sampling(self) -> Mapping[str, Any]:
        return dict(self.body.get("sampling_params") or {})

    @property
    def max_new_tokens(self) -> int:
        return int(self.sampling.get("max_new_tokens", 16))

    @property
    def seed(self) -> int:
        return int(self.sampling.get("sampling_seed") or 0)

    @property
    def start_row(self) -> int:
        return int(self.body.get("routed_experts_start_len") or 0)


class Planned(NamedTuple):
    """What happens to a request: `after` tokens for ``hold`` and ``abort``, and its version."""

    fault: Fault = "ok"
    after: int = 0
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What a request is to be answered, where a test said so."""

    text: str
    ids: tuple[int, ...]
    stop: bool


class FakeEngine:
    """An engine at `url`; starts and stops as a context manager.

    Parameters
    ----------
    layers, topk, experts
        Of the routing.
    version
        Weight version; may be set while it runs (a request answers with the one it began with).
    length
        Tokens of an unscripted reply, with the stop token; None: `max_new_tokens`, without one.
    stop_id
        Token that ends replies which end by themselves (``<|im_end|>`` of the demo's tokenizer).
    token_s
        Seconds that each token takes.
    reply
        Tokens of an unscripted reply in place of synthetic ones, the stop token included.
    plan
        What happens to a request that is not told by :meth:`fault`, and with which weight version
        it is answered; None: nothing, and `version`. For requests of several sessions at once,
        which arrive in any order.
    """

    def __init__(
        self,
        *,
        layers: int = 4,
        topk: int = 2,
        experts: int = 16,
        version: str = "0",
        length: int | None = None,
        stop_id: int = 258,
        token_s: float = 0.0,
        reply: Callable[[AskedRequest], Sequence[int]] | None = None,
        plan: Callable[[AskedRequest], Planned] | None = None,
    ) -> None:
        self.layers, self.topk, self.experts = layers, topk, experts
        self.version = version
        self.length, self.stop_id, self.token_s = length, stop_id, token_s
        self._reply = reply
        self._plan = plan
        self.asked: list[AskedRequest] = []
        self.aborted: list[str] = []  # rids of /abort_request; "*" for all
        self.left: list[str] = []  # rids whose client went away before the answer
        self.running = 0
        self.most_running = 0
        self._faults: deque[tuple[Fault, int]] = deque()
        self._answers: deque[_Answer] = deque()
        self._stopped_rids: Counter[str] = Counter()  # running requests that were aborted
        self._open: Counter[str] = Counter()
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._http = HttpThread(self._app())

    # ------------------------------------------------------------ for tests

    @property
    def url(self) -> str:
        return self._http.url

    def fault(self, *faults: Fault, after: int = 0) -> None:
        """What happens to the next requests, one each; `after` tokens for ``hold``, ``abort``."""
        with self._lock:
            self._faults.extend((fault, after) for fault in faults)

    def answer(self, text: str, *, stop: bool = True) -> None:
        """What one of the next requests is answered: UTF-8 bytes are ids, then the stop token.

        Markers of the demo's tokenizer (``<think>``, ``<tool_call>`` …) are single tokens.
        """
        from tq_fs.demo.tokenizer import build_tokenizer

        ids = build_tokenizer().backend_tokenizer.encode(text, add_special_tokens=False).ids
        with self._lock:
            self._answers.append(_Answer(text=text, ids=tuple(ids), stop=stop))

    def release(self) -> None:
        """Let held requests go on, now and later."""
        self._released.set()

    def wait_for(self, true: Callable[[], bool], seconds: float = 10.0) -> None:
        """Wait until something is true of the engine."""
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, "the engine did not get there in time"
            time.sleep(0.002)

    def rows(self, tokens: Sequence[int], *, version: str | None = None) -> np.ndarray:
        """The routing rows of a whole sequence, int32 ``[T - 1, layers, topk]``."""
        return rows_of(
            tokens,
            layers=self.layers,
            topk=self.topk,
            experts=self.experts,
            version=self.version if version is None else version,
        )

    def logprobs(
        self, tokens: Sequence[int], first: int, *, version: str | None = None
    ) -> np.ndarray:
        """The logprobs of tokens `first` and on, float32."""
        return logprobs_of(tokens, first, version=self.version if version is None else version)

    def __enter__(self) -> Self:
        self._http.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Go away: connections break, later ones are refused. Idempotent."""
        self._released.set()
        self._http.stop()

    # ------------------------------------------------------------ HTTP

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/get_weight_version", self._model_info)
        app.router.add_get("/health", self._ok)
        app.router.add_post("/flush_cache", self._ok)
        return app

    async def _ok(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, _request: web.Request) -> web.Response:
        return web.json_response({"model_path": "fake", "weight_version": self.version})

    async def _abort(self, request: web.Request) -> web.Response:
        asked = await request.json()
        everything = bool(asked.get("abort_all"))
        self.aborted.append("*" if everything else str(asked["rid"]))
        for rid in self._open if everything else [str(asked["rid"])]:
            if self._open[rid]:
                self._stopped_rids[rid] = 1
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = AskedRequest(body=await request.json())
        with self._lock:
            self.asked.append(asked)
            planned = self._next_fault(asked)
        with self._counted(asked.rid):
            try:
                return await self._faulty(request, asked, planned)
            except asyncio.CancelledError:
                self.left.append(asked.rid)
                raise

    @contextlib.contextmanager
    def _counted(self, rid: str) -> Iterator[None]:
        self._open[rid] += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            yield
        finally:
            self.running -= 1
            self._open[rid] -= 1
            if not self._open[rid]:
                del self._open[rid]
                self._stopped_rids.pop(rid, None)

    def _next_fault(self, asked: AskedRequest) -> Planned:
        """What happens to a request; under the lock."""
        if self._faults:
            return Planned(*self._faults.popleft())
        return Planned() if self._plan is None else self._plan(asked)

    async def _faulty(
        self, request: web.Request, asked: AskedRequest, planned: Planned
    ) -> web.StreamResponse:
        fault = planned.fault
        if fault in _REFUSALS:
            status, message = _REFUSALS[fault]
            return web.json_response({"error": {"message": message}}, status=status)
        if fault == "error-502-html":
            page = "<html><body>Bad Gateway</body></html>"
            return web.Response(status=502, text=page, content_type="text/html")
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "reset":
            return _broken_off(request)
        body = await self._body(asked, planned)
        if fault == "broken-body":
            return await _half(request, body)
        if fault == "slow-body":
            return await _slowly(request, body)
        return web.Response(body=body, content_type="application/json")

    async def _body(self, asked: AskedRequest, planned: Planned) -> bytes:
        fault, after = planned.fault, planned.after
        version = self.version if planned.version is None else planned.version
        answer = self._next_answer()
        ids, stopped = self._ids(asked, answer)
        done = await self._spent(asked.rid, len(ids), fault, after)
        kind = "abort" if done is not None else "stop" if stopped else "length"
        ids = ids[: len(ids) if done is None else done]
        whole = answer is not None and done is None and len(answer.ids) <= len(ids)
        text = answer.text if answer is not None and whole else _text(ids)
        return _spoilt(self._reply_of(asked, ids, kind, text, version, fault), fault)

    def _next_answer(self) -> _Answer | None:
        with self._lock:
            return self._answers.popleft() if self._answers else None

    def _ids(self, asked: AskedRequest, answer: _Answer | None) -> tuple[Ids, bool]:
        """All tokens of the reply, and whether the stop token is the last of them."""
        if answer is not None:
            wanted: Iterable[int] = (*answer.ids, self.stop_id) if answer.stop else answer.ids
        elif self._reply is not None:
            wanted = self._reply(asked)
        else:
            count = asked.max_new_tokens if self.length is None else self.length - 1
            synthetic = new_ids(asked.input_ids, min(count, asked.max_new_tokens), seed=asked.seed)
            wanted = synthetic.tolist() + ([] if self.length is None else [self.stop_id])
        ids = np.array(list(wanted)[: asked.max_new_tokens], np.int32)
        return ids, bool(ids.size and ids[-1] == self.stop_id)

    async def _spent(self, rid: str, count: int, fault: Fault, after: int) -> int | None:
        """Let the time of generation pass; the tokens made where it was aborted, else None."""
        if fault == "abort":
            return min(after, count)
        if fault == "hold":
            while not self._released.is_set() and not self._stopped_rids[rid]:
                await asyncio.sleep(HOLD_S)
            if self._stopped_rids[rid]:
                return min(after, count)
        for made in range(count if self.token_s else 0):
            await asyncio.sleep(self.token_s)
            if self._stopped_rids[rid]:
                return made
        return None

    def _reply_of(
        self, asked: AskedRequest, ids: Ids, kind: str, text: str, version: str, fault: Fault
    ) -> dict[str, Any]:
        tokens = [*asked.input_ids, *ids.tolist()]
        start = 0 if fault == "full-rows" else asked.start_row
        rows = None
        if asked.body.get("return_routed_experts"):
            rows = self._spoilt_rows(self.rows(tokens, version=version), fault)[start:]
        finish: dict[str, Any] = {"type": kind}
        if kind == "stop":
            finish["matched"] = self.stop_id
        if kind == "length":
            finish["length"] = asked.max_new_tokens
        if kind == "abort":
            finish["message"] = "Abort before prefill" if not ids.size else "Aborted"
        return reply_body(
            text=text,
            output_ids=ids,
            logprobs=logprobs_of(tokens, len(asked.input_ids), version=version),
            rows=rows,
            start_row=0 if fault == "full-rows" else start,
            version=version,
            finish=finish,
            prompt_tokens=len(asked.input_ids),
            rid=asked.rid,
            input_logprobs=_input_logprobs(asked, version),
        )

    def _spoilt_rows(self, rows: np.ndarray, fault: Fault) -> np.ndarray:
        change = _ROW_FAULTS.get(fault)
        if fault == "expert-out-of-range":
            return rows + self.experts
        return rows if change is None else change(rows)


_ROW_FAULTS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "wrong-width": lambda rows: np.concatenate([rows, rows[:, :1]], axis=1),
    "row-short": lambda rows: rows[:-1],
    "row-more": lambda rows: np.concatenate([rows, rows[-1:]]),
    "one-id": np.zeros_like,
    "repeat-id": lambda rows: np.repeat(rows[..., :1], rows.shape[-1], axis=-1),
    "unknown-rows": lambda rows: np.full_like(rows, -1),
}
_REFUSALS: Mapping[str, tuple[int, str]] = {
    "error-400": (400, "sampling_params: temperature must be non-negative"),
    "error-context": (
        400,
        "The input (40000 tokens) is longer than the model's context length (32768 tokens).",
    ),
    "error-429": (429, "The request queue is full."),
    "error-500": (500, "Internal Server Error"),
    "error-503": (503, "The server is shutting down."),
}


def _text(ids: Ids) -> str:
    return bytes(i for i in ids.tolist() if i < 256).decode("utf-8", "replace")


def _input_logprobs(asked: AskedRequest, version: str) -> list[Any] | None:
    if asked.body.get("logprob_start_len", -1) < 0:
        return None
    values = logprobs_of(asked.input_ids, 0, version=version)
    return [
        [None if at == 0 else float(value), token, None]
        for at, (value, token) in enumerate(zip(values, asked.input_ids, strict=True))
    ]


def _spoilt(reply: dict[str, Any], fault: Fault) -> bytes:
    meta = reply["meta_info"]
    if fault in _MISSING:
        (reply if fault == "no-ids" else meta).pop(_MISSING[fault], None)
    elif fault == "version-number":
        meta["weight_version"] = 7
    elif fault in ("short-base64", "bad-base64"):
        rows = meta["routed_experts"]
        meta["routed_experts"] = rows[:-8] if fault == "short-base64" else "*-_ " + rows[4:]
    else:
        _spoil_logprobs(meta["output_token_logprobs"], fault)
    body = json.dumps(reply).encode()
    if fault == "not-json":
        return b"<html>" + body
    return body[: len(body) // 2] if fault == "cut-json" else body


_MISSING: Mapping[str, str] = {
    "no-routing": "routed_experts",
    "no-version": "weight_version",
    "no-logprobs": "output_token_logprobs",
    "no-ids": "output_ids",
}


def _spoil_logprobs(logprobs: list[list[Any]], fault: Fault) -> None:
    match fault:
        case "nan-logprob":
            logprobs[-1][0] = float("nan")
        case "null-logprob":
            logprobs[-1][0] = None
        case "fewer-logprobs":
            logprobs.pop()
        case "other-ids":
            logprobs[-1][1] += 1


def _broken_off(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def _half(request: web.Request, body: bytes) -> web.StreamResponse:
    answer = web.StreamResponse(
        headers={"Content-Length": str(len(body)), "Content-Type": "application/json"}
    )
    await answer.prepare(request)
    await answer.write(body[: len(body) // 2])
    await asyncio.sleep(0.02)  # so that the client has read it
    assert request.transport is not None
    request.transport.abort()
    return answer


async def _slowly(request: web.Request, body: bytes, pieces: int = 10) -> web.StreamResponse:
    answer = web.StreamResponse(
        headers={"Content-Length": str(len(body)), "Content-Type": "application/json"}
    )
    await answer.prepare(request)
    size = -(-len(body) // pieces)
    for at in range(0, len(body), size):
        await answer.write(body[at : at + size])
        await asyncio.sleep(SLOW_S / pieces)
    return answer
