"""What must come out once all faults have ended: everything that is needed, and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Listener
from pathlib import Path

from tests._cluster_hurts import SufferingWorld
from tests._cluster_lives import CONSUMERS, Found, checker
from tests._cluster_processes import FarCalls
from tests._cluster_worlds import GRACE_S, LEASE_S, STORE, Told
from tq_fs.errors import TqFsError
from tq_fs.manifests import SessionManifest, SessionState, decode
from tq_fs.recovery import wanted_places
from tq_fs.released import needed_steps


class JudgedWorld(SufferingWorld):
    """A world that is looked at when all is over."""

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
        yield from self._judged_finalized(name, told, found)

    def _judged_finalized(self, name: str, told: Told, found: Found) -> Iterator[str]:
        done = {c: self._released(told, c) for c in CONSUMERS}
        if all(how == 2 for how in done.values()) and name in found.read:
            yield f"{name} was released by all, and is there"
        if any(how == 0 for how in done.values()) and name not in found.read:
            yield f"{name} was finalized, and is gone"
        for consumer, how in done.items():
            mine = set(told.refs) & set(found.unreleased.get(consumer, ()))
            if how == 0 and mine != set(told.refs) and consumer not in told.held:
                yield f"{name} lacks {len(told.refs) - len(mine)} Segments for {consumer}"
            if how == 2 and mine:
                yield f"{name} was released by {consumer}, and {len(mine)} Segments are not"

    def _may_be_lost(self, told: Told) -> bool:
        if self._node_of(told.home) in self.lost:
            return True
        return bool(self.lost) and any(hurt.fault == "full" for hurt in self.hurts)

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


def _descriptions(objects: Iterable[str]) -> Iterator[str]:
    """Yield the arrays' own descriptions, which manifests do not name."""
    return (f"{name.partition('/')[0]}/zarr.json" for name in objects)


def _files(root: Path) -> Iterator[Path]:
    # Sweeps go on meanwhile: what they remove is not looked for.
    return (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
