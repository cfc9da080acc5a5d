"""Who uses a cluster while it suffers: writers, trainers, and one who looks at what is left.

Each tells its world what it is about to do and waits for a go, so that a fault can be there by
then; and afterwards how it ended.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Client
from typing import Any, TypeVar

from tests._cluster_plans import FIELDS, rollout_of
from tests._cluster_processes import FarCalls, Where, watched
from tests._rollouts import VIEWS, specs
from tq_fs import Session, Store
from tq_fs.cache import ChunkCache
from tq_fs.cluster._client import open_attached
from tq_fs.embedded import Parts
from tq_fs.errors import (
    CapacityError,
    RetryError,
    SegmentMissing,
    StaleReference,
    TqFsError,
    UnitLost,
)
from tq_fs.fields import select
from tq_fs.keys import SegmentRef

T = TypeVar("T")
SPECS = specs(FIELDS)
TRIES_S = 12.0  # for which a call that may succeed later is made again
CONSUMERS = ("train", "eval")


class GaveUp(Exception):
    """A call failed again and again, or cannot succeed any more."""


@contextmanager
def attached(where: Where, node: str, consumers: Sequence[str] = ()) -> Iterator[Store]:
    """Open the store as a process of a node does."""

    def parts(cache: ChunkCache, opened: ExitStack) -> Parts:
        calls: Any = FarCalls(where)
        return open_attached(
            calls,
            where.config,
            None,
            node=node,
            consumers=consumers,
            metrics=None,
            cache=cache,
            opened=opened,
        )

    with Store(where.config, SPECS, select(SPECS, None), parts, remote=True) as store:
        yield store


class Life:
    """A process that says what it does."""

    def __init__(self, where: Where, name: str) -> None:
        self.where = where
        self.name = name
        self._conn = Client(where.path("world"), "AF_UNIX")
        self._lock = threading.Lock()

    def say(self, *words: Any) -> Any:
        """Tell the world, and return its answer."""
        with self._lock:
            self._conn.send((self.name, *words))
            return self._conn.recv()

    def call(self, operation: str, about: str, home: str, function: Callable[[], T]) -> T:
        """Do something until it succeeds."""
        until = time.monotonic() + TRIES_S
        while True:
            self.say("begin", operation, about, home)
            start = time.monotonic()
            try:
                found = function()
            except TqFsError as error:
                kinds = [kind.__name__ for kind in type(error).__mro__]
                took = time.monotonic() - start
                self.say("error", operation, about, home, kinds, str(error), took)
                again = isinstance(error, RetryError | CapacityError)
                if not again or time.monotonic() > until:
                    raise GaveUp(f"{operation} {about}: {error}") from error
                time.sleep(0.01)
            else:
                value = found if isinstance(found, list) else None
                self.say("done", operation, about, home, value, time.monotonic() - start)
                return found


def _shielded(life: Life, work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException:
        life.say("foreign", traceback.format_exc())
    life.say("end")


# ---------------------------------------------------------------- writers


def writer(where: Where, name: str, node: str, sessions: Sequence[tuple[str, str]]) -> None:
    """Record sessions; each is to be finalized, or to be discarded."""
    watched(where)
    life = Life(where, name)

    def work() -> None:
        with attached(where, node) as store:
            for session, end in sessions:
                try:
                    _record(life, store, session, end)
                except GaveUp as error:
                    life.say("gave up", session, str(error))

    _shielded(life, work)


def _record(life: Life, store: Store, name: str, end: str) -> None:
    session = life.call("open", name, "", lambda: store.session(name))
    home = session.incarnation_id.partition(".")[2]
    life.say("opened", name, home)
    _turns(life, session, name, home)
    if end == "discard":
        life.call("discard", name, home, session.discard)
        return

    def finalize() -> list[str]:
        segments = session.finalize(consumers=CONSUMERS, views=VIEWS)
        return [s.ref for s in segments if s.ref]

    life.call("finalize", name, home, finalize)


def _turns(life: Life, session: Session, name: str, home: str) -> None:
    """Record turns; one that failed has used up its index."""
    rollout = rollout_of(name)
    indexes: dict[int | None, int | None] = {None: None}
    for turn in rollout.turns:
        step = replace(rollout.step(turn), parent=indexes[turn.parent])
        record = functools.partial(session.record, step)
        indexes[turn.index] = life.call("record", name, home, record).index


# ---------------------------------------------------------------- trainers


def trainer(where: Where, name: str, node: str) -> None:
    """Read what is finalized, compare it, and release some of it, some once a checkpoint is there.

    What to do next says the world, for another trainer may have to go on.
    """
    watched(where)
    life = Life(where, name)

    def work() -> None:
        with attached(where, node, CONSUMERS) as store:
            while True:
                match life.say("next"):
                    case ["wait"]:
                        time.sleep(0.005)
                    case [operation, about, home, refs, detail]:
                        _train(life, store, (operation, about, home), refs, detail)
                    case _:
                        return

    _shielded(life, work)


def _train(
    life: Life, store: Store, task: tuple[str, str, str], refs: Sequence[str], detail: Any
) -> None:
    operation = task[0]

    def hydrate() -> None:
        for problem in differences(refs, store.hydrate(refs)):
            life.say("wrong", problem)

    todo: dict[str, Callable[[], object]] = {
        "hydrate": hydrate,
        "release": lambda: store.release(refs, detail),
        "hold": lambda: store.release(refs, detail[0], rollout_id=detail[1]),
        "checkpoint": lambda: store.checkpoint_saved(detail),
    }
    try:
        life.call(*task, todo[operation])
    except GaveUp as error:
        life.say("gave up", task[1], str(error))
    life.say("did")


def differences(refs: Sequence[str], tensors: dict[str, list[Any]]) -> list[str]:
    """Return where hydrated tensors are not what was recorded, bit for bit."""
    wrong = []
    for i, text in enumerate(refs):
        ref = SegmentRef.parse(text)
        rollout = rollout_of(ref.incarnation.session_id)
        segment = rollout.expected(ref.view)[ref.index]  # type: ignore[arg-type]
        for name, want in segment.slime(SPECS).items():
            have = tensors[name][i].numpy()
            same = (have.dtype, have.shape) == (want.dtype, want.shape)
            if not same or have.tobytes() != want.tobytes():
                wrong.append(f"{name} of {text}")
    return wrong


# ---------------------------------------------------------------- who looks at what is left


@dataclass
class Found:
    """What somebody sees who attaches when all is over.

    Attributes
    ----------
    unreleased
        By consumer.
    read
        Names of sessions that were read whole, and equal.
    missing, lost
        Names of sessions that are gone, or on a unit that is.
    problems
        What should not be.
    """

    unreleased: dict[str, list[str]] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def checker(where: Where, answer: str, known: dict[str, list[str]], release: bool) -> None:
    """Read all that is known, or that the store says is there; release it where that is asked."""
    watched(where)
    found = Found()
    try:
        with attached(where, "far") as store:
            _look(store, known, found)
            if release:
                _release(store, found)
    except BaseException:
        found.problems.append(f"the check failed: {traceback.format_exc()}")
    with Client(answer, "AF_UNIX") as conn:
        conn.send(found)


def _look(store: Store, known: dict[str, list[str]], found: Found) -> None:
    found.unreleased = {c: list(store.unreleased(c)) for c in CONSUMERS}
    sessions = dict(known)
    every = sorted(set(itertools.chain(*found.unreleased.values())))
    for name, mine in itertools.groupby(every, key=session_of):
        sessions.setdefault(name, list(mine))
    for name, refs in sessions.items():
        start = time.monotonic()
        try:
            wrong = differences(refs, store.hydrate(refs))
        except (SegmentMissing, StaleReference):
            found.missing.add(name)
        except UnitLost:
            found.lost.add(name)
        except TqFsError as error:
            found.problems.append(f"{name} cannot be read: {type(error).__name__}: {error}")
        else:
            found.read.add(name)
            found.problems += [f"wrong in the end: {w}" for w in wrong]
        took = time.monotonic() - start
        if took > 3.0:
            found.problems.append(f"{name}: an answer took {took:.1f} s when all was over")


def _release(store: Store, found: Found) -> None:
    store.checkpoint_saved(10**9)
    for consumer in CONSUMERS:
        refs = [r for r in store.unreleased(consumer) if session_of(r) not in found.lost]
        store.release(refs, consumer)
        left = [r for r in store.unreleased(consumer) if session_of(r) not in found.lost]
        if left:
            found.problems.append(f"released, and still there for {consumer}: {left}")


def session_of(ref: str) -> str:
    """Return the session id in a reference."""
    return SegmentRef.parse(ref).incarnation.session_id
