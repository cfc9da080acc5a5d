"""A Proxy over real HTTP, before a fake engine: what its tests share."""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tq_fs
from tests._engines import FakeEngine
from tests._rollouts import assert_bits
from tq_fs.demo.tokenizer import build_tokenizer
from tq_fs.metrics import Metrics
from tq_fs.proxy import ChatTemplate, ProxyClient, ProxySettings, RunningProxy
from tq_fs.proxy._routes import Proxy

LAYERS, TOPK, EXPERTS = 4, 2, 16
FIELDS = (
    tq_fs.logprobs(),
    tq_fs.routed_experts(layers=LAYERS, topk=TOPK, experts=EXPERTS),
)
STOP = "<|im_end|>"
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
    },
}

Message = dict[str, Any]


@functools.cache
def template() -> ChatTemplate:
    return ChatTemplate.from_model(build_tokenizer())


def user(text: str) -> Message:
    return {"role": "user", "content": text}


@dataclass(frozen=True)
class Answer:
    """An HTTP answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


@dataclass(frozen=True)
class World:
    """Engine, Proxy and store that run."""

    engine: FakeEngine
    proxy: RunningProxy
    store: tq_fs.Store
    client: ProxyClient
    metrics: Metrics
    folder: Path | None

    # ------------------------------------------------------------ ask

    def send(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str | bytes] | None = None,
    ) -> Answer:
        """One request, as any client sends it; bytes go as they are."""
        port = int(self.proxy.url.rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, sent, dict(headers or {}))
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()

    def chat(self, session_id: str, messages: Sequence[Message], **body: Any) -> Answer:
        """One chat request; `headers` are added."""
        headers = {"X-Session-Id": session_id, **body.pop("headers", {})}
        sent = {"messages": list(messages), "max_tokens": 6, **body}
        return self.send("POST", "/v1/chat/completions", sent, headers)

    def play(self, session_id: str, turns: int = 2, **body: Any) -> list[Message]:
        """A conversation of some turns; returns it."""
        messages: list[Message] = []
        for turn in range(turns):
            messages.append(user(f"question {turn}"))
            answer = self.chat(session_id, messages, **body)
            assert answer.status == 200, answer.body
            messages.append(answer.json["choices"][0]["message"])
        return messages

    # ------------------------------------------------------------ look inside

    @property
    def inside(self) -> Proxy:
        inside = self.proxy.app.state.proxy
        assert isinstance(inside, Proxy)
        return inside

    def on_loop(self, call: Callable[[], Any]) -> Any:
        """Call something on the Proxy's event loop, and return what it returns."""
        loop: asyncio.AbstractEventLoop = self.inside.loop

        async def run() -> Any:
            found = call()
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run_coroutine_threadsafe(run(), loop).result(30)

    def tasks(self) -> list[str]:
        """Names of what runs on the event loop, but for what always does."""
        names = self.on_loop(lambda: [str(t.get_coro()) for t in asyncio.all_tasks()])
        return sorted(n for n in names if not any(word in n for word in _ALWAYS))

    def entry(self, session_id: str) -> Any:
        """The open entry of a session; None where there is none."""
        return self.inside.sessions._open.get(session_id)

    def store_records(self, session_id: str) -> list[tq_fs.StepRecord]:
        """The recorded Steps of an open session."""
        live = self.entry(session_id).opening.result()
        records: list[tq_fs.StepRecord] = live.session.records
        return records

    def quiet(self, session_id: str | None = None, seconds: float = 10.0) -> None:
        """Wait until nothing is under way."""
        wait_until(lambda: not self._busy(session_id), seconds)

    def _busy(self, session_id: str | None) -> bool:
        entries = list(self.inside.sessions._open.values())
        busy = any(e.busy for e in entries if session_id in (None, e.session_id))
        held = self.inside.turns._parts.engine.room.used_bytes
        return busy or bool(self.tasks()) or bool(self.inside.gate.running) or bool(held)

    def steps_on_disk(self) -> int:
        """Step folders in the store, staged ones included."""
        if self.folder is None:
            return 0
        return len({p.parent for p in self.folder.rglob("zarr.json") if _is_step(p)})


_ALWAYS = ("World.on_loop", "_sweeping", "Server", "LifespanOn", "lifespan", "RequestResponseCycle")


def _is_step(path: Path) -> bool:
    return "steps" in path.parts and path.parent.name.isdecimal()


def wait_until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


@contextmanager
def world(
    tmp_path: Path | None,
    *,
    engine: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
    store: Mapping[str, Any] | None = None,
    fields: Sequence[tq_fs.FieldSpec] = FIELDS,
    token: str | None = None,
    **settings: Any,
) -> Iterator[World]:
    """Give a world whose store lies in `tmp_path`, or is off."""
    url = None if tmp_path is None else f"file://{tmp_path}/store"
    given = {"layers": LAYERS, "topk": TOPK, "experts": EXPERTS, "length": 6, **(engine or {})}
    metrics = Metrics("default", role="proxy")
    with (
        FakeEngine(**given) as fake,
        tq_fs.open_store(url, fields=fields, metrics=metrics, **(store or {})) as opened,
    ):
        chosen = {"context_length": 4096, "timeout_s": 30.0, "upstreams": (fake.url,), **settings}
        with RunningProxy(
            ProxySettings(token=token, **chosen), opened, template(), metrics=metrics, clock=clock
        ) as proxy:
            client = ProxyClient(proxy.url, token=token, timeout_s=60)
            folder = None if tmp_path is None else tmp_path / "store"
            yield World(fake, proxy, opened, client, metrics, folder)


class Slow:
    """A method that waits until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        call = getattr(kind, name)

        def slow(this: Any, *args: Any, **named: Any) -> Any:
            self.entered.set()
            assert self.go_on.wait(20)
            return call(this, *args, **named)

        monkeypatch.setattr(kind, name, slow)


def together(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Call all at once, each in a thread; returns what they return or raise."""
    found: dict[int, Any] = {}

    def run(place: int, call: Callable[[], Any]) -> None:
        try:
            found[place] = call()
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place, call)) for place, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[place] for place in range(len(threads))]


def check_tensors(world: World, segments: Sequence[tq_fs.Segment]) -> None:
    """Compare what training gets of Segments with what the engine has said, bit for bit."""
    batch = world.store.hydrate(segments)
    for place, segment in enumerate(segments):
        logprobs, rows = truth(world.engine, segment)
        assert_bits(batch["rollout_log_probs"][place], logprobs, segment.session_id)
        assert_bits(batch["rollout_routed_experts"][place], rows, segment.session_id)


def truth(engine: FakeEngine, segment: tq_fs.Segment) -> tuple[Any, Any]:
    """Logprobs of the response, and routing, as the engine gave them.

    A token's logprob is of the weights that generated it; a row of routing, which leads from one
    token to the next, of the weights of the next.
    """
    tokens = segment.tokens.tolist()
    first = len(tokens) - segment.response_length
    by_token = [version for version, count in segment.versions for _ in range(count)]
    assert len(by_token) == len(tokens)
    logprobs = np.zeros(len(tokens), np.float32)
    rows = np.zeros((len(tokens) - 1, engine.layers, engine.topk), np.int32)
    for version in set(by_token):
        mine = np.array([v == version for v in by_token])
        generated = mine & (segment.loss_mask == 1)
        logprobs[generated] = engine.logprobs(tokens, 0, version=version)[generated]
        rows[mine[1:]] = engine.rows(tokens, version=version)[mine[1:]]
    return logprobs[first:], rows
