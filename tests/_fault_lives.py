"""A small but complete life of a store, told as it happens, and what is made of what was told.

It runs in a process of its own that may be killed anywhere. What it begins, what was acknowledged
and what it was told in errors goes to the parent at once.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import signal
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

import tq_fs
import tq_fs.places
from tests._fault_plans import CONSUMERS, FIELDS, Plan, TierCell
from tests._rollouts import VIEWS, Rollout, specs
from tq_fs.backends import NodeCache, TieredBackend
from tq_fs.errors import TqFsError
from tq_fs.keys import SegmentRef

T = TypeVar("T")

LIFE_S = 60.0  # after which a life counts as hung
TIMEOUT_S, SLOW_S = 0.6, 0.2  # a request's, and what a slow one takes
STALL_S = 2 * LIFE_S  # how long one that is not answered would be waited for
RETRIED_S, LASTING_S = 8.0, 0.3  # how long requests are tried again
TRIES = 16  # of a call that failed: more than the longest burst
KiB = 1024


class Place(NamedTuple):
    """Where a life's store is.

    Attributes
    ----------
    url, storage_options
        As :func:`tq_fs.open_store` takes them.
    folder
        Of the tier, for a life that has one.
    """

    url: str
    storage_options: Mapping[str, Any]
    folder: str

    def open(self, driver: str, tier: TierCell | None, **settings: Any) -> tq_fs.Store:
        """Open the store, or make it. The tier holds few of a life's Steps."""
        if tier is not None:
            settings["tier"] = {
                "folder": self.folder,
                "policy": tier.policy,
                "capacity_bytes": 64 * KiB,
                "high_water": 0.6,
                "low_water": 0.3,
                "upload_threads": 2,
                "cache_bytes": 16 * KiB,
            }
        return tq_fs.open_store(
            self.url,
            fields=specs(FIELDS),
            driver=driver,
            storage_options=self.storage_options,
            writer_threads=2,
            **settings,
        )


# ---------------------------------------------------------------- the life


class GaveUp(Exception):
    """A call failed again and again."""


class Life:
    """Opens a store, records, finalizes, trains and releases, as users do whose network fails."""

    def __init__(self, plan: Plan, place: Place, pipe: Connection) -> None:
        self._plan = plan
        self._place = place
        self._pipe = pipe
        self._lock = threading.Lock()

    def say(self, *words: Any) -> None:
        """Tell the parent at once."""
        with self._lock:
            self._pipe.send(words)

    def call(self, what: str, about: Any, function: Callable[[], T]) -> T:
        """Do something until it succeeds; tell so."""
        for _ in range(TRIES):
            self.say("begin", what, about)
            try:
                found = function()
            except TqFsError as error:
                self.say("error", what, [kind.__name__ for kind in type(error).__mro__], str(error))
            else:
                self.say("done", what, about, found if what == "finalize" else None)
                return found
        raise GaveUp(f"{what} {about}")

    def shield(self, function: Callable[..., None], *arguments: Any) -> None:
        """Do something, and tell if it ends in an error."""
        try:
            function(*arguments)
        except BaseException as error:
            how = "gave up" if isinstance(error, GaveUp) else "foreign"
            self.say(how, traceback.format_exc() if how == "foreign" else str(error))

    def run(self) -> None:
        """Live."""
        store = self._open()
        refs = self._record(store)
        self._discard(store)
        if self._plan.restarts:
            self.call("close", "", store.close)
            store = self._open()
        self._resume(store, refs)
        self._release(store, refs)
        self.call("close", "", store.close)
        self.say("end")

    def _open(self) -> tq_fs.Store:
        plan = self._plan
        settings = {
            "retry_deadline_s": LASTING_S if plan.lasting else RETRIED_S,
            "request_timeout_s": TIMEOUT_S,
            "reader_threads": plan.threads,
        }
        return self.call("open", "", lambda: self._place.open(plan.driver, plan.tier, **settings))

    def _record(self, store: tq_fs.Store) -> dict[str, list[str]]:
        refs: dict[str, list[str]] = {}
        threads = [
            threading.Thread(target=self.shield, args=(self._session, store, name, refs))
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

    def _session(self, store: tq_fs.Store, name: str, refs: dict[str, list[str]]) -> None:
        session = store.session(self._plan.session_id(name), mode=self._plan.mode)
        self._turns(session, name)

        def finalize() -> list[str]:
            return _refs(session.finalize(consumers=CONSUMERS[name], views=VIEWS))

        refs[name] = self.call("finalize", name, finalize)
        if name == "few":  # the rest is read after the restart
            self._hydrate(store, refs[name])

    def _turns(self, session: tq_fs.Session, name: str) -> None:
        """Record turns; one that failed has used up its index."""
        rollout = self._plan.rollout(name)
        indexes: dict[int | None, int | None] = {None: None}
        for turn in rollout.turns:
            step = replace(rollout.step(turn), parent=indexes[turn.parent])
            recorded = self.call("record", name, functools.partial(session.record, step))
            indexes[turn.index] = recorded.index

    def _discard(self, store: tq_fs.Store) -> None:
        for name in ("dropped", "empty"):
            session = store.session(self._plan.session_id(name), mode=self._plan.mode)
            self._turns(session, name)
            self.call("discard", name, session.discard)

    def _hydrate(self, store: tq_fs.Store, refs: Sequence[str]) -> None:
        tensors = self.call("hydrate", refs, lambda: store.hydrate(refs))
        for problem in differences(self._plan, refs, tensors):
            self.say("wrong", problem)

    def _resume(self, store: tq_fs.Store, refs: Mapping[str, Sequence[str]]) -> None:
        """Go on after a restart, with what the store says is there."""
        mine = {ref for each in refs.values() for ref in each}
        self.say("missed", sorted(mine - set(store.unreleased())))
        for name, each in refs.items():
            segments = self.call("segments", name, lambda each=each: list(store.segments(each)))  # type: ignore[misc]
            want = [e.tokens.tolist() for e in expected(self._plan.rollout(name)).values()]
            if [s.tokens.tolist() for s in segments] != want:
                self.say("wrong", f"tokens of {name}")
            self._hydrate(store, each)

    def _release(self, store: tq_fs.Store, refs: Mapping[str, Sequence[str]]) -> None:
        first = [ref for ref in refs["many"] if ref.endswith("/0")]
        for some, consumer in ((first, "train"), (first, "eval"), (refs["few"], "train")):
            release = functools.partial(store.release, some, consumer)
            self.call("release", (consumer, some), release)


def live(plan: Plan, place: Place, pipe: Connection, go: Connection) -> None:
    """Live in a process of its own, once told to begin."""
    die_with_parent()
    life = Life(plan, place, pipe)
    faulthandler.dump_traceback_later(LIFE_S - 5, exit=True)
    if plan.tier is not None:
        _die_at(plan.tier.point, plan.nth, life)
    go.recv()
    life.shield(life.run)


def die_with_parent() -> None:
    """Let the kernel kill this process with the one that made it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _die_at(target: str, nth: int, life: Life) -> None:
    """Let the process kill itself as its tier passes a point."""
    left = nth
    lock = threading.Lock()

    def at(point: str) -> None:
        nonlocal left
        with lock:
            left -= point == target
            if left == 0:
                life.say("killed", point)
                os.kill(os.getpid(), signal.SIGKILL)

    places: Any = tq_fs.places
    places.TieredBackend = functools.partial(TieredBackend, at=at, pause_s=(0.05, 0.2))
    places.NodeCache = functools.partial(NodeCache, at=at)


# ---------------------------------------------------------------- what must come out


def expected(rollout: Rollout) -> dict[tuple[str, int], Any]:
    """Return what a session's Segments must be, by view and index."""
    return {(v, i): e for v in VIEWS for i, e in enumerate(rollout.expected(v))}


def name_in(ref: str) -> str:
    """Return which session of a life a reference is of."""
    return SegmentRef.parse(ref).incarnation.session_id.partition("-")[0]


def differences(plan: Plan, refs: Sequence[str], tensors: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return where hydrated tensors are not what the seed says, bit for bit."""
    wrong = []
    for i, ref in enumerate(refs):
        found = SegmentRef.parse(ref)
        segment = expected(plan.rollout(name_in(ref)))[found.view, found.index]
        for name, want in segment.slime(specs(FIELDS)).items():
            have = tensors[name][i].numpy()
            same = (have.dtype, have.shape) == (want.dtype, want.shape)
            if not same or have.tobytes() != want.tobytes():
                wrong.append(f"{name} of {ref}")
    return wrong


def _refs(segments: Sequence[tq_fs.Segment]) -> list[str]:
    return [segment.ref for segment in segments if segment.ref]


# ---------------------------------------------------------------- what was told


class Heard(NamedTuple):
    """An error that a call ended in: its class and those above, and its text."""

    call: str
    kinds: Sequence[str]
    text: str

    def __str__(self) -> str:
        """Return it as a line."""
        return f"{self.call}: {self.kinds[0]}: {self.text}"


@dataclass
class Ledger:
    """What a life said that it did, and what it had begun."""

    ended: bool = False
    killed: str = ""
    finalizing: set[str] = field(default_factory=set)
    finalized: dict[str, list[str]] = field(default_factory=dict)
    releasing: set[tuple[str, str]] = field(default_factory=set)
    released: set[tuple[str, str]] = field(default_factory=set)
    errors: list[Heard] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def hear(self, words: Sequence[Any]) -> None:
        """Take in what a life tells."""
        match words:
            case ["begin" | "done", *_]:
                self._hear_call(words)
            case ["error", call, kinds, text]:
                self.errors.append(Heard(call, kinds, text))
            case ["missed", refs]:
                self.missed += refs
            case ["killed", point]:
                self.killed = point
            case ["end"]:
                self.ended = True
            case [what, text]:  # wrong, foreign, gave up
                self.problems.append(f"{what}: {text}")

    def _hear_call(self, words: Sequence[Any]) -> None:
        match words:
            case ["begin", "finalize", name]:
                self.finalizing.add(name)
            case ["done", "finalize", name, refs]:
                self.finalized[name] = refs
            case ["begin", "release", [consumer, refs]]:
                self.releasing |= {(ref, consumer) for ref in refs}
            case ["done", "release", [consumer, refs], _]:
                self.released |= {(ref, consumer) for ref in refs}
