"""What is promised of stored values: golden groups, tables of the index, and a checkpoint."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zarr

from tests._rollouts import tree
from tests._values import folder_ground, same_columns
from tq_fs.errors import FormatTooNew
from tq_fs.steps import EncodeOptions, Scratch
from tq_fs.values import CHECKPOINT_FILE, StoredGroup, ValueIndex
from tq_fs.values._entry import GroupAttributes
from tq_fs.values._group import Group, NamedValue, cut, encode_group
from tq_fs.values.codec import encode

GOLDEN = Path(__file__).parent / "golden/values-1"
RUN = "run_é"
SHARDS = [f"values/run___c3_a9/{n:02x}/18ece00000000000-1-0-{n:x}" for n in range(3)]


def golden_columns() -> dict[str, list[Any]]:
    """Return what the golden store holds, for samples 0 to 3 of partition ``train``."""
    rows = np.arange(40_000)
    return {
        "experts": [(rows % 300).astype(np.uint16).reshape(5_000, 4, 2), None, 1, "é"],
        "tokens": [torch.from_numpy(rows % 5), torch.arange(3), 2.5, [1, "a", None]],
        "text": ["x" * 600, b"bytes", {"k": (1, 2)}, np.arange(4, dtype=np.float16)],
        "list": [[*range(3)], [*range(50_000)], True, ""],
    }


def golden_groups() -> list[Group]:
    """Return the golden groups as today's code encodes them: one of each sample with arrays,
    of which the first has layers in two parts, and a pack.
    """
    values = [
        NamedValue(i, field, encode(value, allow_pickle=False, subject=""))
        for field, column in golden_columns().items()
        for i, value in enumerate(column)
    ]
    options = EncodeOptions(layer_groups=2, compact=True)
    return [encode_group("run", RUN, "train", group, options, Scratch()) for group in cut(values)]


def joined(members: Mapping[str, Any]) -> dict[str, bytes]:
    return {
        name: b"".join(bytes(np.asarray(part)) for part in parts) for name, parts in members.items()
    }


def test_the_golden_groups_are_encoded_to_the_same_bytes() -> None:
    groups = golden_groups()
    assert len(groups) == len(SHARDS)
    for path, group in zip(SHARDS, groups, strict=True):
        members = joined(group.members)
        assert tree(GOLDEN / path) == set(members)
        for name, data in members.items():
            assert (GOLDEN / path / name).read_bytes() == data, (path, name)


def test_the_golden_groups_open_with_zarr() -> None:
    large = zarr.open_group(GOLDEN / SHARDS[0], mode="r")
    names = dict(large.arrays())
    assert sorted(names) == ["a0", "a1", "small"]
    found: Any = [names[name][:] for name in ("a0", "a1")]
    columns = golden_columns()
    assert np.array_equal(found[0], columns["experts"][0])
    assert np.array_equal(found[1], columns["tokens"][0].numpy())
    attributes = msgspec.convert(large.attrs["tq_fs"], GroupAttributes)
    assert (attributes.schema, attributes.store_id, attributes.run, attributes.partition) == (
        "tq-fs/values/1",
        "run",
        RUN,
        "train",
    )
    assert [(v.index, v.field) for v in attributes.values] == [
        (0, field) for field in ("experts", "tokens", "text", "list")
    ]
    pack = zarr.open_group(GOLDEN / SHARDS[2], mode="r")
    assert sorted(dict(pack.arrays())) == ["small"]


def test_a_golden_checkpoint_is_loaded_and_its_values_are_what_they_were(tmp_path: Path) -> None:
    for name in ("values", "checkpoints"):
        shutil.copytree(GOLDEN / name, tmp_path / "store" / name)
    columns = golden_columns()
    with folder_ground(tmp_path) as ground, ground.kept("later") as kept:
        assert kept.keeper.sweep() == kept.keeper.sweep() == 0
        kept.values.load(GOLDEN)
        found = kept.values.get([("train", i) for i in range(4)], list(columns))
        assert same_columns(found, columns)
        kept.values.clear([("train", i, None) for i in range(4)])
        assert tree(tmp_path / "store/values") == tree(GOLDEN / "values")  # the checkpoint's


def test_the_tables_of_the_index_are_the_golden_ones(tmp_path: Path) -> None:
    with closing(ValueIndex(tmp_path / "index", "run")) as index:
        tables = [sql for (sql,) in index._db.execute("SELECT sql FROM sqlite_master") if sql]
        (version,) = index._db.execute("PRAGMA user_version").fetchone()
    text = "".join(f"{sql};\n" for sql in [*tables, f"PRAGMA user_version = {version}"])
    assert text == (GOLDEN / "index.sql").read_text()


def test_golden_files_of_a_later_version_are_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "values", tmp_path / "store/values")
    shutil.copytree(GOLDEN / "checkpoints", tmp_path / "store/checkpoints")
    shutil.copy(GOLDEN / CHECKPOINT_FILE, tmp_path)
    with closing(sqlite3.connect(tmp_path / CHECKPOINT_FILE)) as db:
        db.execute("PRAGMA user_version = 2")
    with folder_ground(tmp_path) as ground:
        with ground.kept() as kept, pytest.raises(FormatTooNew, match="upgrade tq-fs"):
            kept.values.load(tmp_path)
        for _, key in ground.objects("checkpoints"):
            if not key.endswith(".saved"):
                document = ground.read("", key)
                ground.write("", key, document.replace(b"tq-fs/pins/1", b"tq-fs/pins/2"))
        with pytest.raises(FormatTooNew, match="tq-fs/pins/2"), ground.kept("r2"):
            pass


def make(folder: Path) -> None:
    """Write the golden files of this version anew; called by hand."""
    with (
        folder_ground(folder) as ground,
        ground.kept(RUN, now_ns=lambda: 0x18ECE00000000000) as kept,
    ):
        stored = []
        for path, group in zip(SHARDS, golden_groups(), strict=True):
            place = kept.places.publish(path, group.members)
            stored.append(StoredGroup(place.unit, place.path, group.nbytes, group.values))
        kept.index.put("train", stored)
        kept.values.save(folder)
        tables = [r[0] for r in kept.index._db.execute("SELECT sql FROM sqlite_master") if r[0]]
        text = "".join(f"{sql};\n" for sql in [*tables, "PRAGMA user_version = 1"])
    for name in ("values", "checkpoints"):
        shutil.copytree(folder / "store" / name, GOLDEN / name)
    shutil.copy(folder / CHECKPOINT_FILE, GOLDEN)
    (GOLDEN / "index.sql").write_text(text)
