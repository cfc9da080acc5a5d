"""``tq-fs bench transfer-queue``: its figures and targets, and what it measures them with."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("psutil")

from tq_fs.bench import transfer_queue as bench
from tq_fs.bench._transfer_queue_memory import stores
from tq_fs.bench._transfer_queue_sittings import Held, Sitting, Sittings
from tq_fs.bench._transfer_queue_variants import VARIANTS, queue_with
from tq_fs.cli import main
from tq_fs.errors import DependencyMissing, StorageFailed

MiB = 1024**2
PEERS = ("simple", "ssd")
SMALL = ["--repeats", "1", "--puts", "16", "--gib", "0.03"]


def sitting(put: float, get: float, stall: float = 0.001) -> Sitting:
    late = [0.0001] * 999 + [stall]
    return Sitting(put=put, call=put * 8, get=get, late=late, idle=[0.0001, 0.0002])


def held(early: float, late: float) -> Held:
    return Held(
        nbytes=4 * 1024 * MiB,
        early=round(early * MiB),
        late=round(late * MiB),
        client=MiB,
        processes=["Storage"],
    )


@pytest.fixture
def measured() -> bench.Measured:
    return bench.Measured(
        place="folder x",
        version="0.1.11",
        sittings=Sittings(
            {
                "simple": [sitting(2e-3, 20e-3), sitting(4e-3, 40e-3), sitting(2e-3, 20e-3)],
                "ssd": [sitting(3e-3, 40e-3), sitting(6e-3, 80e-3), sitting(3e-3, 40e-3)],
                "tq_fs": [
                    sitting(1e-3, 10e-3, stall=9e-3),
                    sitting(2e-3, 20e-3, stall=90e-3),
                    sitting(1e-3, 10e-3, stall=8e-3),
                ],
            }
        ),
        held={
            "simple": held(1024, 4096),
            "ssd": held(20, 80),
            "tq_fs": held(102.4, 133.12),
        },
    )


def test_every_target_has_a_figure(measured: bench.Measured) -> None:
    assert set(bench.TARGETS) <= set(bench.figures(measured))


def test_vs_is_how_often_our_throughput_holds_theirs(measured: bench.Measured) -> None:
    found = bench.figures(measured)
    assert (found["put.vs_simple"], found["put.vs_ssd"]) == (2.0, 3.0)
    assert (found["get.vs_simple"], found["get.vs_ssd"]) == (2.0, 4.0)
    assert found["put.ssd_vs_simple"] == 0.667  # slower than in memory
    assert (found["put.tq_fs.ms"], found["put.tq_fs.call_ms"]) == (1.0, 8.0)
    assert (found["put.tq_fs.steps_per_s"], found["get.simple.steps_per_s"]) == (1000.0, 2400.0)


def test_memory_is_told_as_a_share_and_as_a_slope(measured: bench.Measured) -> None:
    found = bench.figures(measured)
    assert found["memory.share_of_simple"] == 0.0325
    assert found["memory.slope"] == 0.01
    assert found["memory.simple.slope"] == 1.0
    assert found["memory.ssd.growth_mib"] == 80.0


def test_the_stall_of_the_loop_is_that_of_an_ordinary_sitting(measured: bench.Measured) -> None:
    found = bench.figures(measured)
    assert (found["loop_stall_ms"], found["loop_stall.tq_fs.max_ms"]) == (9.0, 90.0)
    assert found["loop_stall.tq_fs.wakeups"] == 3000
    assert found["loop_stall.idle.ms"] == 0.2


def test_the_document_says_which_targets_are_met(measured: bench.Measured) -> None:
    found = bench.document(bench.TransferQueueBench(), measured)
    assert json.loads(json.dumps(found)) == found
    assert found["targets"]["put.vs_simple"] == {"target": "≥ 1.5", "met": True}
    assert set(found["targets"]) == set(bench.TARGETS)
    assert found["settings"]["variants"] == ["simple", "ssd", "tq_fs"]
    assert found["settings"]["processes"]["ssd"] == ["Storage"]


def test_a_comparison_of_the_peers_alone_has_no_targets(measured: bench.Measured) -> None:
    del measured.sittings.of["tq_fs"]
    held = {name: measured.held[name] for name in PEERS}
    peers = bench.Measured(
        place=measured.place, version=measured.version, sittings=measured.sittings, held=held
    )
    found = bench.document(bench.TransferQueueBench(variants=PEERS), peers)
    assert found["targets"] == {}
    assert not any("tq_fs" in name for name in found if name != "settings")


def test_people_see_all_variants_and_targets(
    measured: bench.Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.show(bench.TransferQueueBench(), measured, Console(width=100))
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*VARIANTS, *bench.TARGETS))
    assert "event loop late, p99.9, ms" in shown


@pytest.mark.parametrize(
    ("command", "new", "expected"),
    [
        (["ray::SimpleStorageUnit", "", ""], False, True),  # a worker that was started before
        (["ray::TransferQueueController", "", ""], True, False),
        (["ray::IDLE", "", ""], True, False),
        (["ray::DashboardAgent", "", ""], False, False),
        (["python", "-m", "something.of.ours"], True, True),
        (["raylet", "--raylet_socket_name=x"], False, False),
        (["python", "ray/_private/workers/default_worker.py"], True, False),
        ([], True, False),
    ],
)
def test_what_stores_is_told_by_what_it_is_called(
    command: list[str], new: bool, expected: bool
) -> None:
    assert stores(command, new=new) is expected


def test_values_go_below_the_folder(tmp_path: Path) -> None:
    offload = VARIANTS["ssd"].backend(tmp_path)["SimpleStorage"]["ssd_offload"]
    assert offload["path"] == str(tmp_path)
    assert offload["threshold_bytes"] < 2047 * 40 * 8
    assert VARIANTS["tq_fs"].backend(tmp_path)["TqFs"]["url"] == tmp_path.as_uri()


def test_it_says_what_is_not_installed_before_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    with pytest.raises(DependencyMissing, match=r"needs transfer_queue.*tq-fs\[transfer-queue\]"):
        bench.measure(bench.TransferQueueBench(), Console(quiet=True))


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "transfer-queue", "--help"])
    assert ended.value.code == 0
    assert "tq-fs bench transfer-queue --json figures.json" in capsys.readouterr().out


def test_nothing_can_not_be_held(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "transfer-queue", "--gib", "0"])
    assert "0 is not above 0" in capsys.readouterr().err


def test_a_process_that_cannot_start_shows_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_fs.bench._transfer_queue_variants._CHILD", "tq_fs.bench.no_such_module")
    with (
        pytest.raises(StorageFailed, match=r"(?s)no answer to 'ready'.*no_such_module"),
        queue_with("simple", tmp_path),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)  # four Rays, one after the other
def test_it_prints_one_json_object_and_leaves_nothing(tmp_path: Path) -> None:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    pytest.importorskip("transfer_queue")
    command = ["bench", "transfer-queue", *SMALL, "--variants", *PEERS]
    done = subprocess.run(
        [sys.executable, "-m", "tq_fs.cli", *command, "--root", str(tmp_path), "--json", "-"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    settings, targets = found.pop("settings"), found.pop("targets")
    assert targets == {}
    assert settings["processes"] == dict.fromkeys(PEERS, ["SimpleStorageUnit"] * 2)
    assert {"put.ssd_vs_simple", "get.simple.ms", "memory.ssd.slope"} <= set(found)
    assert [n for n, v in found.items() if v <= 0 and not n.startswith("memory.")] == []
    assert found["memory.simple.growth_mib"] > 25
    assert list(tmp_path.iterdir()) == []
