"""Runs seeds of the fault suite side by side, and looks at what each life left behind.

One process imports everything and forks the workers, which fork the lives: none of them has called
obstore before, whose threads a fork would lack. Asked for seeds on stdin, it prints an outcome a
line; :func:`outcomes` is the other side of that.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tq_fs
from tests._fault_lives import (
    LIFE_S,
    SLOW_S,
    STALL_S,
    Ledger,
    Place,
    die_with_parent,
    differences,
    expected,
    live,
    name_in,
)
from tests._fault_plans import (
    CELLS,
    CONSUMERS,
    TIER_CELLS,
    TIERED,
    Cell,
    Plan,
    TierCell,
    reached,
)
from tests._fault_proxy import FaultProxy, Seen
from tq_fs.backends import Retry, open_object_backend
from tq_fs.bench.servers import S3Server
from tq_fs.keys import SegmentRef
from tq_fs.manifests import SessionManifest, SessionState, decode
from tq_fs.steps import read_attributes
from tq_fs.storage_options import StorageOptions

ARRAYS = ("logprobs/c.0", "routed_experts/c.0.0.0")
FORK = multiprocessing.get_context("fork")


@dataclass(kw_only=True)
class Outcome:
    """How a schedule went; plain values.

    Attributes
    ----------
    cells
        What it reached.
    problems
        Promises that were broken.
    story
        What the proxy did and what the life was told, for whoever looks for the reason.
    counts
        Requests of each operation.
    seconds
        That the life took, and looking at what it left.
    """

    seed: int
    plan: str
    cells: list[Cell | TierCell]
    problems: list[str]
    story: list[str]
    counts: Mapping[str, int]
    seconds: tuple[float, float]


# ---------------------------------------------------------------- what a life left


class Check:
    """Looks at what a life left, without faults, in a process of its own."""

    def __init__(self, plan: Plan, ledger: Ledger, place: Place, *, lenient: bool) -> None:
        self.problems: list[str] = []
        self._plan = plan
        self._said = ledger
        self._place = place
        self._lenient = lenient
        self._driver = "s3fs" if plan.seed % 4 == 0 else "auto"
        self._raw = open_object_backend(
            f"{place.url}/default",
            driver=self._driver,
            options=StorageOptions(place.storage_options),
            retry=Retry(deadline_s=0.0),
            timeout_s=20.0,
        )

    def run(self) -> None:
        """Look before and after a recovery, go on, and clean up."""
        self._check_groups()
        if self._said.ended and not self._plan.leaves_strays and not self._lenient:
            self._check_objects("as it ends")
        if self._plan.tier is not None:
            self._check_without_node()
        with self._place.open(self._driver, self._plan.tier) as store:
            found = store.recovery
            self._expect(not found.incomplete, f"incomplete: {found.incomplete}")
            self._expect(not found.unreadable, f"unreadable: {found.unreadable}")
            self._check_objects("after the recovery")
            alive = self._check_references(store)
            if self._plan.seed % 8 == 1:
                self._go_on(store)
                self._release(store, alive)

    def _expect(self, true: bool, problem: str) -> None:
        if not true:
            self.problems.append(problem)

    def _check_groups(self) -> None:
        """Check that every group that has its commit is whole."""
        objects = {key for key, _ in self._raw.walk("")}
        for place in (key.removesuffix("/zarr.json") for key in objects if "/zarr.json" in key):
            lacks = {name for name in ARRAYS if f"{place}/{name}" not in objects}
            if lacks:  # as a Step without rows does
                key = f"{place}/zarr.json"
                lacks &= read_attributes(self._raw.get(key), key).step.objects().keys()
            self._expect(not lacks, f"half-written: {place} lacks {lacks}")

    def _check_without_node(self) -> None:
        """Check that what was finalized is whole without the node's disk."""
        if not any(self._raw.walk("")):
            return  # killed before there was a store
        with self._place.open(self._driver, None, read_only=True) as store:
            self._hydrate(store, [*store.unreleased()], "without the node")

    def _check_objects(self, when: str) -> None:
        """Check that what lies there is what manifests name, and no more."""
        objects = {key for key, _ in self._raw.walk("")}
        claims = {key for key in objects if key.startswith("claims/")}
        self._expect(len(claims) == 1, f"claims: {claims}")
        named = {"store.json", *claims}
        for key in objects:
            if key.startswith("manifests/") and key.endswith("/manifest.json"):
                named |= self._named(key, objects)
        self._expect(objects >= named, f"missing {when}: {sorted(named - objects)}")
        self._expect(objects <= named, f"nobody refers to {when}: {sorted(objects - named)}")
        if self._plan.tier is not None:
            root = Path(self._place.folder, "default")
            near = {str(p.relative_to(root)) for p in root.glob("steps/**/*") if p.is_file()}
            self._expect(near <= named, f"nobody refers to {when}, near: {sorted(near - named)}")

    def _named(self, key: str, objects: set[str]) -> set[str]:
        """Return a manifest, what lies beside it, and the Steps that are not released by all."""
        folder = key.rpartition("/")[0]
        states = [k for k in objects if k.startswith(f"{folder}/state-")]
        manifest = decode(self._raw.get(key), SessionManifest, key)
        gone = _released_by_all(
            manifest, [decode(self._raw.get(k), SessionState, k) for k in states]
        )
        alive = [s for s in manifest.segments if f"{s.view}/{s.index}" not in gone]
        steps = {f.step for s in alive for fragments in s.fields.values() for f in fragments}
        named = {key, f"{folder}/trajectory.msgpack", *states}
        for step in manifest.steps:
            if step.index in steps:
                place = step.place(manifest.incarnation.path)
                named |= {f"{place}/{name}" for name in ("zarr.json", *step.objects())}
        return named

    def _check_references(self, store: tq_fs.Store) -> list[str]:
        """Compare what is alive with what was said; return it."""
        alive = [*store.unreleased()]
        for name in CONSUMERS:
            want = sorted(expected(self._plan.rollout(name)))
            mine = [SegmentRef.parse(r) for r in alive if name_in(r) == name]
            found = sorted((r.view, r.index) for r in mine)
            if name in self._said.finalized:
                self._check_finalized(store, name)
            elif name in self._said.finalizing:
                self._expect(found in ([], want), f"{name} is there in part: {found}")
            else:
                self._expect(not found, f"{name} was never finalized: {found}")
        others = [r for r in alive if name_in(r) not in CONSUMERS]
        self._expect(not others, f"discarded: {others}")
        self._hydrate(store, alive, "after the recovery")
        return alive

    def _check_finalized(self, store: tq_fs.Store, name: str) -> None:
        for consumer in CONSUMERS[name]:
            mine = {r for r in store.unreleased(consumer) if name_in(r) == name}
            for ref in self._said.finalized[name]:
                if (ref, consumer) not in self._said.releasing:
                    self._expect(ref in mine, f"was finalized and is lost: {ref} for {consumer}")
                elif (ref, consumer) in self._said.released and not self._lenient:
                    self._expect(ref not in mine, f"was released and is there: {ref} {consumer}")

    def _hydrate(self, store: tq_fs.Store, refs: Sequence[str], when: str) -> None:
        wrong = differences(self._plan, refs, store.hydrate(refs)) if refs else []
        self._expect(not wrong, f"wrong {when}: {wrong}")

    def _go_on(self, store: tq_fs.Store) -> None:
        """Record under an id that was used."""
        session = store.session(self._plan.session_id("few"), mode=self._plan.mode)
        self._plan.rollout("few").record(session)
        refs = [s.ref for s in session.finalize() if s.ref]
        self._hydrate(store, refs, "as it goes on")
        store.release(refs)

    def _release(self, store: tq_fs.Store, alive: Sequence[str]) -> None:
        """Release all, and find nothing left."""
        for name, consumers in CONSUMERS.items():
            for consumer in consumers:
                store.release([r for r in alive if name_in(r) == name], consumer)
        left = {key.partition("/")[0] for key, _ in self._raw.walk("")}
        self._expect(left == {"store.json", "claims"}, f"after all was released is left: {left}")


def _released_by_all(manifest: SessionManifest, states: Sequence[SessionState]) -> set[str]:
    by = [{s for state in states for s in state.released.get(c, ())} for c in manifest.consumers]
    return set.intersection(*by)


def _look(check: Check, pipe: Any) -> None:
    die_with_parent()
    try:
        check.run()
    except BaseException:
        check.problems.append(f"the check failed: {traceback.format_exc()}")
    pipe.send(check.problems)


# ---------------------------------------------------------------- one schedule


class Server(NamedTuple):
    """The S3 server behind the proxies."""

    endpoint: str
    key: str
    secret: str
    region: str

    def options(self, endpoint: str) -> dict[str, Any]:
        """Return storage options that lead to it, or to a proxy before it."""
        mine = self._asdict()
        del mine["endpoint"]
        return {**mine, "endpoint_url": endpoint}


@functools.cache
def _client(server: Server) -> Any:
    from botocore.config import Config
    from botocore.session import Session

    return Session().create_client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.key,
        aws_secret_access_key=server.secret,
        region_name=server.region,
        config=Config(s3={"addressing_style": "path"}),
    )


def run(plan: Plan, counts: Mapping[str, int], server: Server) -> Outcome:
    """Let a life happen, and look at what it left."""
    start = time.perf_counter()
    bucket = f"life-{plan.seed % 10**9}-{os.urandom(4).hex()}"
    _client(server).create_bucket(Bucket=bucket)
    with tempfile.TemporaryDirectory(prefix="tq-fs-life-") as folder:
        place = Place(f"s3://{bucket}", server.options(server.endpoint), folder)
        ledger, code, proxy = _lived(plan, counts, server, place)
        lived = time.perf_counter()
        seen = proxy.seen()
        lenient = any(s.fault == "corrupt" and s.operation == "list" for s in seen)
        problems = [*ledger.problems, *_judged(plan, ledger, code, seen, lenient)]
        problems += _looked(Check(plan, ledger, place, lenient=lenient))
    dangling = _client(server).list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    problems += [f"a multipart upload dangles: {upload['Key']}" for upload in dangling]
    hits = [s for s in seen if s.fault or s.crash]
    return Outcome(
        seed=plan.seed,
        plan=str(plan),
        cells=[*_reached(plan, ledger, seen)],
        problems=problems,
        story=[
            *(f"{s.operation} {s.n}: {s.fault or ''} {s.crash or ''} {s.path}" for s in hits),
            *map(str, ledger.errors),
        ],
        counts={str(operation): n for operation, n in proxy.counts().items()},
        seconds=(lived - start, time.perf_counter() - lived),
    )


def _reached(plan: Plan, ledger: Ledger, seen: Sequence[Seen]) -> Iterator[Cell | TierCell]:
    if plan.tier is None:
        yield from reached(seen)
    elif ledger.killed or ledger.ended:
        yield TierCell(plan.tier.policy, ledger.killed)


def _lived(
    plan: Plan, counts: Mapping[str, int], server: Server, place: Place
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
    behind = place._replace(storage_options=server.options(proxy.endpoint))
    process = FORK.Process(target=live, args=(plan, behind, tell, wait), daemon=True)
    process.start()  # before there are threads
    tell.close()
    ledger = Ledger()
    with proxy, told:
        go.send(None)
        with suppress(EOFError, ConnectionError):
            while told.poll(LIFE_S):
                ledger.hear(told.recv())
            ledger.problems.append("hangs")
            process.kill()
        process.join()
    return ledger, process.exitcode, proxy


def _judged(
    plan: Plan, ledger: Ledger, code: int | None, seen: Sequence[Seen], lenient: bool
) -> Iterator[str]:
    """Yield what is wrong with how a life went."""
    killed = any(s.crash for s in seen) or bool(ledger.killed)
    if code != (-signal.SIGKILL if killed else 0) or ledger.ended == killed:
        yield f"the life ended with {code} (ended {ledger.ended}, killed {killed})"
    if any(s.operation == "multipart" for s in seen):
        yield "an upload in parts"
    if ledger.missed and not lenient:
        yield f"finalized, and not there after a restart: {ledger.missed}"
    allowed = {"RetryError", "CorruptError"} if plan.lasting else set()
    if lenient:
        allowed.add("StoreFenced")  # by a claim whose name was changed
    for error in ledger.errors:
        if not allowed.intersection(error.kinds):
            yield f"an error that nothing explains: {error}"


def _looked(check: Check) -> list[str]:
    answer, tell = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_look, args=(check, tell), daemon=True)
    process.start()
    tell.close()
    problems = ["the check hangs"]
    with answer, suppress(EOFError):
        if answer.poll(LIFE_S):
            problems = answer.recv()
    process.kill()
    process.join()
    return problems


# ---------------------------------------------------------------- many, in a process of their own

LAPS = 4  # how often a cell is aimed at before it counts as out of reach


@contextmanager
def _workers(slots: int, server: Server) -> Iterator[ProcessPoolExecutor]:
    """Give processes that run schedules; what they need is imported and warm before they fork."""
    import botocore.session
    import s3fs
    import torch

    assert "obstore" not in sys.modules, (s3fs, torch)
    logging.disable()
    botocore.session.create_loader = functools.cache(botocore.session.create_loader)
    _client(server)
    gc.disable()
    gc.freeze()
    with ProcessPoolExecutor(slots, mp_context=FORK, initializer=die_with_parent) as workers:
        try:
            yield workers
        finally:
            workers.shutdown(cancel_futures=True)  # nobody listens any more


def main() -> None:
    """Run the seeds that are asked for on stdin; print an outcome a line."""
    die_with_parent()
    asked = json.loads(sys.stdin.readline())
    server = Server(**asked["server"])
    cells: set[Cell | TierCell] = set()
    counts: dict[str, Mapping[str, int]] = {}
    with _workers(asked["slots"], server) as workers:

        def run_all(seeds: Iterable[int]) -> None:
            plans = [Plan.of(seed) for seed in seeds]
            futures = [workers.submit(run, p, counts.get(p.driver, {}), server) for p in plans]
            for future in as_completed(futures):
                faulthandler.dump_traceback_later(3 * LIFE_S, exit=True)
                outcome = future.result()
                cells.update(outcome.cells)
                if outcome.seed < 0:
                    counts[Plan.of(outcome.seed).driver] = outcome.counts
                sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
                sys.stdout.flush()

        run_all([-1, -2])  # without faults: how many requests there are
        run_all(asked["seeds"])
        for lap in range(1, LAPS if asked["complete"] else 0):
            run_all(seed for seed in _aimed(lap) if Plan.of(seed).cell not in cells)


def _aimed(lap: int) -> Iterator[int]:
    """Yield the seeds that aim at each cell once more."""
    yield from range(lap * len(CELLS), (lap + 1) * len(CELLS))
    yield from range(TIERED + lap * len(TIER_CELLS), TIERED + (lap + 1) * len(TIER_CELLS))


# ---------------------------------------------------------------- the other side

# With `tests` as a package whose name no installed one can take.
_START = """
import sys, types
tests = types.ModuleType("tests")
tests.__path__ = [sys.argv[1]]
sys.modules["tests"] = tests
from tests._fault_runs import main
main()
"""


def outcomes(
    server: S3Server, seeds: Sequence[int], *, complete: bool, slots: int = 0
) -> Iterator[Outcome]:
    """Run seeds on a server; with `complete` also further ones, for cells that were missed."""
    place = Server(server.endpoint, server.key, server.secret, server.region)
    asked = {
        "server": place._asdict(),
        "seeds": list(seeds),
        "complete": complete,
        "slots": slots or 3 * (os.cpu_count() or 1),
    }
    here = Path(__file__).parent
    path = os.pathsep.join([str(Path(tq_fs.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", _START, str(here)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.close()
        for line in process.stdout:
            found = json.loads(line)
            found["cells"] = [(Cell if len(c) == 3 else TierCell)(*c) for c in found["cells"]]
            yield Outcome(**found)
    assert process.returncode == 0, f"the runs ended with {process.returncode}"


def reached_by(all_of_them: Iterable[Outcome]) -> Counter[Cell | TierCell]:
    """Count how often each cell was reached."""
    return Counter(cell for outcome in all_of_them for cell in outcome.cells)
