"""Lives of a store under seeded faults: what each seed stands for, and whether promises held.

A seed says everything: which cell of the table fault x operation x crash point is aimed at, which
request of the life it hits, which other faults come by chance, and what the life is like. A life
runs in a process of its own behind a proxy and tells what it begins and what was acknowledged, so
that it can be killed anywhere; what it leaves is then looked at without faults.

A process forks the lives, so that everything is imported once. It has never called obstore, whose
threads a fork would lack.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

import numpy as np

import tq_fs
from tests._fault_proxy import Crash, Fault, FaultProxy, Operation, Schedule, Seen, Verdict
from tests._rollouts import VIEWS, Op, Rollout, specs, standard_fields
from tq_fs.backends import Retry, open_object_backend
from tq_fs.errors import TqFsError
from tq_fs.manifests import Mode, SessionManifest, SessionState, decode
from tq_fs.steps import read_attributes
from tq_fs.storage_options import StorageOptions

T = TypeVar("T")
FORK = multiprocessing.get_context("fork")

# ---------------------------------------------------------------- the table

FAULTS: Mapping[str, tuple[Fault, ...]] = {
    "no fault": (),
    "throttling": ("throttle-503", "throttle-429"),
    "server error": ("error-500", "error-502-html"),
    "reset": ("reset",),
    "lost acknowledgement": ("lost-ack",),
    "time-out": ("timeout",),
    "short body": ("short-body",),
    "corrupt bytes": ("corrupt",),
    "slow": ("slow",),
}
OPERATIONS: tuple[Operation, ...] = (
    "put", "commit", "document", "get", "range", "head", "list", "delete", "bulk-delete",
)  # fmt: skip
CRASHES: Mapping[str, Crash | None] = {
    "none": None,
    "before": "before",
    "unacknowledged": "unacknowledged",
    "after": "after",
}
ROW_OF = {fault: row for row, faults in FAULTS.items() for fault in faults}


class Cell(NamedTuple):
    """A fault hits an operation; the process is killed at the next request of that operation."""

    fault: str
    operation: Operation
    crash: str


EVERY = [Cell(f, o, c) for f in FAULTS for o in OPERATIONS for c in CRASHES]


def impossible(cell: Cell) -> str:
    """Return why a cell cannot be; empty where it can."""
    if cell.fault == "corrupt bytes" and cell.operation in ("head", "delete"):
        return "neither its request nor its answer has a body"
    return ""


CELLS = [cell for cell in EVERY if not impossible(cell)]


def reached(seen: Sequence[Seen]) -> set[Cell]:
    """Return the cells that a life reached, by the proxy's log."""
    cells = set()
    by_number = {(s.operation, s.n): s for s in seen}
    for s in seen:
        if s.crash is None:
            if _struck(s):
                cells.add(Cell(ROW_OF[s.fault], s.operation, "none"))
            continue
        before = by_number.get((s.operation, s.n - 1))
        fault = ROW_OF[before.fault] if before and _struck(before) else "no fault"
        return {Cell(fault, s.operation, s.crash)}
    return cells | {Cell("no fault", s.operation, "none") for s in seen if s.fault is None}


def _struck(s: Seen) -> bool:
    """Tell whether a fault had something to spoil: claims are empty objects."""
    return s.fault is not None and not (s.fault == "corrupt" and "/claims/" in s.path)


# ---------------------------------------------------------------- what a seed stands for

DRIVERS = ("s3fs", "obstore")
FIELDS = standard_fields(layers=2)
SINGLE_S, LASTING_S = 8.0, 0.3  # for which requests are tried again
TIMEOUT_S, STALL_S, SLOW_S = 0.6, 1.2, 0.2
CHANCE = 0.003  # of each sort of fault, at each request that is not aimed at
_order = random.Random(0).sample(CELLS, len(CELLS))  # so that nothing else goes with a cell


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to happen to a life.

    Attributes
    ----------
    cell
        What is aimed at; None for a life without faults.
    fault
        The sort of fault, where the row has several.
    place
        Which of the operation's requests is hit, as a share of those that a life makes.
    burst
        How many of them in a row.
    lasting
        The fault outlasts the retries, so that the caller hears of it.
    threads
        That read, and whether two sessions are recorded side by side.
    """

    seed: int
    cell: Cell | None
    fault: Fault | None
    place: float
    burst: int
    lasting: bool
    driver: str
    mode: Mode
    threads: int

    @classmethod
    def of(cls, seed: int) -> Plan:
        """Return what a seed stands for."""
        lap, i = divmod(seed, len(_order))
        cell = _order[i]
        draw = random.Random(f"life {seed}")
        faults = FAULTS[cell.fault]
        lasting = bool(faults) and cell.fault != "slow" and draw.random() < 0.25
        most = 3 if cell.fault == "time-out" else 12
        return cls(
            seed=seed,
            cell=cell,
            fault=faults[(i // 2 + lap) % len(faults)] if faults else None,
            place=draw.random(),
            burst=most if lasting else bool(faults),
            lasting=lasting,
            driver="s3fs" if cell.operation == "bulk-delete" else DRIVERS[(i + lap) % 2],
            mode="snapshot" if draw.random() < 0.25 else "tito",
            threads=draw.choice([1, 2, 4]),
        )

    @classmethod
    def quiet(cls, driver: str) -> Plan:
        """Return a life without faults, by which the requests are counted."""
        return cls(
            seed=-1 - DRIVERS.index(driver), cell=None, fault=None, place=0.0, burst=0,
            lasting=False, driver=driver, mode="tito", threads=1,
        )  # fmt: skip

    def schedule(self, counts: Mapping[str, int]) -> Schedule:
        """Return when the proxy is to do what; `counts` are the requests of a quiet life."""
        if self.cell is None:
            return Schedule()
        operation, crash = self.cell.operation, CRASHES[self.cell.crash]
        first = 2 if operation == "put" else 1  # the first put is a claim, and empty
        last = counts[operation] - (crash is not None and self.fault is not None)
        at = first + int(self.place * max(last - first + 1, 1))

        def decide(asked: Operation, n: int) -> Verdict:
            if asked != operation:
                return Verdict()
            if at <= n < at + self.burst:
                return Verdict(self.fault)
            return Verdict(None, crash) if n == at + self.burst else Verdict()

        chances = {fault: CHANCE for faults in FAULTS.values() for fault in faults}
        return Schedule(decide) | Schedule.seeded(self.seed, chances)

    def rollout(self, session: str) -> Rollout:
        """Return what is recorded as a session."""
        names = sorted(TURNS)
        draw = np.random.default_rng([self.seed % 2**32, names.index(session)])
        return Rollout(FIELDS, self.mode).play(TURNS[session], draw)


# The second Step of an empty append holds no rows: finalizing deletes it again.
TURNS: Mapping[str, Sequence[Op]] = {
    "many": (Op("create"), Op("create", 0, 2, 3), Op("append", 0, 0, 0)),
    "few": (Op("create", 0, 2, 2), Op("append", 0, 1, 3)),
    "dropped": (Op("create"),),
    "empty": (),
}
CONSUMERS = {"many": ("train", "eval"), "few": ("train",)}


# ---------------------------------------------------------------- a life, told as it happens

TRIES = 8  # of a call that failed


class GaveUp(Exception):
    """A call failed again and again."""


class Life:
    """Opens a store, records, finalizes, trains, releases; as the user of a faulty network does."""

    def __init__(self, plan: Plan, url: str, settings: Mapping[str, Any], pipe: Connection) -> None:
        self._plan = plan
        self._url = url
        self._settings = settings
        self._pipe = pipe
        self._lock = threading.Lock()

    def say(self, *words: Any) -> None:
        """Tell the parent at once."""
        with self._lock:
            self._pipe.send(words)

    def call(self, what: str, about: Any, function: Callable[[], T], *, result: bool = False) -> T:
        """Do something until it succeeds, and tell so."""
        for _ in range(TRIES):
            self.say("begin", what, about)
            try:
                found = function()
            except TqFsError as error:
                kinds = [kind.__name__ for kind in type(error).__mro__]
                self.say("error", what, about, kinds, str(error))
            else:
                self.say("done", what, about, found if result else None)
                return found
        raise GaveUp(f"{what} {about}")

    def run(self) -> None:
        """Live."""
        store = self._open()
        refs = self._record(store)
        self._discard(store)
        self.call("close", "", store.close)
        store = self._open()
        self._resume(store, refs)
        self._release(store, refs)
        self.call("close", "", store.close)
        self.say("end")

    def _open(self) -> tq_fs.Store:
        plan = self._plan
        return self.call("open", "", lambda: open_again(
            self._url, plan.driver, self._settings,
            retry_deadline_s=LASTING_S if plan.lasting else SINGLE_S,
            request_timeout_s=TIMEOUT_S,
            reader_threads=plan.threads,
        ))  # fmt: skip

    def _record(self, store: tq_fs.Store) -> dict[str, list[str]]:
        refs: dict[str, list[str]] = {}
        threads = [
            threading.Thread(target=self._shielded, args=(self._session, store, name, refs))
            for name in CONSUMERS
        ]
        for thread in threads:
            thread.start()
            if self._plan.threads == 1:
                thread.join()
        for thread in threads:
            thread.join()
        if len(refs) < len(threads):
            raise GaveUp("recording")
        return refs

    def _shielded(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except GaveUp as error:
            self.say("gave up", str(error))
        except BaseException:
            self.say("foreign", traceback.format_exc())

    def _session(self, store: tq_fs.Store, name: str, refs: dict[str, list[str]]) -> None:
        rollout = self._plan.rollout(name)
        session = store.session(name, mode=self._plan.mode)
        for turn in rollout.turns:
            self.call("record", name, lambda turn=turn: session.record(rollout.step(turn)))  # type: ignore[misc]

        def finalize() -> list[str]:
            segments = session.finalize(consumers=CONSUMERS[name], views=VIEWS)
            return [segment.ref for segment in segments if segment.ref]

        mine = self.call("finalize", name, finalize, result=True)
        self._hydrate(store, mine)
        refs[name] = mine

    def _hydrate(self, store: tq_fs.Store, refs: Sequence[str]) -> None:
        tensors = self.call("hydrate", refs, lambda: store.hydrate(refs))
        for problem in differences(self._plan, refs, tensors):
            self.say("wrong", problem)

    def _discard(self, store: tq_fs.Store) -> None:
        for name in ("dropped", "empty"):
            rollout = self._plan.rollout(name)
            session = store.session(name, mode=self._plan.mode)
            for turn in rollout.turns:
                self.call("record", name, lambda t=turn: session.record(rollout.step(t)))  # type: ignore[misc]
            self.call("discard", name, session.discard)

    def _resume(self, store: tq_fs.Store, refs: Mapping[str, Sequence[str]]) -> None:
        """Go on after a restart, with what the store says is there."""
        mine = {ref for each in refs.values() for ref in each}
        self.say("found", sorted(mine - set(store.unreleased())))
        for name, each in refs.items():
            segments = self.call("segments", name, lambda each=each: list(store.segments(each)))  # type: ignore[misc]
            want = [e.tokens.tolist() for v in VIEWS for e in self._plan.rollout(name).expected(v)]
            if [s.tokens.tolist() for s in segments] != want:
                self.say("wrong", f"tokens of {name}")
            self._hydrate(store, each)

    def _release(self, store: tq_fs.Store, refs: Mapping[str, Sequence[str]]) -> None:
        first = [ref for ref in refs["many"] if ref.endswith("/0")]
        for some, consumer in ((first, "train"), (first, "eval"), (refs["few"], "train")):
            self.call("release", (consumer, some), lambda s=some, c=consumer: store.release(s, c))  # type: ignore[misc]


def open_again(
    url: str, driver: str, storage_options: Mapping[str, Any], **settings: Any
) -> tq_fs.Store:
    """Open a life's store."""
    return tq_fs.open_store(
        url,
        fields=specs(FIELDS),
        driver=driver,
        storage_options=storage_options,
        writer_threads=2,
        **settings,
    )


def differences(plan: Plan, refs: Sequence[str], tensors: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return where hydrated tensors are not what the seed says."""
    wrong = []
    for i, ref in enumerate(refs):
        _, _, session, _, view, index = ref.split("/")
        want = plan.rollout(session).expected(view)[int(index)].slime(specs(FIELDS))  # type: ignore[arg-type]
        for name, array in want.items():
            have = tensors[name][i].numpy()
            same = (have.dtype, have.shape) == (array.dtype, array.shape)
            if not same or have.tobytes() != array.tobytes():
                wrong.append(f"{name} of {ref}")
    return wrong


def live(plan: Plan, url: str, settings: Mapping[str, Any], pipe: Connection, go: Connection) -> None:
    """Live in a process of its own, once told to begin."""
    life = Life(plan, url, settings, pipe)
    faulthandler.dump_traceback_later(LIFE_S - 5, exit=True)
    go.recv()
    life._shielded(life.run)


# ---------------------------------------------------------------- what it said


@dataclass
class Ledger:
    """What a life said that it did, and what it had begun."""

    ended: bool = False
    finalizing: set[str] = field(default_factory=set)
    finalized: dict[str, list[str]] = field(default_factory=dict)
    releasing: set[tuple[str, str]] = field(default_factory=set)
    released: set[tuple[str, str]] = field(default_factory=set)
    errors: list[tuple[str, Any, list[str], str]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def hear(self, words: Sequence[Any]) -> None:
        """Take in what the life told."""
        match words:
            case ["begin", "finalize", name]:
                self.finalizing.add(name)
            case ["done", "finalize", name, refs]:
                self.finalized[name] = refs
            case ["begin", "release", [consumer, refs]]:
                self.releasing |= {(ref, consumer) for ref in refs}
            case ["done", "release", [consumer, refs], _]:
                self.released |= {(ref, consumer) for ref in refs}
            case ["error", what, about, kinds, text]:
                self.errors.append((what, about, kinds, text))
            case ["found", missed]:
                self.missed += missed
            case ["wrong", what]:
                self.problems.append(f"the life got wrong values: {what}")
            case ["foreign", trace]:
                self.problems.append(f"no error of ours: {trace}")
            case ["gave up", what]:
                self.problems.append(f"the life gave up: {what}")
            case ["end"]:
                self.ended = True


# ---------------------------------------------------------------- what it left


class Check:
    """Looks at what a life left, without faults."""

    def __init__(
        self, plan: Plan, ledger: Ledger, url: str, settings: Mapping[str, Any], lenient: bool
    ) -> None:
        self.problems: list[str] = []
        self._plan = plan
        self._ledger = ledger
        self._url = url
        self._settings = settings
        self._lenient = lenient
        self._driver = "s3fs" if plan.seed % 4 == 0 else "auto"
        self._raw = open_object_backend(
            f"{url}/default",
            driver=self._driver,
            options=StorageOptions(settings),
            retry=Retry(deadline_s=0.0),
            timeout_s=20.0,
        )

    def run(self) -> None:
        """Look before and after a recovery, go on, and clean up."""
        before = dict(self._raw.walk(""))
        self._check_groups(before)
        with open_again(self._url, self._driver, self._settings) as store:
            self._check_recovery(store)
            self._check_objects("the recovery")
            live = self._check_references(store)
            self._go_on(store)
            for name, consumers in CONSUMERS.items():
                for consumer in consumers:
                    store.release([r for r in live if r.split("/")[2] == name], consumer)
        left = {key.partition("/")[0] for key in dict(self._raw.walk(""))}
        self._expect(left == {"store.json", "claims"}, f"after all was released is left: {left}")

    def _expect(self, true: bool, problem: str) -> None:
        if not true:
            self.problems.append(problem)

    def _check_groups(self, objects: Mapping[str, int]) -> None:
        """Check that every group that has its commit is whole."""
        for key in objects:
            place, _, name = key.rpartition("/")
            if name == "zarr.json":
                step = read_attributes(self._raw.get(key), key).step
                lacks = [n for n, s in step.objects().items() if objects.get(f"{place}/{n}") != s]
                self._expect(not lacks, f"half-written: {place} lacks {lacks}")

    def _check_recovery(self, store: tq_fs.Store) -> None:
        found = store.recovery
        self._expect(not found.incomplete, f"incomplete: {found.incomplete}")
        self._expect(not found.unreadable, f"unreadable: {found.unreadable}")

    def _check_objects(self, after: str) -> None:
        """Check that what lies there is what manifests name, and no more."""
        objects = dict(self._raw.walk(""))
        claims = [key for key in objects if key.startswith("claims/")]
        named = {"store.json", *claims}
        self._expect(len(claims) == 1, f"claims: {claims}")
        for key in objects:
            folder, _, name = key.rpartition("/")
            if folder.startswith("manifests/") and name == "manifest.json":
                manifest = decode(self._raw.get(key), SessionManifest, key)
                states = [k for k in objects if k.startswith(f"{folder}/state-")]
                named |= {key, f"{folder}/trajectory.msgpack", *states}
                released = [decode(self._raw.get(k), SessionState, k) for k in states]
                named |= _named(manifest, released)
        have = set(objects)
        self._expect(have >= named, f"after {after} is missing: {sorted(named - have)}")
        self._expect(have <= named, f"after {after} nobody refers to: {sorted(have - named)}")

    def _check_references(self, store: tq_fs.Store) -> list[str]:
        """Compare what is alive with what was said; return it."""
        live = list(store.unreleased())
        for name in CONSUMERS:
            want = [(v, i) for v in VIEWS for i, _ in enumerate(self._plan.rollout(name).expected(v))]
            mine = {(r.split("/")[4], int(r.split("/")[5])): r for r in live if f"/{name}/" in r}
            if name in self._ledger.finalized:
                self._check_finalized(store, name)
            elif name in self._ledger.finalizing:
                self._expect(sorted(mine) in ([], sorted(want)), f"{name} is there in part: {mine}")
            else:
                self._expect(not mine, f"{name} was never finalized: {mine}")
        others = [r for r in live if r.split("/")[2] not in CONSUMERS]
        self._expect(not others, f"discarded: {others}")
        for problem in differences(self._plan, live, store.hydrate(live)):
            self.problems.append(f"wrong after the recovery: {problem}")
        return live

    def _check_finalized(self, store: tq_fs.Store, name: str) -> None:
        said = self._ledger
        for consumer in CONSUMERS[name]:
            mine = {r for r in store.unreleased(consumer) if f"/{name}/" in r}
            for ref in said.finalized[name]:
                if (ref, consumer) not in said.releasing:
                    self._expect(ref in mine, f"was finalized and is lost: {ref} for {consumer}")
                elif (ref, consumer) in said.released and not self._lenient:
                    self._expect(ref not in mine, f"was released and is there: {ref} {consumer}")

    def _go_on(self, store: tq_fs.Store) -> None:
        """Record under a used name."""
        rollout = self._plan.rollout("few")
        session = store.session("few", mode=self._plan.mode)
        rollout.record(session)
        refs = [s.ref for s in session.finalize() if s.ref]
        for problem in differences(self._plan, refs, store.hydrate(refs)):
            self.problems.append(f"wrong when it goes on: {problem}")
        store.release(refs)


def _named(manifest: SessionManifest, states: Sequence[SessionState]) -> set[str]:
    """Return the objects of the Steps that Segments not released by all refer to."""
    done = [
        {s for state in states for s in state.released.get(consumer, ())}
        for consumer in manifest.consumers
    ]
    alive = [s for s in manifest.segments if f"{s.view}/{s.index}" not in set.intersection(*done)]
    steps = {f.step for s in alive for fragments in s.fields.values() for f in fragments}
    places = {
        step.place(manifest.incarnation.path): step.objects()
        for step in manifest.steps
        if step.index in steps
    }
    return {f"{place}/{name}" for place, names in places.items() for name in ("zarr.json", *names)}


def look(check: Check, pipe: Connection) -> None:
    """Check in a process of its own."""
    try:
        check.run()
    except BaseException:
        check.problems.append(f"the check failed: {traceback.format_exc()}")
    pipe.send(check.problems)


# ---------------------------------------------------------------- one schedule

LIFE_S = 60.0  # after which a life counts as hung


class Server(NamedTuple):
    """The S3 server behind the proxies."""

    endpoint: str
    key: str
    secret: str
    region: str

    def options(self, endpoint: str) -> dict[str, Any]:
        """Return storage options that lead to it, or to a proxy before it."""
        names = ("key", "secret", "region")
        return {"endpoint_url": endpoint, **{name: getattr(self, name) for name in names}}

    def client(self) -> Any:
        """Return a plain client of this process."""
        if self not in _clients:
            from botocore.config import Config
            from botocore.session import Session

            _clients[self] = Session().create_client(
                "s3",
                endpoint_url=self.endpoint,
                aws_access_key_id=self.key,
                aws_secret_access_key=self.secret,
                region_name=self.region,
                config=Config(s3={"addressing_style": "path"}),
            )
        return _clients[self]


_clients: dict[Server, Any] = {}


@dataclass(kw_only=True)
class Outcome:
    """How a schedule went; plain values.

    Attributes
    ----------
    cells
        What it reached.
    problems
        Promises that were broken.
    counts
        Requests of each operation.
    hits
        What the proxy did, in order.
    """

    seed: int
    plan: str
    cells: list[Cell]
    problems: list[str]
    counts: dict[str, int]
    hits: list[str]
    errors: list[str]
    seconds: list[float]


def run(plan: Plan, counts: Mapping[str, int], server: Server) -> Outcome:
    """Let a life happen, and look at what it left."""
    start = time.perf_counter()
    bucket = f"life-{plan.seed}".replace("--", "-quiet-") + f"-{os.urandom(3).hex()}"
    server.client().create_bucket(Bucket=bucket)
    url = f"s3://{bucket}"
    ledger, code, proxy = _lived(plan, counts, server, url)
    lived = time.perf_counter()
    seen = proxy.seen()
    lenient = any(s.fault == "corrupt" and s.operation == "list" for s in seen)
    problems = [*ledger.problems, *_judged(plan, ledger, code, seen, lenient)]
    check = Check(plan, ledger, url, server.options(server.endpoint), lenient)
    problems += _looked(check)
    dangling = server.client().list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    problems += [f"a multipart upload dangles: {upload['Key']}" for upload in dangling]
    return Outcome(
        seed=plan.seed,
        plan=str(plan),
        cells=sorted(reached(seen)),
        problems=problems,
        counts=dict(proxy.counts()),
        hits=[f"{s.operation} {s.n}: {s.fault or ''} {s.crash or ''} ({s.path})" for s in seen if s.fault or s.crash],
        errors=[f"{what}: {kinds[0]}: {text}" for what, _, kinds, text in ledger.errors],
        seconds=[lived - start, time.perf_counter() - lived],
    )


def _lived(
    plan: Plan, counts: Mapping[str, int], server: Server, url: str
) -> tuple[Ledger, int | None, FaultProxy]:
    """Run a life behind a proxy; return what it said, how it ended, and what the proxy saw."""
    told, tell = FORK.Pipe(duplex=False)
    wait, go = FORK.Pipe(duplex=False)
    proxy = FaultProxy(
        server.endpoint,
        plan.schedule(counts),
        kill=lambda: os.kill(process.pid or 0, signal.SIGKILL),
        stall_s=STALL_S,
        slow_s=SLOW_S,
    )
    settings = server.options(proxy.endpoint)
    process = FORK.Process(target=live, args=(plan, url, settings, tell, wait), daemon=True)
    process.start()  # before there are threads
    tell.close()
    ledger = Ledger()
    with proxy, told:
        go.send(None)
        with suppress(EOFError, ConnectionError):
            while told.poll(LIFE_S):
                ledger.hear(told.recv())
            ledger.problems.append("the life hangs")
            process.kill()
        process.join()
    return ledger, process.exitcode, proxy


def _looked(check: Check) -> list[str]:
    answer, tell = FORK.Pipe(duplex=False)
    process = FORK.Process(target=look, args=(check, tell), daemon=True)
    process.start()
    tell.close()
    with answer:
        problems = ["the check hangs"]
        with suppress(EOFError):
            if answer.poll(LIFE_S):
                problems = answer.recv()
    process.kill()
    process.join()
    return problems


# What a caller may hear of, by what was done to its requests. All else is waited out.
HEARD: Mapping[str, set[str]] = {
    "corrupt": {"CorruptError", "StoreFenced"},
}


def _judged(
    plan: Plan, ledger: Ledger, code: int | None, seen: Sequence[Seen], lenient: bool
) -> Iterator[str]:
    """Yield what is wrong with how a life went."""
    crashed = any(s.crash for s in seen)
    want = -signal.SIGKILL if crashed else 0
    if code != want or ledger.ended == crashed:
        yield f"the life ended with {code} (ended {ledger.ended}, killed {crashed})"
    if any(s.operation == "multipart" for s in seen):
        yield "an upload in parts"
    if ledger.missed and not lenient:
        yield f"finalized, and not there after a restart: {ledger.missed}"
    allowed = {"RetryError"} if plan.lasting else set()
    for fault in {s.fault for s in seen if s.fault}:
        allowed |= HEARD.get(fault, set())
    for what, about, kinds, text in ledger.errors:
        if not allowed.intersection(kinds):
            yield f"{what} {about} failed for no reason: {kinds[0]}: {text}"


# ---------------------------------------------------------------- many


@contextmanager
def pool(slots: int) -> Iterator[ProcessPoolExecutor]:
    """Give processes that run schedules side by side; import everything before they fork."""
    logging.disable()
    import aiobotocore.session
    import s3fs
    import torch

    assert "obstore" not in sys.modules, (aiobotocore, s3fs, torch)
    with ProcessPoolExecutor(slots, mp_context=FORK) as made:
        yield made


LAPS = 4  # how often a cell is aimed at before it counts as out of reach


def main() -> None:
    """Run the seeds that are asked for on stdin; print an outcome a line."""
    asked = json.loads(sys.stdin.readline())
    server = Server(**asked["server"])
    with pool(asked["slots"]) as workers:
        counts: dict[str, Mapping[str, int]] = {}
        cells: set[Cell] = set()

        def tell(outcome: Outcome) -> None:
            cells.update(map(Cell._make, outcome.cells))
            print(json.dumps(asdict(outcome)), flush=True)

        for driver in DRIVERS:
            quiet = workers.submit(run, Plan.quiet(driver), {}, server).result()
            counts[driver] = quiet.counts
            tell(quiet)

        def run_all(seeds: Iterable[int]) -> None:
            plans = [Plan.of(seed) for seed in seeds]
            for done in as_completed([workers.submit(run, p, counts[p.driver], server) for p in plans]):
                tell(done.result())

        run_all(asked["seeds"])
        for lap in range(1, LAPS if asked["complete"] else 0):
            base = lap * len(_order)
            run_all(base + i for i, cell in enumerate(_order) if cell not in cells)
