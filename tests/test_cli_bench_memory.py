"""The command ``tq-fs bench memory``; what is measured is made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests._planes import PAYLOADS, all_runs, measured
from tq_fs.bench import memory
from tq_fs.bench._plane_measured import NVME, GiB, Measured, MemoryBench
from tq_fs.cli import main

MEMORY = ["bench", "memory"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[MemoryBench]:
    """Return what the command has measured, without measuring."""
    return answer(monkeypatch, measured())


def answer(monkeypatch: pytest.MonkeyPatch, found: Measured) -> list[MemoryBench]:
    wanted: list[MemoryBench] = []

    def measure(bench: MemoryBench, console: object) -> Measured:
        wanted.append(bench)
        return replace(found, bench=bench)

    monkeypatch.setattr(memory, "measure", measure)
    return wanted


def test_without_options_it_is_the_whole_experiment(asked: list[MemoryBench]) -> None:
    assert main(MEMORY) == 0
    assert asked == [MemoryBench()]


def test_every_option_is_heard(asked: list[MemoryBench], tmp_path: Path) -> None:
    options = ["--payload", "2GiB, 512MiB,1000", "--paths", "s3, central", "--rollouts", "3"]
    options += ["--trainers", "4", "--dtype", "uint8", "--root", str(tmp_path)]
    assert main([*MEMORY, *options]) == 0
    assert asked == [
        MemoryBench(
            payloads=(1000, GiB // 2, 2 * GiB),
            paths=("central", "s3"),
            rollouts=3,
            trainers=4,
            dtype="uint8",
            root=tmp_path,
        )
    ]


def test_json_on_standard_output_is_nothing_but_json(
    asked: list[MemoryBench], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*MEMORY, "--json", "-"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["growth.nvme_share_of_central"] == 0.04
    assert "RolloutManager" in err
    assert "…" not in err


def test_files_are_written_where_they_were_asked_for(
    asked: list[MemoryBench], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    where, folder = tmp_path / "memory.json", tmp_path / "new" / "figures"
    assert main([*MEMORY, "--json", str(where), "--figures", str(folder)]) == 0
    assert json.loads(where.read_text())["settings"]["payloads"] == [GiB, 2 * GiB, 4 * GiB]
    assert sorted(path.name for path in folder.iterdir()) == [
        "memory-over-time.png",
        "memory-peaks.png",
    ]
    assert "RolloutManager" in capfd.readouterr().out


def test_tensors_that_differ_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = [
        replace(one, digests={"s0/logprobs": "zz"}) if one.path == NVME else one
        for one in all_runs()
    ]
    answer(monkeypatch, measured(runs))
    assert main([*MEMORY, "--json", str(tmp_path / "memory.json")]) == 1
    assert json.loads((tmp_path / "memory.json").read_text())["identical"] is False
    assert "not identical on nvme: s0/logprobs" in capfd.readouterr().out


def test_a_missed_target_is_told_and_no_failure_as_with_other_benchmarks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = [one for one in all_runs() if one.payload_bytes == PAYLOADS[0]]
    slow = replace(runs[-1], samples=runs[0].samples)  # NVMe takes what the centralized path does
    answer(monkeypatch, measured([*runs[:-1], slow]))
    assert main(MEMORY) == 0
    assert "missed" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--payload", "much"], "--payload: 'much' is no size"),
        (["--payload", ""], "--payload: '' is no size"),
        (["--payload", "1GiB,"], "--payload: '' is no size"),
        (["--payload", "0"], "--payload: 0 is not at least 1"),
        (["--payload", "1GiB,1024MiB"], "has a size twice"),
        (["--paths", "central,ssd"], "--paths: 'ssd' is no path; give some of central, tr"),
        (["--paths", ""], "--paths: '' is no path"),
        (["--rollouts", "0"], "--rollouts: 0 is not at least 1"),
        (["--trainers", "-2"], "--trainers: -2 is not at least 1"),
        (["--json", "/no/such/folder/x.json"], "its folder is not there"),
    ],
)
def test_bad_values_are_told_before_anything_is_measured(
    asked: list[MemoryBench],
    options: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*MEMORY, *options]) == 2
    assert says in capsys.readouterr().err
    assert asked == []


def test_a_folder_for_figures_that_cannot_be_is_told_before(
    asked: list[MemoryBench], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    assert main([*MEMORY, "--figures", str(tmp_path / "file" / "x")]) == 2
    assert asked == []


@pytest.mark.parametrize("options", [["--dtype", "int32"], ["--rollouts", "many"]])
def test_what_the_parser_refuses_exits_with_2(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*MEMORY, *options])
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_help_has_an_example_and_says_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*MEMORY, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "example:\n  tq-fs bench memory --json memory.json --figures figures" in said
    assert all(extra in said for extra in ("ray and cluster", "transfer-queue", "extra demo"))
