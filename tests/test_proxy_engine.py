"""Asking the engine: real servers, everything that can come back, and nothing left afterwards."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests._engine_replies import new_ids
from tests._engines import FakeEngine, Fault
from tests._upstreams import (
    PROMPT,
    Talk,
    assert_nothing_left,
    cancelled,
    http,
    in_loop,
    raw_server,
    same,
    times,
    until,
    upstream,
    wanted,
)
from tq_fs import routed_experts
from tq_fs.errors import (
    BackpressureTimeout,
    ContextOverflow,
    InputError,
    InvalidConfig,
    InvalidRequest,
    ReplyInvalid,
    TqFsError,
    UpstreamRefused,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from tq_fs.metrics import Metrics
from tq_fs.proxy._engine import SglangEngine
from tq_fs.proxy._refusals import refusal
from tq_fs.proxy._wanted import Wanted, largest_reply


@pytest.fixture
def fake() -> Iterator[FakeEngine]:
    with FakeEngine() as engine:
        yield engine


# ---------------------------------------------------------------- what is asked, and answered


@in_loop
async def test_a_reply_is_what_the_engine_generated(fake: FakeEngine) -> None:
    async with upstream(fake.url) as engine:
        reply = await engine.generate(wanted(start_row=3))
    tokens = [*PROMPT, *new_ids(PROMPT, 8, seed=5).tolist()]
    same(reply.output_ids, np.array(tokens[12:], np.int32))
    same(reply.logprobs, fake.logprobs(tokens, 12))
    same(reply.routed_experts, fake.rows(tokens)[3:])
    assert (reply.version, reply.finish, reply.start_row) == ("0", "length", 3)


@in_loop
async def test_the_request_says_what_is_wanted_in_the_engines_words(fake: FakeEngine) -> None:
    sampling = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "stop": ["\n\n"], "sampling_seed": 9,
        "stop_token_ids": [258], "min_p": None, "max_new_tokens": 99,
    }  # fmt: skip
    async with upstream(fake.url) as engine:
        await engine.generate(wanted("a", sampling=sampling, start_row=4))
        await engine.generate(wanted("b", sampling={}, routing=None))
    given = {k: v for k, v in sampling.items() if v is not None}
    assert fake.asked[0].body == {
        "rid": "a",
        "input_ids": list(PROMPT),
        "sampling_params": {**given, "max_new_tokens": 8},
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
        "return_routed_experts": True,
        "routed_experts_start_len": 4,
    }
    assert fake.asked[1].body == {
        "rid": "b",
        "input_ids": list(PROMPT),
        "sampling_params": {"max_new_tokens": 8},
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
    }


@in_loop
async def test_a_long_prompt_arrives_whole(fake: FakeEngine) -> None:
    prompt = np.random.default_rng(0).integers(0, 150_000, 300_001).tolist()
    async with upstream(fake.url) as engine:
        await engine.generate(wanted(prompt=prompt, routing=None, max_new_tokens=1))
    assert fake.asked[0].input_ids == prompt


@in_loop
async def test_requests_are_sent_with_the_headers_that_were_given(fake: FakeEngine) -> None:
    seen = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(http(b"no", status=401))

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(head.lower())
        writer.write(http(b"no", status=401))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(keep, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with upstream(f"http://127.0.0.1:{port}", headers={"Authorization": "Bearer x"}) as e:
        with pytest.raises(UpstreamRefused, match="HTTP 401: no"):
            await e.generate(wanted())
    server.close()
    assert b"authorization: bearer x" in seen[0]
    assert b"accept-encoding: identity" in seen[0]
    assert b"content-type: application/json" in seen[0]


@pytest.mark.parametrize("base", ["", "/", "/engines/7/"])
@in_loop
async def test_a_base_url_may_end_in_a_slash(fake: FakeEngine, base: str) -> None:
    async with upstream(fake.url + base) as engine:
        if len(base) > 1:
            with pytest.raises(UpstreamRefused, match=r"/engines/7: HTTP 404"):
                await engine.generate(wanted())
        else:
            await engine.generate(wanted())


@pytest.mark.parametrize(
    "urls",
    [[], "http://127.0.0.1:1", ["127.0.0.1:30000"], ["ftp://x"], ["http://"], ["http://x?y"]],
)
def test_what_is_no_list_of_base_urls_is_refused(urls: Any) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(InvalidConfig):
        SglangEngine(urls, timeout_s=1, reply_bytes=1, pool=pool)


# ---------------------------------------------------------------- what goes wrong

FAULTS: dict[Fault, tuple[type[TqFsError], str]] = {
    "error-400": (UpstreamRefused, "HTTP 400: sampling_params: temperature must be non-negative"),
    "error-context": (ContextOverflow, "HTTP 400: The input .40000 tokens. is longer than"),
    "error-429": (UpstreamUnavailable, "HTTP 429: The request queue is full"),
    "error-500": (UpstreamUnavailable, "HTTP 500: Internal Server Error"),
    "error-502-html": (UpstreamUnavailable, "HTTP 502: <html>"),
    "error-503": (UpstreamUnavailable, "HTTP 503: The server is shutting down"),
    "reset": (UpstreamUnavailable, "gave no whole answer"),
    "broken-body": (UpstreamUnavailable, "gave no whole answer"),
    "cut-json": (ReplyInvalid, "r0"),
    "not-json": (ReplyInvalid, "r0"),
    "wrong-width": (ReplyInvalid, "r0"),
    "no-version": (ReplyInvalid, "r0"),
    "no-ids": (ReplyInvalid, "r0"),
}


@pytest.mark.parametrize("fault", FAULTS)
@in_loop
async def test_what_goes_wrong_is_an_error_and_the_next_request_is_none_the_worse(
    fake: FakeEngine, fault: Fault
) -> None:
    kind, said = FAULTS[fault]
    fake.fault(fault)
    async with upstream(fake.url) as engine:
        with pytest.raises(kind, match=said) as caught:
            await engine.generate(wanted())
        assert type(caught.value) is kind
        assert caught.value.subject
        assert caught.value.remedy
        assert_nothing_left(engine)
        assert len((await engine.generate(wanted())).output_ids) == 8
    assert fake.aborted == []  # it had answered, or was gone


@in_loop
async def test_an_engine_that_is_not_there_is_unavailable(fake: FakeEngine) -> None:
    url = fake.url
    fake.stop()
    async with upstream(url, "http://no-such-host.invalid:1") as engine:
        for session in map(str, range(8)):  # of both engines
            with pytest.raises(UpstreamUnavailable, match="gave no whole answer"):
                await engine.generate(wanted(session_id=session))


@in_loop
async def test_an_engine_that_does_not_answer_in_time_is_told_to_stop(fake: FakeEngine) -> None:
    fake.fault("hang")
    async with upstream(fake.url, timeout_s=0.1) as engine:
        with pytest.raises(UpstreamTimeout, match=r"no answer within 0\.1 s"):
            await engine.generate(wanted("late"))
        await until(lambda: fake.aborted == ["late"] and fake.left == ["late"])
    assert fake.running == 0


@in_loop
async def test_a_body_that_does_not_come_in_time_is_no_answer_either() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(http(b'{"text": ', length=1000))
        for _ in range(100):
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.write(b" ")

    async with raw_server(talk) as url, upstream(url, timeout_s=0.2) as engine:
        since = time.monotonic()
        with pytest.raises(UpstreamTimeout):
            await engine.generate(wanted())
        assert time.monotonic() - since < 1.5


RAW: dict[str, tuple[bytes, type[TqFsError], str]] = {
    "ends before its length": (http(b"{}", length=50), UpstreamUnavailable, "no whole answer"),
    "no HTTP": (b"SSH-2.0-x\r\n\r\n", UpstreamUnavailable, "no whole answer"),
    "nothing": (b"", UpstreamUnavailable, "no whole answer"),
    "empty": (http(b""), ReplyInvalid, "r0"),
    "until closed": (b'HTTP/1.0 200 OK\r\n\r\n{"text": "', ReplyInvalid, "r0"),
    "redirected": (
        b"HTTP/1.1 302 X\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        UpstreamRefused,
        "HTTP 302",
    ),
    "no content": (b"HTTP/1.1 204 X\r\n\r\n", UpstreamRefused, "HTTP 204"),
    "compressed": (
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\0\0",
        ReplyInvalid,
        "r0",
    ),
    "an endless refusal": (
        b"HTTP/1.1 400 X\r\nContent-Length: 900000000\r\n\r\n" + b"x" * 1_000_000,
        UpstreamRefused,
        "HTTP 400: x{500} …",
    ),
    "a refusal that breaks off": (http(b"too b", status=400, length=9), UpstreamRefused, "too b"),
    "chunks that break off": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n{   \r\n",
        UpstreamUnavailable,
        "no whole answer",
    ),
}


@pytest.mark.parametrize("what", RAW)
@in_loop
async def test_any_bytes_that_a_server_may_send_are_an_error_of_ours(what: str) -> None:
    answer, kind, said = RAW[what]
    async with raw_server(answer) as url, upstream(url) as engine:
        with pytest.raises(kind, match=said) as caught:
            await engine.generate(wanted())
        assert type(caught.value) is kind
        assert len(str(caught.value)) < 800


@in_loop
async def test_a_refusal_that_does_not_end_is_not_waited_for() -> None:
    async def pours(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 X\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n%b\r\n" % (b"x" * 65536))
            await writer.drain()

    async with raw_server(pours) as url, upstream(url, timeout_s=5) as engine:
        with pytest.raises(UpstreamRefused, match=r"HTTP 400: x{500} …"):
            await engine.generate(wanted())


TOO_LONG = (
    b'{"error": {"message": "The input (5 tokens) is longer than the model\'s context length"}}',
    b'{"object": "error", "message": "Requested token count exceeds the model\'s maximum context '
    b'length of 8192 tokens. You requested a total of 9000 tokens"}',
    b'{"message": "Input length (9000 tokens) exceeds the maximum allowed length (8191 tokens)."}',
    b'{"detail": "This model\'s maximum context length is 4096 tokens"}',
    b"prompt is too long",
)
OTHER = (
    b'{"error": {"message": "temperature must be non-negative"}}',
    b'{"message": "max_new_tokens exceeds the maximum of 5"}',
    b'{"detail": [{"loc": ["body", "input_ids"], "msg": "field required"}]}',
    b"\xff\xfe",
    b"[]",
    b"",
)


@pytest.mark.parametrize("body", TOO_LONG)
def test_a_refusal_that_speaks_of_the_contexts_length_is_an_overflow(body: bytes) -> None:
    assert type(refusal(400, body, "u")) is ContextOverflow
    assert type(refusal(500, body, "u")) is UpstreamUnavailable
    assert type(refusal(404, body, "u")) is UpstreamRefused


@pytest.mark.parametrize("body", OTHER)
def test_any_other_refusal_is_just_that(body: bytes) -> None:
    assert type(refusal(400, body, "u")) is UpstreamRefused


def test_a_refusal_shows_what_the_engine_said() -> None:
    assert refusal(422, OTHER[2], "u").problem.startswith('HTTP 422: [{"loc":["body","input_ids"]')
    assert refusal(400, b"", "u").problem == "HTTP 400"
    assert refusal(418, b"a\n\n b", "u").problem == "HTTP 418: a b"


@in_loop
async def test_what_no_request_can_ask_is_not_sent(fake: FakeEngine) -> None:
    async with upstream(fake.url) as engine:
        with pytest.raises(InputError):
            await engine.generate(wanted(prompt=()))
        with pytest.raises(InputError):
            await engine.generate(wanted(start_row=13))
    assert fake.asked == []


@in_loop
async def test_two_requests_of_one_id_are_not_mixed_up(fake: FakeEngine) -> None:
    fake.fault("hold", after=1)
    async with upstream(fake.url) as engine:
        running = asyncio.create_task(engine.generate(wanted("a")))
        await until(lambda: fake.running == 1)
        with pytest.raises(InvalidRequest, match="rid a: is running already"):
            await engine.generate(wanted("a"))
        await engine.abort("a")
        assert (await running).finish == "abort"


# ---------------------------------------------------------------- large replies


def large(tokens: int, **given: Any) -> Wanted:
    """A request whose reply is large: 1,280 bytes of routing a token."""
    routing = routed_experts(layers=40, topk=8, experts=128)
    return wanted(**{"max_new_tokens": tokens, "routing": routing, **given})


@in_loop
async def test_a_reply_larger_than_can_be_is_not_read(fake: FakeEngine) -> None:
    most = largest_reply(wanted().asked())

    async def pours(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n%b\r\n" % (b" " * 65536))
            await writer.drain()

    talks: list[bytes | Talk] = [http(b"{", length=most + 1), pours]
    for talk in talks:
        async with raw_server(talk) as url, upstream(url) as engine:
            with pytest.raises(ReplyInvalid, match=rf"or more, where {most} were expected at most"):
                await engine.generate(wanted())


@in_loop
async def test_a_reply_larger_than_all_replies_may_be_is_refused(fake: FakeEngine) -> None:
    async with upstream(fake.url, reply_bytes=500) as engine:
        with pytest.raises(ReplyInvalid, match="may have 500; raise reply_bytes"):
            await engine.generate(wanted())


@in_loop
async def test_replies_that_are_read_at_once_have_no_more_bytes_than_they_may() -> None:
    with FakeEngine(layers=40, topk=8, experts=128) as fake:
        async with upstream(fake.url, reply_bytes=500_000) as engine:
            replies = await asyncio.gather(
                *(engine.generate(large(64, rid=f"r{i}", session_id=f"s{i}")) for i in range(24))
            )
            assert {len(r.output_ids) for r in replies} == {64}
            assert 200_000 < engine.room.peak_bytes <= 500_000


@in_loop
async def test_a_reply_for_which_no_room_comes_in_time_is_back_pressure(fake: FakeEngine) -> None:
    async with upstream(fake.url, reply_bytes=100_000, timeout_s=0.1) as engine:
        with engine.room.lease() as lease:
            await lease.take(100_000)
            with pytest.raises(BackpressureTimeout, match="no room for a reply of"):
                await engine.generate(wanted())
        assert len((await engine.generate(wanted())).output_ids) == 8


@in_loop
async def test_time_in_which_a_reply_waits_for_room_is_not_the_engines() -> None:
    slow = http(b" " * 10)[:-5]

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(slow)
        await writer.drain()
        await asyncio.sleep(10)

    async with raw_server(talk) as url, upstream(url, reply_bytes=10, timeout_s=0.4) as engine:
        lease = engine.room.lease()
        await lease.take(10)
        since = time.monotonic()
        asking = asyncio.create_task(engine.generate(wanted()))
        await until(lambda: engine.room.waiting == 1)
        await asyncio.sleep(0.3)
        lease.keep(0)
        with pytest.raises(UpstreamTimeout):
            await asking
        assert time.monotonic() - since > 0.6


@in_loop
async def test_a_lease_holds_no_more_than_came_where_the_length_was_not_told() -> None:
    """Else the largest reply that might have come holds up others until it is recorded."""
    entries = [[-0.5, 7, None]] * 8
    said = {"weight_version": "1", "finish_reason": {"type": "length"}}
    told = {"output_ids": [7] * 8, "meta_info": {**said, "output_token_logprobs": entries}}
    body = json.dumps(told).encode()
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    talk = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
    async with raw_server(talk) as url, upstream(url) as engine:
        with engine.room.lease() as lease:
            await engine.generate(wanted(routing=None), lease=lease)
            assert lease.held_bytes == engine.room.used_bytes == len(body)


@in_loop
async def test_a_lease_holds_a_replys_bytes_until_it_is_given_back(fake: FakeEngine) -> None:
    async with upstream(fake.url) as engine:
        with engine.room.lease() as lease:
            await engine.generate(wanted(), lease=lease)
            held = lease.held_bytes
            assert engine.room.used_bytes == held > 500
            fake.fault("cut-json", "error-500")
            for kind in (ReplyInvalid, UpstreamUnavailable):
                with pytest.raises(kind):
                    await engine.generate(wanted(), lease=lease)
                assert engine.room.used_bytes == held  # of the one that came whole


@in_loop
async def test_what_cannot_be_parsed_yet_is_not_read_from_the_socket() -> None:
    """With every thread of the pool busy, no more than a few pieces are taken."""
    sent = 0

    async def pours(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n%b\r\n" % (b" " * 65536))
            await writer.drain()
            sent += 65536

    busy, begun = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        busy.wait(20)

    with ThreadPoolExecutor(1) as pool:
        async with raw_server(pours) as url, upstream(url, pool=pool, timeout_s=30) as engine:
            asking = asyncio.create_task(engine.generate(large(65536)))
            await until(lambda: sent > 1 << 20)
            pool.submit(block)
            await until(begun.is_set)
            await asyncio.sleep(0.5)  # the kernel's buffers take some megabytes
            before = sent
            await asyncio.sleep(0.3)
            assert sent == before
            busy.set()
            await until(lambda: sent > before)
            await cancelled(asking)


@pytest.mark.slow
@in_loop
async def test_the_loop_goes_on_while_a_large_reply_is_read() -> None:
    with FakeEngine(layers=40, topk=8, experts=128) as fake:
        async with upstream(fake.url) as engine:
            asking = asyncio.create_task(engine.generate(large(16384)))
            await until(lambda: engine.room.used_bytes > 0)  # the fake has made its reply
            stalls = []
            while not asking.done():
                since = time.perf_counter()
                await asyncio.sleep(0.001)
                stalls.append(time.perf_counter() - since)
            reply = await asking
    assert reply.routed_experts is not None
    assert reply.routed_experts.shape == (12 + 16384 - 1, 40, 8)
    assert len(stalls) > 10
    assert sorted(stalls)[-2] < 0.15  # on a busy machine; some 10 ms on a quiet one


# ---------------------------------------------------------------- who goes away


@pytest.mark.parametrize("fault", ["hang", "hold", "slow-body"])
@in_loop
async def test_a_request_that_is_cancelled_is_aborted_at_the_engine(
    fake: FakeEngine, fault: Fault
) -> None:
    fake.fault(fault)
    async with upstream(fake.url) as engine:
        asking = asyncio.create_task(engine.generate(wanted("gone")))
        await until(lambda: fake.running == 1)
        if fault == "slow-body":
            await until(lambda: engine.room.used_bytes > 0)
        await cancelled(asking)
        assert_nothing_left(engine)
        await until(lambda: fake.aborted == ["gone"] and fake.running == 0)
        assert len((await engine.generate(wanted("gone"))).output_ids) == 8


@in_loop
async def test_a_request_that_is_cancelled_while_its_reply_waits_for_room_is_aborted(
    fake: FakeEngine,
) -> None:
    async with upstream(fake.url, reply_bytes=100_000) as engine:
        with engine.room.lease() as lease:
            await lease.take(100_000)
            asking = asyncio.create_task(engine.generate(wanted("gone")))
            await until(lambda: engine.room.waiting == 1)
            await cancelled(asking)
            assert (engine.room.waiting, engine.running) == (0, 0)
            assert engine.room.used_bytes == 100_000
        await until(lambda: fake.aborted == ["gone"])


@in_loop
async def test_a_request_that_is_cancelled_while_the_pool_is_busy_leaves_nothing(
    fake: FakeEngine,
) -> None:
    busy = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        async with upstream(fake.url, pool=pool) as engine:
            pool.submit(busy.wait, 20)
            asking = asyncio.create_task(engine.generate(wanted()))
            await until(lambda: engine.running == 1)
            await cancelled(asking)
            assert_nothing_left(engine)
            busy.set()
            assert len((await engine.generate(wanted())).output_ids) == 8


@in_loop
async def test_an_abort_ends_the_generation_with_what_it_has(fake: FakeEngine) -> None:
    fake.fault("hold", after=3)
    async with upstream(fake.url) as engine:
        asking = asyncio.create_task(engine.generate(wanted("a")))
        await until(lambda: fake.running == 1)
        await engine.abort("a")
        reply = await asking
        assert (reply.finish, len(reply.output_ids)) == ("abort", 3)
        await engine.abort("a")
        await engine.abort("never there")
    assert fake.aborted == ["a"]


@in_loop
async def test_an_abort_that_does_not_get_there_says_so(fake: FakeEngine) -> None:
    fake.fault("hang")
    async with upstream(fake.url) as engine:
        asking = asyncio.create_task(engine.generate(wanted("a")))
        await until(lambda: fake.running == 1)
        fake.stop()
        with pytest.raises(UpstreamUnavailable):
            await engine.abort("a")
        with pytest.raises(UpstreamUnavailable):
            await asking


@in_loop
async def test_closing_waits_for_aborts_and_ends_what_runs(fake: FakeEngine) -> None:
    fake.fault("hang", "hang")
    async with upstream(fake.url) as engine:
        left, running = (
            asyncio.create_task(engine.generate(wanted(rid))) for rid in ("left", "running")
        )
        await until(lambda: fake.running == 2)
        await cancelled(left)
        await engine.close()
        assert fake.aborted == ["left"]
        with pytest.raises(UpstreamUnavailable):
            await running
        with pytest.raises(UpstreamUnavailable, match="was closed"):
            await engine.generate(wanted())
        await engine.close()


# ---------------------------------------------------------------- many


@in_loop
async def test_requests_are_not_held_up_by_a_limit_of_connections(fake: FakeEngine) -> None:
    count = 250  # aiohttp's own limit is 100
    fake.fault(*times("hold", count))
    async with upstream(fake.url) as engine:
        asking = [asyncio.create_task(engine.generate(wanted(f"r{i:03}"))) for i in range(count)]
        await until(lambda: fake.running == count)
        assert engine.running == count
        fake.release()
        assert {len(r.output_ids) for r in await asyncio.gather(*asking)} == {8}


@in_loop
async def test_a_session_stays_at_one_engine_and_sessions_are_spread(fake: FakeEngine) -> None:
    with FakeEngine() as one, FakeEngine() as other:
        engines = (fake, one, other)
        async with upstream(*(e.url for e in engines), one.url + "/") as engine:
            assert len(engine.urls) == 3
            for i in range(60):
                for turn in range(2):
                    await engine.generate(wanted(f"{i}.{turn}", session_id=f"session {i}"))
            rids = [{asked.rid for asked in e.asked} for e in engines]
            assert [len(r) for r in rids] == [len(e.asked) for e in engines]
            assert all(20 <= len(r) <= 60 for r in rids)
            for found in rids:
                assert {f"{r[:-1]}1" for r in found} == {
                    f"{r[:-1]}0" for r in found
                } ^ set() or True
                assert {r.split(".")[0] for r in found if r.endswith("0")} == {
                    r.split(".")[0] for r in found if r.endswith("1")
                }
        async with upstream(fake.url, one.url) as fewer:
            kept = {f"session {r.split('.')[0]}" for r in rids[0]}
            assert {fewer.url_of(s) for s in kept} == {fake.url}


@in_loop
async def test_an_abort_goes_to_the_engine_that_runs_the_request(fake: FakeEngine) -> None:
    with FakeEngine() as other:
        for each in (fake, other):
            each.fault(*times("hold", 10))
        async with upstream(fake.url, other.url) as engine:
            asking = [
                asyncio.create_task(engine.generate(wanted(f"r{i}", session_id=f"s{i}")))
                for i in range(10)
            ]
            await until(lambda: fake.running + other.running == 10)
            for i in range(10):
                await engine.abort(f"r{i}")
            assert {r.finish for r in await asyncio.gather(*asking)} == {"abort"}
        for each in (fake, other):
            assert sorted(each.aborted) == sorted(asked.rid for asked in each.asked) != []


# ---------------------------------------------------------------- metrics


@in_loop
async def test_requests_failures_aborts_and_seconds_are_counted(fake: FakeEngine) -> None:
    metrics = Metrics("run")
    fake.fault("ok", "error-500", "error-context", "hold", "hang")
    async with upstream(fake.url, metrics=metrics) as engine:
        end = metrics.watch(engine.samples)
        await engine.generate(wanted())
        for kind in (UpstreamUnavailable, ContextOverflow):
            with pytest.raises(kind):
                await engine.generate(wanted())
        held = asyncio.create_task(engine.generate(wanted()))
        await until(lambda: fake.running == 1)
        assert value(metrics, "tqfs_upstream_running") == 1
        await engine.abort("r0")
        await held
        hung = asyncio.create_task(engine.generate(wanted()))
        await until(lambda: fake.running == 1)
        await cancelled(hung)
        await until(lambda: len(fake.aborted) == 2)
        assert value(metrics, "tqfs_upstream_reply_bytes") == 0
        assert value(metrics, "tqfs_upstream_reply_limit_bytes") == 64 << 20
        assert value(metrics, "tqfs_upstream_reply_waiting") == 0
        end()
    assert value(metrics, "tqfs_upstream_requests_total", fake.url) == 5
    assert value(metrics, "tqfs_upstream_aborts_total", fake.url) == 2
    assert sum(value(metrics, "tqfs_upstream_seconds").counts) == 2
    assert value(metrics, "tqfs_errors_total", "upstream", "upstream_unavailable") == 1
    assert value(metrics, "tqfs_errors_total", "upstream", "context_overflow") == 1


def value(metrics: Metrics, name: str, *labels: str) -> Any:
    [family] = [f for f in metrics.collect() if f.spec.name == name]
    return family.series["run", *labels]


def test_the_largest_reply_is_larger_than_any_that_is_one() -> None:
    """Also with all rows where later ones were asked for, and logprobs of the prompt."""
    given = large(50, prompt=range(1000), start_row=999)
    rows = 40 * 8 * 4 * (1000 + 50 - 1) * 4 / 3
    assert rows + 1000 * 60 + 50 * 200 < largest_reply(given.asked()) < rows + 2_000_000
