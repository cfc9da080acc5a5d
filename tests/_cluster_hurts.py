"""What befalls a cluster: every fault of the table, as it is done to real processes."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import Any, ClassVar

from tests._cluster_plans import Aim
from tests._cluster_processes import FOREIGN, FarCalls, Where, ask, watched
from tests._cluster_worlds import Hurt, World
from tq_fs.channel import ChannelBackend
from tq_fs.cluster._node_unit import NodeUnit
from tq_fs.errors import RetryError, StoreBusy, StoreFenced, WrongStore
from tq_fs.keys import Incarnation


class SufferingWorld(World):
    """A world in which a plan's faults happen."""

    def _inflict(self, aim: Aim, who: str, home: str) -> None:
        """Let a fault happen, before or while somebody does something."""
        hurt = Hurt(aim, self._victim(aim, home), who)

        def work() -> None:
            if not aim.before:
                time.sleep(aim.delay_s)
            hurt.since = time.monotonic()
            self.tell(f"fault: {hurt.fault} ({hurt.node}), at {aim.cell.operation}")
            with self._lock:
                self.hurts.append(hurt)
            self._handlers[hurt.fault](self, hurt)
            hurt.until = time.monotonic()
            self.tell(f"fault is over: {hurt.fault} ({hurt.node})")

        self._thread(work, "fault")
        if aim.before and hurt.fault not in ("kill writer", "kill trainer", "reset"):
            hurt.begun.wait(2.0)

    def _victim(self, aim: Aim, home: str) -> str:
        """Return the node that is hurt: the one that the operation needs, if any."""
        node = self._node_of(home)
        if node in self._units and node not in self.lost:
            return node
        if aim.cell.operation == "join" and "n9" in self._units:
            return "n9"
        return self._draw.choice(sorted(self._units.keys() - self.lost))

    # ------------------------------------------------------------ processes

    def _suffer_kill(self, hurt: Hurt) -> None:
        number, pid = self._controller
        old = self._units[hurt.node]
        if hurt.fault != "kill controller":
            self._kill(old)
        if hurt.fault != "kill unit":
            self._kill(pid)
        hurt.begun.set()
        if hurt.fault != "kill unit":
            self._await("a restart", lambda: int(self.where.read("current") or 0) > number, 20)
        if hurt.fault != "kill controller":
            self._await(
                "a restart", lambda: self._units[hurt.node] != old or hurt.node in self.lost
            )

    def _suffer_user(self, hurt: Hurt) -> None:
        kind = hurt.fault.partition(" ")[2]
        with self._lock:
            mine = [pid for pid, role in self._roles.items() if role == (kind, hurt.who)]
        victims = mine or self._alive(kind)
        if not victims:
            self._extra(kind)
            time.sleep(0.03)
            victims = self._alive(kind)
        if victims:
            self._kill(victims[0])
            self._await("a death", lambda: victims[0] not in self._roles)

    def _suffer_stop(self, hurt: Hurt) -> None:
        pid = self._units[hurt.node]
        self._kill(pid, signal.SIGSTOP)
        hurt.begun.set()
        time.sleep(hurt.aim.lasts_s)
        self._kill(pid, signal.SIGCONT)

    def _extra(self, kind: str) -> None:
        """Start one more, only for it to die."""
        name = f"{kind}-{len(self.story)}"
        with self._lock:
            if kind == "writer":
                self._work[name] = [(f"x-{name}", "finalize")]
                self._start_writer(name)
            elif not self._trained:
                self._start_trainer(name)

    def _suffer_loss(self, hurt: Hurt) -> None:
        with self._lock:
            if len(self._units.keys() - self.lost) >= 3:
                self.lost.add(hurt.node)
                self.where.note(f"{hurt.node}.lost", "")
                self._kill(self._units[hurt.node])
                self._relays[hurt.node].set("cut")
        hurt.begun.set()

    def _suffer_replacement(self, hurt: Hurt) -> None:
        with self._lock:
            number, pid = self._controller
            if self.where.read("current") != str(number):
                hurt.begun.set()
                return  # it has not begun
            self._kill(pid, signal.SIGSTOP)
            self._start_controller()
        hurt.begun.set()
        self._await("a replacement", lambda: int(self.where.read("current")) > number, 20)
        time.sleep(hurt.aim.lasts_s / 4)
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

    def _suffer_second(self, hurt: Hurt) -> None:
        with self._lock:
            pid = self._nursery.start(_second, self.where, hurt.node)
            self._roles[pid] = ("once", hurt.node)
        hurt.begun.set()
        self._await("a second unit", lambda: pid not in self._roles)

    def _suffer_stranger(self, hurt: Hurt) -> None:
        hurt.begun.set()
        endpoint = f"tcp:127.0.0.1:{self.where.relays[hurt.node]}"
        for _ in range(5):
            with closing(
                ChannelBackend(endpoint, store_id="other", unit=hurt.node, timeout_s=1.0)
            ) as stranger:
                try:
                    stranger.delete("steps")
                except WrongStore:
                    continue
                except RetryError:
                    time.sleep(0.01)  # it is down
                    continue
                self.blame("a client of another store was served")

    def _suffer_garbage(self, hurt: Hurt) -> None:
        hurt.begun.set()
        until = time.monotonic() + 0.1
        while time.monotonic() < until:
            with suppress(OSError):
                port = int(self.where.read(f"{hurt.node}.port") or 0)
                with socket.create_connection(("127.0.0.1", port), 1) as sock:
                    sock.sendall(self._draw.randbytes(self._draw.randrange(1, 4000)))
            time.sleep(0.005)

    # ------------------------------------------------------------ network and disk

    def _suffer_network(self, hurt: Hurt) -> None:
        self._relays[hurt.node].set(hurt.fault)
        hurt.begun.set()
        time.sleep(hurt.aim.lasts_s)
        self._relays[hurt.node].set("whole")

    def _suffer_resets(self, hurt: Hurt) -> None:
        for _ in range(4):
            self._relays[hurt.node].set("reset")
            time.sleep(0.005)

    def _suffer_full(self, hurt: Hurt) -> None:
        self.where.note(f"{hurt.node}.full", "")
        hurt.begun.set()
        time.sleep(hurt.aim.lasts_s)
        os.unlink(self.where.path(f"{hurt.node}.full"))

    _handlers: ClassVar[Mapping[str, Callable[[Any, Hurt], None]]] = {
        "kill unit": _suffer_kill,
        "kill controller": _suffer_kill,
        "kill unit and controller": _suffer_kill,
        "kill writer": _suffer_user,
        "kill trainer": _suffer_user,
        "lose unit": _suffer_loss,
        "stop unit": _suffer_stop,
        "replace controller": _suffer_replacement,
        "second unit": _suffer_second,
        "stranger": _suffer_stranger,
        "garbage": _suffer_garbage,
        "cut": _suffer_network,
        "hang": _suffer_network,
        "slow": _suffer_network,
        "reset": _suffer_resets,
        "full": _suffer_full,
    }


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
