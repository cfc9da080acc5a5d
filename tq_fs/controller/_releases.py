"""Which consumer has released which Segments, or will have once a checkpoint is saved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from tq_fs.errors import InvalidConfig
from tq_fs.keys import Incarnation, SegmentRef
from tq_fs.manifests import STATE_SCHEMA, Catalog, SessionManifest, SessionState
from tq_fs.released import (
    Released,
    is_over,
    is_pending,
    needed_steps,
    nothing_released,
    released_by_all,
)
from tq_fs.steps import StepEntry

Held = Mapping[str, Mapping[int, frozenset[str]]]
"""For each consumer, by rollout, the Segments it will have released, as ``view/index``."""


_STRIPES = 64


class Freed(NamedTuple):
    """What a release has changed of a session.

    Attributes
    ----------
    steps
        Steps that nobody needs any more.
    cold
        Steps that are still needed, but hardly read.
    is_over
        Whether nothing of the session is needed.
    """

    steps: list[StepEntry]
    cold: list[StepEntry]
    is_over: bool


class Releases:
    """The sessions of which something is still needed. Safe to call from many threads.

    Parameters
    ----------
    catalog
        Where releases are noted before anything is deleted on their account; stays the caller's.
    bury
        Removes the manifest of a session that nobody needs any more.
    epoch
        Stands in each note.
    """

    def __init__(
        self, catalog: Catalog, bury: Callable[[SessionManifest], None], *, epoch: int
    ) -> None:
        self._catalog = catalog
        self._bury = bury
        self._epoch = epoch
        self._lock = threading.Lock()  # of the tables
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]  # of sessions
        self._released: dict[Incarnation, Released] = {}
        self._held: dict[Incarnation, Held] = {}

    # ------------------------------------------------------------ what is known

    def begin(self, manifest: SessionManifest) -> None:
        """Take in a session that was finalized."""
        with self._lock:
            self._released[manifest.incarnation] = nothing_released(manifest.consumers)

    def learn(
        self, incarnation: Incarnation, released: Released, state: SessionState | None
    ) -> None:
        """Take in a session that a start has found; one that is known stays as it is known."""
        with self._lock:
            if incarnation in self._released:
                return
            self._released[incarnation] = released
            if state is not None and state.held:
                self._held[incarnation] = {
                    consumer: {rollout: frozenset(names) for rollout, names in by_rollout.items()}
                    for consumer, by_rollout in state.held.items()
                }

    def forget(self, incarnation: Incarnation) -> None:
        """Know nothing of a session any more that was discarded."""
        with self._alone(incarnation):
            self._set(incarnation, None, {})

    def of(self, incarnation: Incarnation) -> Released | None:
        """Return what was released of a session; None where nothing of it is needed."""
        return self._released.get(incarnation)

    def known(self) -> list[Incarnation]:
        """Return all sessions of which something is needed, the oldest first."""
        with self._lock:
            return list(self._released)

    def pending(
        self, consumer: str | None, partition: str | None, *, held: bool = False
    ) -> Iterator[str]:
        """Yield the references that a consumer, or any, has not released.

        With `held`, those too whose release waits for a checkpoint.
        """
        for incarnation in self.known():
            if partition in (None, incarnation.partition):
                yield from self._pending(incarnation, consumer, held)

    def some_pending(
        self,
        consumer: str | None,
        partition: str | None,
        after: Incarnation | None,
        limit: int,
        *,
        held: bool = False,
    ) -> tuple[list[str], bool]:
        """Return references of sessions behind `after`, in the order of their ids."""
        found: list[str] = []
        known = sorted(self.known(), key=_in_order)
        for incarnation in known:
            if after is not None and _in_order(incarnation) <= _in_order(after):
                continue
            if len(found) >= limit:
                return found, False
            if partition in (None, incarnation.partition):
                found += self._pending(incarnation, consumer, held)
        return found, True

    def _pending(self, incarnation: Incarnation, consumer: str | None, held: bool) -> Iterator[str]:
        manifest = self._catalog.manifest(incarnation)
        with self._lock:
            released = self._released.get(incarnation)
            waiting = {} if held else self._held.get(incarnation, {})
        if manifest is None or released is None:
            return  # released while we were counting
        done = {c: names.union(*waiting.get(c, {}).values()) for c, names in released.items()}
        for segment in manifest.segments:
            if is_pending(segment, done, consumer):
                yield str(manifest.ref(segment))

    def check(self, incarnation: Incarnation, refs: Iterable[SegmentRef], consumer: str) -> None:
        """Refuse a release of what is not there, or by a consumer that was not declared.

        Raises
        ------
        InvalidConfig, SegmentMissing
        """
        released = self._released.get(incarnation)
        if released is None:
            return  # all of the session was released before
        for ref in refs:
            self._catalog.resolve(ref)
        if consumer not in released:
            raise InvalidConfig(
                f"{consumer!r} is not among {sorted(released)}",
                subject=str(incarnation),
                remedy="declare every consumer at finalize",
            )

    # ------------------------------------------------------------ release

    def release(self, incarnation: Incarnation, names: frozenset[str], consumer: str) -> Freed:
        """Note that a consumer needs Segments no more."""
        with self._alone(incarnation):
            return self._release(incarnation, {consumer: names})

    def release_all(self, incarnation: Incarnation) -> Freed:
        """Note that nobody needs a session any more."""
        with self._alone(incarnation):
            manifest = self._catalog.manifest(incarnation)
            names = {f"{s.view}/{s.index}" for s in manifest.segments} if manifest else set()
            everyone = self._released.get(incarnation, {})
            return self._release(incarnation, dict.fromkeys(everyone, frozenset(names)))

    def hold(
        self, incarnation: Incarnation, names: frozenset[str], consumer: str, rollout_id: int
    ) -> None:
        """Note that a consumer will have released Segments once a rollout's checkpoint is saved."""
        with self._alone(incarnation):
            released = self._released.get(incarnation)
            if released is None:
                return
            mine = dict(self._held.get(incarnation, {}))
            by_rollout = dict(mine.get(consumer, {}))
            by_rollout[rollout_id] = by_rollout.get(rollout_id, frozenset()) | names
            mine[consumer] = by_rollout
            self._note(incarnation, released, mine)
            self._set(incarnation, released, mine)

    def saved(self, rollout_id: int) -> Iterator[tuple[Incarnation, Freed]]:
        """Release what is held for a rollout or an earlier one, session by session."""
        with self._lock:
            waiting = list(self._held)
        for incarnation in waiting:
            with self._alone(incarnation):
                due = _due(self._held.get(incarnation, {}), rollout_id)
                freed = self._release(incarnation, due, rollout_id) if due else None
            if freed is not None:
                yield incarnation, freed

    def _release(
        self,
        incarnation: Incarnation,
        names: Mapping[str, frozenset[str]],
        saved: int | None = None,
    ) -> Freed:
        released = self._released.get(incarnation)
        manifest = self._catalog.manifest(incarnation) if released is not None else None
        if released is None or manifest is None:
            self._set(incarnation, None, {})
            return Freed([], [], is_over=False)
        before = released_by_all(released)
        wanted = {c: s | names.get(c, frozenset()) for c, s in released.items()}
        after = released_by_all(wanted)
        over = is_over(manifest, after)
        if over:
            # Without a manifest the Steps are orphans, which a sweep removes: nothing else has to
            # be written down, so that this works on a full disk too.
            self._bury(manifest)
            self._set(incarnation, None, {})
        else:
            held = _left(self._held.get(incarnation, {}), saved)
            self._note(incarnation, wanted, held)
            self._set(incarnation, wanted, held)
        return _freed(manifest, before, after, wanted, over=over)

    def _alone(self, incarnation: Incarnation) -> threading.Lock:
        """Return what keeps others away from a session; writing may take long where it lies."""
        return self._stripes[hash(incarnation) % _STRIPES]

    def _set(self, incarnation: Incarnation, released: Released | None, held: Held) -> None:
        with self._lock:
            if released is None:
                self._released.pop(incarnation, None)
            else:
                self._released[incarnation] = released
            if held:
                self._held[incarnation] = held
            else:
                self._held.pop(incarnation, None)

    def _note(self, incarnation: Incarnation, released: Released, held: Held) -> None:
        """Write down a release before anything is deleted on its account."""
        state = SessionState(
            schema=STATE_SCHEMA,
            epoch=self._epoch,
            released={c: tuple(sorted(s)) for c, s in released.items()},
            held={
                consumer: {rollout: tuple(sorted(names)) for rollout, names in by_rollout.items()}
                for consumer, by_rollout in held.items()
            },
        )
        self._catalog.put_state(incarnation, state)


def _in_order(incarnation: Incarnation) -> tuple[str, Incarnation]:
    return incarnation.incarnation_id, incarnation


def _freed(
    manifest: SessionManifest,
    before: frozenset[str],
    after: frozenset[str],
    wanted: Released,
    *,
    over: bool,
) -> Freed:
    steps = {step.index: step for step in manifest.steps}
    gone = needed_steps(manifest, before) - needed_steps(manifest, after)
    unwanted = frozenset().union(*wanted.values())
    cold = needed_steps(manifest, frozenset()) - needed_steps(manifest, unwanted) - gone
    return Freed([steps[i] for i in sorted(gone)], [steps[i] for i in sorted(cold)], over)


def _due(held: Held, rollout_id: int) -> dict[str, frozenset[str]]:
    """Return what each consumer holds for a rollout or an earlier one."""
    found = {
        consumer: frozenset().union(*(n for r, n in by_rollout.items() if r <= rollout_id))
        for consumer, by_rollout in held.items()
    }
    return {consumer: names for consumer, names in found.items() if names}


def _left(held: Held, saved: int | None) -> Held:
    """Return what is still held once a rollout's checkpoint is saved."""
    if saved is None:
        return held
    left = {
        consumer: {r: names for r, names in by_rollout.items() if r > saved}
        for consumer, by_rollout in held.items()
    }
    return {consumer: by_rollout for consumer, by_rollout in left.items() if by_rollout}
