"""``tq-fs bench memory``: its figures, targets, tables and pictures, of runs that are made up."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from rich.console import Console

import tq_fs.bench
from tests._planes import DIGESTS, PAYLOADS, QUEUE_MIB, TOKENS, MiB, all_runs, measured, run
from tq_fs import planner
from tq_fs.bench import _plane_figure as figure
from tq_fs.bench import memory as bench
from tq_fs.bench._plane_compare import change, left_out
from tq_fs.bench._plane_measured import CENTRAL, NVME, QUEUE, S3, Measured, MemoryBench, Run
from tq_fs.cli import main
from tq_fs.errors import DependencyMissing, InvalidConfig


def of(*paths: str) -> list[Run]:
    return [one for one in all_runs() if one.path in paths]


def shown(found: Measured) -> str:
    console = Console(width=110)
    with console.capture() as text:
        bench.show(found.bench, found, console)
    return text.get()


def cells(text: str, row: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if row in line)
    return [cell.strip() for cell in line.split("│")[2:-1]]


# ---------------------------------------------------------------- figures


def test_every_target_has_a_figure() -> None:
    assert set(bench.TARGETS) <= set(bench.figures(measured()))
    assert left_out(measured()) == {}


def test_a_peak_is_that_of_the_sum_at_one_moment_with_the_first_payload() -> None:
    found = bench.figures(measured())
    peaks = {path: found[f"peak.{path}"] / MiB for path in (CENTRAL, QUEUE, NVME, S3)}
    assert peaks == {CENTRAL: 1600, QUEUE: 1200, NVME: 270, S3: 310}


def test_growth_is_the_peak_above_the_same_processes_idle() -> None:
    found = bench.figures(measured())
    growths = {path: found[f"growth.{path}"] / MiB for path in (CENTRAL, QUEUE, NVME, S3)}
    assert growths == {CENTRAL: 1500, QUEUE: 1000, NVME: 60, S3: 90}
    assert found["growth.nvme_share_of_central"] == 0.04
    assert found["growth.s3_share_of_central"] == 0.06
    assert found["growth.nvme_share_of_transfer_queue"] == 0.06


def test_a_slope_is_the_least_squares_one_over_all_payloads() -> None:
    found = bench.figures(measured())
    assert found["slope.nvme"] == 0.01
    assert found["slope.s3"] == 0.01857  # 13 / 700; from end to end it would be 0.02


def test_components_have_peaks_of_their_own() -> None:
    document = bench.document(MemoryBench(), measured())
    assert {name: size // MiB for name, size in document["components.central"].items()} == {
        "proxy": 550, "rollout_manager": 900, "object_store": 640, "controller": 0,
        "storage_unit": 0,
    }  # fmt: skip
    assert document["idle.transfer_queue"]["storage_unit"] == 60 * MiB


@pytest.mark.parametrize(
    ("value", "base", "text"),
    [(18.7, 591.7, "-96.8%"), (3, 2, "+50.0%"), (5, 0, "new"), (0, 0, ""), (0, 4, "-100.0%")],
)
def test_changes_are_told_in_percent(value: float, base: float, text: str) -> None:
    assert change(value, base) == text


# ---------------------------------------------------------------- what is left out


def test_a_share_of_a_path_that_did_not_run_is_left_out() -> None:
    found = measured(of(CENTRAL, NVME))
    assert "growth.nvme_share_of_central" in bench.figures(found)
    assert left_out(found) == {
        "growth.s3_share_of_central": "s3 did not run",
        "growth.nvme_share_of_transfer_queue": "transfer_queue did not run",
        "slope.s3": "needs two payloads, 0 ran",
    }
    assert not left_out(found).keys() & bench.figures(found).keys()


def test_a_slope_needs_two_payloads() -> None:
    nvme = [one for one in of(NVME) if one.payload_bytes == PAYLOADS[0]]
    assert "slope.nvme" not in bench.figures(measured(nvme))
    assert left_out(measured(nvme * 2))["slope.nvme"] == "needs two payloads, 1 ran"


def test_other_payloads_are_not_compared() -> None:
    late = [one for one in of(NVME) if one.payload_bytes > PAYLOADS[0]]
    found = measured([*of(CENTRAL), *late])
    assert "growth.nvme_share_of_central" not in bench.figures(found)
    assert "payloads differ: 2,097," in left_out(found)["growth.nvme_share_of_central"]


def test_a_share_of_what_did_not_grow_is_left_out() -> None:
    flat = run(CENTRAL, PAYLOADS[0], (50, 50, 0, 0, 0), (50, 50, 0, 0, 0))
    found = measured([flat, *of(NVME)])
    assert left_out(found)["growth.nvme_share_of_central"] == "central did not grow"


# ---------------------------------------------------------------- tensors


def with_digests(path: str, payload: int, digests: dict[str, str]) -> Measured:
    runs = [
        replace(one, digests=digests) if (one.path, one.payload_bytes) == (path, payload) else one
        for one in all_runs()
    ]
    return measured(runs)


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize(
    "digests",
    [
        DIGESTS | {"s0/logprobs": "ab"},
        {"s0/logprobs": "aa"},
        DIGESTS | {"s1/logprobs": "aa"},
        {},
    ],
)
def test_a_tensor_that_is_another_or_not_there_is_told(
    payload: int, digests: dict[str, str]
) -> None:
    found = with_digests(S3, payload, digests)
    assert bench.figures(found)["identical"] is False
    assert bench.document(found.bench, found)["targets"]["identical"]["met"] is False
    assert "not identical on s3: s" in shown(found)


def test_identical_is_said_only_where_tensors_were_compared() -> None:
    assert bench.figures(measured())["identical"] is True
    assert "12 tensors compared" not in shown(measured(of(NVME)))
    why = "no two paths gave tensors to compare"
    for runs in (of(NVME), [replace(one, digests={}) for one in all_runs()]):
        assert "identical" not in bench.figures(measured(runs))
        assert left_out(measured(runs))["identical"] == why


def test_tensors_of_one_payload_are_not_held_against_those_of_another() -> None:
    runs = [replace(one, digests={"s0/logprobs": str(one.payload_bytes)}) for one in of(NVME, S3)]
    assert bench.figures(measured(runs))["identical"] is True


# ---------------------------------------------------------------- for people


def test_people_see_each_component_with_its_change() -> None:
    text = shown(measured())
    assert cells(text, "RolloutManager") == [
        "900.0 MiB", "80.0 MiB", "-91.1%", "110.0 MiB", "-87.8%", "140.0 MiB", "-84.4%"
    ]  # fmt: skip
    assert cells(text, "StorageUnit") == [
        "", "1,012.0 MiB", "new", "60.0 MiB", "new", "70.0 MiB", "new"
    ]  # fmt: skip
    assert cells(text, "all, at one moment")[::2] == ["1.56 GiB", "-25.0%", "-83.1%", "-80.6%"]
    assert cells(text, "beside: page cache")[3] == "300.0 MiB"
    assert "12 tensors" not in text
    assert "10 tensors compared with another path's: all identical" in text
    assert all(name in text for name in bench.TARGETS)
    assert "…" not in text


def test_people_see_each_run() -> None:
    lines = [line for line in shown(measured()).splitlines() if line.startswith("│ tq-fs S3")]
    assert [[cell.strip() for cell in line.split("│")[2:-1]] for line in lines] == [
        ["1,000.0 MiB", "192", f"{TOKENS:,}", "3", "220.0 MiB", "310.0 MiB", "90.0 MiB"],
        ["1.95 GiB", "192", f"{2 * TOKENS:,}", "3", "220.0 MiB", "350.0 MiB", "130.0 MiB"],
        ["3.91 GiB", "192", f"{4 * TOKENS:,}", "3", "220.0 MiB", "370.0 MiB", "150.0 MiB"],
    ]


def test_what_is_absent_is_said() -> None:
    found = measured(of(CENTRAL, NVME), {QUEUE: "needs TransferQueue"})
    text = shown(found)
    assert "left out: transfer_queue: needs TransferQueue" in text
    assert "left out: s3: did not run" in text
    assert "left out: growth.nvme_share_of_transfer_queue: transfer_queue did not run" in text
    absent = bench.document(found.bench, found)["absent"]
    assert absent == {QUEUE: "needs TransferQueue", S3: "did not run"}


def test_a_path_that_was_not_asked_for_is_not_absent() -> None:
    found = measured(of(CENTRAL, NVME), paths=(CENTRAL, NVME))
    assert bench.document(found.bench, found)["absent"] == {}


def test_a_path_that_broke_off_is_said_although_it_ran() -> None:
    found = measured(absent={S3: "the server ended"})
    assert "left out: s3: the server ended" in shown(found)


def test_without_the_centralized_path_nothing_is_compared_with_it() -> None:
    assert cells(shown(measured(of(QUEUE, S3))), "StorageUnit") == ["1,012.0 MiB", "70.0 MiB"]


def test_nothing_measured_is_shown_as_that() -> None:
    text = shown(measured([], {CENTRAL: "no memory"}))
    assert "left out: central: no memory" in text
    assert bench.document(MemoryBench(), measured([]))["runs"] == []


# ---------------------------------------------------------------- the document


def test_the_document_is_plain_json() -> None:
    document = bench.document(MemoryBench(root=Path("/x")), measured())
    again = json.loads(json.dumps(document))
    assert again["targets"]["slope.s3"] == {"target": "≤ 0.02", "met": True}
    assert again["identical"] is True
    assert (again["settings"]["root"], again["settings"]["step_tokens"]) == ("/x", 2048)
    assert again["settings"]["tokens"] == TOKENS
    assert [one["peak"] // MiB for one in again["runs"]] == [
        1600, 1200, 370, 350, 310, 300, 280, 270
    ]  # fmt: skip
    assert again["runs"][-1]["page_cache"] == 300 * MiB
    assert again["runs"][0]["trainers"] == 402 * MiB


def test_a_missed_target_is_told() -> None:
    held = run(NVME, PAYLOADS[0], (60, 50, 0, 40, 60), (60, 50, 0, 40, 211))  # 151 of 1500
    document = bench.document(MemoryBench(), measured([*of(CENTRAL, QUEUE), held]))
    assert document["targets"]["growth.nvme_share_of_central"] == {"target": "≤ 0.08", "met": False}
    assert document["targets"]["growth.nvme_share_of_transfer_queue"]["met"] is True


def test_the_planner_scales_what_was_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "memory.json"
    path.write_text(json.dumps(bench.document(MemoryBench(), measured())))
    workload = ["--layers", "40", "--topk", "8", "--experts", "256", "--nodes", "1"]
    workload += ["--context", "1024", "--central", "uint16", "--stored", "uint16", "--json", "-"]
    peaks = {}
    for batch in (128, 256):
        assert main(["plan", *workload, "--batch", str(batch), "--calibrate", str(path)]) == 0
        planned = json.loads(capfd.readouterr().out)["memory"]
        peaks[batch] = {
            name: {part: round(size / MiB, 1) for part, size in found["components_bytes"].items()}
            for name, found in planned.items()
        }
    assert peaks[128]["central"] == {"proxy": 550, "rollout_manager": 900, "object_store": 640}
    assert peaks[256]["central"] == {"proxy": 1050, "rollout_manager": 1750, "object_store": 1280}
    assert peaks[256]["transfer_queue"] == {
        "proxy": 110, "rollout_manager": 110, "object_store": 8, "storage_unit": 60 + 2 * 952
    }  # fmt: skip
    assert peaks[256]["tq_fs"]["proxy"] == 60 + 2 * 60
    assert peaks[256]["tq_fs"]["rollout_manager"] == 50 + 2 * 60


def test_the_planner_takes_totals_idle_and_traffic() -> None:
    document = bench.document(MemoryBench(), measured())
    known = planner.calibration_of(document)
    assert known.traffic == planner.Traffic(tokens=TOKENS, row_bytes=40 * 8 * 2)
    assert (known.central.total, known.queue.total) == (1600 * MiB, 1200 * MiB)
    assert known.queue.idle == {
        name: mib * MiB for name, mib in zip(known.queue.idle, QUEUE_MIB[0], strict=True)
    }
    assert known.store is not None
    assert known.store.total == 270 * MiB


def test_the_planner_takes_tq_fs_alone() -> None:
    document = bench.document(MemoryBench(), measured(of(CENTRAL, NVME)))
    known = planner.calibration_of(document)
    assert known.store is not None
    assert known.central == planner.PUBLISHED.central


# ---------------------------------------------------------------- pictures


def test_both_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench.prepare_pictures(tmp_path / "made" / "here")
    paths = bench.draw_pictures(measured(), tmp_path / "made" / "here")
    assert [path.name for path in paths] == ["memory-peaks.png", "memory-over-time.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert all(path.stat().st_size > 20_000 for path in paths)


def test_the_peaks_are_drawn_as_bars_with_what_is_saved() -> None:
    pytest.importorskip("matplotlib")
    totals, components = figure._peaks({one.path: one for one in of(CENTRAL, QUEUE)}).axes
    assert [bar.get_height() for bar in totals.patches] == [1600, 1200]  # type: ignore[attr-defined]
    assert [text.get_text() for text in totals.texts] == ["1.56 GiB", "1.17 GiB\n-25.0%"]
    heights = [bar.get_height() for bar in components.patches]  # type: ignore[attr-defined]
    assert heights == [550, 900, 640, 0, 0, 80, 80, 4, 44, 1012]


def test_the_lines_are_the_totals_over_time_and_the_page_cache() -> None:
    pytest.importorskip("matplotlib")
    nvme = next(one for one in of(NVME) if one.payload_bytes == PAYLOADS[0])
    above, below = figure._over_time({NVME: nvme}).axes
    total, cache = above.lines[:2]
    assert np.array_equal(total.get_xydata(), [[0, 270], [1, 270]])
    assert np.array_equal(cache.get_xydata(), [[0, 300], [1, 200]])
    assert cache.get_linestyle() == ":"
    assert len(below.collections) == 2  # rollouts and training


def test_nothing_measured_is_not_drawn(tmp_path: Path) -> None:
    assert bench.draw_pictures(measured([]), tmp_path) == []


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match=r"file.*name another folder"):
        bench.prepare_pictures(tmp_path / "file")


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DependencyMissing, match=r"tq-fs\[demo\]"):
        bench.prepare_pictures(tmp_path)


# ---------------------------------------------------------------- measuring


def test_it_measures_and_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Sittings(ModuleType):
        @staticmethod
        def measure(wanted: MemoryBench, progress: object) -> Measured:
            asked.append(wanted)
            assert callable(progress)
            progress("path [central] runs")
            return measured()

    fake = Sittings("tq_fs.bench._plane_sittings")
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(tq_fs.bench, "_plane_sittings", fake, raising=False)
    monkeypatch.setattr(bench, "find_spec", lambda name: name)
    console = Console(width=100)
    with console.capture() as text:
        assert bench.measure(MemoryBench(rollouts=3), console) == measured()
    assert asked == [MemoryBench(rollouts=3)]
    assert text.get() == "  0:00  path [central] runs\n"


def test_it_says_what_is_not_installed_before_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    with pytest.raises(DependencyMissing, match=r"needs ray.*tq-fs\[ray,cluster\]"):
        bench.measure(MemoryBench(), Console(quiet=True))
