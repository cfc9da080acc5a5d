"""``tq-fs plan``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tq_fs.cli import main

GLM = ["plan", "--preset", "glm-5.2", "--context", "256k", "--batch", "512"]


def test_the_table_and_the_document_say_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*GLM, "--json", "-"]) == 0
    out, err = capfd.readouterr()
    document = json.loads(out)
    assert document["r3_tib"] == {"int32": 2.34375, "uint16": 1.171875, "uint8": 0.5859375}
    assert document["settings"]["nodes"] == 32
    assert "2.34 TiB" in err
    for path in document["memory"].values():
        assert f"{path['exceeding_batch']:,}" in err
    assert f"{document['s3_requests']['put']:,}" in err


def test_the_table_goes_to_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(GLM) == 0
    out, err = capfd.readouterr()
    assert "left for HiCache on the master" in out
    assert "3.52 TiB short" in out
    assert err == ""


def test_the_page_shows_what_the_command_prints(capfd: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parent.parent / "docs/planning.md").read_text()
    shown = page.partition("```text\n")[2].partition("```")[0]
    assert main(GLM) == 0
    printed = [line.rstrip() for line in capfd.readouterr().out.splitlines()]
    assert printed == shown.splitlines()


def test_own_numbers_stand_in_for_those_of_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert main([*GLM, "--experts", "384", "--nodes", "4", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["settings"]["model"] == {"layers": 75, "topk": 8, "experts": 384}
    assert document["settings"]["stored"] == "uint16"
    assert document["settings"]["nodes"] == 4
    assert document["r3_tib"]["uint8"] is None


def test_experts_that_do_not_fit_are_told_in_the_table(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "kimi-k2"]) == 0
    assert "does not fit" in capfd.readouterr().out


def test_every_option_reaches_the_plan(capfd: pytest.CaptureFixture[str]) -> None:
    options = {
        "segments": "2.5", "mode": "snapshot", "stored": "int32", "central": "uint8",
        "samples": "4", "turns": "8", "units": "64", "gpus": "4", "checkpoint-batches": "3",
        "data": "2", "tensor": "2", "pipeline": "5", "context-parallel": "4",
        "host-memory": "1TiB", "micro-batch": "1GiB", "unit-budget": "1GiB",
        "writer-budget": "2GiB", "rollout-s": "10", "train-s": "20",
    }  # fmt: skip
    flat = [part for name, value in options.items() for part in (f"--{name}", value)]
    assert main([*GLM, *flat, "--json", "-"]) == 0
    settings = json.loads(capfd.readouterr().out)["settings"]
    assert settings["ranks"] == {"data": 2, "tensor": 2, "pipeline": 5, "context": 4}
    told = {
        "segments": 2.5, "mode": "snapshot", "stored": "int32", "central": "uint8", "samples": 4,
        "turns": 8, "units": 64, "gpus": 4, "checkpoint_batches": 3, "host_bytes": 2**40,
        "micro_batch_bytes": 2**30, "unit_bytes": 2**30, "writer_bytes": 2**31, "rollout_s": 10,
        "train_s": 20,
    }  # fmt: skip
    assert {name: settings[name] for name in told} == told


def test_a_measured_run_calibrates(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "memory.json"
    settings = {"layers": 4, "topk": 2, "dtype": "uint8", "tokens": 1000}
    figures = {"settings": settings, "peak.nvme": {"proxy": 5000, "rollout_manager": 1000}}
    path.write_text(json.dumps(figures))
    assert main([*GLM, "--calibrate", str(path), "--json", "-"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["calibration"] == "memory.json"
    assert document["memory"]["tq_fs"]["components_bytes"]["proxy"] == pytest.approx(5 * 2**30)


def test_a_figure_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "made" / "figure.png"
    assert main([*GLM, "--figure", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_figure_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*GLM, "--figure", str(tmp_path / "figure.png")]) == 1
    assert "pip install 'tq-fs[demo]'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "give --preset"),
        (["--layers", "4", "--topk", "2"], "experts of the model are not known"),
        (["--preset", "gpt-2"], "no model is called"),
        (["--preset", "glm-5.2", "--batch", "0"], "batch: 0"),
        (["--preset", "glm-5.2", "--topk", "300"], "300 of 256 experts"),
        (["--preset", "glm-5.2", "--pipeline", "4"], "75 recorded layers in 4 equal stages"),
        (["--preset", "kimi-k2", "--stored", "uint8"], "384 experts do not fit uint8"),
        (["--preset", "glm-5.2", "--units", "5000"], "5,000 StorageUnits"),
        (["--preset", "glm-5.2", "--context", "much"], "'much' is no count"),
        (["--preset", "glm-5.2", "--host-memory", "much"], "'much' is no size"),
        (["--preset", "glm-5.2", "--calibrate", "/nowhere.json"], "cannot be read"),
        (["--preset", "glm-5.2", "--json", "/nowhere/plan.json"], "cannot be written"),
    ],
)
def test_contradictions_end_with_2_and_one_line(
    options: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *options]) == 2
    err = capfd.readouterr().err
    assert says in err
    assert err.startswith("tq-fs: ")
    assert err.count("\n") == 1


def test_help_shows_an_example(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--help"])
    assert ended.value.code == 0
    assert "tq-fs plan --preset glm-5.2 --context 256k --batch 512" in capfd.readouterr().out
