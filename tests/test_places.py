"""Where a store lies: what is refused, and what two places must not do to each other."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

import tq_fs
from tests._rollouts import assert_batch, record, short_rollout, specs, standard_fields
from tq_fs import StoreConfig
from tq_fs.errors import InvalidConfig, StoreFenced
from tq_fs.manifests import Catalog

FIELDS = standard_fields()


def open_at(url: str, folder: Path | None = None, **settings: Any) -> tq_fs.Store:
    tier: dict[str, Any] = (
        {} if folder is None else {"tier": {"folder": str(folder), **settings.pop("tier", {})}}
    )
    return tq_fs.open_store(url, fields=specs(FIELDS), **tier, **settings)


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/stores"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tier", {"folder": "/nowhere"}),
        ("storage_options", {"region": "x"}),
        ("driver", "s3fs"),
    ],
)
def test_settings_of_object_stores_are_refused_for_a_folder(
    tmp_path: Path, name: str, value: object
) -> None:
    with pytest.raises(InvalidConfig, match=f"{name}.*object stores"):
        tq_fs.open_store(
            tmp_path.as_uri(), fields=specs(FIELDS), config=StoreConfig.of({name: value})
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [0, 7])
def test_a_front_that_a_power_cut_shortened_never_replaces_what_was_uploaded(
    tmp_path: Path, url: str, size: int
) -> None:
    with open_at(url, tmp_path, tier={"cache_bytes": 0}) as store:
        segments, want = record(store, "a", 1)
    cut = [p for p in (tmp_path / "default/steps").rglob("*") if p.is_file()]
    for path in cut:
        path.write_bytes(path.read_bytes()[:size])
    with open_at(url, tmp_path, tier={"cache_bytes": 0}) as store:
        assert_batch(store.hydrate(segments), want)
    assert not [p for p in cut if p.exists()]
    with open_at(url) as store:
        assert store.recovery.incomplete == ()
        assert_batch(store.hydrate(segments), want)


def test_a_finalize_that_another_process_overtook_is_not_acknowledged(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Catalog.publish

    def overtaken(self: Catalog, *args: Any) -> None:
        monkeypatch.undo()
        open_at(url).close()  # sweeps the Steps of the session, which has no manifest yet
        publish(self, *args)

    with open_at(url) as store:
        session = store.session("s")
        short_rollout(FIELDS, 0).record(session)
        monkeypatch.setattr(Catalog, "publish", overtaken)
        with pytest.raises(StoreFenced):
            session.finalize()


def test_a_store_may_be_named_like_another_ones_cache(tmp_path: Path, url: str) -> None:
    for names in (("run", "run.cache", ".cache"), ("x.cache", "x", "_cache")):
        stores = [open_at(url, tmp_path, store_id=name) for name in names]
        kept = [record(store, "a", i) for i, store in enumerate(stores)]
        for store, (segments, want) in zip(stores, kept, strict=True):
            assert_batch(store.hydrate(segments), want)
            store.close()
        for name, (segments, want) in zip(names, kept, strict=True):
            with open_at(url, tmp_path, store_id=name) as store:
                assert_batch(store.hydrate(segments), want)
