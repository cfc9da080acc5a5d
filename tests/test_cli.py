"""The command line and the benchmark behind it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tq_fs.bench._disk import measuring_place
from tq_fs.cli import main

KEYS = {
    "write.x_raw",
    "write.x_raw_crc32c",
    "write.x_floor",
    "write.vs_zarr_python",
    "read.x_raw",
    "read.x_raw_crc32c",
    "read.vs_zarr_python",
    "partial.quarter_tokens",
    "partial.quarter_layers",
}
SMALL = ["--tokens", "96", "--layers", "8", "--topk", "4", "--repeats", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_bench_step_prints_one_json_object_of_positive_ratios(
    dtype: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = main(["bench", "step", *SMALL, "--dtype", dtype, "--root", str(tmp_path), "--json", "-"])
    out, err = capfd.readouterr()
    document = json.loads(out)
    assert code == 0
    assert set(document) >= KEYS
    assert all(document[key] > 0 for key in KEYS)
    assert document["settings"]["dtype"] == dtype
    assert "Read to int32" in err
    assert list(tmp_path.iterdir()) == []


def test_bench_step_writes_the_json_where_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "ratios.json"
    assert main(["bench", "step", *SMALL, "--root", str(tmp_path / "b"), "--json", str(path)]) == 0
    assert json.loads(path.read_text())["write.x_raw"] > 0


FIGURES = {
    "bytes_per_step",
    "fragments_per_s",
    "x_flat",
    "restart_s",
    "restart_killed_s",
    "restart_closed_s",
    "sweep_us_per_step",
}


@pytest.mark.slow
def test_bench_controller_prints_one_json_object_of_positive_figures(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--steps", "31000", "--root", str(tmp_path), "--json", "-"]
    assert main(["bench", "controller", *arguments]) == 0
    out, err = capfd.readouterr()
    document = json.loads(out)
    assert set(document) >= {f"controller.{name}" for name in FIGURES}
    assert all(document[f"controller.{name}"] > 0 for name in FIGURES)
    assert document["settings"]["steps"] == 31000
    assert "31,000 Steps" in err
    assert list(tmp_path.iterdir()) == []


def test_bench_controller_refuses_fewer_steps_than_it_compares_with(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "controller", "--steps", "10000"]) == 2
    assert "steps: 10,000 are too few; 30,480 or more" in capsys.readouterr().err


def test_a_place_of_our_own_is_journaled_and_goes_away_again() -> None:
    with measuring_place(None, 64 * 1024 * 1024) as place:
        (place.folder / "file").write_bytes(b"x")
        if "loop mount" not in place.kind or "not permitted" in place.kind:
            pytest.skip(f"measured on {place.kind}")
        assert f" {place.folder} ext4" in Path("/proc/mounts").read_text()
    assert str(place.folder) not in Path("/proc/mounts").read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["bench"],
        ["bench", "step", "--tokens", "0"],
        ["bench", "step", "--dtype", "int8"],
        ["x"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        *(["demo"], ["recover"], ["serve"], ["bench", "step"], ["bench", "s3"]),
        *(["bench", "channel"], ["bench", "controller"], ["bench", "memory"]),
    ],
)
def test_help_shows_an_example(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--help"])
    assert exit_.value.code == 0
    assert f"example:\n  tq-fs {' '.join(arguments)}" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_an_error_with_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert main(["bench", "step", *SMALL, "--root", str(blocker / "x")]) == 1
    assert str(blocker) in capsys.readouterr().err


def test_the_installed_command_says_its_version() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tq_fs.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith("tq-fs 0.")
