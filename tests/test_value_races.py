"""Values under what happens at the same time, and what clients make up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests._values import Kept, folder_ground
from tq_fs.backends import LocalBackend
from tq_fs.errors import InvalidKey, ObjectMissing, StorageFull, ValueMissing
from tq_fs.values import Keeper, StoredGroup, group_path

ROW = ("train", 1)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    with folder_ground(tmp_path) as ground, ground.kept() as found:
        yield found


def put(kept: Kept, value: float) -> None:
    kept.values.put("train", [1], {"x": [torch.full((20_000,), value)]})


def holds(kept: Kept, value: float) -> bool:
    found = kept.values.get([ROW], ["x"])["x"]
    assert isinstance(found, list)
    return bool(found[0].equal(torch.full((20_000,), value)))


def test_what_is_put_while_a_checkpoint_is_saved_is_not_in_it(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(kept, 1.0)
    settle = LocalBackend.settle

    def put_meanwhile(backend: LocalBackend, prefix: str) -> None:
        monkeypatch.undo()
        put(kept, 2.0)
        settle(backend, prefix)

    monkeypatch.setattr(LocalBackend, "settle", put_meanwhile)
    kept.values.save(tmp_path / "saved")
    assert holds(kept, 2.0)
    kept.values.clear([(*ROW, None)])
    kept.values.load(tmp_path / "saved")
    assert holds(kept, 1.0)


def test_what_was_swept_before_its_names_were_told_is_refused(kept: Kept) -> None:
    late = kept.values.prepare("train", [1], {"x": [torch.zeros(20_000)]})
    assert (kept.keeper.sweep(), kept.keeper.sweep()) == (0, 1)
    with pytest.raises(ObjectMissing, match="swept"):
        kept.values.commit("train", [late])
    with pytest.raises(ValueMissing):
        kept.values.get([ROW], ["x"])


def test_a_group_that_was_named_lately_is_not_swept(tmp_path: Path) -> None:
    with folder_ground(tmp_path) as ground, ground.kept() as kept:
        keeper = Keeper(
            kept.index, ground.places, "run", "r1",
            checkpoints=1, sweep_s=0, check=lambda: None, grace_s=60.0,
        )  # fmt: skip
        late = kept.values.prepare("train", [1], {"x": [torch.ones(20_000)]})
        assert [keeper.sweep() for _ in range(3)] == [0, 0, 0]
        kept.values.commit("train", [late])
        assert holds(kept, 1.0)


def test_a_repeated_request_that_is_refused_leaves_what_the_first_has_stored(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = kept.values.prepare("train", [1], {"x": [torch.ones(20_000)]})
    (group,) = prepared.groups
    kept.keeper.put_group("train", group)

    def full(*_: object) -> Any:
        raise StorageFull("no room", subject="index")

    with monkeypatch.context() as patched:
        patched.setattr(kept.index, "put", full)
        with pytest.raises(StorageFull):
            kept.keeper.put_group("train", group)
    assert holds(kept, 1.0)


def test_a_refused_group_goes_at_once(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = kept.values.prepare("train", [1], {"x": [torch.ones(20_000)]})
    (group,) = prepared.groups

    def full(*_: object) -> Any:
        raise StorageFull("no room", subject="index")

    monkeypatch.setattr(kept.index, "put", full)
    with pytest.raises(StorageFull):
        kept.keeper.put_group("train", group)
    shard, _, name = group_path(group.path).rpartition("/")
    assert name not in list(kept.places.backend("").list(shard))


@pytest.mark.parametrize(
    "path", ["values", "values/r1/00", "checkpoints/a/b/c", "steps/a/b/c", "values/../b/c", ""]
)
def test_groups_elsewhere_are_refused(kept: Kept, path: str) -> None:
    group = StoredGroup("", path, 1, ())
    for put_it in (
        lambda: kept.keeper.put("train", [group]),
        lambda: kept.keeper.put_group("train", group),
    ):
        with pytest.raises(InvalidKey):
            put_it()


def test_an_interrupt_deletes_nothing_that_the_index_may_have(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = kept.keeper.put

    def interrupted(*asked: Any) -> Any:
        taken(*asked)
        raise KeyboardInterrupt

    monkeypatch.setattr(kept.keeper, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        put(kept, 1.0)
    assert holds(kept, 1.0)


def test_a_keeper_that_sweeps_ends_at_once(kept: Kept) -> None:
    for _ in range(20):
        keeper = Keeper(
            kept.index, kept.places, "run", "r1", checkpoints=1, sweep_s=60.0, check=lambda: None
        )
        ended = threading.Thread(target=keeper.close)
        begun = time.monotonic()
        ended.start()
        ended.join(10)
        assert time.monotonic() - begun < 5
