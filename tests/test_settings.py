"""Ids and settings of a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tq_fs
from tests._rollouts import (
    FIELDS,
    assert_batch,
    open_store,
    record,
    refs_of,
    specs,
    tree,
)
from tq_fs import StoreConfig
from tq_fs.config import folder_of
from tq_fs.errors import (
    InvalidConfig,
    InvalidKey,
)
from tq_fs.keys import SegmentRef

# ---------------------------------------------------------------- ids

WEIRD = {
    "slash": "a/b",
    "two dots": "..",
    "a dot": ".",
    "hidden": ".hidden",
    "percent": "100%2F",
    "colon": "tqfs1:x",
    "bracket": "[a]*?",
    "under score": "_",
    "escape look-alike": "_2f__h",
    "empty": "",
    "blank": "  \t\n",
    "null": "a\0b",
    "accent": "é",
    "decomposed accent": "e\u0301",
    "emoji": "🧵",
    "upper": "ID",
    "lower": "id",
    "300 bytes": "x" * 300,
    "300 bytes of accents": "é" * 150,
    "300 bytes that end otherwise": "x" * 299 + "y",
    "1000 bytes": "/" * 1000,
}


def test_every_id_round_trips_as_session_and_as_partition(tmp_path: Path) -> None:
    want = {}
    with open_store(tmp_path, FIELDS, store_id="weird/../id %") as store:
        for i, text in enumerate(WEIRD.values()):
            for partition, session in [(text, "s"), ("p", text), (text, text)]:
                segments, (arrays,) = record(store, session, i, partition)
                want[refs_of(segments)[0]] = (partition, session, arrays)
        assert len(want) == 3 * len(WEIRD)
    (root,) = tmp_path.iterdir()
    assert root.name == "weird_2f.._2fid_20_25"
    for tree_of in ("steps", "manifests"):
        assert len(list((root / tree_of / "p").iterdir())) == len(WEIRD)  # a folder for each
    with open_store(tmp_path, FIELDS, store_id="weird/../id %") as store:
        assert store.recovery.swept_steps == 0
        assert set(store.unreleased()) == set(want)
        for text in WEIRD.values():
            mine = {ref for ref, (p, _, _) in want.items() if p == text}
            assert set(store.unreleased(partition=text)) == mine
        for ref, (partition, session, arrays) in want.items():
            where = SegmentRef.parse(ref).incarnation
            assert (where.partition, where.session_id) == (partition, session)
            assert_batch(store.hydrate([ref]), [arrays])
        assert store.release(want) == 3 * len(want)
    assert tree(tmp_path) == {"weird_2f.._2fid_20_25/store.json"}


@pytest.mark.parametrize("bad", ["x" * 1001, "x" * 2000, "é" * 501, "\ud800"])
def test_ids_that_are_too_long_or_no_text_are_refused(tmp_path: Path, bad: str) -> None:
    with open_store(tmp_path, FIELDS) as store:
        for partition, session in [("train", bad), (bad, "s")]:
            with pytest.raises(InvalidKey):
                store.session(session, partition=partition)
    with pytest.raises(InvalidKey):
        open_store(tmp_path, FIELDS, store_id=bad)
    assert tree(tmp_path) == {"default/store.json"}


# ---------------------------------------------------------------- configuration


def test_unknown_keys_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidConfig, match=r"unknown keys \['cache_byte'\].*cache_bytes"):
        StoreConfig.of({"cache_byte": 1})
    with pytest.raises(InvalidConfig, match="unknown keys"):
        tq_fs.open_store(None, fields=specs(FIELDS), cash_bytes=1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_groups", 0),
        ("writer_threads", 0),
        ("reader_threads", -1),
        ("inflight_bytes", 0),
        ("inflight_bytes", 1.5),
        ("prepared_groups", -1),
        ("cache_bytes", "1 GiB"),
        ("manifest_cache_bytes", True),
        ("inflight_deadline_s", -1),
        ("inflight_deadline_s", "soon"),
        ("inflight_deadline_s", float("nan")),
        ("checksum", "yes"),
        ("compact", 1),
        ("durability", "sometimes"),
        ("transfer", ["logprobs", "nonsense"]),
        ("transfer", "logprobs"),
        ("store_id", 7),
        ("layout", "tight"),
        ("driver", "boto3"),
        ("persist_trajectories", "yes"),
        ("retry_deadline_s", -1),
        ("request_timeout_s", "soon"),
        ("tier", {}),
        ("tier", {"folder": "relative"}),
        ("tier", {"folder": "/nvme", "polcy": "write-back"}),
        ("tier", {"folder": "/nvme", "policy": "write-around"}),
        ("tier", {"folder": "/nvme", "capacity_bytes": 0}),
        ("tier", {"folder": "/nvme", "low_water": 0.95}),
        ("tier", {"folder": "/nvme", "upload_threads": 0}),
    ],
)
def test_values_that_make_no_sense_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(tq_fs.errors.InputError):
        open_store(tmp_path, FIELDS, **{key: value})
    assert tree(tmp_path) == set()


def test_the_largest_step_fits_the_default_budget() -> None:
    assert StoreConfig().inflight_bytes >= 256 * 1024 * 75 * 8 * 4  # tokens, layers, top-k, int32


def test_a_configuration_is_read_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "store.yaml"
    path.write_text("store_id: run-7\ntransfer: [routed_experts]\nlayer_groups: 4\n")
    config = StoreConfig.from_yaml(path)
    assert config == StoreConfig(store_id="run-7", transfer=("routed_experts",), layer_groups=4)
    with open_store(tmp_path, FIELDS, config=config, cache_bytes=0) as store:
        assert store.config.store_id == "run-7"
        assert (store.config.cache_bytes, store.config.layer_groups) == (0, 4)
    for text in ["- a list", "a: [1", "", "store_ids: x"]:
        path.write_text(text)
        with pytest.raises(InvalidConfig):
            StoreConfig.from_yaml(path)
    with pytest.raises(InvalidConfig, match="cannot be read"):
        StoreConfig.from_yaml(tmp_path / "none.yaml")


def test_an_unknown_kind_of_store_is_refused_with_the_known_ones() -> None:
    for url in [
        "/no/scheme",
        "relative",
        "file://host/folder",
        "http://x/y",
        "",
    ]:
        with pytest.raises(InvalidConfig, match="known: file:///absolute/folder"):
            tq_fs.open_store(url, fields=specs(FIELDS))
    with pytest.raises(InvalidConfig, match=r"nonsense://x/y.*not known"):
        tq_fs.open_store("nonsense://x/y", fields=specs(FIELDS))
    for url in ["file:///a?b=c", "file:///a#b", "file:relative"]:
        with pytest.raises(InvalidConfig, match="absolute"):
            tq_fs.open_store(url, fields=specs(FIELDS))


def test_a_url_may_hold_spaces_and_percent_escapes(tmp_path: Path) -> None:
    for name in ["with space", "ünï", "100%", "a#b?c"]:
        folder = tmp_path / name
        assert folder_of(folder.as_uri()) == folder
        with open_store(folder, FIELDS) as store:
            segments, want = record(store, "a", 1)
            assert_batch(store.hydrate(segments), want)
        assert (folder / "default/store.json").is_file()
    unescaped = f"file://{tmp_path}/with space"
    with tq_fs.open_store(unescaped, fields=specs(FIELDS)) as store:
        refs = list(store.unreleased())
        assert len(refs) == 1
        assert_batch(store.hydrate(refs), want)


def test_a_field_is_declared_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="declared twice"):
        tq_fs.open_store(tmp_path.as_uri(), fields=[tq_fs.logprobs(), tq_fs.logprobs()])
