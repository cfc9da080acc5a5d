"""ValueStore: values by name, into groups and back."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tq_fs.errors import (
    CapacityError,
    InvalidField,
    MissingError,
    ObjectMissing,
    RetryError,
    StepMissing,
    TqFsError,
    UnitLost,
    ValueMissing,
)
from tq_fs.keys import component
from tq_fs.reader import SegmentReader
from tq_fs.steps import EncodeOptions, Scratch
from tq_fs.values._calls import Note, Sample, ValueCalls
from tq_fs.values._entry import ROOT, Found, Place, StoredGroup, group_path
from tq_fs.values._fetch import Column, fetch
from tq_fs.values._group import Group, NamedValue, cut, encode_group
from tq_fs.values._places import AtOnce, ValuePlaces
from tq_fs.values.codec import encode

CHECKPOINT_FILE = "tq_fs_values.sqlite"
_TRIES = 4  # to read what is replaced again and again meanwhile
_log = logging.getLogger(__name__)
T = TypeVar("T")


class Prepared(NamedTuple):
    """Values that are written and that nobody finds yet.

    Attributes
    ----------
    partition
        Where their samples belong.
    paths
        Of their groups, as they were asked for.
    groups
        What was written.
    """

    partition: str
    paths: tuple[str, ...]
    groups: tuple[StoredGroup, ...]


class ValueStore:
    """Values under the names (partition, index, field). Safe to call from many threads.

    A value that is put again replaces the earlier one, for readers at once. Memory: what is
    encoded (up to 16 MiB for each writing thread, or the largest array that is not contiguous) and
    what is read.

    Parameters
    ----------
    store_id, run
        The store, and which of its runs this is.
    calls
        The index.
    places
        Where groups go.
    reader
        Reads arrays; stays the caller's, as the others do.
    pool
        Threads that write, delete and read packs.
    options
        How arrays are encoded.
    allow_pickle
        Whether what has no other form is pickled.
    now_ns
        For names of groups.
    """

    def __init__(
        self,
        store_id: str,
        run: str,
        *,
        calls: ValueCalls,
        places: ValuePlaces,
        reader: SegmentReader,
        pool: Executor,
        options: EncodeOptions,
        allow_pickle: bool = False,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.calls = calls
        self.places = places
        self._at_once = places if isinstance(places, AtOnce) else None
        self.reader = reader
        self.allow_pickle = allow_pickle
        self._ids = store_id, run
        self._pool = pool
        self._options = options
        self._now_ns = now_ns
        self._numbers = itertools.count()
        self._writer = f"{os.getpid():x}-{os.urandom(4).hex()}"
        self._local = threading.local()

    # ------------------------------------------------------------ put

    def put(
        self, partition: str, indexes: Sequence[int], columns: Mapping[str, Sequence[Any]]
    ) -> int:
        """Store values, all of them or none; returns when they are as durable as the policy says.

        Parameters
        ----------
        partition
            Where the indexes belong.
        indexes
            Of the samples, each once.
        columns
            For each field the samples' values.

        Returns
        -------
        int
            The generation, which grows with every put.

        Raises
        ------
        ValueUnsupported
            A value is of a type that has no form here; nothing was written.
        InvalidField
            A column is not as long as there are indexes.
        StorageFull
            Nothing is visible.
        """
        written = self.write(partition, indexes, columns)
        return written if isinstance(written, int) else self.commit(partition, [written])

    def write(
        self, partition: str, indexes: Sequence[int], columns: Mapping[str, Sequence[Any]]
    ) -> int | Prepared:
        """Put values where that is one request, else write them for a :meth:`commit` to come.

        See :meth:`put`. Returns the generation, or what is to be committed.
        """
        groups = list(cut(self._encoded(indexes, columns)))
        if len(groups) == 1 and self._at_once is not None:
            return self._put(self._at_once, partition, groups[0])
        return self._prepared(partition, groups)

    def prepare(
        self, partition: str, indexes: Sequence[int], columns: Mapping[str, Sequence[Any]]
    ) -> Prepared:
        """Write values for a :meth:`commit` to come; see :meth:`put`."""
        return self._prepared(partition, list(cut(self._encoded(indexes, columns))))

    def _prepared(self, partition: str, groups: Sequence[list[NamedValue]]) -> Prepared:
        prepared = Prepared(partition, tuple(self._path() for _ in groups), ())
        try:
            return prepared._replace(groups=self._publish_all(partition, groups, prepared.paths))
        except BaseException:
            self.withdraw(prepared)
            raise

    def _put(self, places: AtOnce, partition: str, values: list[NamedValue]) -> int:
        scratch = self._scratch()
        try:
            group = encode_group(*self._ids, partition, values, self._options, scratch)
            note = Note(group.nbytes, group.values)
            return places.put(partition, self._path(), group.members, note)
        finally:
            scratch.reset()

    def commit(self, partition: str, prepared: Sequence[Prepared]) -> int:
        """Let what was prepared be found, all at once; of values of one name the last.

        Returns
        -------
        int
            The generation of all of them.

        Raises
        ------
        RetryError, CapacityError
            The index did not answer, or not to the first try. It may have them, or may not: the
            sweep sees to it.
        TqFsError
            Nothing is visible, and nothing is left.
        """
        groups = [group for some in prepared for group in some.groups]
        if not groups:
            return 0
        try:
            generation, unneeded = self.calls.put(partition, groups)
        except TqFsError as error:
            if not isinstance(error, RetryError | CapacityError):
                for some in prepared:
                    self.withdraw(some)
            raise
        if unneeded:
            self._pool.submit(self._bury_later, unneeded)
        return generation

    def _encoded(
        self, indexes: Sequence[int], columns: Mapping[str, Sequence[Any]]
    ) -> list[NamedValue]:
        found = []
        for field, values in columns.items():
            if len(values) != len(indexes):
                raise InvalidField(
                    f"has {len(values)} values for {len(indexes)} samples", subject=field
                )
            for index, value in zip(indexes, values, strict=True):
                subject = f"{field!r} of sample {index}"
                encoded = encode(value, allow_pickle=self.allow_pickle, subject=subject)
                found.append(NamedValue(index, field, encoded))
        return found

    def _path(self) -> str:
        number = next(self._numbers)
        name = f"{self._now_ns():016x}-{self._writer}-{number:x}"
        return f"{ROOT}/{component(self._ids[1])}/{number % 256:02x}/{name}"

    def _publish_all(
        self, partition: str, groups: Sequence[list[NamedValue]], paths: Sequence[str]
    ) -> tuple[StoredGroup, ...]:
        if len(groups) == 1:
            return (self._publish(partition, groups[0], paths[0]),)
        futures = [
            self._pool.submit(self._publish, partition, group, path)
            for group, path in zip(groups, paths, strict=True)
        ]
        try:
            return tuple([future.result() for future in futures])
        finally:
            for future in futures:
                future.cancel()
            wait(futures)

    def _publish(self, partition: str, values: list[NamedValue], path: str) -> StoredGroup:
        scratch = self._scratch()
        try:
            group: Group = encode_group(*self._ids, partition, values, self._options, scratch)
            unit, place = self.places.publish(path, group.members)
            return StoredGroup(unit, place, group.nbytes, group.values)
        finally:
            scratch.reset()

    def _scratch(self) -> Scratch:
        scratch: Scratch | None = getattr(self._local, "scratch", None)
        if scratch is None:
            scratch = self._local.scratch = Scratch()
        return scratch

    def withdraw(self, prepared: Prepared) -> None:
        """Remove what nobody finds yet; what cannot be is left to the sweep."""
        units = {group.unit for group in prepared.groups} or set(self.places.units())
        for path, unit in itertools.product(prepared.paths, sorted(units)):
            try:
                self.places.backend(unit).delete(path)
            except TqFsError:
                _log.warning("%s is left to the sweep", path, exc_info=True)

    # ------------------------------------------------------------ get

    def get(
        self, samples: Sequence[Sample], fields: Sequence[str], *, joined: bool = False
    ) -> dict[str, Column]:
        """Return values.

        Parameters
        ----------
        samples
            Partition and index of each.
        fields
            Of each sample.
        joined
            Read arrays that differ in their first axis only into one block of memory.

        Returns
        -------
        dict
            For each field its :class:`Column`.

        Raises
        ------
        ValueMissing
            A sample has no such field, or it was cleared.
        ChunkCorrupt, ObjectShort, UnitLost
            What is stored is not what was written, or is gone.
        """
        return self.reading(
            samples, fields, lambda found: fetch(self, samples, fields, found, joined=joined)
        )

    def reading(
        self,
        samples: Sequence[Sample],
        fields: Sequence[str],
        read: Callable[[list[list[Found]]], T],
    ) -> T:
        """Read what names stand for, and anew where that is replaced or cleared meanwhile.

        Parameters
        ----------
        read
            Is given, for each field, where the samples' values lie.
        """
        before: list[list[Found]] | None = None
        for _ in range(_TRIES):
            found = self._find(samples, fields)
            try:
                return read(found)
            except (StepMissing, ObjectMissing) as error:
                if found == before:
                    raise self._gone(error) from error
                before = found  # replaced, or cleared, while it was read: look again
        raise ValueMissing(
            "is replaced faster than it can be read", subject=f"{list(fields)} of {list(samples)}"
        )

    @staticmethod
    def _gone(error: MissingError) -> ValueMissing:
        return ValueMissing(
            f"the index knows it, but {error.problem}",
            subject=error.subject,
            remedy="files were deleted by somebody else: load the last checkpoint",
        )

    def _find(self, samples: Sequence[Sample], fields: Sequence[str]) -> list[list[Found]]:
        found = self.calls.find(samples, fields)
        for field, column in zip(fields, found, strict=True):
            for sample, value in zip(samples, column, strict=True):
                if value is None:
                    raise ValueMissing(
                        "is not there: it was never put, or cleared",
                        subject=f"{field!r} of sample {sample[1]} ({sample[0]})",
                        remedy="ask for its meta data again",
                    )
        return found  # type: ignore[return-value]

    def find(self, sample: Sample, field: str) -> Found:
        """Return where a value lies.

        Raises
        ------
        ValueMissing
        """
        return self._find([sample], [field])[0][0]

    @property
    def store_id(self) -> str:
        """The store that the values lie in."""
        return self._ids[0]

    def run_each(self, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Do something with each of several items, in this thread and in others."""
        futures = [self._pool.submit(work, item) for item in items[1:]]
        first = [work(item) for item in items[:1]]
        return first + [future.result() for future in futures]

    # ------------------------------------------------------------ checkpoints

    def save(self, folder: Path) -> str:
        """Write down in a folder which values there are, and keep them; return the checkpoint's id.

        They are kept, whatever is cleared, until some later checkpoints were saved.
        """
        return self.calls.save(str(folder))

    def load(self, folder: Path) -> str:
        """Let there be the values of a checkpoint, and no others; return its id.

        Raises
        ------
        FileNotFoundError
            The folder holds none.
        CheckpointMissing
            The store does not keep its values any more.
        ManifestCorrupt, FormatTooNew, WrongStore
        """
        path = folder / CHECKPOINT_FILE
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not there: the folder is no checkpoint of tq-fs")
        return self.calls.load(str(folder))

    # ------------------------------------------------------------ clear

    def clear(self, samples: Iterable[tuple[str, int, int | None]]) -> None:
        """Forget samples and delete what lies of them; idempotent, whatever fields they have.

        Parameters
        ----------
        samples
            Partition, index, and the generation of a value that is meant; None for what there is
            now. A sample that was born later is left alone, however late the call comes.
        """
        asked = list(samples)
        now = self.calls.now() if any(until is None for *_, until in asked) else 0
        self.bury(
            self.calls.clear([(p, i, now if until is None else until) for p, i, until in asked])
        )

    def _bury_later(self, places: Sequence[Place]) -> None:
        """Delete what was replaced, in a thread of the pool: whoever has put does not wait."""
        gone = [place for place in places if self._bury(place)]
        with suppress(TqFsError):
            self.calls.forget(gone)

    def bury(self, places: Sequence[Place]) -> None:
        """Delete groups that nobody needs; what cannot be now is left to the sweep."""
        if not places:
            return
        gone = [
            place for place, is_gone in zip(places, self._delete(places), strict=True) if is_gone
        ]
        with suppress(RetryError):
            self.calls.forget(gone)

    def _delete(self, places: Sequence[Place]) -> Iterator[bool]:
        if len(places) == 1:
            yield self._bury(places[0])
            return
        yield from self._pool.map(self._bury, places)

    def _bury(self, place: Place) -> bool:
        try:
            self.places.backend(place.unit).delete(group_path(place.path))
        except UnitLost:
            return True  # it went with its unit
        except TqFsError:
            _log.warning("%s is left to the sweep", place.path, exc_info=True)
            return False
        return True
