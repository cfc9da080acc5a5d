"""The flags: off by default, loud where they contradict each other, at home in others' parsers."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tq_fs
from tq_fs import flags
from tq_fs.config import StoreConfig
from tq_fs.errors import InvalidConfig, ValueOutOfRange
from tq_fs.flags import TransferFlags

ROOT = Path(__file__).parent.parent
ALL = (flags.ENABLE, flags.CONFIG, flags.PARAMS, flags.DTYPE, flags.REPLAY)
REPLAY = ["--use-rollout-routing-replay"]


def model(experts: int = 384, layers: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        **more,
    }


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="host")
    flags.add_arguments(parser)
    return parser


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "store.yaml"
    path.write_text(f"url: {(tmp_path / 'store').as_uri()}\nstore_id: run-1\n")
    return path


def parsed(*arguments: str | Path) -> TransferFlags:
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    return flags.from_arguments(parser.parse_args([str(a) for a in arguments]))


def on(config: Path, *arguments: str) -> TransferFlags:
    return parsed("--enable-transfer-queue", "--transfer-queue-config", config, *arguments)


# ---------------------------------------------------------------- off, on


def test_all_is_off_by_default() -> None:
    found = parsed()
    assert found == TransferFlags()
    assert (found.selected, found.url()) == ((), None)
    assert [spec.name for spec in found.fields()] == ["logprobs"]


def test_a_namespace_without_the_flags_is_off() -> None:
    assert flags.from_arguments(argparse.Namespace()) == TransferFlags()


def test_without_the_queue_a_store_is_off_and_the_compact_type_counts() -> None:
    found = parsed(*REPLAY, "--routed-experts-dtype", "uint16", "--transfer-params", "logprobs")
    config = found.store_config()
    assert (config.transfer, config.compact) == ((), True)
    with found.open(model()) as store:
        assert store.url is None
    assert found.fields(model())[1].stored == "uint16"


def test_the_queue_stores_all_that_is_recorded(config: Path) -> None:
    assert on(config).selected == ("logprobs",)
    assert on(config, *REPLAY).selected == ("logprobs", "routed_experts")


@pytest.mark.parametrize("names", [["logprobs"], ["routed_experts"], list(flags.NAMES)])
def test_transfer_params_choose_among_them(config: Path, names: list[str]) -> None:
    found = on(config, *REPLAY, "--transfer-params", *names)
    assert found.store_config().transfer == tuple(names)
    assert [spec.name for spec in found.fields(model())] == list(flags.NAMES)


def test_transfer_params_count_more_than_the_file(config: Path) -> None:
    config.write_text(config.read_text() + "transfer: [logprobs]\n")
    assert on(config, *REPLAY).selected == ("logprobs",)
    found = on(config, *REPLAY, "--transfer-params", "routed_experts")
    assert found.selected == ("routed_experts",)


def test_a_name_that_is_given_twice_counts_once(config: Path) -> None:
    assert on(config, "--transfer-params", "logprobs", "logprobs").selected == ("logprobs",)


def test_settings_of_the_file_reach_the_store(config: Path, tmp_path: Path) -> None:
    config.write_text(config.read_text() + "checksum: false\n")
    found = on(config, *REPLAY, "--routed-experts-dtype", "uint16")
    with found.open(model()) as store:
        assert store.location == tmp_path / "store" / "run-1"
        assert (store.config.checksum, store.config.compact) == (False, True)
        assert store.config.transfer == ("logprobs", "routed_experts")


def test_another_process_can_open_it_to_read(config: Path) -> None:
    found = on(config)
    with found.open(), found.open(read_only=True) as reader:
        assert reader.reader is not None


def test_what_is_not_selected_stays_in_memory_in_its_compact_type(config: Path) -> None:
    found = on(config, *REPLAY, "--transfer-params", "logprobs", "--routed-experts-dtype", "uint8")
    ids = np.arange(2 * 4 * 2, dtype=np.int32).reshape(2, 4, 2)
    with found.open(model(256)) as store:
        session = store.session("a")
        session.create([1, 2], [3], logprobs=np.zeros(1, np.float32), routed_experts=ids)
        (segment,) = session.finalize()
        (kept,) = store.hydrate([segment])["rollout_routed_experts"]
    assert segment.arrays["routed_experts"].dtype == np.uint8
    assert kept.numpy().dtype == np.int32
    assert np.array_equal(kept.numpy(), ids)


def test_an_id_beyond_the_compact_type_is_refused_without_the_queue_too() -> None:
    found = parsed(*REPLAY, "--routed-experts-dtype", "uint8")
    ids = np.full((1, 4, 2), 256, np.int32)
    with found.open() as store:
        session = store.session("a")
        with pytest.raises(ValueOutOfRange, match="256"):
            session.create([1], [2], logprobs=np.zeros(1, np.float32), routed_experts=ids)
        assert session.records == []


def test_a_cluster_of_the_file_is_attached_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    asked: list[Any] = []

    class Running:
        def store(self, fields: Any, **settings: Any) -> str:
            asked.append(([spec.name for spec in fields], settings))
            return "store"

    def attach(store_id: str) -> Running:
        asked.append(store_id)
        return Running()

    monkeypatch.setattr("tq_fs.cluster.attach", attach)
    path = tmp_path / "cluster.yaml"
    path.write_text("store_id: run-1\nurl: s3://bucket/x\ncluster: {paths: [/nvme/tq-fs]}\n")
    found = on(path, *REPLAY, "--transfer-params", "routed_experts")
    assert found.url() is None
    assert found.open() == "store"  # type: ignore[comparison-overlap]
    settings = {"metrics": None, "transfer": ("routed_experts",), "compact": True}
    assert asked == ["run-1", (["logprobs", "routed_experts"], settings)]


# ---------------------------------------------------------------- contradictions


def test_experts_are_only_stored_where_they_are_recorded(config: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"--transfer-params.*--use-rollout-routing-replay"):
        on(config, "--transfer-params", "logprobs", "routed_experts")
    config.write_text(config.read_text() + "transfer: [routed_experts]\n")
    with pytest.raises(InvalidConfig, match=r"-queue-config.*--use-rollout-routing-replay"):
        on(config)
    on(config, *REPLAY)


def test_without_the_queue_nothing_is_stored_that_is_not_recorded() -> None:
    assert parsed("--transfer-params", "routed_experts").selected == ()


def test_an_unknown_field_is_refused_by_the_parser(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--transfer-params", "logprobs", "entropy"])
    assert ended.value.code == 2
    assert "argument --transfer-params: invalid choice: 'entropy'" in capsys.readouterr().err


@pytest.mark.parametrize("enabled", [False, True])
def test_an_unknown_field_of_another_parser_is_refused(enabled: bool, config: Path) -> None:
    namespace = argparse.Namespace(
        enable_transfer_queue=enabled,
        transfer_queue_config=config,
        transfer_params=["logprobs", "entropy"],
    )
    with pytest.raises(InvalidConfig, match=r"--transfer-params: unknown fields entropy; choose"):
        flags.from_arguments(namespace)


def test_an_unknown_field_of_the_file_is_refused(config: Path) -> None:
    config.write_text(config.read_text() + "transfer: [entropy]\n")
    with pytest.raises(InvalidConfig, match=r"--transfer-queue-config, transfer: unknown fields"):
        on(config)


def test_names_in_one_text_are_taken_apart() -> None:
    found = flags.from_arguments(argparse.Namespace(transfer_params="logprobs, routed_experts"))
    assert found.params == flags.NAMES


@pytest.mark.parametrize(
    ("dtype", "experts", "fitting"),
    [
        ("uint8", 257, "uint16 or int32 or auto"),
        ("uint8", 384, "uint16 or int32 or auto"),
        ("uint16", 65_537, "int32 or auto"),
    ],
)
def test_a_type_too_small_for_the_experts_is_refused(
    dtype: str, experts: int, fitting: str
) -> None:
    found = parsed(*REPLAY, "--routed-experts-dtype", dtype)
    with pytest.raises(InvalidConfig) as raised:
        found.fields(model(experts))
    assert str(raised.value).startswith(f"--routed-experts-dtype: {dtype} holds ")
    assert f"the model has {experts:,}" in str(raised.value)
    assert raised.value.remedy == f"use {fitting}"
    with pytest.raises(InvalidConfig, match="--routed-experts-dtype"):
        found.open(model(experts))


@pytest.mark.parametrize(
    ("dtype", "experts"),
    [("uint8", 256), ("uint16", 65_536), ("int32", 100_000), ("auto", 384), ("auto", 128)],
)
def test_a_type_that_is_large_enough_is_taken(dtype: str, experts: int) -> None:
    declared = parsed(*REPLAY, "--routed-experts-dtype", dtype).fields(model(experts))[1]
    assert (declared.stored, declared.limit, declared.inner) == (dtype, experts, (4, 2))


def test_the_seed_s_type_is_the_default() -> None:
    assert parsed(*REPLAY).fields(model())[1].stored == "int32"


def test_without_a_model_the_shape_is_left_open() -> None:
    declared = parsed(*REPLAY).fields()[1]
    assert (declared.inner, declared.limit) == (None, None)


def test_layers_without_experts_count_as_sglang_counts_them() -> None:
    dense = model(first_k_dense_replace=1)
    found = parsed(*REPLAY)
    assert found.fields(dense)[1].inner == (4, 2)
    assert found.fields(dense, dense_layers=False)[1].inner == (3, 2)


def test_replay_of_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 4}))
    with pytest.raises(InvalidConfig) as raised:
        parsed(*REPLAY).fields(tmp_path)
    assert str(raised.value).startswith("--use-rollout-routing-replay, ")
    assert "leave --use-rollout-routing-replay out" in raised.value.remedy
    assert [spec.name for spec in parsed().fields(tmp_path)] == ["logprobs"]


def test_an_unknown_type_is_refused_wherever_it_comes_from(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["--routed-experts-dtype", "int8"])
    assert "argument --routed-experts-dtype: invalid choice: 'int8'" in capsys.readouterr().err
    with pytest.raises(InvalidConfig, match=r"--routed-experts-dtype: 'int8'.*int32, uint16"):
        flags.from_arguments(argparse.Namespace(routed_experts_dtype="int8"))


def test_the_queue_needs_a_file_that_says_where() -> None:
    with pytest.raises(InvalidConfig, match="--transfer-queue-config: is missing"):
        parsed("--enable-transfer-queue")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("store_id: run-1", "--transfer-queue-config: the file says neither url nor cluster"),
        ("- 1", "holds no mapping"),
        ("url: [", "cannot be read"),
        ("url: file:///x\nspeed: 9", r"unknown keys \['speed'\]"),
        ("url: file:///x\nlayout: round", "layout: 'round'"),
        ("url: file:///x\ntransfer: []", "--transfer-queue-config: names no field"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(config: Path, text: str, said: str) -> None:
    config.write_text(text)
    with pytest.raises(InvalidConfig, match=said) as raised:
        on(config)
    assert str(raised.value).startswith("--transfer-queue-config")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"--transfer-queue-config .*none.yaml: cannot be read"):
        on(tmp_path / "none.yaml")


def test_without_the_queue_the_file_is_not_read(tmp_path: Path) -> None:
    assert parsed("--transfer-queue-config", tmp_path / "none.yaml") == TransferFlags()


def test_they_can_be_made_without_a_parser() -> None:
    made = TransferFlags(enabled=True, config=StoreConfig(url="file:///x"), replay=True)
    assert made.selected == ("logprobs", "routed_experts")
    with pytest.raises(InvalidConfig, match="--transfer-params: names no field"):
        TransferFlags(enabled=True, config=StoreConfig(url="file:///x"), params=())


# ---------------------------------------------------------------- others' parsers


@pytest.mark.parametrize("handler", ["error", "resolve"])
@pytest.mark.parametrize("default", [False, None])
def test_a_flag_that_a_parser_has_is_accepted(handler: str, default: bool | None) -> None:
    host = argparse.ArgumentParser(conflict_handler=handler)
    host.add_argument(
        "--use-rollout-routing-replay", action="store_true", default=default, help="of the host"
    )
    flags.add_arguments(host)
    found = flags.from_arguments(host.parse_args(REPLAY))
    assert found.replay
    assert not flags.from_arguments(host.parse_args([])).replay
    if default is False:
        assert "of the host" in host.format_help()
    assert host.format_help().count("--use-rollout-routing-replay\n") == 1


def test_adding_them_twice_changes_nothing(parser: argparse.ArgumentParser) -> None:
    before = parser.format_usage()
    flags.add_arguments(parser)
    assert parser.format_usage() == before


def test_they_are_told_in_help(parser: argparse.ArgumentParser) -> None:
    shown = " ".join(parser.format_help().split())
    assert all(flag in shown for flag in ALL)
    assert "needed with --enable-transfer-queue" in shown
    assert "needed to store routed_experts" in shown
    assert "(default: int32)" in shown


LIGHT = """
import sys
import tq_fs.flags
loaded = {name.partition(".")[0] for name in sys.modules}
print(sorted(loaded & {"torch", "ray", "fastapi", "uvicorn", "aiohttp", "transformers", "zarr"}))
"""


def test_importing_them_is_light() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LIGHT],
        env={**os.environ, "PYTHONPATH": str(Path(tq_fs.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
