"""A `TinyMoe` behind SGLang's wire format, over HTTP.

==========================================  ====================================================
request                                     answer
==========================================  ====================================================
``POST /generate``                          tokens, logprobs, routing rows, weight version
``POST /abort_request``                     the request answers with what it has
``POST /update_weights_from_disk``          new weights, once nothing is generated any more
``GET /model_info``, ``/get_model_info``    where the model lies, and its weight version
``GET /get_weight_version``                 the weight version
``GET /health``, ``POST /flush_cache``      nothing: it runs, and it has no cache
==========================================  ====================================================

Several requests run at once, in threads, each sequence computed by itself: a reply depends on its
request and the weights, to the bit, and not on what else runs or on what came first. A generation
that goes on after an abort draws what it would have drawn; what it had is then computed in one pass
as part of the prompt, which changes the last bits of logprobs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from aiohttp import web
from tokenizers import Tokenizer

from tq_fs.demo.engine import TinyMoe
from tq_fs.demo.generate_request import read_request
from tq_fs.demo.generation import Generation
from tq_fs.demo.http_thread import HttpThread
from tq_fs.demo.tokenizer import STOP_IDS, build_tokenizer
from tq_fs.demo.weights import load_model, take_weights
from tq_fs.errors import InputError, InvalidRequest

MOST_BODY_BYTES = 256 * 2**20


class EngineServer:
    """Serves a model at `url` from threads of its own; a context manager.

    While it runs, torch computes in one thread in this process.

    Parameters
    ----------
    moe
        The model. The server changes its weights when it is asked to.
    model_path
        What it calls the model.
    version
        Of the weights, until others come.
    host, port
        Where to listen; 0 takes a free port.
    context
        Most tokens of a prompt and its reply; None: as the model's configuration says.
    eos_ids
        Tokens that end a reply.
    tokenizer
        For the text in replies, and to stop at texts.
    at_once
        Requests that are computed at the same time; others wait.
    """

    def __init__(
        self,
        moe: TinyMoe,
        *,
        model_path: str = "tiny-moe",
        version: str = "0",
        host: str = "127.0.0.1",
        port: int = 0,
        context: int | None = None,
        eos_ids: Collection[int] = STOP_IDS,
        tokenizer: Tokenizer | None = None,
        at_once: int = 8,
    ) -> None:
        self._moe = moe
        self._model_path, self._version = model_path, version
        self._context = context or int(moe.model.config.max_position_embeddings)
        self._eos_ids = tuple(eos_ids)
        self._tokenizer: Tokenizer = tokenizer or build_tokenizer().backend_tokenizer
        self._pool = ThreadPoolExecutor(at_once, "tq-fs-engine", lambda: torch.set_num_threads(1))
        self._running: dict[str, Generation] = {}
        self._weights = _Weights()
        self._numbers = itertools.count()
        self._http = HttpThread(self._app(), host=host, port=port)
        self._threads = torch.get_num_threads()

    @classmethod
    def of_folder(cls, folder: str | Path, *, seed: int = 0, **settings: Any) -> EngineServer:
        """Serve the model of a folder; one without weights gets random ones.

        Parameters
        ----------
        folder
            As `tq_fs.demo.weights.save_model` or `tq_fs.demo.tokenizer.save_tokenizer` wrote it.
        seed
            Of random weights.
        settings
            As of the class.

        Raises
        ------
        InvalidConfig
            No such model there.
        """
        return cls(load_model(folder, seed=seed), model_path=str(folder), **settings)

    @property
    def url(self) -> str:
        """Base URL."""
        return self._http.url

    @property
    def version(self) -> str:
        """Version of the weights."""
        return self._version

    def start(self) -> Self:
        """Listen, and return once requests are taken.

        Raises
        ------
        OSError
            The port cannot be had.
        """
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._http.start()
        return self

    def stop(self) -> None:
        """End what runs, and stop; idempotent."""
        self._http.stop()
        for generation in list(self._running.values()):
            generation.abort()
        self._pool.shutdown()
        torch.set_num_threads(self._threads)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # ------------------------------------------------------------ HTTP

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=MOST_BODY_BYTES, middlewares=[_refusals])
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_get("/model_info", self._info)
        app.router.add_get("/get_model_info", self._info)
        app.router.add_get("/get_weight_version", self._info)
        app.router.add_get("/health", _nothing)
        app.router.add_route("*", "/flush_cache", _nothing)
        return app

    async def _generate(self, request: web.Request) -> web.Response:
        asked = read_request(
            await _json(request),
            rid=f"request-{next(self._numbers)}",
            vocab=self._moe.vocab,
            context=self._context,
            eos_ids=self._eos_ids,
        )
        if asked.rid in self._running:
            raise InvalidRequest("runs already", subject=f"rid {asked.rid}")
        generation = self._running[asked.rid] = Generation(asked)
        try:
            async with self._weights.used():
                body = await self._in_thread(generation, lambda: self._answer(generation))
        finally:
            del self._running[asked.rid]
        return web.Response(body=body, content_type="application/json")

    async def _in_thread(self, generation: Generation, work: Callable[[], bytes]) -> bytes:
        """Await a thread's work; where the client goes away, end it and wait for its end."""
        running = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            generation.abort()
            await asyncio.wait([running])  # the weights may change only then
            raise

    def _answer(self, generation: Generation) -> bytes:
        generation.run(self._moe, self._text_of)
        return json.dumps(generation.reply(self._version, self._text_of)).encode()

    async def _abort(self, request: web.Request) -> web.Response:
        body = await _json(request)
        if not isinstance(body, dict) or not (body.get("rid") or body.get("abort_all")):
            raise InvalidRequest("names no rid, and not abort_all", subject="the body")
        for rid, generation in self._running.items():
            if body.get("abort_all") or rid == body["rid"]:
                generation.abort()
        return web.Response()

    async def _update(self, request: web.Request) -> web.Response:
        body = await _json(request)
        if not isinstance(body, dict) or not isinstance(body.get("model_path"), str):
            raise InvalidRequest("names no model_path", subject="the body")
        version = body.get("weight_version")
        if version is not None and not isinstance(version, str):
            raise InvalidRequest(f"{version!r} is no text", subject="weight_version")
        if body.get("abort_all_requests"):
            for generation in self._running.values():
                generation.abort()
        # Whoever asked may go away; weights that are half changed may not be used.
        await asyncio.shield(asyncio.ensure_future(self._change(body["model_path"], version)))
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def _change(self, folder: str, version: str | None) -> None:
        async with self._weights.changed():
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._pool, take_weights, self._moe, folder)
            self._version = self._version if version is None else version

    async def _info(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": self._model_path,
                "tokenizer_path": self._model_path,
                "is_generation": True,
                "weight_version": self._version,
            }
        )

    def _text_of(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


class _Weights:
    """Who uses the weights, and who changes them: many of the former, or one of the latter.

    In one event loop. Who wants to change them comes before those who come later.
    """

    def __init__(self) -> None:
        self._users = 0
        self._changers = 0
        self._changing = False
        self._freed = asyncio.Condition()

    @asynccontextmanager
    async def used(self) -> AsyncIterator[None]:
        async with self._freed:
            await self._freed.wait_for(lambda: not self._changers)
            self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            await asyncio.shield(self._tell())

    @asynccontextmanager
    async def changed(self) -> AsyncIterator[None]:
        self._changers += 1
        try:
            async with self._freed:
                await self._freed.wait_for(lambda: not (self._users or self._changing))
                self._changing = True
            try:
                yield
            finally:
                self._changing = False
        finally:
            self._changers -= 1
            await asyncio.shield(self._tell())

    async def _tell(self) -> None:
        async with self._freed:
            self._freed.notify_all()


@web.middleware
async def _refusals(
    request: web.Request, handler: Callable[[web.Request], Any]
) -> web.StreamResponse:
    """Answer what is wrong with a request with 400, as SGLang does."""
    try:
        response: web.StreamResponse = await handler(request)
    except InputError as error:
        return web.json_response(
            {"success": False, "message": str(error), "error": {"message": str(error)}}, status=400
        )
    return response


async def _json(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"is no JSON: {error}", subject="the body") from error


async def _nothing(_request: web.Request) -> web.Response:
    return web.Response()
