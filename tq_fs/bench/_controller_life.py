"""One life of a Controller, in a process of its own: it fills a store, or opens one that is full.

Started by :mod:`tq_fs.bench.controller` with a :class:`Life` as JSON; says what it measured in one
line of JSON. A life that fills is killed at its end, by itself: nothing is closed.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Literal, NamedTuple

import numpy as np

from tq_fs.backends import LocalBackend
from tq_fs.bench._data import Shape, declared
from tq_fs.config import StoreConfig
from tq_fs.controller import Controller
from tq_fs.fields import FieldSpec
from tq_fs.keys import Incarnation, StepKey
from tq_fs.manifests import Catalog
from tq_fs.steps import EncodeOptions, FieldArray, Scratch, StepEntry, encode_step
from tq_fs.storage_unit import StorageUnit
from tq_fs.trajectory import ClosedSession, StepRecord

STORE_ID = "bench"
STEPS_IN_SESSION = 10
LAYERS, TOPK = 40, 8
WINDOW = 1024  # sessions that are timed together; one of them writes a page
RUN = 64
BATCH = 512  # references that are resolved at once
_ROUNDS = 20
_DISTINCT = 100  # sessions that differ; the others repeat their Steps under names of their own
_TOKENS = (64, 4096)  # of a Step: some are one chunk, some are shards
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Life(NamedTuple):
    """What a process is to do.

    Attributes
    ----------
    folder
        Of the store.
    epoch
        Number of the life, from 1.
    task
        ``fill``; ``open`` what is there, resolve it and close; or ``sweep`` real Steps.
    sessions
        To finalize.
    early
        Sessions after which finalizing is timed for the first time.
    cached
        Whether decoded manifests are kept, as usual.
    """

    folder: str
    epoch: int
    task: Literal["fill", "open", "sweep"]
    sessions: int = 0
    early: int = 0
    cached: bool = True


def main(life: Life) -> None:
    """Live it."""
    cache_bytes = StoreConfig().manifest_cache_bytes if life.cached else 0
    with closing(LocalBackend(life.folder, ahead=0)) as backend:
        unit = StorageUnit(backend, STORE_ID, options=EncodeOptions())
        catalog = Catalog(backend, STORE_ID, cache_bytes=cache_bytes)
        controller = Controller(catalog, unit, epoch=life.epoch, now_ns=time.time_ns)
        if life.task == "fill":
            found = _fill(controller, life)
        elif life.task == "open":
            found = _open(controller)
        else:
            found = _sweep(controller, unit, life)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
        if life.task == "fill":
            os.kill(os.getpid(), signal.SIGKILL)
        controller.close()


# ---------------------------------------------------------------- fill


def _fill(controller: Controller, life: Life) -> dict[str, float]:
    kinds = _kinds()
    controller.recover()
    _finalize(controller, kinds, range(WINDOW))
    before = _resident()
    _finalize(controller, kinds, range(WINDOW, life.early))
    early_s = _timed(controller, kinds, life.early)
    _finalize(controller, kinds, range(life.early + WINDOW, life.sessions - WINDOW))
    late_s = _timed(controller, kinds, life.sessions - WINDOW)
    grown = _resident() - before
    return {
        "early_finalize_s": early_s / STEPS_IN_SESSION,
        "late_finalize_s": late_s / STEPS_IN_SESSION,
        "bytes_per_step": grown / ((life.sessions - WINDOW) * STEPS_IN_SESSION),
    }


def _kinds() -> list[list[StepRecord]]:
    """Return the Steps of some sessions, as recording leaves them; their groups lie nowhere."""
    rng = np.random.default_rng(0)
    fields = _fields()
    return [
        _records(fields, rng.integers(*_TOKENS, STEPS_IN_SESSION).tolist())
        for _ in range(_DISTINCT)
    ]


def _fields() -> list[FieldSpec]:
    return declared(Shape(0, LAYERS, TOPK, "uint8"))


def _records(fields: Sequence[FieldSpec], sizes: Sequence[int]) -> list[StepRecord]:
    records = []
    prefix = 0
    for index, tokens in enumerate(sizes):
        record = StepRecord(
            index=index,
            kind="append" if index else "create",
            parent=index - 1 if index else None,
            prefix=prefix,
            tokens=np.zeros(tokens, np.int32),
            response=tokens // 2,
            versions=(("1", tokens),),
            arrays={},
            stored=_entry(fields, index, tokens),
        )
        records.append(record)
        prefix += tokens
    return records


def _entry(fields: Sequence[FieldSpec], index: int, tokens: int) -> StepEntry:
    """Encode a Step for what a manifest says of it."""
    rows = {"tokens": tokens, "transitions": tokens if index else tokens - 1}
    arrays = [FieldArray(s, np.zeros((rows[s.rows], *(s.inner or ())), s.dtype)) for s in fields]
    key = StepKey(Incarnation("train", "session", "0"), index)
    return encode_step(STORE_ID, key, tokens, arrays, EncodeOptions(), Scratch()).entry


def _timed(controller: Controller, kinds: Sequence[Sequence[StepRecord]], first: int) -> float:
    """Finalize a window of sessions; return the seconds one takes, the median of runs."""
    runs = [range(n, n + RUN) for n in range(first, first + WINDOW, RUN)]
    return float(np.median([_finalize(controller, kinds, run) for run in runs])) / RUN


def _finalize(
    controller: Controller, kinds: Sequence[Sequence[StepRecord]], numbers: range
) -> float:
    """Finalize sessions; return the seconds that took."""
    fields = _fields()
    start = time.perf_counter()
    for number in numbers:
        closed = ClosedSession(
            incarnation=controller.open_session("train", f"rollout-{number:012d}"),
            mode="tito",
            views=("lineage",),
            consumers=("train",),
            records=kinds[number % len(kinds)],
            stored=fields,
            resident=(),
            extra={},
        )
        controller.finalize(closed)
    return time.perf_counter() - start


# ---------------------------------------------------------------- open


def _open(controller: Controller) -> dict[str, float]:
    before = _resident()
    start = time.perf_counter()
    found = controller.load()
    restart_s = time.perf_counter() - start
    grown = _resident() - before
    return {
        "restart_s": restart_s,
        "steps": found.steps,
        "bytes_per_step": grown / max(found.steps, 1),
        **_resolve(controller),
    }


def _resolve(controller: Controller) -> dict[str, float]:
    """Resolve batches of references in no order; return fragments per second.

    ``cold`` is a batch that was not asked for lately, ``hot`` the same once more.
    """
    refs = list(controller.unreleased())
    random.Random(0).shuffle(refs)
    cold_s: list[float] = []
    hot_s: list[float] = []
    fragments = 0
    for number in range(_ROUNDS):
        batch = [refs[(number * BATCH + i) % len(refs)] for i in range(BATCH)]
        for seconds in (cold_s, hot_s):
            start = time.perf_counter()
            resolved = controller.resolve(batch)
            seconds.append(time.perf_counter() - start)
        fragments = sum(len(f) for r in resolved for f in r.segment.fields.values())
    return {
        "cold_per_s": fragments / float(np.median(cold_s)),
        "hot_per_s": fragments / float(np.median(hot_s)),
    }


# ---------------------------------------------------------------- sweep


def _sweep(controller: Controller, unit: StorageUnit, life: Life) -> dict[str, float]:
    """Record Steps for real, small ones; return what a start takes to look for each of them."""
    fields = _fields()
    arrays = [FieldArray(s, np.zeros((8, *(s.inner or ())), s.dtype)) for s in fields]
    for number in range(life.sessions):
        incarnation = controller.open_session("train", f"rollout-{number:012d}")
        for index in range(STEPS_IN_SESSION):
            unit.put(StepKey(incarnation, index), 8, arrays, fresh=True)
    start = time.perf_counter()
    count = sum(len(held.places) for held in unit.inventory())
    return {"sweep_s": (time.perf_counter() - start) / count}


def _resident() -> int:
    """Return the resident memory of this process in bytes."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


if __name__ == "__main__":
    main(Life(*json.loads(sys.argv[1])))
