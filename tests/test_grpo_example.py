"""The GRPO example, small: the same to the bit wherever trajectories lie, killed or not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tq_fs
from tq_fs.backends import Retry, open_object_backend
from tq_fs.storage_options import StorageOptions

for library in ("torch", "transformers", "matplotlib", "fastapi", "uvicorn", "aiohttp"):
    pytest.importorskip(library)

EXAMPLE = Path(__file__).parent.parent / "examples" / "05_grpo_tiny_moe.py"
SMALL = ["--iterations", "2", "--prompts", "2", "--samples", "2", "--new-tokens", "6", "--json"]

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


KILLER = """
import importlib, os, runpy, signal, sys

module, _, name = sys.argv.pop(1).partition(":")
count = int(sys.argv.pop(1))
kind, method = name.split(".")
kind = getattr(importlib.import_module(module), kind)
whole, calls = getattr(kind, method), []

def dying(*args, **named):
    calls.append(1)
    if len(calls) == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*args, **named)

setattr(kind, method, dying)
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def kill_at(call: str, count: int, *arguments: object) -> None:
    """Run the example, and kill it, and it alone, when it begins a call for the count-th time."""
    python, *rest = command(*arguments)
    done = subprocess.run(
        [python, "-c", KILLER, call, str(count), *rest],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr + done.stdout


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
    assert [row["number"] for row in rows] == [0, 1]
    for row in rows:
        learned = row["learned"]
        assert learned["replayed"]["mean"] < learned["free"]["mean"]
        assert learned["micro_batches"] > 1
    assert len({row["learned"]["loss"] for row in rows}) == 2


@pytest.mark.slow
def test_another_seed_is_another_run(off: Result) -> None:
    other = run("--store", "off", "--seed", "1", "--iterations", "1")
    assert other["iterations"][0]["learned"] != off["iterations"][0]["learned"]


@pytest.mark.slow
def test_on_disk_and_one_session_after_the_other_all_is_the_same_to_the_bit(
    off: Result, tmp_path: Path
) -> None:
    stored = run("--store", "file", "--work", tmp_path, "--at-once", "1")
    assert bits(stored) == bits(off)
    assert all("Steps deleted" in line for line in per_iteration(stored))
    assert not any(", 0 Steps deleted" in line for line in per_iteration(stored))
    assert steps_in(tmp_path / "store") == 0


def per_iteration(result: Result) -> list[str]:
    return [line for line in result["said"].splitlines() if ": loss" in line]


def steps_in(folder: Path) -> int:
    return len([p for p in folder.glob("*/steps/*/*/*/*") if p.is_dir()])


@pytest.mark.s3
@pytest.mark.slow
def test_in_a_bucket_losses_and_weights_are_the_same_to_the_bit(
    off: Result, bucket: str, tmp_path: Path
) -> None:
    stored = run("--store", "s3", "--s3-url", f"s3://{bucket}/runs", "--work", tmp_path)
    assert bits(stored) == bits(off)
    assert steps_left(f"s3://{bucket}/runs") == []


@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "count", "trained", "taken"),
    [
        ("tq_fs.proxy:ProxyClient.finalize", 7, 1, None),  # some sessions are, others are not
        ("tq_fs.demo.grpo:Learner.learn", 2, 1, 4),  # rolled out, not trained on
        ("tq_fs.proxy:ProxyClient.release", 2, 2, 0),  # checkpoint saved, nothing released
        ("tq_fs.proxy:ProxyClient.checkpoint_saved", 2, 2, 0),  # the release is only noted
    ],
)
def test_killed_and_started_anew_a_run_goes_on_from_the_bucket(
    off: Result, bucket: str, tmp_path: Path, call: str, count: int, trained: int, taken: int | None
) -> None:
    where = ("--store", "s3", "--s3-url", f"s3://{bucket}/runs", "--work", tmp_path)
    kill_at(call, count, *where)
    assert steps_left(f"s3://{bucket}/runs") != []
    resumed = run(*where)
    assert f"Goes on after {trained} iteration" in resumed["said"]
    assert bits(resumed) == bits(off)
    assert taken in (None, resumed["iterations"][-1]["taken"])
    assert steps_left(f"s3://{bucket}/runs") == []


@pytest.mark.slow
def test_stopped_on_purpose_a_run_goes_on_from_the_folder(off: Result, tmp_path: Path) -> None:
    where = ("--store", "file", "--work", tmp_path)
    first = run(*where, "--stop-after", "1")
    assert len(first["iterations"]) == 1
    assert bits(run(*where)) == bits(off)


def steps_left(url: str) -> list[str]:
    """Objects of Steps in the bucket; also of those whose release is only noted."""
    options = StorageOptions()
    backend = open_object_backend(
        url, driver="auto", options=options, retry=Retry(), timeout_s=30.0
    )
    return [key for key, _ in backend.walk("") if "/steps/" in f"/{key}"]
