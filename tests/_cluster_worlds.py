"""Lets clusters live and suffer, side by side, and looks at what each left behind.

One process imports everything and forks workers, which fork the processes of one world after the
other. Asked for seeds on stdin, it prints an outcome a line; :func:`outcomes` is the other side.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import logging
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import tq_fs
from tests._cluster_lives import CONSUMERS, Found, checker, trainer, writer
from tests._cluster_plans import CELLS, LAP, POINTS, Aim, Cell, Plan, Point, table
from tests._cluster_processes import (
    FOREIGN,
    KILLED,
    NODES,
    FarCalls,
    Nursery,
    Relay,
    Where,
    ask,
    controller,
    die_with_parent,
    unit,
    watched,
)
from tq_fs import ClusterConfig, StoreConfig
from tq_fs.channel import ChannelBackend
from tq_fs.cluster._node_unit import NodeUnit
from tq_fs.errors import RetryError, StoreBusy, StoreFenced, TqFsError, WrongStore
from tq_fs.keys import Incarnation
from tq_fs.manifests import SessionManifest, SessionState, decode
from tq_fs.recovery import wanted_places
from tq_fs.released import needed_steps

STORE = "run"
LEASE_S = GRACE_S = 0.4
LIFE_S = 50.0  # after which a world counts as hung
CALL_LIMIT_S = 16.0  # that any call of a client may take
FORK = multiprocessing.get_context("fork")


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
class Told:
    """What the world was told of a session. Of each thing: not begun, begun, or done."""

    home: str = ""
    refs: list[str] = field(default_factory=list)
    finalized: int = 0
    discarded: int = 0
    released: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class Outcome:
    """How a schedule went; plain values."""

    seed: int
    plan: str
    cells: list[Cell | Point]
    problems: list[str]
    story: list[str]
    seconds: float


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
        self._hurts: list[list[Any]] = []  # fault, node, from, to
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

    # ------------------------------------------------------------ faults

    def _node_of(self, home: str) -> str:
        return self._names.get(home, "")

    def _inflict(self, aim: Aim, who: str, home: str) -> None:
        fault = aim.cell.fault
        node = self._node_of(home)
        if node not in self._units or node in self.lost:
            node = self._draw.choice(sorted(self._units.keys() - self.lost))
            if aim.cell.operation == "join" and "n9" in self._units:
                node = "n9"
        started = threading.Event()

        def work() -> None:
            if not aim.before:
                time.sleep(aim.delay_s)
            hurt = [fault, node, time.monotonic(), float("inf")]
            self.tell(f"fault: {fault} ({node}), at {aim.cell.operation}")
            with self._lock:
                self._hurts.append(hurt)
            self._suffer(fault, node, who, aim, started)
            hurt[3] = time.monotonic()
            self.tell(f"fault is over: {fault} ({node})")

        self._thread(work, "fault")
        if aim.before and fault not in ("kill writer", "kill trainer", "reset"):
            started.wait(2.0)

    def _suffer(self, fault: str, node: str, who: str, aim: Aim, started: threading.Event) -> None:
        match fault:
            case "kill unit" | "kill controller" | "kill unit and controller":
                self._suffer_kill(fault, node, started)
            case "kill writer" | "kill trainer":
                self._suffer_user(fault.partition(" ")[2], who)
            case "lose unit":
                self._suffer_loss(node)
                started.set()
            case "cut" | "hang" | "slow":
                self._relays[node].set(fault)
                started.set()
                time.sleep(aim.lasts_s)
                self._relays[node].set("whole")
            case "reset":
                for _ in range(4):
                    self._relays[node].set("reset")
                    time.sleep(0.005)
            case "full":
                self.where.note(f"{node}.full", "")
                started.set()
                time.sleep(aim.lasts_s)
                os.unlink(self.where.path(f"{node}.full"))
            case "stop unit":
                pid = self._units[node]
                self._kill(pid, signal.SIGSTOP)
                started.set()
                time.sleep(aim.lasts_s)
                self._kill(pid, signal.SIGCONT)
            case "replace controller":
                self._suffer_replacement(started, aim.lasts_s)
            case "second unit":
                self._suffer_second(node, started)
            case "stranger":
                started.set()
                self._suffer_stranger(node)
            case _:
                started.set()
                self._suffer_garbage(node)

    def _suffer_kill(self, fault: str, node: str, started: threading.Event) -> None:
        number, pid = self._controller
        old = self._units[node]
        if fault != "kill controller":
            self._kill(old)
        if fault != "kill unit":
            self._kill(pid)
        started.set()
        if fault != "kill unit":
            self._await("a restart", lambda: int(self.where.read("current") or 0) > number, 20)
        if fault != "kill controller":
            self._await("a restart", lambda: self._units[node] != old or node in self.lost)

    def _suffer_user(self, kind: str, who: str) -> None:
        with self._lock:
            mine = [pid for pid, (k, name) in self._roles.items() if (k, name) == (kind, who)]
        victims = mine or self._alive(kind)
        if not victims:
            self._extra(kind)
            time.sleep(0.03)
            victims = self._alive(kind)
        for pid in victims[:1]:
            self._kill(pid)
            self._await("a death", lambda: pid not in self._roles)

    def _extra(self, kind: str) -> None:
        """Start one more, only for it to die."""
        name = f"{kind}-{len(self.story)}"
        with self._lock:
            if kind == "writer":
                self._work[name] = [(f"x-{name}", "finalize")]
                self._start_writer(name)
            elif not self._trained:
                self._start_trainer(name)

    def _suffer_loss(self, node: str) -> None:
        with self._lock:
            if len(self._units.keys() - self.lost) < 3:
                return
            self.lost.add(node)
            self.where.note(f"{node}.lost", "")
            self._kill(self._units[node])
            self._relays[node].set("cut")

    def _suffer_replacement(self, started: threading.Event, lasts_s: float) -> None:
        with self._lock:
            number, pid = self._controller
            if self.where.read("current") != str(number):
                started.set()
                return  # it has not begun
            self._kill(pid, signal.SIGSTOP)
            self._start_controller()
        started.set()
        self._await("a replacement", lambda: int(self.where.read("current")) > number, 20)
        time.sleep(lasts_s / 4)
        self._kill(pid, signal.SIGCONT)
        self._check_fenced(number)
        time.sleep(0.1)
        self._kill(pid)

    def _check_fenced(self, number: int) -> None:
        """Let the Controller that was replaced try to change something."""
        name = self._draw.choice(sorted(self._names.keys()))
        if self._names[name] in self.lost:
            return
        gone = Incarnation.new("train", "never", time.time_ns(), name)
        old = FarCalls(self.where, pinned=str(number))
        try:
            old.discard(gone.partition, gone.session_id, gone.incarnation_id)
        except StoreFenced:
            return
        except (RetryError, OSError, EOFError) as error:
            self.tell(f"the old Controller could not be tried: {error!r}")
            return
        self.blame("a Controller that was replaced still changes what units hold")

    def _suffer_second(self, node: str, started: threading.Event) -> None:
        with self._lock:
            pid = self._nursery.start(_second, self.where, node)
            self._roles[pid] = ("once", node)
        started.set()
        self._await("a second unit", lambda: pid not in self._roles)

    def _suffer_stranger(self, node: str) -> None:
        endpoint = f"tcp:127.0.0.1:{self.where.relays[node]}"
        for _ in range(5):
            with closing(
                ChannelBackend(endpoint, store_id="other", unit=node, timeout_s=1.0)
            ) as stranger:
                try:
                    stranger.delete("steps")
                except WrongStore:
                    continue
                except RetryError:
                    time.sleep(0.01)  # it is down
                    continue
                self.blame("a client of another store was served")

    def _suffer_garbage(self, node: str) -> None:
        until = time.monotonic() + 0.1
        while time.monotonic() < until:
            with suppress(OSError):
                port = int(self.where.read(f"{node}.port") or 0)
                with socket.create_connection(("127.0.0.1", port), 1) as sock:
                    sock.sendall(self._draw.randbytes(self._draw.randrange(1, 4000)))
            time.sleep(0.005)

    # ------------------------------------------------------------ what is left

    def settle(self) -> None:
        """End all faults, and wait until everything is there again that can be."""
        for node, relay in self._relays.items():
            if node not in self.lost:
                relay.set("whole")
        wanted = self._units.keys() - self.lost
        self._await("the end", lambda: self._live_units() == wanted, 15.0)
        time.sleep(LEASE_S + GRACE_S + 0.1)

    def check(self) -> None:
        """Look at what is left; sweep as often as it takes, within a bound."""
        found = self._look()
        self._judge(found)
        self._check_folders(found.read)
        if self.plan.ends:
            number = self._controller[0]
            self._kill(self._controller[1])
            self._await("a restart", lambda: int(self.where.read("current")) > number, 20)
            again = self._look(release=True)
            self._judge(again)
            self._check_folders(set())

    def _look(self, *, release: bool = False) -> Found:
        known = {n: t.refs for n, t in self.sessions.items() if t.finalized == 2}
        path = self.where.path(f"answer{time.monotonic_ns()}")
        with Listener(path, "AF_UNIX") as listener, self._lock:
            pid = self._nursery.start(checker, self.where, path, known, release)
            self._roles[pid] = ("once", "checker")
            listener._listener._socket.settimeout(40)  # type: ignore[attr-defined]
            with listener.accept() as conn:
                found: Found = conn.recv()
        self.problems += found.problems
        return found

    def _judge(self, found: Found) -> None:
        for name, told in self.sessions.items():
            if name in ("", "all"):
                continue
            for problem in self._judged(name, told, found):
                self.blame(problem)
        strange = (found.read | found.lost) - self.sessions.keys()
        if strange:
            self.blame(f"nobody recorded {strange}")

    def _judged(self, name: str, told: Told, found: Found) -> Iterator[str]:
        if name in found.lost:
            if not self._may_be_lost(told):
                yield f"{name} counts as lost, and its home {told.home} is there"
            return
        if self._node_of(told.home) in self.lost:
            if name in found.read:
                yield f"{name} was read, and its home is lost"
            return
        if told.finalized < 2:
            if (told.finalized == 0 or told.discarded == 2) and name in found.read:
                yield f"{name} was never finalized, and is there"
            return
        done = {c: self._released(told, c) for c in CONSUMERS}
        if all(how == 2 for how in done.values()) and name in found.read:
            yield f"{name} was released by all, and is there"
        if any(how == 0 for how in done.values()) and name not in found.read:
            yield f"{name} was finalized, and is gone"
        for consumer, how in done.items():
            mine = set(told.refs) & set(found.unreleased[consumer])
            if how == 0 and mine != set(told.refs) and consumer not in told.held:
                yield f"{name} lacks {len(told.refs) - len(mine)} Segments for {consumer}"
            if how == 2 and mine:
                yield f"{name} was released by {consumer}, and {len(mine)} Segments are not"

    def _may_be_lost(self, told: Told) -> bool:
        if self._node_of(told.home) in self.lost:
            return True
        return bool(self.lost) and any(hurt[0] == "full" for hurt in self._hurts)

    def _released(self, told: Told, consumer: str) -> int:
        """Tell whether something is released: 0 not, 1 perhaps, 2 certainly."""
        released, held = told.released.get(consumer, 0), told.held.get(consumer, 0)
        if released == 2 or (held == 2 and self._checkpoint == 2):
            return 2
        return 1 if released or held else 0

    def _check_folders(self, alive: set[str]) -> None:
        """Compare what lies in the units' folders with what is needed."""
        until = time.monotonic() + 4.0
        while True:
            self._sweep()
            leaks = [*self._leaks(alive)]
            if not leaks or time.monotonic() > until:
                break
            time.sleep(0.2)
        for leak in leaks:
            self.blame(f"nobody needs {leak}")

    def _sweep(self) -> None:
        try:
            FarCalls(self.where).sweep()
        except TqFsError as error:
            self.tell(f"a sweep failed: {error}")

    def _leaks(self, alive: set[str]) -> Iterator[str]:
        roots = {n: Path(self.where.path(n), STORE) for n in self._units.keys() - self.lost}
        files = {(n, p.relative_to(r).as_posix()) for n, r in roots.items() for p in _files(r)}
        needed = {(n, f) for n in roots for f in ("store.json", ".lock", ".staging/reserve")}
        for node, path in files:
            if path.endswith("/manifest.json") and path.split("/")[2] in alive:
                needed |= self._needed(roots[node], node, path)
        for node, path in sorted(files - needed):
            if path.startswith("pages/") or (self.lost and self._is_of_lost(path)):
                continue
            yield f"{node}/{path}"

    def _is_of_lost(self, path: str) -> bool:
        """Tell whether something belongs to a session that a lost unit keeps from ending."""
        parts = path.split("/")
        home = parts[3].partition(".")[2] if len(parts) > 3 else ""
        return path.startswith("tombstones/") or self._node_of(home) in self.lost

    def _needed(self, root: Path, node: str, path: str) -> set[tuple[str, str]]:
        """Return a manifest, what lies beside it, and the Steps that not all have released."""
        folder = root / Path(path).parent
        manifest = decode((root / path).read_bytes(), SessionManifest, path)
        states = [decode(p.read_bytes(), SessionState, str(p)) for p in folder.glob("state-*")]
        gone = [
            {s for state in states for s in state.released.get(c, ())} for c in manifest.consumers
        ]
        wanted = needed_steps(manifest, frozenset(set.intersection(*gone)))
        places = wanted_places(manifest, [s for s in manifest.steps if s.index in wanted])
        beside = {(node, f"{Path(path).parent}/{p.name}") for p in folder.iterdir()}
        return beside | {
            (self._node_of(want.unit), f"{place}/{name}")
            for place, want in places.items()
            for name in ("zarr.json", *want.objects, *_descriptions(want.objects))
        }

    # ------------------------------------------------------------ the end

    def cells(self) -> set[Cell | Point]:
        """Return which cells were reached."""
        ops = [*self._ops, *((*op, time.monotonic()) for op in self._opened.values())]
        pairs = itertools.product(self._hurts, ops)
        found: set[Cell | Point] = {
            Cell(str(hurt[0]), op[0]) for hurt, op in pairs if hurt[2] <= op[3] and op[2] <= hurt[3]
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


def _descriptions(objects: Iterable[str]) -> Iterator[str]:
    """Yield the arrays' own descriptions, which manifests do not name."""
    return (f"{name.partition('/')[0]}/zarr.json" for name in objects)


def _files(root: Path) -> Iterator[Path]:
    return (p for p in root.rglob("*") if not p.is_dir())


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _second(where: Where, node: str) -> None:
    """Try to be a unit where one is."""
    watched(where)
    with suppress(StoreBusy):
        NodeUnit(
            where.path(node), where.config, None, node=node, node_name=node, address="127.0.0.1"
        ).close()
        if where.is_set(f"{node}.ctl"):
            with suppress(OSError, EOFError):
                ask(where.path(f"{node}.ctl"), "report")
                where.add(FOREIGN, f"a second unit took the folder of {node}")


# ---------------------------------------------------------------- many

_nursery: Nursery | None = None


def run(plan: Plan) -> Outcome:
    """Let a world live, and look at what it left."""
    global _nursery  # noqa: PLW0603  # forked before this process has threads
    if _nursery is None:
        _nursery = Nursery()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tq-world-", ignore_cleanup_errors=True) as folder:
        world = World(plan, folder, _nursery)
        try:
            world.live()
            world.settle()
            world.check()
            cells = world.cells()
        except BaseException:
            world.blame(f"the test itself: {traceback.format_exc()}")
            cells = set()
        finally:
            world.close()
    return Outcome(
        seed=plan.seed,
        plan=str(plan),
        cells=[*cells],
        problems=world.problems,
        story=world.story,
        seconds=time.monotonic() - start,
    )


def main() -> None:
    """Run the seeds that are asked for on stdin; print an outcome a line."""
    die_with_parent()
    import torch  # what the lives need is imported before they fork

    assert torch
    asked = json.loads(sys.stdin.readline())
    logging.disable()
    gc.disable()
    gc.freeze()
    cells: set[Cell | Point] = set()
    with ProcessPoolExecutor(
        asked["slots"], mp_context=FORK, initializer=die_with_parent
    ) as workers:
        try:

            def run_all(seeds: Iterable[int]) -> None:
                futures = [workers.submit(run, Plan.of(seed)) for seed in seeds]
                for future in as_completed(futures):
                    faulthandler.dump_traceback_later(3 * LIFE_S, exit=True)
                    outcome = future.result()
                    cells.update(outcome.cells)
                    sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
                    sys.stdout.flush()

            run_all(asked["seeds"])
            for lap in range(2, 5 if asked["complete"] else 0):
                run_all([s for s in range(lap * LAP, (lap + 1) * LAP) if _misses(s, cells)])
        finally:
            workers.shutdown(cancel_futures=True)


def _misses(seed: int, cells: set[Cell | Point]) -> bool:
    plan = Plan.of(seed)
    return any(aim.cell not in cells for aim in plan.aims) or (
        plan.point is not None and plan.point not in cells
    )


_START = """
import sys, types
tests = types.ModuleType("tests")
tests.__path__ = [sys.argv[1]]
sys.modules["tests"] = tests
from tests._cluster_worlds import main
main()
"""


def outcomes(seeds: Sequence[int], *, complete: bool, slots: int = 0) -> Iterator[Outcome]:
    """Run seeds; with `complete` also further ones, for cells that were missed."""
    asked = {"seeds": list(seeds), "complete": complete, "slots": slots or 6}
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
            found["cells"] = [
                Point(*c) if Point(*c) in POINTS else Cell(*c) for c in found["cells"]
            ]
            yield Outcome(**found)
    assert process.returncode == 0, f"the runs ended with {process.returncode}"


def reached_by(all_of_them: Iterable[Outcome]) -> Mapping[Cell | Point, int]:
    """Count how often each cell was reached."""
    return Counter(cell for outcome in all_of_them for cell in outcome.cells)


__all__ = ["CELLS", "Outcome", "outcomes", "reached_by", "replace", "table"]
