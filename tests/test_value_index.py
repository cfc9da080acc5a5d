"""The index of values: what names stand for, through kills, full disks and calls made twice."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tests._values import place_of, spawn_child, stored_group
from tq_fs.errors import (
    CheckpointMissing,
    FatalError,
    FormatTooNew,
    ManifestCorrupt,
    RetryError,
    StorageFailed,
    StorageFull,
    WrongStore,
)
from tq_fs.values import Place, StoredGroup, ValueIndex
from tq_fs.values import _index as index_module

NOW = 2**62


@pytest.fixture
def index(tmp_path: Path) -> Iterator[ValueIndex]:
    with closing(ValueIndex(tmp_path / "index.sqlite", "run")) as found:
        yield found


def where(index: ValueIndex, sample: int, field: str, partition: str = "train") -> str | None:
    """Return the path of the group that a name stands for."""
    ((found,),) = index.find([(partition, sample)], [field])
    return None if found is None else found.place.path


# ---------------------------------------------------------------- what names stand for


def test_a_later_put_replaces_an_earlier_one(index: ValueIndex) -> None:
    first, second = stored_group((1, "a"), (1, "b")), stored_group((1, "a"))
    assert index.put("train", [first]) == (1, [])
    assert index.put("train", [second]) == (2, [])
    assert (where(index, 1, "a"), where(index, 1, "b")) == (second.path, first.path)
    ((found,),) = index.find([("train", 1)], ["a"])
    assert found is not None
    assert (found.generation, found.entry) == (2, second.values[0].entry)
    third = stored_group((1, "b"))
    assert index.put("train", [third]) == (3, [place_of(first)])


def test_partitions_samples_and_fields_are_apart(index: ValueIndex) -> None:
    names = [("train", 1, "a"), ("train", 2, "a"), ("train", 1, "b"), ("eval", 1, "a"), ("", 0, "")]
    groups = {name: stored_group(name[1:]) for name in names}
    for (partition, *_), group in groups.items():
        index.put(partition, [group])
    for (partition, sample, field), group in groups.items():
        assert where(index, sample, field, partition) == group.path
    assert index.fields("train", 1) == ["a", "b"]
    assert where(index, 2, "b") is where(index, 1, "a", "test") is None
    assert index.totals() == {
        "values": 5,
        "samples": 4,
        "groups": 5,
        "bytes": 500,
        "pinned_bytes": 0,
    }


def test_found_values_come_by_field_in_the_order_of_the_samples(index: ValueIndex) -> None:
    group = stored_group((1, "a"), (2, "a"), (2, "b"))
    index.put("train", [group])
    found = index.find([("train", 2), ("train", 3), ("train", 1)], ["b", "a"])
    at = [[None if f is None else f.entry.at for f in column] for column in found]
    assert at == [[2, None, None], [1, None, 0]]


def test_of_one_name_the_last_of_a_put_counts(index: ValueIndex) -> None:
    first, second = stored_group((1, "a")), stored_group((1, "a"), (1, "a"))
    assert index.put("train", [first, second]) == (1, [place_of(first)])
    ((found,),) = index.find([("train", 1)], ["a"])
    assert found is not None
    assert (found.place.path, found.entry.at) == (second.path, 1)
    assert index.clear([("train", 1, NOW)]) == [place_of(second)]


def test_a_put_of_nothing_changes_nothing(index: ValueIndex) -> None:
    index.put("train", [stored_group((1, "a"))])
    assert index.put("train", []) == (1, [])
    assert index.generation == 1


# ---------------------------------------------------------------- clear


def test_a_clear_needs_no_list_of_fields_and_may_come_twice(index: ValueIndex) -> None:
    group = stored_group((1, "a"), (1, "b"), (2, "a"))
    extra = stored_group((1, "c"))
    index.put("train", [group, extra])
    assert index.clear([("train", 1, 1)]) == [place_of(extra)]
    assert index.clear([("train", 1, 1)]) == []
    assert index.fields("train", 1) == []
    assert index.clear([("train", 2, 1), ("train", 9, 1), ("other", 2, 1)]) == [place_of(group)]
    assert index.totals()["values"] == index.totals()["samples"] == 0


def test_a_late_clear_leaves_a_sample_that_was_born_later(index: ValueIndex) -> None:
    index.put("train", [stored_group((1, "a"))])
    index.clear([("train", 1, 1)])
    again = stored_group((1, "a"))
    index.put("train", [again])
    assert index.clear([("train", 1, 1)]) == []
    assert where(index, 1, "a") == again.path


def test_a_clear_takes_what_a_sample_was_given_after(index: ValueIndex) -> None:
    first, second = stored_group((1, "a")), stored_group((1, "b"))
    index.put("train", [first])
    index.put("train", [second])  # of the same sample, which was born in generation 1
    assert set(index.clear([("train", 1, 1)])) == {place_of(first), place_of(second)}


def test_a_generation_is_not_used_again_once_its_values_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "index"
    with closing(ValueIndex(path, "run")) as index:
        index.put("train", [stored_group((1, "a"))])
        index.forget(index.clear([("train", 1, NOW)]))
    with closing(ValueIndex(path, "run")) as index:
        assert index.put("train", [stored_group((1, "a"))])[0] == 2


def test_only_the_groups_that_a_call_made_unneeded_are_its_callers_to_delete(
    index: ValueIndex,
) -> None:
    groups = [stored_group((i, "a")) for i in range(3)]
    index.put("train", groups)
    assert index.clear([("train", 0, NOW)]) == [place_of(groups[0])]
    assert index.clear([("train", 1, NOW)]) == [place_of(groups[1])]  # who asked first has the 1st
    again = stored_group((2, "a"))
    assert index.put("train", [again])[1] == [place_of(groups[2])]
    assert index.unneeded() == [place_of(group) for group in groups]  # for the sweep


# ---------------------------------------------------------------- calls that come twice


def test_a_put_that_comes_twice_changes_nothing(index: ValueIndex) -> None:
    first = stored_group((1, "a"))
    assert index.put("train", [first]) == (1, [])
    second = stored_group((1, "a"))
    index.put("train", [second])
    assert index.put("train", [first]) == (1, [])
    assert where(index, 1, "a") == second.path
    index.forget(index.unneeded())
    assert index.put("train", [first]) == (1, [])  # nor once it is deleted
    assert index.knows([first.path, second.path]) == [False, True]


def test_a_put_that_comes_twice_is_known_after_a_restart(tmp_path: Path) -> None:
    group = stored_group((1, "a"))
    with closing(ValueIndex(tmp_path / "index", "run")) as index:
        index.put("train", [group])
    with closing(ValueIndex(tmp_path / "index", "run")) as index:
        assert index.put("train", [group]) == (1, [])
        assert index.totals()["values"] == index.totals()["groups"] == 1


def test_a_put_that_failed_is_not_taken_for_one_that_was_done(
    index: ValueIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = stored_group((1, "a"))

    def fails(*_: Any) -> None:
        raise StorageFailed("the disk hung", subject="disk")

    with monkeypatch.context() as patch:
        patch.setattr(index, "_add", fails)
        with pytest.raises(StorageFailed):
            index.put("train", [group])
    assert index.generation == 0
    assert index.put("train", [group]) == (1, [])  # as a client tries again
    assert where(index, 1, "a") == group.path


def test_the_generation_of_a_put_is_not_told_before_it_is_done(
    index: ValueIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, end = threading.Event(), threading.Event()

    def hangs(*_: Any) -> None:
        inside.set()
        end.wait(10)
        raise StorageFailed("the disk hung", subject="disk")

    monkeypatch.setattr(index, "_add", hangs)
    told: list[int] = []
    ask = threading.Thread(target=lambda: told.append(index.generation))

    def put() -> None:
        with pytest.raises(StorageFailed):
            index.put("train", [stored_group((1, "a"))])

    thread = threading.Thread(target=put)
    thread.start()
    assert inside.wait(10)
    ask.start()
    ask.join(0.1)
    end.set()
    thread.join()
    ask.join()
    assert told == [0]


# ---------------------------------------------------------------- against a model


class Model:
    """What an index should say."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, int, str], tuple[Place, int]] = {}
        self.births: dict[tuple[str, int], int] = {}
        self.groups: set[Place] = set()
        self.pins: dict[str, set[Place]] = {}

    def unneeded(self) -> set[Place]:
        live = {place for place, _ in self.values.values()}
        return self.groups - live - {place for pins in self.pins.values() for place in pins}


NAMES = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["a", "b", "ü"])), min_size=1, max_size=4
)
PARTITIONS = st.sampled_from(["train", "eval"])


class Indexing(RuleBasedStateMachine):
    """An index and a model of it live through the same."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.index = ValueIndex(self.folder / "index", "run")
        self.model = Model()
        self.saved: dict[str, tuple[dict[Any, Any], dict[Any, Any]]] = {}
        self.numbers = iter(range(10_000))

    def teardown(self) -> None:
        self.index.close()
        shutil.rmtree(self.folder)

    puts = Bundle("puts")
    checkpoints = Bundle("checkpoints")

    @rule(target=puts, partition=PARTITIONS, names=st.lists(NAMES, min_size=1, max_size=3))
    def put(self, partition: str, names: list[list[tuple[int, str]]]) -> Any:
        model, before = self.model, self.model.unneeded()
        units = [f"u{len(group) % 2}" for group in names]
        groups = [stored_group(*g, unit=u) for g, u in zip(names, units, strict=True)]
        generation, gone = self.index.put(partition, groups)
        for group in groups:
            model.groups.add(place_of(group))
            for value in group.values:
                model.births.setdefault((partition, value.index), generation)
                name = (partition, value.index, value.field)
                model.values[name] = place_of(group), generation
        assert set(gone) == model.unneeded() - before
        return partition, groups, generation

    @rule(put=puts)
    def put_again(self, put: tuple[str, list[StoredGroup], int]) -> None:
        partition, groups, generation = put
        if place_of(groups[0]) in self.model.groups:
            again, gone = self.index.put(partition, groups)
            assert generation <= again <= self.index.generation
            assert gone == []

    @rule(partition=PARTITIONS, samples=st.lists(st.integers(0, 3), max_size=3), age=st.integers(0))
    def clear(self, partition: str, samples: list[int], age: int) -> None:
        before = self.model.unneeded()
        until = max(0, self.index.generation - age)
        for sample in samples:
            if self.model.births.get((partition, sample), NOW) <= until:
                del self.model.births[partition, sample]
                for name in [n for n in self.model.values if n[:2] == (partition, sample)]:
                    del self.model.values[name]
        asked = [(partition, sample, until) for sample in samples]
        assert set(self.index.clear(asked)) == self.model.unneeded() - before
        assert self.index.clear(asked) == []

    @rule()
    def forget(self) -> None:
        self.index.forget([*self.model.unneeded(), Place("u0", "values/none")])
        self.model.groups -= self.model.unneeded()

    @rule()
    def forget_what_is_needed(self) -> None:
        self.index.forget([place for place, _ in self.model.values.values()])

    @rule(target=checkpoints)
    def pin(self) -> Any:
        name = f"c{next(self.numbers):04}"
        pins = {place for place, _ in self.model.values.values()}
        found = self.index.pin(name)
        assert {Place(unit, path) for unit, paths in found.items() for path in paths} == pins
        assert self.index.pin(name) == found
        self.model.pins[name] = pins
        self.index.copy_to(self.folder / name)
        self.saved[name] = dict(self.model.values), dict(self.model.births)
        return name

    @rule(target=checkpoints, name=consumes(checkpoints), keep=st.booleans())
    def unpin(self, name: str, keep: bool) -> Any:
        before = self.model.unneeded()
        self.model.pins.pop(name, None)
        assert set(self.index.unpin(name)) >= self.model.unneeded() - before
        return name if keep else multiple()

    @rule(name=checkpoints)
    def replace(self, name: str) -> None:
        values, births = self.saved[name]
        if {place for place, _ in values.values()} - self.model.pins.get(name, set()):
            with pytest.raises(CheckpointMissing):
                self.index.replace(self.folder / name, name)
            return
        generation = self.index.generation
        self.index.replace(self.folder / name, name)
        assert self.index.generation > generation
        self.model.values, self.model.births = dict(values), dict(births)

    @rule()
    def reopen(self) -> None:
        generation = self.index.generation
        self.index.close()
        self.index = ValueIndex(self.folder / "index", "run")
        assert self.index.generation == generation

    @invariant()
    def says_what_the_model_says(self) -> None:
        model = self.model
        samples = [(partition, i) for partition in ("train", "eval") for i in range(4)]
        fields = ["a", "b", "ü"]
        for field, column in zip(fields, self.index.find(samples, fields), strict=True):
            for (partition, i), found in zip(samples, column, strict=True):
                have = None if found is None else (found.place, found.generation)
                assert have == model.values.get((partition, i, field))
        assert set(self.index.unneeded()) == model.unneeded()
        assert self.index.checkpoints() == sorted(n for n, pins in model.pins.items() if pins)
        totals = self.index.totals()
        assert totals["values"] == len(model.values)
        assert totals["samples"] == len(model.births)
        assert totals["groups"] == len(model.groups)


Indexing.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
TestIndexing = Indexing.TestCase


# ---------------------------------------------------------------- checkpoints


def test_puts_during_a_load_land_in_their_own_partition(
    tmp_path: Path, index: ValueIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.put("a", [stored_group((1, "x"))])
    index.pin("c")
    index.copy_to(tmp_path / "copy")
    index.replace(tmp_path / "copy", "c")
    other = tmp_path / "other"
    with closing(ValueIndex(other, "run")) as earlier:  # where other partitions have these numbers
        earlier.put("b", [stored_group((1, "x"))])
        earlier.put("a", [stored_group((1, "x"))])
        pins = earlier.pin("d")
        earlier.copy_to(tmp_path / "copy-d")
    for unit, paths in pins.items():
        index.add_pins("d", unit, paths)
    group = stored_group((7, "x"))
    unneeded = index._unneeded

    def put_meanwhile(db: sqlite3.Connection) -> list[Place]:
        threading.Thread(target=lambda: index.put("a", [group])).start()
        return unneeded(db)

    with monkeypatch.context() as patch:
        patch.setattr(index, "_unneeded", put_meanwhile)
        index.replace(tmp_path / "copy-d", "d")
    until = time.monotonic() + 10
    while (found := where(index, 7, "x", "a")) is None and time.monotonic() < until:
        time.sleep(0.01)
    assert found == group.path
    assert where(index, 7, "x", "b") is None


def test_a_copy_whose_groups_are_not_kept_is_refused_and_nothing_changes(
    tmp_path: Path, index: ValueIndex
) -> None:
    index.put("train", [stored_group((1, "a"))])
    index.copy_to(tmp_path / "copy")
    index.forget(index.clear([("train", 1, NOW)]))
    now = stored_group((2, "a"))
    index.put("eval", [now])
    with pytest.raises(CheckpointMissing, match=r"checkpoint c: 1 value of it"):
        index.replace(tmp_path / "copy", "c")
    assert where(index, 2, "a", "eval") == now.path
    assert where(index, 1, "a") is None
    assert index.generation == 2


def test_pins_of_an_earlier_run_keep_groups_until_they_are_let_go(index: ValueIndex) -> None:
    index.add_pins("c", "u", ["values/old/00/x"])
    index.add_pins("c", "u", ["values/old/00/x"])
    assert index.knows(["values/old/00/x", "values/old/00/y"]) == [True, False]
    assert index.pinned("c") == {"u": ["values/old/00/x"]}
    assert index.unneeded() == []
    assert index.unpin("c") == [Place("u", "values/old/00/x")]


def test_a_group_is_known_by_its_path_without_that_of_an_attempt(index: ValueIndex) -> None:
    index.put("train", [stored_group((1, "a"), path="values/r/00/x/try-01")])
    paths = ["values/r/00/x", "values/r/00/x/try-01", "values/r/00", "values/r/00/x-1"]
    assert index.knows(paths) == [True, True, True, False]


# ---------------------------------------------------------------- kills


CHILD = """
import json, sys
from pathlib import Path
from tq_fs.values import StoredGroup, ValueEntry, ValueIndex
from tq_fs.values._entry import NamedEntry

index = ValueIndex(Path(sys.argv[1]), "run")
start = index.generation
for n in range(start, start + 100_000):
    value = NamedEntry(n % 50, f"f{n % 3}", ValueEntry(at=n, nbytes=1))
    group = StoredGroup("u", f"values/r/00/{n:08}", 10, (value,))
    generation, _ = index.put("train", [group])
    if n % 7 == 6:
        index.clear([("train", n % 50, generation)])
    print(json.dumps([n, generation]), flush=True)
"""


def test_a_process_killed_among_its_puts_loses_none_that_was_answered(tmp_path: Path) -> None:
    path = tmp_path / "index"
    first = 0
    for round_ in range(4):
        with spawn_child(CHILD, path) as process:
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(40 + 31 * round_)]
            process.send_signal(signal.SIGKILL)
            said += process.stdout.read().splitlines(keepends=True)
        whole = [line for line in said if line.endswith("]\n")]
        last = first + len(whole) - 1
        with closing(ValueIndex(path, "run")) as index:
            # one more may be there whose answer was not said, or its clear
            assert index.generation in (last + 1, last + 2)
            want = replayed(index.generation)
            less = replayed(index.generation, cleared=False)
            assert all_of(index) in (want, less)
            assert [r for (r,) in index._db.execute("PRAGMA integrity_check")] == ["ok"]
            first = index.generation
            index.clear([("train", (first - 1) % 50, first)] if (first - 1) % 7 == 6 else [])


def replayed(count: int, *, cleared: bool = True) -> dict[tuple[int, str], str]:
    """Return what there is after so many puts, and the clear of the last where there is one."""
    found: dict[tuple[int, str], str] = {}
    for n in range(count):
        found[n % 50, f"f{n % 3}"] = f"values/r/00/{n:08}"
        if n % 7 == 6 and (cleared or n < count - 1):
            found = {name: path for name, path in found.items() if name[0] != n % 50}
    return found


def all_of(index: ValueIndex) -> dict[tuple[int, str], str]:
    names = [(i, f"f{k}") for i in range(50) for k in range(3)]
    return {(i, f): path for i, f in names if (path := where(index, i, f)) is not None}


# ---------------------------------------------------------------- full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tq-fs-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(index: ValueIndex, put: list[StoredGroup]) -> None:
    """Put until it fails."""
    while True:
        group = stored_group(*((len(put), f"field{k}") for k in range(200)))
        index.put("train", [group])
        put.append(group)


@pytest.mark.root
def test_a_full_disk_is_said_and_what_is_there_stays(small_disk: Path, tmp_path: Path) -> None:
    with closing(ValueIndex(small_disk / "index", "run")) as index:
        put: list[StoredGroup] = []
        with pytest.raises(StorageFull, match="index"):
            fill(index, put)
        generation = index.generation
        assert generation == len(put) > 3
        for other in [stored_group(*((9999, f"f{k}") for k in range(3000)))] * 2:
            with pytest.raises(StorageFull):  # the same again: it is not taken for done
                index.put("else", [other])
        assert where(index, 9999, "f0", "else") is None
        assert index.knows([other.path]) == [False]
        for i, group in enumerate(put):
            assert where(index, i, "field7") == group.path
        with pytest.raises(StorageFull):
            index.copy_to(small_disk / "copy")
        assert index.generation == generation
    shutil.copytree(small_disk, tmp_path / "larger")
    with closing(ValueIndex(tmp_path / "larger" / "index", "run")) as index:
        assert index.generation == generation
        assert index.put("else", [other])[0] == generation + 1


@pytest.mark.root
def test_an_index_is_not_begun_on_a_full_disk(small_disk: Path) -> None:
    (small_disk / "filling").write_bytes(bytes(1024**2))
    with pytest.raises(StorageFull):
        ValueIndex(small_disk / "index", "run")
    (small_disk / "filling").unlink()
    ValueIndex(small_disk / "index", "run").close()


# ---------------------------------------------------------------- files that are none


def other_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript("CREATE TABLE t (x); INSERT INTO t VALUES (1)")


def other_database_of_our_version(path: Path) -> None:
    other_database(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {index_module.VERSION}")


def newer(path: Path) -> None:
    ValueIndex(path, "run").close()
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {index_module.VERSION + 1}")


def damaged(path: Path) -> None:
    with closing(ValueIndex(path, "run")) as index:
        for i in range(300):
            index.put("train", [stored_group((i, "a"))])
        index._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(path.read_bytes())
    data[8192:-4096] = os.urandom(len(data) - 8192 - 4096)
    path.write_bytes(data)


FOREIGN: list[tuple[Callable[[Path], Any], type[Exception], str]] = [
    (lambda path: path.write_bytes(b"no database at all" * 99), ManifestCorrupt, "not a database"),
    (other_database, ManifestCorrupt, "no index of values"),
    (other_database_of_our_version, ManifestCorrupt, "no such table"),
    (newer, FormatTooNew, "version 2, this program reads 1"),
    (lambda path: ValueIndex(path, "else").close(), WrongStore, "'else'"),
    (damaged, ManifestCorrupt, "malformed"),
]


@pytest.mark.parametrize(
    ("make", "error", "words"), FOREIGN, ids=["bytes", "other", "like", "newer", "store", "damaged"]
)
def test_a_file_that_is_no_index_is_refused_and_left_as_it_is(
    tmp_path: Path, make: Callable[[Path], Any], error: type[Exception], words: str
) -> None:
    path = tmp_path / "index"
    make(path)
    before = path.read_bytes()
    with pytest.raises(error, match=words) as caught, closing(ValueIndex(path, "run")) as index:
        index.put("train", [stored_group((i, "a")) for i in range(300)])
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, FatalError)
    if make is not damaged:
        assert path.read_bytes() == before


def test_a_closed_index_does_not_say_that_it_is_damaged(tmp_path: Path) -> None:
    index = ValueIndex(tmp_path / "index", "run")
    index.close()
    index.close()
    with pytest.raises(RetryError, match="closed"):
        index.find([("train", 1)], ["a"])


# ---------------------------------------------------------------- size and time


@pytest.mark.slow
def test_a_hundred_thousand_values_take_little_memory_disk_and_time(tmp_path: Path) -> None:
    path = tmp_path / "index"
    resident = rss_bytes()
    with closing(ValueIndex(path, "run")) as index:
        began = time.perf_counter()
        for start in range(0, 12_500, 50):
            index.put(
                "train",
                [
                    stored_group(*((i, f"field{k}") for k in range(8)))
                    for i in range(start, start + 50)
                ],
            )
        put_us = (time.perf_counter() - began) * 10
        began = time.perf_counter()
        index.find([("train", i) for i in range(0, 12_500, 10)], [f"field{k}" for k in range(8)])
        find_us = (time.perf_counter() - began) * 100
        grown = rss_bytes() - resident
        began = time.perf_counter()
        index.pin("c")
        pin_s = time.perf_counter() - began
        began = time.perf_counter()
        index.forget(index.clear([("train", i, NOW) for i in range(6_000)]))
        index.unpin("c")
        index.forget(index.unneeded())
        clear_s = time.perf_counter() - began
    disk = path.stat().st_size / 100_000
    print(f"{disk:.0f} B/value, put {put_us:.1f} us, find {find_us:.1f} us")
    print(f"grown {grown >> 20} MiB, pin {pin_s:.2f} s, clear {clear_s:.2f} s")
    assert disk < 300
    assert grown < 48 << 20
    assert put_us < 300
    assert find_us < 300
    assert pin_s + clear_s < 20


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_no_statement_scans_what_it_need_not(index: ValueIndex) -> None:
    """Statements are planned by index: what is asked of one sample does not grow with the store."""
    asked: list[str] = []
    index._db.set_trace_callback(asked.append)
    first = stored_group((1, "a"), (1, "b"))
    index.put("train", [first])
    index.put("train", [stored_group((1, "a"))])
    index.find([("train", 1)], ["a"])
    index.fields("train", 1)
    index.knows([first.path])
    index.forget(index.clear([("train", 1, NOW)]))
    index.unneeded()
    index._db.set_trace_callback(None)
    for statement in {s for s in asked if s.lstrip().split()[0] not in ("BEGIN", "COMMIT")}:
        plan = [row[3] for row in index._db.execute(f"EXPLAIN QUERY PLAN {statement}")]
        assert not [step for step in plan if step.startswith("SCAN")], (statement, plan)
