"""StorageUnit: takes Steps, encodes them and puts them on its node's disk."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from tq_fs.backends import COMMIT, Backend, is_attempt
from tq_fs.errors import ConflictError
from tq_fs.keys import Incarnation, StepKey
from tq_fs.steps import EncodeOptions, FieldArray, Scratch, StepEntry, encode_step, read_attributes

_STEP_PARTS = 6  # steps / partition / session / incarnation / Step / attempt or member


class Located(NamedTuple):
    """Something on a unit.

    Attributes
    ----------
    unit
        The unit's name; empty for wherever it is.
    path
        Of a Step (:attr:`tq_fs.keys.StepKey.path`) or below it, or ``steps/`` and the path of an
        incarnation.
    """

    unit: str
    path: str


class Inventory(NamedTuple):
    """What a unit holds of one incarnation.

    Attributes
    ----------
    unit
        The unit's name; empty where all that the store has lies in one place.
    path
        Of the incarnation.
    places
        For each place of a Step, whole or not, the members that lie there with their sizes.
    """

    unit: str
    path: str
    places: dict[str, dict[str, int]]


class Units(Protocol):
    """Where the Steps of one store lie: one StorageUnit, or those of many nodes.

    All methods may be called from many threads.
    """

    def put(
        self, key: StepKey, tokens: int, arrays: Sequence[FieldArray], *, fresh: bool = False
    ) -> StepEntry:
        """Encode a Step and publish it; returns when it is as durable as the policy says.

        Parameters
        ----------
        key
            The Step.
        tokens
            Tokens it recorded.
        arrays
            Its fields; not changed, and not needed afterwards.
        fresh
            The caller knows that the Step was never put: a repeated one may then not be noticed.

        Returns
        -------
        StepEntry
            What a manifest says of it.

        Raises
        ------
        ValueOutOfRange, ObjectExists, StorageFull
            Nothing is visible, or the other content is unchanged.
        """

    def withdraw(self, key: StepKey) -> None:
        """Remove what a put that failed, or that nobody recorded, may have left; idempotent."""

    def settle(self, incarnation: Incarnation, steps: Collection[StepEntry]) -> None:
        """Return once Steps of an incarnation lie where the policy wants them."""

    def cool(self, places: Iterable[Located]) -> None:
        """Hear that Steps will hardly be read again."""

    def clear(self, place: Located) -> bool:
        """Remove a Step, one attempt to put it, or an incarnation; idempotent.

        Returns
        -------
        bool
            Whether there was something.
        """

    def may_hold(self, incarnation: Incarnation) -> Collection[str]:
        """Return the units that may hold Steps of an incarnation."""

    def steps(self, incarnation: Incarnation, unit: str) -> Collection[int]:
        """Return the indexes of an incarnation's Steps on a unit, whole or not."""

    def entries(self, held: Inventory) -> dict[int, StepEntry]:
        """Return what an incarnation's Steps say of themselves; those that are whole.

        Raises
        ------
        ConflictError
            Two attempts to put a Step differ: only the manifest knew which one counts.
        """

    def inventory(self) -> Iterator[Inventory]:
        """Yield what lies on the units, incarnation by incarnation, unit by unit."""


class StorageUnit:
    """Writes and deletes the Steps of one store on one backend; :class:`Units` by itself.

    Parameters
    ----------
    backend
        Where Steps go; stays the caller's.
    store_id
        The store the unit serves.
    name
        The unit's name in manifests.
    options
        How Steps are encoded.
    """

    def __init__(
        self, backend: Backend, store_id: str, *, name: str = "local", options: EncodeOptions
    ) -> None:
        self.backend = backend
        self.name = name
        self._store_id = store_id
        self._options = options
        self._local = threading.local()

    def put(
        self, key: StepKey, tokens: int, arrays: Sequence[FieldArray], *, fresh: bool = False
    ) -> StepEntry:
        """Encode a Step and publish it; see :class:`Units`."""
        scratch = self._scratch()
        try:
            encoded = encode_step(self._store_id, key, tokens, arrays, self._options, scratch)
            place = self.backend.publish(key.path, encoded.members, fresh=fresh)
        finally:
            scratch.reset()
        attempt = place[len(key.path) + 1 :]
        return msgspec.structs.replace(encoded.entry, unit=self.name, attempt=attempt)

    def withdraw(self, key: StepKey) -> None:
        """Remove what a put may have left; idempotent."""
        self.backend.delete(key.path)

    def settle(self, incarnation: Incarnation, steps: Collection[StepEntry]) -> None:  # noqa: ARG002
        """Return once an incarnation's Steps lie where the policy wants them."""
        self.backend.settle(f"steps/{incarnation.path}")

    def cool(self, places: Iterable[Located]) -> None:
        """Hear that Steps will hardly be read again."""
        self.backend.cool([place.path for place in places])

    def clear(self, place: Located) -> bool:
        """Remove a Step, one attempt to put it, or an incarnation, whoever took it; idempotent."""
        return self.backend.delete(place.path)

    def may_hold(self, incarnation: Incarnation) -> Collection[str]:  # noqa: ARG002
        """Return its own name."""
        return (self.name,)

    def steps(self, incarnation: Incarnation, unit: str) -> Collection[int]:  # noqa: ARG002
        """Return the indexes of an incarnation's Steps, whole or not."""
        names = self.backend.list(f"steps/{incarnation.path}")
        return {int(name) for name in names if name.isdecimal()}

    def entries(self, held: Inventory) -> dict[int, StepEntry]:
        """Return what an incarnation's Steps say of themselves; see :class:`Units`."""
        found: dict[int, StepEntry] = {}
        for place, members in held.places.items():
            if COMMIT not in members:
                continue
            key = f"{place}/{COMMIT}"
            step = read_attributes(self.backend.get(key), key).step
            if any(members.get(n) != size for n, size in step.objects().items()):
                continue
            name = place.rpartition("/")[2]
            mine = msgspec.structs.replace(
                step, unit=self.name, attempt=name if is_attempt(name) else ""
            )
            other = found.setdefault(step.index, mine)
            if other.fields != mine.fields:
                raise ConflictError("differs from another attempt at the same Step", subject=place)
        return found

    def inventory(self) -> Iterator[Inventory]:
        """Yield what lies on the unit, incarnation by incarnation."""
        current: Inventory | None = None
        for key, nbytes in self.backend.walk("steps"):
            parts = key.split("/")
            if len(parts) < _STEP_PARTS:
                continue  # nothing that a unit has written
            path = "/".join(parts[1 : _STEP_PARTS - 2])
            if current is None or current.path != path:
                if current is not None:
                    yield current
                current = Inventory("", path, {})
            deep = _STEP_PARTS if is_attempt(parts[_STEP_PARTS - 1]) else _STEP_PARTS - 1
            members = current.places.setdefault("/".join(parts[:deep]), {})
            members["/".join(parts[deep:])] = nbytes
        if current is not None:
            yield current

    def _scratch(self) -> Scratch:
        scratch: Scratch | None = getattr(self._local, "scratch", None)
        if scratch is None:
            scratch = self._local.scratch = Scratch()
        return scratch
