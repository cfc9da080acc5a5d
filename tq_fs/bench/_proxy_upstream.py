"""The rollout engine of ``tq-fs bench proxy``: answers at once, with what was made before.

A process of its own, so that what it takes is not counted as the Proxy's. It speaks SGLang's
``/generate``: says what it was asked for (rows from ``routed_experts_start_len`` on), no more.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import threading

import msgspec
from aiohttp import web

from tq_fs.bench._child import answer, own_answers
from tq_fs.bench._proxy_load import NICE
from tq_fs.bench._proxy_replies import Replies, RoutingShape

_BODY_BYTES = 1024**3


class _Sampling(msgspec.Struct):
    max_new_tokens: int


class _Asked(msgspec.Struct):
    input_ids: list[int]
    sampling_params: _Sampling
    routed_experts_start_len: int = 0


class Upstream:
    """Answers requests with prepared replies."""

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self._numbers = itertools.count()
        self._decode = msgspec.json.Decoder(_Asked).decode

    def app(self) -> web.Application:
        """Return what serves it."""
        app = web.Application(client_max_size=_BODY_BYTES)
        app.router.add_post("/generate", self._generate)
        app.router.add_route("*", "/{rest:.*}", self._other)
        return app

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = self._decode(await request.read())
        pieces = self._replies.body(
            next(self._numbers),
            prompt=len(asked.input_ids),
            start_row=asked.routed_experts_start_len,
            tokens=asked.sampling_params.max_new_tokens,
        )
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = sum(map(len, pieces))
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        await response.write_eof()
        return response

    async def _other(self, request: web.Request) -> web.StreamResponse:  # noqa: ARG002
        return web.json_response({"weight_version": "1", "model_path": "bench"})


async def _serve(upstream: Upstream, started: threading.Event, found: list[str]) -> None:
    runner = web.AppRunner(upstream.app(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.append("http://{}:{}".format(*runner.addresses[0][:2]))
    started.set()
    await asyncio.Event().wait()


def main(layers: int, topk: int, experts: int, tokens: int, stop_id: int) -> None:
    """Serve until the input ends."""
    answers = own_answers()
    os.nice(NICE)
    upstream = Upstream(Replies(RoutingShape(layers, topk, experts), tokens, stop_id=stop_id))
    started, found = threading.Event(), list[str]()
    threading.Thread(
        target=lambda: asyncio.run(_serve(upstream, started, found)), daemon=True
    ).start()
    started.wait()
    answer({"ready": lambda: found[0], "url": lambda: found[0]}, sys.stdin, answers)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
