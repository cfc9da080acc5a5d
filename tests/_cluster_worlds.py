"""A cluster and who uses it, from its start until nobody has anything left to do."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from typing import Any

from tests._cluster_lives import CONSUMERS, trainer, writer
from tests._cluster_plans import Aim, Cell, Plan, Point
from tests._cluster_processes import (
    FOREIGN,
    KILLED,
    NODES,
    FarCalls,
    Nursery,
    Relay,
    Where,
    controller,
    unit,
)
from tq_fs import ClusterConfig, StoreConfig
from tq_fs.errors import RetryError, TqFsError

STORE = "run"
LEASE_S = GRACE_S = 0.4
LIFE_S = 50.0  # after which a world counts as hung
CALL_LIMIT_S = 16.0  # that any call of a client may take


def config_of(plan: Plan, folder: str) -> StoreConfig:
    """Return a world's settings: those of users, in small."""
    return StoreConfig(
        store_id=STORE,
        durability=plan.durability,
        prepared_groups=0,
        retry_deadline_s=2.0,
        request_timeout_s=1.0,
        inflight_deadline_s=5.0,
        persist_trajectories=plan.persist,
        reader_threads=2,
        writer_threads=2,
        cluster=ClusterConfig(
            paths=(f"{folder}/{{node}}",),
            host="127.0.0.1",
            encryption="none",
            deadline_s=1.0,
            full_deadline_s=1.5,
            lease_s=LEASE_S,
            grace_s=GRACE_S,
            sweep_s=0.3,
        ),
    )


# ---------------------------------------------------------------- what was said


@dataclass
class Hurt:
    """A fault as it happens.

    Attributes
    ----------
    aim
        What was planned.
    node
        Whose unit is hurt.
    who
        Does what is aimed at.
    begun
        Set as soon as it is there.
    since, until
        When.
    """

    aim: Aim
    node: str
    who: str
    begun: threading.Event = field(default_factory=threading.Event)
    since: float = 0.0
    until: float = float("inf")

    @property
    def fault(self) -> str:
        """Its name in the table."""
        return self.aim.cell.fault


@dataclass
class Told:
    """What the world was told of a session. Of each thing: not begun, begun, or done."""

    home: str = ""
    refs: list[str] = field(default_factory=list)
    finalized: int = 0
    discarded: int = 0
    released: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)


# ---------------------------------------------------------------- the world


class World:
    """A cluster, who uses it, and what befalls it.

    Parameters
    ----------
    plan
        What is to happen.
    folder
        Its own.
    nursery
        Forks its processes.
    """

    def __init__(self, plan: Plan, folder: str, nursery: Nursery) -> None:
        self.plan = plan
        self._nursery = nursery
        self._draw = random.Random(f"world {plan.seed}")
        self._start = time.monotonic()
        self.problems: list[str] = []
        self.story: list[str] = []
        self.sessions: dict[str, Told] = {}
        self.lost: set[str] = set()
        self._lock = threading.RLock()
        self._roles: dict[int, tuple[str, str]] = {}
        self._units: dict[str, int] = {}
        self._controller = (0, 0)  # number and process
        self._names: dict[str, str] = {}  # of units, to their nodes
        self._opened: dict[str, tuple[str, str, float]] = {}  # what is under way, by who does it
        self._ops: list[tuple[str, str, float, float]] = []
        self.hurts: list[Hurt] = []
        self._counts: Counter[str] = Counter()
        self._aims = list(plan.aims)
        self._work: dict[str, list[tuple[str, str]]] = {}
        self._tasks: deque[tuple[Any, ...]] = deque()
        self._doing: dict[str, tuple[Any, ...]] = {}
        self._checkpoint = 0
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._trained = False
        self._relays = {node: Relay(self._port_of(node)) for node in NODES}
        ports = {node: relay.port for node, relay in self._relays.items()}
        self.where = Where(folder, config_of(plan, folder), ports)
        self._listener = Listener(self.where.path("world"), "AF_UNIX", backlog=64)

    def _port_of(self, node: str) -> Callable[[], int | None]:
        return lambda: int(self.where.read(f"{node}.port") or 0) or None

    def tell(self, text: str) -> None:
        """Write down what happened."""
        self.story.append(f"{time.monotonic() - self._start:7.3f} {text}")

    def blame(self, problem: str) -> None:
        """Write down what should not have happened."""
        self.problems.append(problem)
        self.tell(f"PROBLEM {problem}")

    # ------------------------------------------------------------ processes

    def live(self) -> None:
        """Let everything happen, until nobody has anything to do."""
        for work in (self._accept, self._watch):
            self._thread(work)
        for node in NODES[: self.plan.units]:
            self._start_unit(node, first=node == "n0")
        self._start_controller(first=True)
        self._await("the start", lambda: len(self._live_units()) == self.plan.units)
        for i in range(2):
            ends = ["finalize", "discard", "finalize"]
            self._work[f"w{i}"] = [(f"s{i}{j}", end) for j, end in enumerate(ends)]
            self._start_writer(f"w{i}")
        self._start_trainer("t0")
        operator = self._thread(self._operate)
        self._await("the users", lambda: self._trained and not operator.is_alive(), LIFE_S)
        self._await("the faults", self._are_over, LIFE_S)

    def _are_over(self) -> bool:
        return all(not t.is_alive() for t in self._threads if t.name == "fault")

    def _thread(self, work: Callable[[], None], name: str = "") -> threading.Thread:
        def shielded() -> None:
            try:
                work()
            except Exception:
                if not self._ended.is_set():
                    self.blame(f"the test itself: {traceback.format_exc()}")

        thread = threading.Thread(target=shielded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _await(self, what: str, holds: Callable[[], object], limit_s: float = 10.0) -> None:
        until = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > until:
                under_way = {who: op[:2] for who, op in self._opened.items()}
                self.blame(f"{what} took more than {limit_s:g} s; under way: {under_way}")
                return
            time.sleep(0.005)

    def _target(self, process: str) -> tuple[str, int]:
        point = self.plan.point
        return (point.name, self.plan.nth) if point and point.process == process else ("", 0)

    def _start_unit(self, node: str, *, first: bool = False) -> None:
        self.where.note(f"{node}.begun", "")
        target = self._target("unit") if first else ("", 0)
        with self._lock:
            pid = self._nursery.start(unit, self.where, node, *target)
            self._units[node] = pid
            self._roles[pid] = ("unit", node)
        self.tell(f"unit {node} starts")

    def _start_controller(self, *, first: bool = False) -> None:
        target = self._target("controller") if first else ("", 0)
        with self._lock:
            number = self._controller[0] + 1
            pid = self._nursery.start(controller, self.where, number, *target)
            self._controller = (number, pid)
            self._roles[pid] = ("controller", str(number))
        self.tell(f"Controller {number} starts")

    def _start_writer(self, name: str) -> None:
        with self._lock:
            pid = self._nursery.start(writer, self.where, name, "far", self._work[name])
            self._roles[pid] = ("writer", name)

    def _start_trainer(self, name: str) -> None:
        node = "n0" if self.plan.near and "n0" not in self.lost else "far"
        with self._lock:
            pid = self._nursery.start(trainer, self.where, name, node)
            self._roles[pid] = ("trainer", name)

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            for pid, code in self._nursery.dead().items():
                with self._lock:
                    kind, name = self._roles.pop(pid, ("", ""))
                    if kind not in ("", "once"):
                        self._bury(kind, name, pid, code)

    def _bury(self, kind: str, name: str, pid: int, code: int) -> None:
        """Start again what has ended and is still needed."""
        self.tell(f"{kind} {name} ended with {code}")
        if code not in (0, -signal.SIGKILL):
            self.blame(f"{kind} {name} ended with {code}")
        self._close_op(name)
        again: Callable[[], None] | None = None
        if kind == "unit" and name not in self.lost:
            again = lambda: self._start_unit(name)  # noqa: E731
        elif kind == "controller" and pid == self._controller[1]:
            again = self._start_controller
        elif kind == "writer" and code:
            rest = [w for w in self._work.pop(name, []) if w[0] not in self.sessions]
            if rest:
                self._work[f"{name}+"] = rest
                again = lambda: self._start_writer(f"{name}+")  # noqa: E731
        elif kind == "writer":
            self._work.pop(name, None)
        elif kind == "trainer" and not self._trained:
            if name in self._doing:
                self._tasks.appendleft(self._doing.pop(name))
            again = lambda: self._start_trainer(f"{name}+")  # noqa: E731
        if again is not None:
            self._thread(lambda: self._later(again), "restart")

    def _later(self, again: Callable[[], None]) -> None:
        time.sleep(self.plan.restart_s)
        with self._lock:
            if not self._ended.is_set():
                again()

    def _kill(self, pid: int, how: signal.Signals = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, how)

    def _alive(self, kind: str) -> list[int]:
        with self._lock:
            return [pid for pid, (k, _) in self._roles.items() if k == kind]

    def _live_units(self) -> set[str]:
        """Return the nodes whose units the Controller says can be asked; and learn their names."""
        try:
            layout = FarCalls(self.where).look()
        except TqFsError:
            return set()
        self._names.update({u.name: u.node for u in layout.units})
        return {u.node for u in layout.units if u.state == "live"}

    # ------------------------------------------------------------ what users tell

    def _accept(self) -> None:
        while not self._ended.is_set():
            conn = self._listener.accept()
            self._thread(lambda conn=conn: self._hear(conn))  # type: ignore[misc]

    def _hear(self, conn: Connection) -> None:
        with conn, suppress(EOFError, ConnectionError):
            while True:
                who, *words = conn.recv()
                conn.send(self._answer(who, words))

    def _answer(self, who: str, words: Sequence[Any]) -> Any:
        match words:
            case ["begin", operation, about, home]:
                self._begin(who, operation, about, home)
            case ["done", operation, about, home, value, took]:
                with self._lock:
                    self._close_op(who)
                    self._note(operation, about, 2, value)
                    self._check_time(operation, about, took)
                self.tell(f"{who} did {operation} {about}")
            case ["error", operation, about, home, kinds, text, took]:
                self._close_op(who)
                self.tell(f"{who} failed {operation} {about}: {kinds[0]}: {text}")
                self._check_time(operation, about, took)
                self._check_error(operation, about, home, kinds, text)
            case ["opened", name, home]:
                self.sessions[name].home = home
            case ["next"]:
                return self._next(who)
            case ["did"]:
                self._doing.pop(who, None)
            case ["gave up", about, text]:
                self.tell(f"{who} gave up {about}: {text}")
            case [what, text]:
                self.blame(f"{who}: {what}: {text}")
        return None

    def _begin(self, who: str, operation: str, about: str, home: str) -> None:
        with self._lock:
            self._note(operation, about, 1, None)
            self._counts[operation] += 1
            self._opened[who] = (operation, self._node_of(home), time.monotonic())
            aims = [
                aim
                for aim in self._aims
                if aim.cell.operation == operation and self._counts[operation] >= aim.nth
            ]
            for aim in aims:
                self._aims.remove(aim)
        for aim in aims:
            self._inflict(aim, who, home)

    def _close_op(self, who: str) -> None:
        with self._lock:
            if (op := self._opened.pop(who, None)) is not None:
                self._ops.append((*op, time.monotonic()))

    def _check_time(self, operation: str, about: str, took: float) -> None:
        if took > CALL_LIMIT_S:
            self.blame(f"{operation} {about} took {took:.1f} s")

    def _check_error(
        self, operation: str, about: str, home: str, kinds: Sequence[str], text: str
    ) -> None:
        allowed = {"RetryError", "CapacityError"}
        if self.lost:
            allowed.add("UnitLost")
        if operation in ("finalize", "record") and "lease ran out" in text:
            allowed.add("SessionClosed")  # it was held up for so long
        if not allowed & set(kinds):
            self.blame(f"an error that nothing explains: {operation} {about}: {kinds[0]}: {text}")

    def _note(self, operation: str, about: str, how: int, value: Any) -> None:
        told = self.sessions.setdefault(about.partition(" ")[0], Told())
        detail = about.partition(" ")[2]
        if operation == "finalize":
            told.finalized = max(told.finalized, how)
            if value is not None:
                told.refs = value
                self._plan_training(about, told)
        elif operation == "discard":
            told.discarded = max(told.discarded, how)
        elif operation in ("release", "hold"):
            where = told.released if operation == "release" else told.held
            where[detail] = max(where.get(detail, 0), how)
        elif operation == "checkpoint":
            self._checkpoint = max(self._checkpoint, how)

    # ------------------------------------------------------------ training

    def _plan_training(self, name: str, told: Told) -> None:
        """Read what was finalized, and release some of it."""
        i = sum(t.finalized == 2 for t in self.sessions.values())
        self._tasks.append(("hydrate", name, told.home, told.refs, None))
        kinds: list[list[tuple[str, str, Any]]] = [
            [("release", c, c) for c in CONSUMERS],
            [("hold", "train", ("train", i)), ("release", "eval", "eval")],
            [("release", "eval", "eval")],
            [],
        ]
        for operation, about, detail in kinds[(i + self.plan.seed) % len(kinds)]:
            self._tasks.append((operation, f"{name} {about}", told.home, told.refs, detail))

    def _next(self, who: str) -> tuple[Any, ...]:
        with self._lock:
            if self._tasks:
                self._doing[who] = self._tasks.popleft()
                return self._doing[who]
            if self._work:
                return ("wait",)
            if not self._checkpoint:
                if self.plan.wants("hold") and not self._counts["hold"]:
                    self._hold_one()
                self._checkpoint = 1
                self._tasks.append(("checkpoint", "all", "", (), 1000))
                return ("wait",)
            self._trained = True
            return ("end",)

    def _hold_one(self) -> None:
        for name, told in self.sessions.items():
            if told.finalized == 2 and "train" not in (told.released.keys() | told.held.keys()):
                task = ("hold", f"{name} train", told.home, told.refs, ("train", 5))
                self._tasks.append(task)
                return

    # ------------------------------------------------------------ the operator

    def _operate(self) -> None:
        self._await("the first finalize", lambda: self._counts["finalize"] or not self._work)
        todo: list[tuple[str, Callable[[], object]]] = [
            ("sweep", self._sweep_once),
            ("join", self._join_unit),
            ("takeover", self._take_over),
        ]
        self._draw.shuffle(todo)
        for operation, function in todo:
            if self.plan.wants(operation):
                self._begin("operator", operation, "", "")
                try:
                    function()
                except TqFsError as error:
                    self.tell(f"operator failed {operation}: {error}")
                    if not isinstance(error, RetryError) and not self.lost:
                        self.blame(f"operator: {operation}: {type(error).__name__}: {error}")
                self._close_op("operator")

    def _sweep_once(self) -> None:
        FarCalls(self.where).sweep()

    def _join_unit(self) -> None:
        self._start_unit("n9")
        self._await("a join", lambda: "n9" in self._live_units() | self.lost, CALL_LIMIT_S)

    def _take_over(self) -> None:
        number, pid = self._controller
        self._kill(pid)
        self._await(
            "a takeover", lambda: int(self.where.read("current") or 0) > number, CALL_LIMIT_S
        )

    def _inflict(self, aim: Aim, who: str, home: str) -> None:
        """Let a fault happen; what it is, a subclass says."""

    # ------------------------------------------------------------ the end

    def _node_of(self, home: str) -> str:
        return self._names.get(home, "")

    def cells(self) -> set[Cell | Point]:
        """Return which cells were reached."""
        ops = [*self._ops, *((*op, time.monotonic()) for op in self._opened.values())]
        pairs = itertools.product(self.hurts, ops)
        found: set[Cell | Point] = {
            Cell(h.fault, op[0]) for h, op in pairs if h.since <= op[3] and op[2] <= h.until
        }
        killed = [line.split("/", 1) for line in self.where.read(KILLED).split("\n") if line]
        found.update(Point(process, name) for process, name in killed)
        return found

    def close(self) -> None:
        """Kill everything."""
        self._ended.set()
        with self._lock:
            pids = list(self._roles)
        for pid in pids:
            self._kill(pid)
        for relay in self._relays.values():
            relay.close()
        self._listener.close()
        self.problems += [f"foreign: {t}" for t in [self.where.read(FOREIGN)] if t]
        until = time.monotonic() + 5
        while pids and time.monotonic() < until:
            pids = [pid for pid in pids if pid not in self._nursery.dead() and _is_there(pid)]


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
