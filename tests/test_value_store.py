"""ValueStore: values come back from wherever they lie, or it is said which one is damaged."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from tests._values import (
    Folders,
    Ground,
    Kept,
    bucket_ground,
    folder_ground,
    keeper_of,
    run_child,
    same,
    same_columns,
    tree,
    unit_ground,
)
from tq_fs.bench.servers import S3Server
from tq_fs.cluster import _roster
from tq_fs.errors import (
    ChunkCorrupt,
    CorruptError,
    InvalidField,
    ObjectShort,
    StorageFailed,
    StorageFull,
    TqFsError,
    ValueMissing,
    ValueUnsupported,
    WrongStore,
)
from tq_fs.keeper import ValueConfig, open_keeper, open_values
from tq_fs.keeper._open import Spot
from tq_fs.values import Joined
from tq_fs.values.codec import encode

HERE = Spot("n0", "node", "127.0.0.1")
GROUNDS = [
    "folder",
    "units",
    pytest.param("s3fs", marks=pytest.mark.s3),
    pytest.param("obstore", marks=pytest.mark.s3),
]


@pytest.fixture(params=GROUNDS)
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ground]:
    """Give a folder, two units, or a bucket by each driver."""
    if request.param == "folder":
        with folder_ground(tmp_path) as found:
            yield found
    elif request.param == "units":
        with unit_ground(tmp_path, "far") as found:
            yield found
    else:
        server: S3Server = request.getfixturevalue("s3_server")
        bucket: str = request.getfixturevalue("bucket")
        with bucket_ground(tmp_path, server, bucket, request.param) as there:
            yield there


@pytest.fixture
def kept(ground: Ground) -> Iterator[Kept]:
    with ground.kept() as found:
        yield found


@pytest.fixture
def local(tmp_path: Path) -> Iterator[tuple[Folders, Kept]]:
    with folder_ground(tmp_path) as ground, ground.kept() as found:
        yield ground, found


def mixed(seed: int, count: int = 4) -> dict[str, list[Any]]:
    """Return columns of values of many kinds, small and large."""
    rng = np.random.default_rng(seed)
    rows = [int(n) for n in rng.integers(17_000, 30_000, count)]
    return {
        "logprobs": [torch.from_numpy(rng.random(n, np.float32)) for n in rows],
        "tokens": [torch.arange(n) + seed for n in rows],
        "experts": [rng.integers(0, 256, (n // 4, 5, 4), np.uint8) for n in rows],
        "text": [f"é{seed}" * int(n) for n in rng.integers(0, 50_000, count)],
        "score": [float(x) for x in rng.random(count)],
        "none": [None] * count,
        "meta": [{"id": i, "parts": [b"x" * i, (1, 2.5)], "a": np.arange(i)} for i in range(count)],
        "list": [[int(x) for x in rng.integers(0, 1000, n)] for n in rows],
        "odd": [None, 1, torch.zeros(0, 3), np.float32(seed), "", [], torch.eye(300)][:count],
    }


def put(kept: Kept, seed: int = 0, count: int = 4, partition: str = "train") -> dict[str, Any]:
    columns = mixed(seed, count)
    kept.values.put(partition, range(count), columns)
    return columns


def samples(count: int = 4, partition: str = "train") -> list[tuple[str, int]]:
    return [(partition, i) for i in range(count)]


# ---------------------------------------------------------------- there and back


def test_mixed_columns_come_back_exactly(kept: Kept) -> None:
    columns = put(kept)
    assert same_columns(kept.values.get(samples(), list(columns)), columns)
    order = [3, 0, 3]
    found = kept.values.get([("train", i) for i in order], ["odd", "tokens"])
    want = {name: [columns[name][i] for i in order] for name in ("odd", "tokens")}
    assert same_columns(found, want)


def test_a_later_put_replaces_values_and_fields_are_added(kept: Kept, ground: Ground) -> None:
    columns = put(kept)
    later = mixed(1, 2)
    kept.values.put("train", [2, 3], {"tokens": later["tokens"], "new": later["text"]})
    columns["tokens"][2:] = later["tokens"]
    assert same_columns(kept.values.get(samples(), list(columns)), columns)
    found = kept.values.get([("train", 2), ("train", 3)], ["new"])
    assert same_columns(found, {"new": later["text"]})
    everything = mixed(2)
    kept.values.put("train", range(4), {**everything, "new": everything["text"]})
    until(lambda: len(groups_of(ground)) == 4 and known_paths(kept) == groups_of(ground))


def test_what_was_cleared_leaves_nothing_behind(kept: Kept, ground: Ground) -> None:
    put(kept)
    columns = put(kept, 1, partition="eval")
    kept.values.clear([("train", i, None) for i in range(4)])
    with pytest.raises(ValueMissing, match=r"'text' of sample 0 \(train\)"):
        kept.values.get(samples(), ["text"])
    assert same_columns(kept.values.get(samples(4, "eval"), list(columns)), columns)
    kept.values.clear([("eval", i, None) for i in range(4)] + [("eval", 9, None)])
    kept.values.clear([("eval", i, None) for i in range(4)])
    assert ground.objects() == []
    assert kept.index.totals()["groups"] == 0
    if isinstance(ground, Folders):
        for root in ground.roots.values():
            assert not [name for name in tree(root) if name.startswith("values/")]
            assert [*(root / "values").iterdir()] == []


def test_what_lies_there_opens_with_zarr_and_equals_what_was_encoded(
    kept: Kept, ground: Ground, tmp_path: Path
) -> None:
    columns = put(kept)
    dump = tmp_path / "dump"
    for unit, key in ground.objects():
        path = dump / (unit or "-") / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(ground.read(unit, key))
    arrays = 0
    for field, values in columns.items():
        for i, value in enumerate(values):
            found = kept.values.find(("train", i), field)
            group = zarr.open_group(dump / (found.place.unit or "-") / found.place.path, mode="r")
            want = encode(value)
            for number, array in enumerate(want.arrays):
                node = group[found.entry.name(number)]
                assert isinstance(node, zarr.Array)
                have: Any = node[:]
                assert have.dtype == array.dtype
                assert have.tobytes() == array.tobytes()
                arrays += 1
            if found.entry.nbytes:
                small = group["small"]
                assert isinstance(small, zarr.Array)
                at = found.entry.at
                assert bytes(small[at : at + found.entry.nbytes]) == want.head  # type: ignore[arg-type]
            attributes: Any = group.attrs["tq_fs"]
            assert attributes["schema"] == "tq-fs/values/1"
            assert [i, field] in [value[:2] for value in attributes["values"]]
    assert arrays >= 12


def test_a_thousand_small_values_are_a_few_objects(kept: Kept, ground: Ground) -> None:
    texts = [f"{i}" * 50 for i in range(500)]
    kept.values.put("train", range(500), {"text": texts, "number": list(range(500))})
    assert len(ground.objects()) == 2  # one group: its metadata, and all heads
    order = random.Random(0).sample(range(500), 500)
    found = kept.values.get([("train", i) for i in order], ["number", "text"])
    assert found == {"number": order, "text": [texts[i] for i in order]}
    kept.values.put("train", range(500), {"text": ["x" * 20_000 for _ in range(500)]})
    assert len(groups_of(ground)) <= 13  # packs of a MiB, and that of the numbers


def test_tensors_of_one_width_are_read_into_one_block(kept: Kept) -> None:
    columns = put(kept)
    columns["fixed"] = [torch.full((20_000,), float(i)) for i in range(4)]
    kept.values.put("train", range(4), {"fixed": columns["fixed"]})
    found = kept.values.get(samples(), list(columns), joined=True)
    for name in ("logprobs", "tokens", "fixed"):
        joined = found.pop(name)
        assert isinstance(joined, Joined)
        assert joined.lengths == [len(value) for value in columns[name]]
        assert joined.memory == f"torch:{columns[name][0].dtype}".replace("torch.", "")
        parts = np.split(joined.block, np.cumsum(joined.lengths)[:-1])
        wanted = columns.pop(name)
        for part, want in zip(parts, wanted, strict=True):
            assert same(torch.from_numpy(part).to(want.dtype), want)
    assert same_columns(found, columns)


def test_tensors_of_several_widths_or_types_are_not_joined(local: tuple[Folders, Kept]) -> None:
    _, kept = local
    columns = {
        "width": [torch.zeros(20_000, 2), torch.zeros(20_000, 3)],
        "type": [torch.zeros(18_000), torch.zeros(18_000, dtype=torch.int32)],
        "small": [torch.zeros(18_000), torch.zeros(1)],
    }
    kept.values.put("train", range(2), columns)
    assert same_columns(kept.values.get(samples(2), list(columns), joined=True), columns)


NAMES = ["", ".", "a/b", "..", "é\0%", "x" * 5_000, "\N{ROCKET}"]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_fields_and_partitions_have_any_name(local: tuple[Folders, Kept], name: str) -> None:
    ground, kept = local
    columns = {name: [torch.arange(10_000), 7]}
    kept.values.put(name, [2**62, 0], columns)
    found = kept.values.get([(name, 2**62), (name, 0)], [name])
    assert same_columns(found, columns)
    assert {key.split("/")[1] for _, key in ground.objects()} == {"r1"}


def test_an_empty_put_and_an_empty_get_are_no_work(local: tuple[Folders, Kept]) -> None:
    ground, kept = local
    assert kept.values.put("train", [], {}) == 0
    assert kept.values.put("train", [], {"a": []}) == 0
    assert kept.values.put("train", [1], {}) == 0
    assert kept.values.get([], ["a"]) == {"a": []}
    assert kept.values.get([("train", 1)], []) == {}
    assert ground.objects() == []


# ---------------------------------------------------------------- changes while it is read


class Interrupting(dict[str, Any]):
    """Ways to read that do something first, the first so many times."""

    def __init__(self, inner: Any, act: Callable[[], object], times: int) -> None:
        super().__init__()
        self.inner, self.act, self.times = inner, act, times

    def __missing__(self, unit: str) -> Any:
        if self.times:
            self.times -= 1
            self.act()
        return self.inner[unit]


def interrupted(kept: Kept, monkeypatch: pytest.MonkeyPatch, act: Any, times: int = 1) -> None:
    ways = Interrupting(kept.places.readers, act, times)
    monkeypatch.setattr(kept.places, "readers", ways)
    monkeypatch.setattr(kept.values.reader, "_backends", ways)


@pytest.mark.parametrize("field", ["number", "tokens"])
def test_a_value_that_is_replaced_while_it_is_read_is_read_anew(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, field: str, ground: Ground
) -> None:
    versions = itertools.count(1)

    def column(version: int) -> dict[str, list[Any]]:
        return {field: [version if field == "number" else torch.full((20_000,), version)]}

    def replace() -> None:
        kept.values.put("train", [1], column(next(versions)))
        until(lambda: len(groups_of(ground)) == 1)

    replace()
    interrupted(kept, monkeypatch, replace, times=2)
    assert same_columns(kept.values.get([("train", 1)], [field]), column(3))


def test_what_is_replaced_faster_than_it_is_read_is_given_up(
    local: tuple[Folders, Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    ground, kept = local

    def replace() -> None:
        kept.values.put("train", [1], {"a": [1]})
        until(lambda: len(groups_of(ground)) == 1)

    replace()
    interrupted(kept, monkeypatch, replace, times=99)
    with pytest.raises(ValueMissing, match="replaced faster"):
        kept.values.get([("train", 1)], ["a"])


@pytest.mark.parametrize("field", ["text", "tokens"])
def test_a_value_that_is_cleared_while_it_is_read_is_missing(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    kept.values.put("train", [1], {"text": ["a"]})
    kept.values.put("train", [1], {"tokens": [torch.zeros(20_000)]})
    interrupted(kept, monkeypatch, lambda: kept.values.clear([("train", 1, None)]))
    with pytest.raises(ValueMissing, match=rf"'{field}' of sample 1 \(train\): is not there"):
        kept.values.get([("train", 1)], [field])


# ---------------------------------------------------------------- damage


def flipped(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def key_of(kept: Kept, field: str) -> tuple[str, str]:
    found = kept.values.find(("train", 7), field)
    name = "small" if found.entry.nbytes else found.entry.name(0)
    return found.place.unit, f"{found.place.path}/{name}/c.0" + (".0.0" if field == "e" else "")


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("field", ["text", "tokens", "floats", "e", "long"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "delete"])
def test_damaged_bytes_are_an_error_that_names_the_value(
    local: tuple[Folders, Kept], field: str, damage: str, joined: bool
) -> None:
    hurt(*local, field, damage, joined=joined)


@pytest.mark.parametrize("field", ["text", "tokens"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_damage_is_noticed_wherever_values_lie(
    ground: Ground, kept: Kept, field: str, damage: str
) -> None:
    hurt(ground, kept, field, damage, joined=False)


def hurt(ground: Ground, kept: Kept, field: str, damage: str, *, joined: bool) -> None:
    columns: dict[str, list[Any]] = {
        "text": ["a" * 5_000],
        "tokens": [torch.arange(40_000)],
        "floats": [torch.rand(700_000)],
        "e": [np.arange(240_000, dtype=np.uint16).reshape(6_000, 10, 4)],
        "long": [[*range(100_000)]],
    }
    kept.values.put("train", [7], {field: columns[field]})
    unit, key = key_of(kept, field)
    if damage == "delete":
        ground.remove(unit, key)
    else:
        data = ground.read(unit, key)
        ground.write(
            unit, key, {"flip": flipped(data), "empty": b""}.get(damage, data[: len(data) // 2])
        )
    kind = {"delete": ValueMissing, "flip": ChunkCorrupt}.get(damage, CorruptError)
    with pytest.raises(kind) as caught:
        kept.values.get([("train", 7)], [field], joined=joined)
    assert f"'{field}' of sample 7 (train)" in str(caught.value)
    assert isinstance(caught.value, TqFsError)
    assert caught.value.remedy


def test_a_damaged_value_does_not_keep_others_from_being_read(
    local: tuple[Folders, Kept],
) -> None:
    ground, kept = local
    columns: dict[str, list[Any]] = {"text": ["a" * 5_000, "b" * 5_000], "n": [1, 2]}
    kept.values.put("train", [7, 8], columns)
    unit, key = key_of(kept, "text")
    data = ground.read(unit, key)
    at = kept.values.find(("train", 7), "text").entry.at
    ground.write(unit, key, data[: at + 99] + b"!" + data[at + 100 :])
    with pytest.raises(ChunkCorrupt, match=r"'text' of sample 7 \(train\), in values/r1/"):
        kept.values.get([("train", 8), ("train", 7)], ["n", "text"])
    assert kept.values.get([("train", 7), ("train", 8)], ["n"]) == {"n": [1, 2]}
    assert kept.values.get([("train", 8)], ["text"]) == {"text": ["b" * 5_000]}


def test_of_a_pack_that_was_cut_the_values_are_named_that_are_gone(
    local: tuple[Folders, Kept],
) -> None:
    ground, kept = local
    kept.values.put("train", [5, 6, 7], {"text": ["a" * 5_000, "b" * 5_000, "c" * 5_000]})
    unit, key = key_of(kept, "text")
    ground.write(unit, key, ground.read(unit, key)[:-1])
    with pytest.raises(ObjectShort, match=r"'text' of sample 7 \(train\), in values/"):
        kept.values.get([("train", i) for i in (5, 6, 7)], ["text"])
    assert kept.values.get([("train", 6)], ["text"]) == {"text": ["b" * 5_000]}


def test_reading_does_not_hang_on_a_groups_metadata(local: tuple[Folders, Kept]) -> None:
    ground, kept = local
    columns = put(kept)
    for unit, key in ground.objects():
        if key.endswith("zarr.json"):
            ground.write(unit, key, b"{}")
    assert same_columns(kept.values.get(samples(), list(columns)), columns)


# ---------------------------------------------------------------- puts that fail


def test_an_unsupported_value_of_the_last_sample_leaves_nothing(kept: Kept, ground: Ground) -> None:
    columns = mixed(0)
    columns["odd"][-1] = object()
    with pytest.raises(ValueUnsupported, match="'odd' of sample 3"):
        kept.values.put("train", range(4), columns)
    assert ground.objects() == []
    assert kept.index.totals()["values"] == kept.index.generation == 0


def test_a_column_of_another_length_is_refused(local: tuple[Folders, Kept]) -> None:
    ground, kept = local
    with pytest.raises(InvalidField, match="b: has 1 values for 2 samples"):
        kept.values.put("train", [1, 2], {"a": [1, 2], "b": [1]})
    assert ground.objects() == []


def test_a_put_that_the_index_refuses_leaves_nothing(
    kept: Kept, ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = put(kept, 1, partition="eval")
    keys = ground.objects()

    def refuse(*_: Any) -> Any:
        raise WrongStore("is not yours", subject="the index")

    with monkeypatch.context() as patch:
        patch.setattr(kept.values, "calls", Refusing(kept.keeper, refuse))
        with pytest.raises(WrongStore):
            put(kept)
    assert ground.objects() == keys
    assert same_columns(kept.values.get(samples(4, "eval"), list(before)), before)


@pytest.mark.parametrize("arrived", [False, True])
def test_a_put_whose_answer_is_lost_is_there_or_swept(
    kept: Kept, ground: Ground, monkeypatch: pytest.MonkeyPatch, arrived: bool
) -> None:
    def lose(*arguments: Any) -> Any:
        if arrived:
            kept.keeper.put(*arguments)
        raise StorageFailed("no answer", subject="the keeper")

    with monkeypatch.context() as patch:
        patch.setattr(kept.values, "calls", Refusing(kept.keeper, lose))
        with pytest.raises(StorageFailed):
            put(kept)
    assert ground.objects()  # it may be known: only the index tells
    assert kept.keeper.sweep() == 0
    swept = kept.keeper.sweep()
    columns = mixed(0)
    if arrived:
        assert swept == 0
        assert same_columns(kept.values.get(samples(), list(columns)), columns)
    else:
        assert swept == 4
        assert ground.objects() == []
        with pytest.raises(ValueMissing):
            kept.values.get(samples(), list(columns))


class Refusing:
    """Calls of which one does something else."""

    def __init__(self, calls: Any, put: Any) -> None:
        self._calls = calls
        self.put = put

    def __getattr__(self, name: str) -> Any:
        return getattr(self._calls, name)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tq-fs-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("where", ["folder", "units"])
def test_a_disk_that_is_full_in_the_middle_leaves_what_was_there(
    small_disk: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_roster, "_FULL_BYTES", 0)
    open_ground = folder_ground if where == "folder" else unit_ground
    with open_ground(small_disk) as ground:
        ground.folder = tmp_path / "index"
        with ground.kept() as kept:
            first = {"a": [torch.arange(30_000)]}
            kept.values.put("train", [0], first)
            there = set(ground.objects())
            with pytest.raises(StorageFull):
                kept.values.put("train", range(1, 9), {"a": [torch.rand(200_000)] * 8})
            assert set(ground.objects()) == there
            assert same_columns(kept.values.get(samples(1), ["a"]), first)
            with pytest.raises(ValueMissing):
                kept.values.get([("train", 1)], ["a"])
            kept.values.put("train", [1], {"a": [torch.rand(200_000)]})
            kept.values.clear([("train", 0, None), ("train", 1, None)])
            assert ground.objects() == []


@pytest.mark.root
def test_units_that_are_full_from_the_start_are_said_to_be(small_disk: Path) -> None:
    with (
        unit_ground(small_disk) as ground,
        ground.kept() as kept,
        pytest.raises(StorageFull, match="all units are full"),
    ):
        kept.values.put("train", [0], {"a": [1]})


# ---------------------------------------------------------------- many at once


def folder_config(folder: Path, **settings: Any) -> ValueConfig:
    config = {"url": folder.as_uri(), "store_id": "run", "sweep_s": 0.0, **settings}
    return ValueConfig.of(config)


def test_threads_that_put_get_and_clear_see_whole_values_only(local: tuple[Folders, Kept]) -> None:
    ground, kept = local
    stop = time.monotonic() + 2
    versions = itertools.count(1)
    missing: list[str] = []

    def write(k: int) -> None:
        rng = random.Random(k)
        while time.monotonic() < stop:
            version = next(versions)
            sample = rng.randrange(6)
            if rng.random() < 0.25:
                kept.values.clear([("train", sample, None)])
                continue
            a, b = [torch.full((20_000,), version)], [[version] * 40]
            kept.values.put("train", [sample], {"a": a, "b": b})

    def read(k: int) -> int:
        rng = random.Random(k)
        seen = 0
        while time.monotonic() < stop:
            try:
                found = kept.values.get([("train", rng.randrange(6))], ["a", "b"])
            except ValueMissing as error:
                missing.append(str(error))
                continue
            a: Any = found["a"][0]
            b = found["b"][0]
            assert a.unique().numel() == 1
            assert b == [int(a[0])] * 40  # both of one put
            seen += 1
        return seen

    with ThreadPoolExecutor(6) as pool:
        writers = [pool.submit(write, k) for k in range(3)]
        readers = [pool.submit(read, k) for k in range(3)]
        for writer in writers:
            writer.result()
        assert sum(reader.result() for reader in readers) > 20
    assert not [words for words in missing if "is not there" not in words], missing
    kept.keeper.bury()
    until(lambda: known_paths(kept) == groups_of(ground))
    kept.values.clear([("train", i, None) for i in range(6)])
    kept.keeper.bury()
    until(lambda: ground.objects() == [])


PROCESS = """
import json, pickle, random, sys, time
from contextlib import ExitStack
import torch
from tq_fs.errors import ValueMissing
from tq_fs.keeper import open_values

connection, me = pickle.load(open(sys.argv[1], "rb")), int(sys.argv[2])
rng = random.Random(me)
model = {}
with ExitStack() as opened:
    values = open_values(connection, "n0", opened=opened)
    for step in range(60):
        mine = [100 * me + rng.randrange(5) for _ in range(2)]
        mine = sorted(set(mine))
        what = rng.random()
        if what < 0.5:
            large = [torch.full((20_000,), 1000 * step + i) for i in mine]
            values.put("p", mine, {"small": [[step, i] for i in mine], "large": large})
            for i in mine:
                model[i] = step
        elif what < 0.7:
            values.clear([("p", i, None) for i in mine])
            for i in mine:
                model.pop(i, None)
        else:
            for i in mine:
                try:
                    found = values.get([("p", i)], ["small", "large"])
                except ValueMissing:
                    assert i not in model, (i, model)
                    continue
                assert found["small"] == [[model[i], i]], (found, model)
                assert torch.equal(found["large"][0], torch.full((20_000,), 1000 * model[i] + i))
        version = 1000 * me + step
        values.put("shared", [0], {"v": [version], "w": [torch.full((20_000,), version)]})
        found = values.get([("shared", 0)], ["v", "w"])
        assert torch.equal(found["w"][0], torch.full((20_000,), found["v"][0])), found
print(json.dumps(model))
"""


@pytest.mark.usefixtures("private_tmp")
def test_processes_agree_with_a_model_through_one_keeper(tmp_path: Path) -> None:
    with ExitStack() as opened:
        config = folder_config(tmp_path / "store")
        connection = open_keeper(config, "r1", HERE, again=False, opened=opened)
        (tmp_path / "connection").write_bytes(pickle.dumps(connection))
        with ThreadPoolExecutor(3) as pool:
            runs = [pool.submit(run_child, PROCESS, tmp_path / "connection", k) for k in range(3)]
            done = [run.result() for run in runs]
        model: dict[int, int] = {}
        for child in done:
            assert child.returncode == 0, child.stderr
            model |= {int(i): step for i, step in json.loads(child.stdout).items()}
        values = open_values(connection, "n0", opened=opened)
        names = sorted(model)
        found = values.get([("p", i) for i in names], ["small", "large"])
        assert found["small"] == [[model[i], i] for i in names]
        want = [torch.full((20_000,), 1000 * model[i] + i) for i in names]
        assert all(map(torch.equal, found["large"], want))
        for k in range(3):
            gone = set(range(100 * k, 100 * k + 5)) - set(model)
            for i in gone:
                with pytest.raises(ValueMissing):
                    values.get([("p", i)], ["small"])
        values.clear([("p", i, None) for i in names] + [("shared", 0, None)])
        until(lambda: [*(tmp_path / "store/run/values").iterdir()] == [])


KILLED = """
import os, pickle, sys
from contextlib import ExitStack
import torch
from tq_fs.backends import LocalBackend
from tq_fs.keeper import open_values
from tq_fs.values import OnePlace

connection, point, nth = pickle.load(open(sys.argv[1], "rb")), sys.argv[2], int(sys.argv[3])
left = nth

def at(name):
    global left
    if name == point:
        left -= 1
        if not left:
            os.kill(os.getpid(), 9)

with ExitStack() as opened:
    values = open_values(connection, "n0", opened=opened)
    values.places = OnePlace(LocalBackend(sys.argv[4], ahead=0, at=at))
    if point == "prepared":
        values.prepare("train", range(4), {"a": [torch.rand(20_000) for _ in range(4)]})
        os.kill(os.getpid(), 9)
    values.put("train", range(4), {"a": [torch.rand(20_000) for _ in range(4)]})
"""


@pytest.mark.usefixtures("private_tmp")
@pytest.mark.parametrize(
    ("point", "nth"),
    [("staged", 1), ("members written", 3), ("renamed", 1), ("renamed", 4), ("prepared", 0)],
)
def test_a_writer_killed_in_a_put_leaves_nothing_visible_and_is_swept(
    tmp_path: Path, point: str, nth: int
) -> None:
    root = tmp_path / "store/run"
    with ExitStack() as opened:
        config = folder_config(tmp_path / "store")
        connection = open_keeper(config, "r1", HERE, again=False, opened=opened)
        (tmp_path / "connection").write_bytes(pickle.dumps(connection))
        done = run_child(KILLED, tmp_path / "connection", point, nth, root)
        assert done.returncode == -signal.SIGKILL, done.stderr
        values = open_values(connection, "n0", opened=opened)
        with pytest.raises(ValueMissing):
            values.get(samples(1), ["a"])
        if point != "members written":  # of which some threads may be further than others
            assert bool(left_of(root, "values")) is (point != "staged")
        keeper = keeper_of(opened)
        assert [keeper.sweep(), keeper.sweep()] == [0, 0]  # it is young
        keeper._strange.clear()
        keeper._now_ns = lambda: time.time_ns() + 3600 * 10**9
        assert keeper.sweep() == 0  # it may be of a put that is under way
        keeper.sweep()
        assert left_of(root, "values") == set()
    with ExitStack() as opened:
        open_keeper(config, "r2", HERE, again=False, opened=opened)
        assert left_of(root, ".staging") <= {".staging/reserve"}


def left_of(root: Path, folder: str) -> set[str]:
    return {name for name in tree(root) if name.startswith(f"{folder}/")}


# ---------------------------------------------------------------- helpers


def groups_of(ground: Ground) -> set[str]:
    """Return the groups that lie somewhere, by their paths without an attempt's."""
    return {"/".join(key.split("/")[:4]) for _, key in ground.objects()}


def known_paths(kept: Kept) -> set[str]:
    rows = kept.index._db.execute("SELECT path FROM groups")
    return {"/".join(path.split("/")[:4]) for (path,) in rows}


def until(is_so: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "did not come about"
        time.sleep(0.005)
