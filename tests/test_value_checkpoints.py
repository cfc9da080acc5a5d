"""Checkpoints of values: what they speak of stays, whatever is put, cleared or killed."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests._clusters import cluster
from tests._values import (
    Folders,
    Ground,
    Kept,
    bucket_ground,
    folder_ground,
    run_child,
    same_columns,
    unit_ground,
    unit_view,
)
from tq_fs.errors import (
    CheckpointMissing,
    FormatTooNew,
    ManifestCorrupt,
    StorageFailed,
    StorageFull,
    TqFsError,
    UnitLost,
    ValueMissing,
    WrongStore,
)
from tq_fs.values import CHECKPOINT_FILE, ValueIndex
from tq_fs.values import _index as index_module

GROUNDS = [
    "folder",
    "units",
    pytest.param("s3fs", marks=pytest.mark.s3),
    pytest.param("obstore", marks=pytest.mark.s3),
]


@pytest.fixture(params=GROUNDS)
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ground]:
    if request.param == "folder":
        with folder_ground(tmp_path) as found:
            yield found
    elif request.param == "units":
        with unit_ground(tmp_path, "far") as found:
            yield found
    else:
        server = request.getfixturevalue("s3_server")
        bucket = request.getfixturevalue("bucket")
        with bucket_ground(tmp_path, server, bucket, request.param) as there:
            yield there


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Folders]:
    with folder_ground(tmp_path) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def columns(version: int) -> dict[str, list[Any]]:
    return {
        "small": [[version, i] for i in range(3)],
        "large": [torch.full((20_000,), 10 * version + i) for i in range(3)],
    }


def put(kept: Kept, version: int) -> None:
    kept.values.put("train", range(3), columns(version))


def holds(kept: Kept, version: int) -> bool:
    found = kept.values.get([("train", i) for i in range(3)], ["small", "large"])
    return same_columns(found, columns(version))


def clear(kept: Kept) -> None:
    kept.values.clear([("train", i, None) for i in range(3)])


def save(kept: Kept, folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return kept.values.save(folder)


def groups_of(ground: Ground) -> set[str]:
    return {"/".join(key.split("/")[:4]) for _, key in ground.objects()}


def swept(kept: Kept) -> int:
    """Sweep until nothing is left to be."""
    return kept.keeper.sweep() + kept.keeper.sweep()


# ---------------------------------------------------------------- what is kept


def test_later_overwrites_and_clears_do_not_touch_what_a_checkpoint_keeps(
    ground: Ground, folder: Path
) -> None:
    with ground.kept() as kept:
        put(kept, 1)
        save(kept, folder)
        put(kept, 2)
        assert holds(kept, 2)
        kept.values.load(folder)
        assert holds(kept, 1)
        clear(kept)
        swept(kept)
        with pytest.raises(ValueMissing):
            holds(kept, 1)
        kept.values.load(folder)
        assert holds(kept, 1)
        assert kept.index.totals()["values"] == 6


def test_the_last_checkpoints_are_kept_and_what_only_older_ones_speak_of_is_deleted(
    ground: Ground, folder: Path
) -> None:
    with ground.kept() as kept:
        kept.values.put("train", [9], {"small": ["always there"]})
        for version in range(1, 5):
            put(kept, version)
            save(kept, folder / str(version))
        kept.keeper.bury()
        kept.values.run_each(lambda _: None, range(4))
        kept.keeper.sweep()
        lasting = 2 * 3 + 1  # of two checkpoints, the last of which is what there is
        assert len(groups_of(ground)) == lasting
        for version in (1, 2):
            with pytest.raises(CheckpointMissing, match="last 2 checkpoints only"):
                kept.values.load(folder / str(version))
            assert holds(kept, 4)
        for version in (3, 4, 3):
            kept.values.load(folder / str(version))
            assert holds(kept, version)
            assert kept.values.get([("train", 9)], ["small"]) == {"small": ["always there"]}
        swept(kept)
        assert len(groups_of(ground)) == lasting


def test_a_new_run_becomes_what_a_checkpoint_says_and_sweeps_the_rest(
    ground: Ground, folder: Path
) -> None:
    with ground.kept("r1") as kept:
        put(kept, 1)
        save(kept, folder)
        put(kept, 2)
        kept.values.put("eval", [1], {"late": ["x"]})
        kept.values.prepare("eval", [2], {"late": ["never committed"]})
    with ground.kept("r2") as kept:
        assert kept.keeper.sweep() == 5  # of an earlier run: at once
        assert len(groups_of(ground)) == 3
        with pytest.raises(ValueMissing):
            holds(kept, 1)
        kept.values.load(folder)
        assert holds(kept, 1)
        kept.values.put("eval", [1], {"late": ["y"]})
        assert swept(kept) == 0
        save(kept, folder / "second")
        save(kept, folder / "third")
        with pytest.raises(CheckpointMissing):
            kept.values.load(folder)
    with ground.kept("r3") as kept:  # which keeps groups of two runs
        assert swept(kept) == 0
        kept.values.load(folder / "second")
        assert holds(kept, 1)
        assert kept.values.get([("eval", 1)], ["late"]) == {"late": ["y"]}


def test_a_loaded_sample_is_cleared_by_what_was_known_of_it_and_later_ones_are_not(
    local: Folders, folder: Path
) -> None:
    with local.kept() as kept:
        put(kept, 1)
        generation = kept.values.find(("train", 0), "small").generation
        save(kept, folder)
    with local.kept("r2") as kept:
        kept.values.load(folder)
        clear_all = [("train", i, generation) for i in range(3)]
        kept.values.clear(clear_all)
        with pytest.raises(ValueMissing):
            holds(kept, 1)
        put(kept, 2)
        kept.values.clear(clear_all)
        assert holds(kept, 2)


def test_an_empty_store_is_saved_and_loaded(local: Folders, folder: Path) -> None:
    with local.kept() as kept:
        save(kept, folder)
        put(kept, 1)
        kept.values.load(folder)
        assert kept.index.totals()["values"] == 0
        assert swept(kept) == 0
        assert local.objects() == []


def test_what_a_checkpoint_keeps_is_named_where_it_lies(ground: Ground, folder: Path) -> None:
    with ground.kept() as kept:
        put(kept, 1)
        name = save(kept, folder)
        documents = {key for _, key in ground.objects("checkpoints")}
        assert documents == {f"checkpoints/{name}", f"checkpoints/{name}.saved"}
        for version in (2, 3):
            put(kept, version)
            save(kept, folder / str(version))
        assert f"checkpoints/{name}" not in {key for _, key in ground.objects("checkpoints")}


def test_a_clock_that_goes_back_does_not_make_the_newest_checkpoint_the_oldest(
    local: Folders, folder: Path
) -> None:
    times = [3_000, 2_000, 1_000]
    with local.kept(checkpoints=1, now_ns=lambda: times.pop(0)) as kept:
        for version in (1, 2, 3):
            put(kept, version)
            save(kept, folder)
            clear(kept)
            kept.values.load(folder)
            assert holds(kept, version)


# ---------------------------------------------------------------- what is refused


def refused(
    kept: Kept, folder: Path, kind: type[TqFsError], words: str, ground: Ground
) -> TqFsError:
    """Check that a load is refused, and that all is as it was."""
    put(kept, 7)
    kept.keeper.bury()
    generation, totals = kept.index.generation, kept.index.totals()
    with pytest.raises(kind, match=words) as caught:
        kept.values.load(folder)
    assert holds(kept, 7)
    kept.values.run_each(lambda _: None, range(4))
    assert kept.index.generation == generation
    assert kept.index.totals()["values"] == totals["values"]
    assert swept(kept) == 0
    assert holds(kept, 7)
    assert not [path for path in ground.folder.iterdir() if path.name.startswith("copy-")]
    return caught.value


def newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {index_module.VERSION + 1}")


def foreign(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE t (x)")


def foreign_of_our_version(path: Path) -> None:
    foreign(path)
    with closing(sqlite3.connect(path)) as db:
        db.executescript(
            "CREATE TABLE found (x); CREATE TABLE meta (name, value);"
            "INSERT INTO meta VALUES ('store_id', 'run')"
        )
        db.execute(f"PRAGMA user_version = {index_module.VERSION}")


def other_store(path: Path) -> None:
    path.unlink()
    with closing(ValueIndex(path.with_name("other"), "else")) as index:
        index.copy_to(path)


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:-4096:7] = bytes(len(data[4096:-4096:7]))
    path.write_bytes(data)


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


REFUSED: list[tuple[Callable[[Path], Any], type[TqFsError], str]] = [
    (newer, FormatTooNew, "version 2, this program reads 1"),
    (foreign, ManifestCorrupt, "no index of values"),
    (foreign_of_our_version, ManifestCorrupt, "no index of values"),
    (other_store, WrongStore, "is of store 'else', this is 'run'"),
    (damaged, ManifestCorrupt, "damaged|malformed|no checkpoint"),
    (halved, ManifestCorrupt, "damaged|malformed|no checkpoint"),
    (lambda path: path.write_bytes(b""), ManifestCorrupt, "no index"),
    (lambda path: path.write_bytes(b"text" * 999), ManifestCorrupt, "not a database"),
]


@pytest.mark.parametrize(("hurt", "kind", "words"), REFUSED, ids=range(len(REFUSED)))
def test_a_file_that_is_no_checkpoint_of_the_store_is_refused(
    local: Folders, folder: Path, hurt: Callable[[Path], Any], kind: type[TqFsError], words: str
) -> None:
    with local.kept() as kept:
        put(kept, 1)
        save(kept, folder)
        hurt(folder / CHECKPOINT_FILE)
        error = refused(kept, folder, kind, words, local)
        assert str(folder) in str(error)


def test_a_folder_without_a_checkpoint_is_no_checkpoint(local: Folders, folder: Path) -> None:
    with local.kept() as kept:
        with pytest.raises(FileNotFoundError, match="no checkpoint of tq-fs"):
            kept.values.load(folder)
        with pytest.raises(CheckpointMissing, match="where the node of the keeper sees them"):
            kept.keeper.load(str(folder))


def test_a_checkpoint_whose_files_were_deleted_is_missing_and_names_them(
    ground: Ground, folder: Path
) -> None:
    with ground.kept() as kept:
        put(kept, 1)
        save(kept, folder)
        place = kept.values.find(("train", 1), "large").place
        for unit, key in ground.objects():
            if unit == place.unit and key.startswith(f"{place.path}/"):
                ground.remove(unit, key)
        if isinstance(ground, Folders):
            shutil.rmtree(ground.roots[place.unit] / place.path)
        error = refused(kept, folder, CheckpointMissing, "1 of its [123] groups are gone", ground)
        assert place.path in str(error)


def test_a_checkpoint_of_another_store_of_the_same_name_is_missing(
    tmp_path: Path, folder: Path
) -> None:
    with folder_ground(tmp_path / "one") as ground, ground.kept() as kept:
        put(kept, 1)
        save(kept, folder)
    with folder_ground(tmp_path / "two") as ground, ground.kept() as kept:
        refused(kept, folder, CheckpointMissing, "keeps the values of its last", ground)


def test_a_damaged_list_of_what_is_kept_stops_a_run_before_it_sweeps(
    local: Folders, folder: Path
) -> None:
    with local.kept() as kept:
        put(kept, 1)
        name = save(kept, folder)
    local.write("", f"checkpoints/{name}", b"{}")
    with pytest.raises(ManifestCorrupt, match=name), local.kept("r2"):
        pass
    assert len(groups_of(local)) == 3
    local.remove("", f"checkpoints/{name}")
    with local.kept("r2") as kept:
        assert kept.keeper.sweep() == 3


# ---------------------------------------------------------------- saves that fail


class Failing:
    """A backend of which one method fails."""

    def __init__(self, inner: Any, method: str) -> None:
        self._inner, self._method = inner, method

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            return self._fail
        return getattr(self._inner, name)

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise StorageFailed("the disk hung", subject="disk")


@pytest.mark.parametrize("method", ["settle", "sync", "put", "copy_to"])
def test_a_save_that_fails_leaves_earlier_checkpoints_and_no_pins(
    ground: Ground, folder: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    with ground.kept(checkpoints=1) as kept:
        put(kept, 1)
        first = save(kept, folder)
        put(kept, 2)
        backend = kept.places.backend
        with monkeypatch.context() as patch:
            if method == "copy_to":
                patch.setattr(kept.index, method, Failing(kept.index, method).copy_to)
            else:
                patch.setattr(kept.places, "backend", lambda unit: Failing(backend(unit), method))
            with pytest.raises(StorageFailed):
                save(kept, folder)  # into the same folder
        assert kept.index.checkpoints() == [first]
        assert {key.split("/")[1][:25] for _, key in ground.objects("checkpoints")} == {first}
        assert [path.name for path in folder.iterdir()] == [CHECKPOINT_FILE]
        put(kept, 3)
        kept.keeper.bury()
        kept.values.load(folder)
        assert holds(kept, 1)


def test_a_checkpoint_that_cannot_be_noted_as_saved_is_kept_all_the_same(
    local: Folders, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local.kept(checkpoints=1) as kept:
        put(kept, 1)
        put_document = kept.places.backend("").put

        def fails(key: str, data: bytes, **named: Any) -> None:
            if key.endswith(".saved"):
                raise StorageFailed("the disk hung", subject="disk")
            put_document(key, data, **named)

        with monkeypatch.context() as patch:
            patch.setattr(kept.places.backend(""), "put", fails)
            save(kept, folder)
    with local.kept("r2", checkpoints=1) as kept:
        kept.values.load(folder)
        assert holds(kept, 1)


def test_a_checkpoint_that_cannot_be_dropped_is_dropped_by_a_later_save(
    local: Folders, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local.kept(checkpoints=1) as kept:
        put(kept, 1)
        first = save(kept, folder / "1")
        put(kept, 2)
        with monkeypatch.context() as patch:
            patch.setattr(kept.places.backend(""), "delete", Failing(None, "x").x)
            second = save(kept, folder / "2")
            assert kept.index.checkpoints() == [first, second]
        third = save(kept, folder / "3")
        assert kept.index.checkpoints() == [third]
        assert swept(kept) == 0
        assert len(groups_of(local)) == 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tq-fs-test", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.root
def test_a_full_disk_leaves_the_checkpoint_that_the_folder_had(
    small_disk: Path, local: Folders
) -> None:
    with local.kept() as kept:
        put(kept, 1)
        first = save(kept, small_disk)
        for i in range(20):
            kept.values.put("train", range(100 * i, 100 * i + 100), {"more": ["x"] * 100})
        with pytest.raises(StorageFull, match=CHECKPOINT_FILE):
            save(kept, small_disk)
        assert kept.index.checkpoints() == [first]
        assert [path.name for path in small_disk.iterdir()] == [CHECKPOINT_FILE]
        kept.values.load(small_disk)
        assert holds(kept, 1)


# ---------------------------------------------------------------- saves that are killed

KILLED = """
import os, sys
from pathlib import Path
from tq_fs.backends import LocalBackend
from tq_fs.values import Keeper, OnePlace, ValueIndex

root, folder, target = sys.argv[1:]

def at(point):
    if point == target:
        os.kill(os.getpid(), 9)

def passing(owner, name, point):
    method = getattr(owner, name)
    def passed(*arguments, **named):
        at("before " + point)
        done = method(*arguments, **named)
        at("after " + point)
        return done
    setattr(owner, name, passed)

backend = LocalBackend(f"{root}/store", ahead=0)
index = ValueIndex(Path(f"{root}/index/r1.sqlite"), "run")
keeper = Keeper(
    index, OnePlace(backend), "run", "r1", checkpoints=2, sweep_s=0, check=lambda: None
)
for owner, name in ((index, "pin"), (index, "copy_to"), (index, "unpin"), (backend, "put"),
                    (backend, "sync"), (backend, "delete"), (index, "confirm")):
    passing(owner, name, name)
replace = Path.replace
def at_replace(path, target):
    at("before replace")
    replace(path, target)
    at("after replace")
Path.replace = at_replace
keeper.save(folder)
"""
STEPS = ("pin", "put", "sync", "copy_to", "replace", "confirm", "delete", "unpin")
POINTS = [f"{when} {name}" for name in STEPS for when in ("before", "after")]
DONE = POINTS[POINTS.index("after replace") :]  # from then on there is the new file


@pytest.mark.parametrize("same_run", [True, False], ids=["again", "new"])
@pytest.mark.parametrize("point", POINTS)
def test_a_keeper_killed_in_a_save_leaves_earlier_checkpoints_and_garbage_at_most(
    tmp_path: Path, folder: Path, point: str, same_run: bool
) -> None:
    with folder_ground(tmp_path) as ground:
        with ground.kept() as kept:
            for version in (1, 2, 3):
                put(kept, version)
                if version < 3:
                    save(kept, folder / str(version))
        (folder / "3").mkdir()
        done = run_child(KILLED, tmp_path, folder / "3", point)
        assert done.returncode == -signal.SIGKILL, (point, done.stderr)
        with ground.kept("r1" if same_run else "r2") as kept:
            swept(kept)
            if same_run:
                assert holds(kept, 3)
            kept.values.load(folder / "2")
            assert holds(kept, 2)
            if (folder / "3" / CHECKPOINT_FILE).exists():
                assert point in DONE
                kept.values.load(folder / "3")
                assert holds(kept, 3)
            else:
                assert point not in DONE
            put(kept, 4)
            save(kept, folder / "4")
            for version in (4, 2 if point not in DONE else 3):
                kept.values.load(folder / str(version))  # the last two that were saved
                assert holds(kept, version)
            put(kept, 5)
            save(kept, folder / "5")
            save(kept, folder / "6")
            swept(kept)
            assert len(groups_of(ground)) == 3  # of version 5, and nothing else is kept
            assert len(kept.index.checkpoints()) == 2


# ---------------------------------------------------------------- units


def test_a_unit_that_was_away_when_a_run_began_loses_nothing_it_keeps(
    tmp_path: Path, folder: Path
) -> None:
    with cluster(tmp_path / "units", 2) as made:
        ground = unit_view(made, tmp_path, "n1")
        with ground.kept() as kept:
            put(kept, 1)
            save(kept, folder)
            assert {unit for unit, _ in ground.objects()} == {made.unit("n1").name}
        made.down("n1")
        ground = unit_view(made, tmp_path, "n0")
        with ground.kept("r2") as kept:
            assert swept(kept) == 0
            made.join("n1")
            made.controller.look()
            other = unit_view(made, tmp_path, "n0")
            kept.places._units = other.places._units  # type: ignore[attr-defined]
            kept.places.readers = other.places.readers
            kept.values.reader._backends = other.places.readers
            assert made.unit("n1").name in kept.places.units()
            assert swept(kept) == 0
            kept.values.load(folder)
            assert holds(kept, 1)


def test_values_of_a_unit_that_is_lost_are_said_to_be_and_their_groups_forgotten(
    tmp_path: Path, folder: Path
) -> None:
    with cluster(tmp_path / "units", 2) as made:
        ground = unit_view(made, tmp_path, "n1")
        with ground.kept(checkpoints=1) as kept:
            put(kept, 1)
            save(kept, folder)
            made.down("n1", lost=True)
            other = unit_view(made, tmp_path, "n0")
            kept.places._units = other.places._units  # type: ignore[attr-defined]
            kept.places.readers = other.places.readers
            kept.values.reader._backends = other.places.readers
            for field in ("small", "large"):
                with pytest.raises(UnitLost, match=rf"'{field}' of sample 0 \(train\)"):
                    kept.values.get([("train", 0)], [field])
            with pytest.raises(UnitLost):
                kept.values.load(folder)
            put(kept, 2)
            assert holds(kept, 2)
            save(kept, folder / "2")  # which drops the one whose documents are lost too
            assert len(kept.index.checkpoints()) == 1
            kept.keeper.sweep()
            assert kept.index.totals()["groups"] == 3
