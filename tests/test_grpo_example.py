"""The GRPO example, small: the same to the bit wherever trajectories lie, killed or not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tq_fs

for library in ("torch", "transformers", "matplotlib", "fastapi", "uvicorn", "aiohttp"):
    pytest.importorskip(library)

EXAMPLE = Path(__file__).parent.parent / "examples" / "05_grpo_tiny_moe.py"
SMALL = ["--iterations", "3", "--prompts", "2", "--samples", "2", "--new-tokens", "6", "--json"]

Result = dict[str, Any]


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(EXAMPLE), *SMALL, *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(tq_fs.__file__).parents[1])}


def run(*arguments: object) -> Result:
    """Run the example to its end; what it prints last is its result."""
    done = subprocess.run(
        command(*arguments), env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    result: Result = json.loads(done.stdout.strip().splitlines()[-1])
    return result | {"said": done.stdout}


def kill_at(line: str, *arguments: object) -> None:
    """Run the example until it prints a line that begins so, then kill it, and it alone."""
    with subprocess.Popen(
        command(*arguments), env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for said in process.stdout:
            if said.startswith(line):
                os.kill(process.pid, signal.SIGKILL)
                return
    raise AssertionError(f"it never said {line!r}")


def bits(result: Result) -> Any:
    """What must be the same to the bit: losses, rewards, gaps, and the weights."""
    rows = [{**row, "taken": 0} for row in result["iterations"]]
    return json.dumps(rows), result["weights"]


@pytest.fixture(scope="module")
def off(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The run that all others are compared with: everything in memory, never killed."""
    figure = tmp_path_factory.mktemp("figure") / "gap.png"
    result = run("--store", "off", "--figure", figure)
    assert figure.read_bytes().startswith(b"\x89PNG")
    return result


def test_replay_closes_the_gap_and_the_weights_change(off: Result) -> None:
    rows = off["iterations"]
    assert [row["number"] for row in rows] == [0, 1, 2]
    for row in rows:
        learned = row["learned"]
        assert learned["replayed"]["mean"] < learned["free"]["mean"]
        assert learned["micro_batches"] > 1
    assert len({row["learned"]["loss"] for row in rows}) == 3


def test_another_seed_is_another_run(off: Result) -> None:
    other = run("--store", "off", "--seed", "1", "--iterations", "1")
    assert other["iterations"][0]["learned"] != off["iterations"][0]["learned"]


def test_on_disk_losses_and_weights_are_the_same_to_the_bit(off: Result, tmp_path: Path) -> None:
    stored = run("--store", "file", "--work", tmp_path)
    assert bits(stored) == bits(off)
    assert all("Steps deleted" in line for line in per_iteration(stored))
    assert not any(", 0 Steps deleted" in line for line in per_iteration(stored))
    assert steps_in(tmp_path / "store") == 0


def per_iteration(result: Result) -> list[str]:
    return [line for line in result["said"].splitlines() if ": loss" in line]


def steps_in(folder: Path) -> int:
    return len([p for p in folder.glob("*/steps/*/*/*/*") if p.is_dir()])


@pytest.mark.s3
def test_in_a_bucket_losses_and_weights_are_the_same_to_the_bit(
    off: Result, bucket: str, tmp_path: Path
) -> None:
    stored = run("--store", "s3", "--s3-url", f"s3://{bucket}/runs", "--work", tmp_path)
    assert bits(stored) == bits(off)


@pytest.mark.s3
@pytest.mark.parametrize(
    ("line", "taken"),
    [
        ("iteration 1: 4 sessions", [0, 4, 0]),  # rolled out, and not trained on yet
        ("iteration 1: loss", [0, 0, 0]),  # trained, and perhaps not released yet
    ],
)
def test_killed_and_started_anew_a_run_goes_on_from_the_bucket(
    off: Result, bucket: str, tmp_path: Path, line: str, taken: Sequence[int]
) -> None:
    where = ("--store", "s3", "--s3-url", f"s3://{bucket}/runs", "--work", tmp_path)
    kill_at(line, *where)
    resumed = run(*where)
    assert bits(resumed) == bits(off)
    assert "Goes on after" in resumed["said"]
    assert [row["taken"] for row in resumed["iterations"]] == taken
    with opened(f"s3://{bucket}/runs") as store:
        assert list(store.unreleased()) == []


def test_stopped_on_purpose_a_run_goes_on_from_the_folder(off: Result, tmp_path: Path) -> None:
    where = ("--store", "file", "--work", tmp_path)
    first = run(*where, "--stop-after", "1")
    assert len(first["iterations"]) == 1
    assert bits(run(*where)) == bits(off)


@contextmanager
def opened(url: str) -> Iterator[tq_fs.Store]:
    config = tq_fs.StoreConfig(store_id="grpo-0")
    with tq_fs.open_store(url, fields=[tq_fs.logprobs()], config=config, read_only=True) as store:
        yield store


def test_another_scale_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    run("--store", "off", "--work", tmp_path, "--stop-after", "1")
    again = command("--store", "off", "--work", tmp_path, "--seed", "5")
    done = subprocess.run(again, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "give another --work" in done.stderr
