"""The units of a store on many nodes, as one: who takes a Step, and who is asked for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tq_fs.backends import COMMIT, Backend, ObjectBackend, Retry
from tq_fs.channel import ChannelBackend, Identity
from tq_fs.errors import (
    RetryError,
    StorageFull,
    TqFsError,
    UnitLost,
    UnitsUnavailable,
)
from tq_fs.keys import Incarnation, StepKey
from tq_fs.steps import EncodeOptions, FieldArray, StepEntry
from tq_fs.storage_unit import Inventory, Located, StorageUnit
from tq_fs.units._directory import Directory, lost
from tq_fs.units._rest import Rest

_MOST_ASKED = 2  # units beside the home that are sent a Step before there is a pause
_PAUSES_S = (0.05, 1.0)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a process reaches the units of a store.

    Attributes
    ----------
    store_id
        The store.
    identity
        For units of other nodes; None where they are not protected.
    retry_deadline_s
        Seconds for which a unit that may come back is waited for.
    timeout_s
        Seconds to wait for an answer.
    full_deadline_s
        Seconds for which a Step waits while all units are full.
    epoch, holder
        Of the Controller, where this is its process.
    """

    store_id: str
    identity: Identity | None
    retry_deadline_s: float = 60.0
    timeout_s: float = 30.0
    full_deadline_s: float = 60.0
    epoch: int = 0
    holder: str = ""


class RemoteUnits:
    """All :class:`~tq_fs.storage_unit.Units` of a store's cluster. Safe to call from many threads.

    Parameters
    ----------
    directory
        Knows the units; stays the caller's.
    access
        How they are reached.
    options
        How Steps are encoded.
    objects
        The object store that Steps end in; None where they stay on their units. Stays the caller's.
    clock, sleep
        Monotonic seconds, and waiting.
    """

    def __init__(
        self,
        directory: Directory,
        access: Access,
        options: EncodeOptions,
        *,
        objects: ObjectBackend | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.directory = directory
        self.objects = objects
        self._access = access
        self._options = options
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._backends: dict[str, ChannelBackend] = {}
        self._tried: dict[StepKey, set[str]] = {}

    @property
    def epoch(self) -> int:
        """Of the Controller, where this is its process; 0 in others."""
        return self._access.epoch

    # ------------------------------------------------------------ ways

    def backend(self, unit: str) -> ChannelBackend:
        """Return the way to a unit; made when it is first asked for, and kept.

        Raises
        ------
        UnitLost
            There is no such unit.
        StorageUnreachable
            To the Controller, which waits for nobody who is known to be away: it has others to
            serve, and does later what it could not do now.
        """
        access = self._access
        if access.epoch:
            self.directory.endpoint(unit)
        with self._lock:
            found = self._backends.get(unit)
            if found is None:
                self.directory.check(unit)
                found = self._backends[unit] = ChannelBackend(
                    _Endpoint(self.directory, unit),
                    store_id=access.store_id,
                    unit=unit,
                    identity=access.identity,
                    retry=self._retry(),
                    timeout_s=access.timeout_s,
                    epoch=access.epoch,
                    holder=access.holder,
                    named=True,
                )
            return found

    def _retry(self) -> Retry | Rest:
        retry = Retry(deadline_s=self._access.retry_deadline_s, most_s=1.0)
        return Rest(retry, clock=self._clock) if self._access.epoch else retry

    @property
    def sent_bytes(self) -> int:
        """Bytes of values that went to units over the channel."""
        return sum(backend.sent_bytes for backend in list(self._backends.values()))

    @property
    def received_bytes(self) -> int:
        """Bytes of values that came from units over the channel."""
        return sum(backend.received_bytes for backend in list(self._backends.values()))

    def close(self) -> None:
        """Close all connections; idempotent."""
        with self._lock:
            backends, self._backends = self._backends, {}
        for backend in backends.values():
            backend.close()

    def _unit(self, name: str) -> StorageUnit:
        where: Backend = self.backend(name) if name else self._objects()
        return StorageUnit(where, self._access.store_id, name=name, options=self._options)

    def _objects(self) -> ObjectBackend:
        assert self.objects is not None
        return self.objects

    # ------------------------------------------------------------ write

    def put(
        self, key: StepKey, tokens: int, arrays: Sequence[FieldArray], *, fresh: bool = False
    ) -> StepEntry:
        """Send a Step to the session's home, or to another unit where that one has no room.

        Raises
        ------
        StorageFull
            No unit has had room until the deadline; nothing is visible.
        UnitLost
            The session's home is gone, and with it what was recorded before.
        StorageUnreachable, UnitsUnavailable
        """
        until = self._clock() + self._access.full_deadline_s
        pause_s, most_s = _PAUSES_S
        home = key.incarnation.home
        while True:
            full: StorageFull | None = None
            for name in self._candidates(key.incarnation):
                try:
                    return self._put(name, key, tokens, arrays, fresh=fresh)
                except StorageFull as error:
                    full = error
                except (UnitLost, RetryError):
                    if self.objects is None and name == home:
                        raise  # the session cannot be finalized without its home
                    _log.warning("%s goes to another unit than %s", key, name, exc_info=True)
            if full is None:
                raise UnitsUnavailable(
                    "no unit takes it",
                    subject=str(key),
                    remedy="see the units' states: tq-fs cluster status",
                )
            if self._clock() + pause_s > until:
                raise _all_full(full, key, self._access.full_deadline_s) from full
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, most_s)

    def _candidates(self, incarnation: Incarnation) -> Iterator[str]:
        """Yield the units to try: the home, without asking anybody; then others."""
        home = incarnation.home
        if home and not self.directory.is_lost(home):
            yield home
        elif home and self.objects is None:
            raise lost(self.directory.find(home))  # and what was recorded before
        yield from self.directory.others(incarnation)[:_MOST_ASKED]
        if self.objects is not None:
            yield ""

    def _put(
        self, name: str, key: StepKey, tokens: int, arrays: Sequence[FieldArray], *, fresh: bool
    ) -> StepEntry:
        with self._lock:
            self._tried.setdefault(key, set()).add(name)
        entry = self._unit(name).put(key, tokens, arrays, fresh=fresh)
        with self._lock:
            self._tried.pop(key, None)
        return entry

    def withdraw(self, key: StepKey) -> None:
        """Remove what a put may have left on the units that it was sent to; idempotent."""
        with self._lock:
            tried = self._tried.pop(key, None)
        for name in tried if tried is not None else self.may_hold(key.incarnation):
            self.clear(Located(name, key.path))

    def settle(self, incarnation: Incarnation, steps: Collection[StepEntry]) -> None:
        """Return once Steps lie where the policy wants them.

        Raises
        ------
        UnitLost
            Its unit is gone, and a Step is not in the object store.
        """
        for name in sorted({step.unit for step in steps} - {""}):
            try:
                self.backend(name).settle(f"steps/{incarnation.path}")
            except UnitLost:
                if self.objects is None:
                    raise
                self._check_uploaded(incarnation, [s for s in steps if s.unit == name])

    def _check_uploaded(self, incarnation: Incarnation, steps: Iterable[StepEntry]) -> None:
        there = {key for key, _ in self._objects().walk(f"steps/{incarnation.path}")}
        for step in steps:
            place = step.place(incarnation.path)
            if f"{place}/{COMMIT}" not in there:
                raise UnitLost(
                    f"its unit {step.unit} was lost before it was uploaded",
                    subject=str(StepKey(incarnation, step.index)),
                    remedy="discard the session; policy write-through loses nothing with a node",
                )

    # ------------------------------------------------------------ read, for the Controller

    def may_hold(self, incarnation: Incarnation) -> Collection[str]:  # noqa: ARG002
        """Return the units that can be asked; and the object store, as one without a name."""
        return [*self.directory.live(), *([""] if self.objects is not None else [])]

    def steps(self, incarnation: Incarnation, unit: str) -> Collection[int]:
        """Return the indexes of an incarnation's Steps on a unit, whole or not."""
        if unit and self.objects is not None and self.directory.is_lost(unit):
            unit = ""
        return self._unit(unit).steps(incarnation, unit)

    def entries(self, held: Inventory) -> dict[int, StepEntry]:
        """Return what Steps say of themselves; those that are whole."""
        return self._unit(held.unit).entries(held)

    def inventory(self) -> Iterator[Inventory]:
        """Yield what lies in the object store, or on each unit that can be asked."""
        if self.objects is not None:
            yield from self._unit("").inventory()
            return
        for name in self.directory.live():
            for held in self._unit(name).inventory():
                yield held._replace(unit=name)

    # ------------------------------------------------------------ remove

    def clear(self, place: Located) -> bool:
        """Remove something from its unit, from all where it names none; idempotent.

        Raises
        ------
        UnitLost
            It is on a unit that is gone, and nowhere else.
        """
        if not place.unit:
            found = [self._clear(name, place.path) for name in ("", *self.directory.live())]
            return any(found)
        if self.objects is not None and self.directory.is_lost(place.unit):
            return self._clear("", place.path)
        return self._clear(place.unit, place.path)

    def _clear(self, unit: str, path: str) -> bool:
        if unit:
            return self.backend(unit).delete(path)
        return self.objects is not None and self.objects.delete(path)

    def cool(self, places: Iterable[Located]) -> None:
        """Pass on that Steps will hardly be read again, to units that can be asked."""
        by_unit: dict[str, list[str]] = {}
        for place in places:
            by_unit.setdefault(place.unit, []).append(place.path)
        for unit in by_unit.keys() & set(self.directory.live()):
            try:
                self.backend(unit).cool(by_unit[unit])
            except TqFsError:  # advice only
                _log.info("unit %s did not hear what is cold", unit, exc_info=True)


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """Asks for a unit's endpoint when it is called."""

    directory: Directory
    unit: str

    def __call__(self) -> str:
        return self.directory.endpoint(self.unit)


def _all_full(error: StorageFull, key: StepKey, deadline_s: float) -> StorageFull:
    return StorageFull(
        f"no unit had room for it within {deadline_s:g} s; the last said: {error}",
        subject=str(key),
        remedy="release trained Segments, add units, or raise full_deadline_s",
    )
