"""The processes of a cluster without Ray: who forks them, how they are asked, what lies between.

A nursery that runs no thread forks all of them, so that each starts in some ten milliseconds.
Requests are pickles over sockets in the world's folder; Ray's part is played by whoever holds it.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import functools
import logging
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Client, Connection, Listener, Pipe
from pathlib import Path
from typing import Any, NamedTuple

import tq_fs.places
from tq_fs.backends import LocalBackend
from tq_fs.cluster import _roster, _service
from tq_fs.cluster._node_unit import NodeUnit, UnitReport
from tq_fs.cluster._service import ClusterController
from tq_fs.config import StoreConfig
from tq_fs.controller import Controller
from tq_fs.errors import (
    RetryError,
    StorageUnreachable,
    StoreFenced,
    TqFsError,
    UnitLost,
    UnitsUnavailable,
)
from tq_fs.units import _rest

CALL_S = 8.0  # a client's patience with its Controller
NODES = ("n0", "n1", "n2", "n9")
KILLED = "killed"  # where processes note that they kill themselves
FOREIGN = "foreign"  # where they note what should never happen


class Where(NamedTuple):
    """A world's folder, and what all of its processes need to know."""

    folder: str
    config: StoreConfig
    relays: Mapping[str, int]

    def path(self, name: str) -> str:
        """Return the path of a file or socket of the world's own."""
        return f"{self.folder}/{name}"

    def is_set(self, name: str) -> bool:
        """Tell whether a mark was set."""
        return os.path.exists(self.path(name))

    def read(self, name: str) -> str:
        """Return what is noted under a name; empty where nothing is."""
        with suppress(FileNotFoundError):
            return Path(self.path(name)).read_text()
        return ""

    def note(self, name: str, text: str) -> None:
        """Note something whole."""
        Path(self.path(f"{name}.new{os.getpid()}")).write_text(text)
        os.rename(self.path(f"{name}.new{os.getpid()}"), self.path(name))

    def add(self, name: str, line: str) -> None:
        """Add a line, which a kill right behind does not take back."""
        fd = os.open(self.path(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(fd, f"{line}\n".encode())
        os.close(fd)


# ---------------------------------------------------------------- who forks


def die_with_parent() -> None:
    """Let the kernel kill this process with the one that made it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Nursery:
    """A process without threads that forks others. Safe to call from many threads."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        self._lock = threading.Lock()
        if os.fork() == 0:
            self._pipe.close()
            _run(lambda: _nurse(theirs))
        theirs.close()

    def start(self, role: Callable[..., None], *arguments: Any) -> int:
        """Fork a process for a role; return its id."""
        return int(self._ask("start", role, arguments))

    def dead(self) -> dict[int, int]:
        """Return the processes that have ended since, and how."""
        found: dict[int, int] = self._ask("dead")
        return found

    def _ask(self, *words: Any) -> Any:
        with self._lock:
            self._pipe.send(words)
            return self._pipe.recv()


def _nurse(pipe: Connection) -> None:
    while True:
        match pipe.recv():
            case ["start", role, arguments]:
                pid = os.fork()
                if pid == 0:
                    pipe.close()
                    _run(lambda: role(*arguments))  # it never returns
                pipe.send(pid)
            case _:
                pipe.send(_reaped())


def _reaped() -> dict[int, int]:
    found = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            found[pid] = os.waitstatus_to_exitcode(status)
    return found


def _run(work: Callable[[], None]) -> None:
    """Be a process from here on."""
    code = 1
    try:
        die_with_parent()
        work()
        code = 0
    except (EOFError, KeyboardInterrupt):
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def watched(where: Where) -> None:
    """Note what ends a thread that nobody waits for."""
    logging.disable()
    faulthandler.enable()

    def note(args: Any) -> None:
        text = "".join(
            traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        )
        where.add(FOREIGN, f"{args.thread}: {text}")

    threading.excepthook = note


# ---------------------------------------------------------------- how they are asked


def serve(path: str, answer: Callable[[str, Sequence[Any]], Any]) -> None:
    """Answer requests at a socket, each in a thread, for ever."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    listener = Listener(path, "AF_UNIX", backlog=128)
    while True:
        threading.Thread(target=_answered, args=(listener.accept(), answer), daemon=True).start()


def _answered(conn: Connection, answer: Callable[[str, Sequence[Any]], Any]) -> None:
    with conn, suppress(EOFError, ConnectionError):
        while True:
            name, arguments = conn.recv()
            try:
                said = ("ok", answer(name, arguments))
            except Exception as error:
                said = ("error", error)
            conn.send(said)


def ask(path: str, name: str, *arguments: Any, timeout_s: float = 2.0) -> Any:
    """Ask once; raises OSError or EOFError where nobody answers."""
    with Client(path, "AF_UNIX") as conn:
        conn.send((name, arguments))
        if not conn.poll(timeout_s):
            raise TimeoutError(path)
        return _said(conn.recv())


def _said(answer: tuple[str, Any]) -> Any:
    if answer[0] == "error":
        raise answer[1]
    return answer[1]


class FarCalls:
    """A client's calls of whichever Controller there is, made again where one dies, as Ray does.

    Parameters
    ----------
    where
        The world.
    pinned
        Asks that Controller only, once.
    """

    def __init__(self, where: Where, pinned: str = "") -> None:
        self._where = where
        self._pinned = pinned

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> Any:
        if self._pinned:
            return ask(self._where.path(f"c{self._pinned}"), name, *arguments, timeout_s=5.0)
        until = time.monotonic() + CALL_S
        while True:
            number = self._where.read("current")
            try:
                return self._once(number, name, arguments, until)
            except (OSError, EOFError) as error:
                if time.monotonic() > until:
                    raise UnitsUnavailable(f"no answer: {error!r}", subject="Controller") from error
            except StoreFenced:
                if self._where.read("current") == number:
                    raise  # nobody has replaced it
            time.sleep(0.01)

    def _once(self, number: str, name: str, arguments: Sequence[Any], until: float) -> Any:
        with Client(self._where.path(f"c{number}"), "AF_UNIX") as conn:
            conn.send((name, arguments))
            while not conn.poll(0.05):
                if self._where.read("current") != number or time.monotonic() > until:
                    raise ConnectionError(f"Controller {number} does not answer")
            return _said(conn.recv())


# ---------------------------------------------------------------- a unit


class UnitHook:
    """What happens to a unit as it passes points: its disk is full, or it is killed.

    Parameters
    ----------
    where, node
        The unit.
    target, nth
        Kill it at this point as it passes it for the nth time.
    """

    def __init__(self, where: Where, node: str, target: str, nth: int) -> None:
        self._full = where.path(f"{node}.full")
        self._die = Deadly(where, "unit", target, nth)
        self._turn = threading.local()

    def __call__(self, point: str) -> None:
        """Pass a point."""
        self._die(point)
        if point in ("staged", "value written") and os.path.exists(self._full):
            # A small document that is urgent finds room at its second try: the reserve.
            first = not getattr(self._turn, "first", False)
            self._turn.first = first and point == "value written"
            if first:
                raise OSError(errno.ENOSPC, "the disk is full, says the test")


class Deadly:
    """Kills its process as it passes a point."""

    def __init__(self, where: Where, process: str, target: str, nth: int) -> None:
        self._where = where
        self._process = process
        self._target = target
        self._left = nth
        self._lock = threading.Lock()

    def __call__(self, point: str) -> None:
        """Pass a point."""
        if point != self._target:
            return
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._where.add(KILLED, f"{self._process}/{point}")
                os.kill(os.getpid(), signal.SIGKILL)


def unit(where: Where, node: str, target: str, nth: int) -> None:
    """Be a unit."""
    watched(where)
    places: Any = tq_fs.places
    places.LocalBackend = functools.partial(LocalBackend, at=UnitHook(where, node, target, nth))
    while True:
        try:
            made = NodeUnit(
                where.path(node),
                where.config,
                None,
                node=node,
                node_name=node,
                address="127.0.0.1",
            )
            break
        except RetryError:
            time.sleep(0.02)  # the one before is not quite gone
    port = made.server.endpoints[1].rpartition(":")[2]
    where.note(f"{node}.port", port)
    serve(where.path(f"{node}.ctl"), lambda name, _: getattr(made, name)())


# ---------------------------------------------------------------- the Controller


class Reports:
    """Asks the units of a world; their ports are those of the relays before them."""

    def __init__(self, where: Where) -> None:
        self._where = where

    def reports(self) -> Mapping[str, UnitReport | TqFsError]:
        """Return what each unit says, or why it does not."""
        begun = [node for node in NODES if self._where.is_set(f"{node}.begun")]
        return {node: self._report(node) for node in begun}

    def _report(self, node: str) -> UnitReport | TqFsError:
        if self._where.is_set(f"{node}.lost"):
            return UnitLost("its node is gone", subject=node)
        try:
            found: UnitReport = ask(self._where.path(f"{node}.ctl"), "report", timeout_s=0.3)
        except (OSError, EOFError) as error:
            return StorageUnreachable(f"no report: {error!r}", subject=node)
        return replace(found, remote=f"tcp:127.0.0.1:{self._where.relays[node]}")


def controller(where: Where, number: int, target: str, nth: int) -> None:
    """Be the Controller."""
    watched(where)
    quick: Any = _service
    quick._EVERY_S, quick._PATIENCE_S = 0.1, 1.0
    quick.Controller = functools.partial(Controller, at=Deadly(where, "controller", target, nth))
    small: Any = _roster
    small._FULL_BYTES = 0
    brief: Any = _rest
    brief._REST_S = 0.3
    while True:
        try:
            made = ClusterController(
                where.config, None, Reports(where), node="nc", replaced=lambda: os._exit(0)
            )
            break
        except RetryError:
            time.sleep(0.05)
    threading.Thread(target=_announce, args=(where, number), daemon=True).start()
    serve(where.path(f"c{number}"), lambda name, arguments: getattr(made, name)(*arguments))


def _announce(where: Where, number: int) -> None:
    while not where.is_set(f"c{number}"):
        time.sleep(0.001)
    if int(where.read("current") or -1) < number:
        where.note("current", str(number))


# ---------------------------------------------------------------- the network


class Relay:
    """Stands before a unit's port; cuts, hangs and slows what passes.

    Parameters
    ----------
    target
        Says where the unit listens; None where it does not.
    """

    def __init__(self, target: Callable[[], int | None]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._mode = "whole"
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._hard: set[socket.socket] = set()
        self._flows = threading.Event()
        self._flows.set()
        self.passed = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, mode: str) -> None:
        """Become ``whole``, ``cut``, ``hang`` or ``slow``; or ``reset`` all connections once."""
        self._mode = "whole" if mode == "reset" else mode
        if mode == "hang":
            self._flows.clear()
        else:
            self._flows.set()
        if mode in ("cut", "reset"):
            self._drop(hard=mode == "reset")

    def close(self) -> None:
        """End."""
        self._mode = "cut"
        self._flows.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._drop(hard=False)

    def _drop(self, *, hard: bool) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, set()
            socks = [sock for pair in pairs for sock in pair]
            if hard:
                self._hard.update(socks)
        for sock in socks:
            with suppress(OSError):
                if hard:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                sock.shutdown(socket.SHUT_RD if hard else socket.SHUT_RDWR)  # wakes its thread

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        port = self._target()
        if self._mode == "cut" or port is None:
            near.close()
            return
        try:
            far = socket.create_connection(("127.0.0.1", port), 2)
        except OSError:
            near.close()
            return
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far.settimeout(None)
        with self._lock:
            self._pairs.add((near, far))
        back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
        back.start()
        self._pump(near, far)
        back.join()
        with self._lock:
            self._pairs.discard((near, far))
            self._hard -= {near, far}
        near.close()
        far.close()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                if self._mode == "slow":
                    time.sleep(0.02)
                target.sendall(data)
                self.passed += len(data)
        how = socket.SHUT_RD if source in self._hard else socket.SHUT_RDWR
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(how)
