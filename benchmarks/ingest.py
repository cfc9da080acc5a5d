"""How long a reply of the engine takes to parse, and who waits: ``python benchmarks/ingest.py``.

Replies of one prompt token, 40 layers and top-8, as SGLang writes them. Times are medians of
processor time. A thread
that wants to run every millisecond tells how long the parser kept the interpreter from it: the most
processor time that the parser had between two of its turns, in the best of the repeats (what else
runs on the machine only adds). Memory is what is taken beside the body, at its most.
"""

from __future__ import annotations

import base64
import json
import logging
import statistics
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from tq_fs.fields import routed_experts
from tq_fs.ingest import Asked, RoutingCheck, parse_reply

LAYERS, TOPK, EXPERTS = 40, 8, 256
SWITCH_S = 0.0005  # of the interpreter, so that what is seen are calls that hold it


def routing(tokens: int) -> np.ndarray:
    """Return different ids in every layer, as a router chooses them."""
    draws = np.random.default_rng(0)
    first = draws.integers(0, EXPERTS, (tokens, LAYERS, 1))
    return ((first + 31 * np.arange(TOPK)) % EXPERTS).astype(np.int32)


def reply(tokens: int) -> bytes:
    """Return the body of a reply that generated so many tokens."""
    draws = np.random.default_rng(1)
    ids = draws.integers(0, 150_000, tokens).tolist()
    logprobs = (-draws.random(tokens)).astype(np.float32).tolist()
    meta = {
        "id": "0",
        "finish_reason": {"type": "length", "length": tokens},
        "prompt_tokens": 1,
        "weight_version": "1",
        "completion_tokens": tokens,
        "output_token_logprobs": [[lp, i, None] for lp, i in zip(logprobs, ids, strict=True)],
        "routed_experts": base64.b64encode(routing(tokens).tobytes()).decode(),
    }
    return json.dumps({"text": "word " * tokens, "output_ids": ids, "meta_info": meta}).encode()


def arrays(document: dict) -> object:
    """Return what a reply says, of the parsed document."""
    meta = document["meta_info"]
    rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
    logprobs = np.array([entry[0] for entry in meta["output_token_logprobs"]], np.float32)
    return rows, logprobs, np.array(document["output_ids"], np.int32)


class Meta(msgspec.Struct):
    """The large parts, as the types that they become."""

    output_token_logprobs: list[tuple[float, int, str | None]]
    routed_experts: bytes


class Typed(msgspec.Struct):
    """A reply that msgspec checks and decodes in one call, base64 and all."""

    output_ids: list[int]
    meta_info: Meta


def typed(body: bytes) -> object:
    """Return what a reply says, the fastest way."""
    found = msgspec.json.decode(body, type=Typed)
    rows = np.frombuffer(found.meta_info.routed_experts, np.int32)
    logprobs = np.array([entry[0] for entry in found.meta_info.output_token_logprobs], np.float32)
    return rows, logprobs, np.array(found.output_ids, np.int32)


def most_held(call: Callable[[], object]) -> float:
    """Return the most processor seconds of this thread between two turns of another."""
    clock = time.pthread_getcpuclockid(threading.get_ident())
    gaps, ended = [0.0], threading.Event()

    def tick() -> None:
        last = time.clock_gettime(clock)
        while not ended.is_set():
            time.sleep(0.001)
            now = time.clock_gettime(clock)
            gaps.append(now - last)
            last = now

    ticking = threading.Thread(target=tick)
    ticking.start()
    call()
    ended.set()
    ticking.join()
    return max(gaps)


def measure(call: Callable[[], object], repeats: int) -> tuple[float, float, float]:
    """Return seconds, seconds without the interpreter, and bytes."""
    seconds = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        seconds.append(time.thread_time() - start)
    held = min(most_held(call) for _ in range(repeats))
    tracemalloc.start()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return statistics.median(seconds), held, peak


def main() -> None:
    """Print the tables."""
    sys.setswitchinterval(SWITCH_S)
    logging.disable()
    table = Table("tokens", "parsed by", "ms", "held ms", "MB beside the body")
    checked = Table("rows", "of routing", "ms to check")
    spec = routed_experts(layers=LAYERS, topk=TOPK, experts=EXPERTS)
    for tokens, repeats in ((2048, 25), (65536, 5)):
        body = reply(tokens)
        asked = Asked(prompt_tokens=1, start_row=0, max_new_tokens=tokens, routing=spec)
        ways: dict[str, Callable[[], object]] = {
            "json, base64": lambda body=body: arrays(json.loads(body)),
            "msgspec, base64": lambda body=body: arrays(msgspec.json.decode(body)),
            "msgspec, typed": lambda body=body: typed(body),
            "tq_fs.ingest": lambda body=body, asked=asked: parse_reply(asked, body),
        }
        for name, call in ways.items():
            seconds, held, peak = measure(call, repeats)
            table.add_row(
                str(tokens), name, f"{seconds * 1e3:.1f}", f"{held * 1e3:.1f}", f"{peak / 1e6:.1f}"
            )
        rows = routing(tokens)
        for name in ("as a router gives them", "all of one id"):
            seconds, _, _ = measure(lambda r=rows: RoutingCheck("warn").check(r, "s"), repeats)
            checked.add_row(str(tokens), name, f"{seconds * 1e3:.2f}")
            rows = np.zeros_like(rows)
    Console(width=100).print(table, checked)


if __name__ == "__main__":
    main()
