"""The keeper: one process of a run that has the index, and cleans up after all others."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from tq_fs.backends import Backend, mapped
from tq_fs.errors import (
    CheckpointMissing,
    InvalidKey,
    ManifestCorrupt,
    ObjectMissing,
    TqFsError,
    UnitLost,
    WrongStore,
)
from tq_fs.keys import component
from tq_fs.steps import check_schema
from tq_fs.values._entry import DEEP, ROOT, Found, Place, StoredGroup, group_path
from tq_fs.values._index import ValueIndex, check_copy
from tq_fs.values._places import ValuePlaces
from tq_fs.values._store import CHECKPOINT_FILE

CHECKPOINTS = "checkpoints"
PINS_SCHEMA = "tq-fs/pins/1"
_SAVED = ".saved"
_log = logging.getLogger(__name__)


class Pins(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept for a checkpoint: paths of groups by unit. Lies where those are."""

    schema: str
    store_id: str
    checkpoint: str
    groups: dict[str, list[str]]


class Keeper:
    """Has the index of a run; :class:`~tq_fs.values.ValueCalls`. Safe to call from many threads.

    Parameters
    ----------
    index
        The index; stays the caller's.
    places
        Where groups lie; stay the caller's.
    store_id, run
        The store and its run.
    checkpoints
        How many checkpoints keep what they speak of; what only older ones speak of is deleted.
    sweep_s
        Seconds between two sweeps; 0 for none.
    check
        Raises where another run has taken the store since.
    grace_s
        Seconds for which a group that was named is left alone, whatever the index knows of it: a
        put may take that long, and clocks of nodes differ.
    """

    def __init__(
        self,
        index: ValueIndex,
        places: ValuePlaces,
        store_id: str,
        run: str,
        *,
        checkpoints: int,
        sweep_s: float,
        check: Callable[[], None],
        grace_s: float = 0.0,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.index = index
        self._grace_ns = int(grace_s * 1e9)
        self._places = places
        self._store_id = store_id
        self._run = run
        self._most = checkpoints
        self._check = check
        self._now_ns = now_ns
        self._strange: set[str] = set()  # groups that the last sweep did not know
        self._learned: set[str] = set()  # places whose checkpoints are known
        self._saving = threading.Lock()
        self._ended = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._learn(places.units())
        if sweep_s:
            self._thread = threading.Thread(
                target=self._tend, args=(sweep_s,), name="tq-fs-keeper", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """End the sweeps; idempotent."""
        self._ended = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    # ------------------------------------------------------------ calls

    def put(self, partition: str, groups: Sequence[StoredGroup]) -> tuple[int, list[Place]]:
        """Let names stand for new values.

        Raises
        ------
        InvalidKey
            A group does not lie where values do.
        """
        for group in groups:
            _check_path(group.path)
        return self.index.put(partition, groups)

    def put_group(self, partition: str, group: StoredGroup) -> int:
        """Let names stand for the values of one group; delete what nobody needs any more."""
        _check_path(group.path)
        try:
            generation, unneeded = self.index.put(partition, [group])
        except TqFsError:
            path = group_path(group.path)
            if self.index.bar(path):  # else an earlier try was taken, and its answer lost
                self._places.backend(group.unit).delete(path)
            raise
        if unneeded and self._thread is not None:
            self._wake.set()  # whoever has put does not wait
        elif unneeded:
            self.bury()
        return generation

    def find(
        self, samples: Sequence[tuple[str, int]], fields: Sequence[str]
    ) -> list[list[Found | None]]:
        """Return what names stand for."""
        return self.index.find(samples, fields)

    def clear(self, samples: Sequence[tuple[str, int, int]]) -> list[Place]:
        """Forget samples."""
        return self.index.clear(samples)

    def forget(self, places: Sequence[Place]) -> None:
        """Hear that unneeded groups are deleted."""
        self.index.forget(places)

    def now(self) -> int:
        """Return the last put's generation."""
        return self.index.generation

    def totals(self) -> dict[str, int]:
        """Return how much there is."""
        return self.index.totals()

    def save(self, folder: str) -> str:
        """Write a checkpoint into a folder; return its id.

        From then on the values that are there now are kept, whatever is cleared, until
        `checkpoints` later ones were saved.

        Raises
        ------
        TqFsError
            Something could not be written, or brought where the policy wants it; earlier
            checkpoints are as they were.
        """
        with self._saving:
            checkpoint = self._name()
            copy = self.index.path.with_name(f"copy-{os.urandom(4).hex()}")
            try:
                self._keep(checkpoint, self.index.pin_and_copy(checkpoint, copy))
                _place(copy, Path(folder) / CHECKPOINT_FILE)
            except BaseException:
                self._drop(checkpoint)
                raise
            finally:
                copy.unlink(missing_ok=True)
            self._confirm(checkpoint)
            kept = self.index.saved()[-self._most :]
            for older in self.index.checkpoints():
                if len(kept) == self._most and older < kept[0]:
                    self._drop(older)
            return checkpoint

    def _name(self) -> str:
        """Return a checkpoint's name, which sorts behind all others, whatever clocks say."""
        newest = max((int(name[:16], 16) for name in self.index.checkpoints()), default=0)
        return f"{max(self._now_ns(), newest + 1):016x}-{os.urandom(4).hex()}"

    def _keep(self, checkpoint: str, pinned: dict[str, list[str]]) -> None:
        """Bring what a checkpoint keeps where the policy wants it, and note it there."""
        for home, groups in self._by_home(pinned).items():
            for unit in groups:
                self._places.backend(unit).settle(ROOT)
                self._places.backend(unit).sync()
            pins = Pins(
                schema=PINS_SCHEMA, store_id=self._store_id, checkpoint=checkpoint, groups=groups
            )
            backend = self._places.backend(home)
            backend.put(f"{CHECKPOINTS}/{checkpoint}", msgspec.json.encode(pins))
            backend.sync()

    def _confirm(self, checkpoint: str) -> None:
        """Note that there is a file that speaks of it: one whose save was killed does not count."""
        self.index.confirm(checkpoint)
        try:
            for home in self._by_home(self.index.pinned(checkpoint)):
                self._places.backend(home).put(f"{CHECKPOINTS}/{checkpoint}{_SAVED}", b"")
        except TqFsError:  # then a later run keeps it, and does not count it
            _log.warning("checkpoint %s is not known as saved", checkpoint, exc_info=True)

    def _by_home(self, groups: dict[str, list[str]]) -> dict[str, dict[str, list[str]]]:
        homes: dict[str, dict[str, list[str]]] = {}
        for unit, paths in groups.items():
            homes.setdefault(self._places.home(unit), {})[unit] = paths
        return homes

    def _drop(self, checkpoint: str) -> None:
        """Let go of what a checkpoint keeps."""
        try:
            for home in self._by_home(self.index.pinned(checkpoint)):
                with suppress(UnitLost):  # with all that it kept
                    self._places.backend(home).delete(f"{CHECKPOINTS}/{checkpoint}{_SAVED}")
                    self._places.backend(home).delete(f"{CHECKPOINTS}/{checkpoint}")
        except TqFsError:
            _log.warning("checkpoint %s is dropped later", checkpoint, exc_info=True)
            return
        self.index.unpin(checkpoint)
        self.bury()

    def load(self, folder: str) -> str:
        """Become what a checkpoint in a folder says; return its id.

        Raises
        ------
        ManifestCorrupt, FormatTooNew, WrongStore
            It is none, a later version's, or of another store.
        CheckpointMissing
            The folder holds none, or the store does not keep what it speaks of any more.
        """
        path = Path(folder) / CHECKPOINT_FILE
        if not path.is_file():
            raise CheckpointMissing(
                "is not there",
                subject=str(path),
                remedy="save checkpoints where the node of the keeper sees them too",
            )
        with self._saving:
            copy = self.index.path.with_name(f"copy-{os.urandom(4).hex()}")
            try:
                with mapped(str(path)):
                    shutil.copyfile(path, copy)
                self._learn(self._places.units())
                checkpoint = self._checked(copy, path)
                self.index.replace(copy, checkpoint)
            finally:
                copy.unlink(missing_ok=True)
        self.bury()
        return checkpoint

    def _checked(self, copy: Path, path: Path) -> str:
        meta = check_copy(copy, path)
        if meta.get("store_id") != self._store_id:
            raise WrongStore(
                f"is of store {meta.get('store_id')!r}, this is {self._store_id!r}",
                subject=str(path),
                remedy="run with the store_id and url of the run that saved it",
            )
        checkpoint = meta.get("checkpoint", "")
        kept = self.index.checkpoints()
        if checkpoint not in kept and int(meta["values"]):
            raise CheckpointMissing(
                f"the store keeps the values of its last {self._most} checkpoints only: {kept}",
                subject=f"checkpoint {checkpoint} in {path}",
                remedy="load a later one; raise `checkpoints` to keep more",
            )
        self._check_there(checkpoint)
        return checkpoint

    def _check_there(self, checkpoint: str) -> None:
        """Refuse a checkpoint of which groups are gone."""
        for unit, paths in self.index.pinned(checkpoint).items():
            backend = self._places.backend(unit)
            shards = {group_path(path).rpartition("/")[0] for path in paths}
            there = {f"{s}/{name}" for s in shards for name in backend.list(s)}
            gone = [path for path in paths if group_path(path) not in there]
            if gone:
                raise CheckpointMissing(
                    f"{len(gone)} of its {len(paths)} groups are gone, such as {gone[0]}",
                    subject=f"checkpoint {checkpoint}",
                    remedy="load another checkpoint: files of the store were deleted",
                )

    # ------------------------------------------------------------ what is done by itself

    def _learn(self, units: Iterable[str]) -> None:
        """Take in what checkpoints of earlier runs keep on units that were not asked yet."""
        for home in sorted({self._places.home(unit) for unit in units} - self._learned):
            backend = self._places.backend(home)
            names = set(backend.list(CHECKPOINTS))
            for name in sorted(n for n in names if not n.endswith(_SAVED)):
                pins = self._pins(backend, name)
                for unit, paths in (pins.groups if pins is not None else {}).items():
                    self.index.add_pins(name, unit, paths)
                if pins is not None and f"{name}{_SAVED}" in names:
                    self.index.confirm(name)
            self._learned.add(home)

    def _pins(self, backend: Backend, name: str) -> Pins | None:
        key = f"{CHECKPOINTS}/{name}"
        try:
            data = backend.get(key)
        except ObjectMissing:
            return None
        try:
            pins = msgspec.json.decode(data, type=Pins)
        except msgspec.MsgspecError as error:
            raise ManifestCorrupt(
                f"no list of groups: {error}",
                subject=key,
                remedy="delete it, and with it what only that checkpoint keeps",
            ) from error
        check_schema(pins.schema, PINS_SCHEMA, key)
        if (pins.store_id, pins.checkpoint) != (self._store_id, name):
            raise ManifestCorrupt(
                f"is of checkpoint {pins.checkpoint} of store {pins.store_id!r}", subject=key
            )
        return pins

    def _tend(self, sweep_s: float) -> None:
        next_s = 0.0
        while not self._ended:
            try:
                if time.monotonic() >= next_s:
                    next_s = time.monotonic() + sweep_s
                    self.sweep()
                else:
                    self.bury()
            except Exception:  # a thread's edge: the next round may do better
                _log.exception("the sweep of values was broken off")
            self._wake.wait(max(0.0, next_s - time.monotonic()))
            self._wake.clear()

    def sweep(self) -> int:
        """Delete what nobody needs; return how many groups.

        What the index does not know is of a put that failed, unless it is of one that is under
        way: it is deleted by the second sweep that sees it, once it is older than the grace time;
        whoever tells of it later is refused. That of earlier runs goes at once, unless a checkpoint
        keeps it.
        """
        self._check()
        deleted = self.bury()
        strange: set[str] = set()
        for unit in self._places.units():
            self._learn([unit])  # one that came later may keep groups of checkpoints
            backend = self._places.backend(unit)
            for path, is_own in self._groups(backend):
                if self._ended:
                    return deleted
                if is_own and (path not in self._strange or self._is_young(path)):
                    strange.add(path)
                elif self.index.bar(path):
                    backend.delete(path)
                    deleted += 1
        self._strange = strange
        return deleted

    def _is_young(self, path: str) -> bool:
        named = path.rpartition("/")[2].partition("-")[0]
        try:
            return self._now_ns() - int(named, 16) < self._grace_ns
        except ValueError:
            return False  # nothing that a put has named

    def _groups(self, backend: Backend) -> Iterator[tuple[str, bool]]:
        """Yield the groups on a unit that the index does not know, and whether the run is this."""
        own = component(self._run)
        for run in list(backend.list(ROOT)):
            for shard in list(backend.list(f"{ROOT}/{run}")):
                prefix = f"{ROOT}/{run}/{shard}"
                paths = [f"{prefix}/{name}" for name in backend.list(prefix)]
                known = self.index.knows(paths)
                yield from (
                    (p, run == own)
                    for p, is_known in zip(paths, known, strict=True)
                    if not is_known
                )

    def bury(self) -> int:
        """Delete groups that the index needs no more; return how many."""
        gone = []
        for place in self.index.unneeded():
            try:
                self._places.backend(place.unit).delete(group_path(place.path))
            except UnitLost:
                pass  # and the group with it; if the unit comes back, the sweep meets a stranger
            except TqFsError:
                _log.warning("%s is deleted later", place.path, exc_info=True)
                continue
            gone.append(place)
        self.index.forget(gone)
        return len(gone)


def _check_path(path: str) -> None:
    parts = path.split("/")
    if parts[0] != ROOT or len(parts) < DEEP or any(part in ("", ".", "..") for part in parts):
        raise InvalidKey("is no place of a group of values", subject=repr(path)[:200])


def _place(copy: Path, path: Path) -> None:
    """Write a copy of the index into a file that is whole; other nodes may see it by NFS."""
    half = path.with_name(f".{path.name}-{copy.name}")
    with mapped(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(copy, half)
            _sync(half)
            half.replace(path)  # an earlier one stays whole until then
        finally:
            half.unlink(missing_ok=True)
        with suppress(OSError):  # some network file systems sync no folders
            _sync(path.parent)


def _sync(path: Path) -> None:
    """Wait until a file or folder is as durable as its device can make it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
