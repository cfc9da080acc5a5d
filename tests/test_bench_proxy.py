"""``tq-fs bench proxy``: its figures and targets, its engine, and a small real run."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from tq_fs.bench import proxy as bench
from tq_fs.bench._proxy_load import Agent
from tq_fs.bench._proxy_replies import Replies, RoutingShape
from tq_fs.bench._proxy_sittings import OFF, ON, Place, Resident, Stalls, Steps, engine, proxy
from tq_fs.bench._timing import Timings
from tq_fs.cli import main
from tq_fs.errors import DependencyMissing, StorageFailed, UpstreamRefused

MiB = 1024**2
SMALL = [
    *("--repeats", "1", "--sessions", "2", "--turns", "3", "--tokens", "64"),
    *("--long-tokens", "512", "--layers", "4", "--held-sessions", "2", "--held-turns", "4"),
]
SHAPE = RoutingShape(layers=5, topk=8, experts=256)


@pytest.fixture
def measured() -> bench.Measured:
    late = [0.0001] * 999
    return bench.Measured(
        place="folder x",
        steps=Steps(
            wall=Timings({ON: [0.030, 0.060, 0.033], OFF: [0.025, 0.050, 0.030]}),
            processor=Timings({ON: [0.028, 0.028, 0.028], OFF: [0.020, 0.020, 0.020]}),
        ),
        stalls=Stalls([[*late, 0.009], [*late, 0.090], [*late, 0.008]], [0.0001, 0.0002]),
        long_stalls=Stalls([[*late, 0.050]], [0.0001]),
        resident=Resident(
            sessions=4,
            steps=400,
            tokens=800_000,
            anonymous=10 * MiB,
            traced=9 * MiB,
            rss=11 * MiB,
            messages=2 * MiB,
        ),
    )


def test_every_target_has_a_figure(measured: bench.Measured) -> None:
    assert set(bench.TARGETS) <= set(bench.figures(measured))


def test_a_step_is_told_as_the_median_of_pairs(measured: bench.Measured) -> None:
    found = bench.figures(measured)
    assert (found["step.x_store_off"], found["step.processor_x_store_off"]) == (1.2, 1.4)
    assert (found["step.store_on.ms"], found["step.store_off.ms"]) == (33.0, 30.0)


def test_the_stall_of_the_loop_is_that_of_an_ordinary_round(measured: bench.Measured) -> None:
    found = bench.figures(measured)
    assert (found["loop_stall_ms"], found["loop_stall.max_ms"]) == (9.0, 90.0)
    assert (found["loop_stall_64k_ms"], found["loop_stall_64k.wakeups"]) == (50.0, 1000)


def test_messages_are_not_counted_as_memory_of_tokens(measured: bench.Measured) -> None:
    found = bench.figures(measured)
    assert found["resident.bytes_per_token"] == round(8 * MiB / 800_000, 2)
    assert found["resident.growth_mib"] == 10.0


def test_the_document_says_which_targets_are_met(measured: bench.Measured) -> None:
    found = bench.document(bench.ProxyBench(root=Path("/x")), measured)
    assert json.loads(json.dumps(found)) == found
    assert found["targets"]["step.x_store_off"] == {"target": "≤ 1.2", "met": True}
    assert {name for name, target in found["targets"].items() if target["met"]} == set(
        bench.TARGETS
    )
    assert (found["settings"]["sessions"], found["settings"]["root"]) == (8, "/x")


def test_people_see_times_and_targets(
    measured: bench.Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.show(bench.ProxyBench(), measured, Console(width=100))
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("store on", "store off", *bench.TARGETS))


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize(
    ("prompt", "start", "tokens"), [(10, 0, 64), (100, 99, 64), (9, 8, 1), (64, 3, 30)]
)
def test_a_prepared_reply_has_the_rows_that_were_asked_for(
    number: int, prompt: int, start: int, tokens: int
) -> None:
    replies = Replies(SHAPE, 64, stop_id=257, margin=128)
    pieces = replies.body(number, prompt=prompt, start_row=start, tokens=tokens)
    body = json.loads(b"".join(pieces))
    raw = base64.b64decode(body["meta_info"]["routed_experts"], validate=True)
    ids = np.frombuffer(raw, "<i4").reshape(-1, SHAPE.layers, SHAPE.topk)
    assert len(ids) == prompt + tokens - 1 - start
    assert np.array_equal(ids, replies._rows[3 * (number % 4) :][: len(ids)])
    assert ids.min() >= 0
    assert ids.max() < SHAPE.experts
    assert (np.diff(np.sort(ids, axis=-1)) > 0).all()  # as a router gives them
    assert len(body["output_ids"]) == len(body["meta_info"]["output_token_logprobs"]) == tokens
    assert body["output_ids"][-1] == 257
    assert body["text"].encode() == bytes(body["output_ids"][:-1])


def test_a_turn_that_was_recorded_as_something_else_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = Agent("http://127.0.0.1:9", "a")
    answer = {
        "tq_fs": {"kind": "boundary"},
        "usage": {"total_tokens": 9},
        "choices": [{"message": {"role": "assistant", "content": "x"}}],
    }
    monkeypatch.setattr(agent, "_post", lambda path, body: answer)
    with pytest.raises(UpstreamRefused, match="was recorded as boundary where create was meant"):
        agent.turn(1)


def test_it_says_what_is_not_installed_before_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    with pytest.raises(DependencyMissing, match=r"needs fastapi.*tq-fs\[proxy\]"):
        bench.measure(bench.ProxyBench(), Console(quiet=True))


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "proxy", "--help"])
    assert ended.value.code == 0
    assert "example:\n  tq-fs bench proxy --json figures.json" in capsys.readouterr().out


def test_a_process_that_cannot_start_shows_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_fs.bench._proxy_sittings._UPSTREAM", "tq_fs.bench.no_such_module")
    with (
        pytest.raises(StorageFailed, match=r"(?s)no answer to 'ready'.*no_such_module"),
        engine(Place.of(tmp_path, SHAPE), 8),
    ):
        pass


@pytest.mark.slow
def test_its_engine_and_its_proxy_make_steps_of_the_size_that_is_told(tmp_path: Path) -> None:
    place = Place.of(tmp_path, SHAPE)
    with engine(place, 100) as url, proxy(place, url, ON) as child:
        agent = Agent(child.ask("url"), "a")
        agent.turn(100)
        first = agent.tokens
        agent.turn(100)
        stored = [step.name for step in tmp_path.glob("store_on-*/store/*/steps/train/*/*/0*")]
        agent.discard()
        assert child.ask("memory")["anonymous"] > MiB
        assert len(child.ask("idle", 0.05)) > 3
    assert sorted(stored) == ["000000", "000001"]
    assert agent.tokens - first > 100
    assert agent.message_bytes() > 4 * 100


@pytest.mark.slow
def test_it_prints_one_json_object_and_leaves_nothing(tmp_path: Path) -> None:
    command = ["bench", "proxy", *SMALL, "--root", str(tmp_path), "--json", "-"]
    done = subprocess.run(
        [sys.executable, "-m", "tq_fs.cli", *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    settings, targets = found.pop("settings"), found.pop("targets")
    assert set(targets) == set(bench.TARGETS)
    assert settings["place"] == f"folder {tmp_path}"
    assert found["resident.sessions"] == 2
    assert found["resident.tokens"] > 2 * 4 * 1910
    assert [n for n, v in found.items() if v <= 0 and not n.startswith("resident.")] == []
    assert list(tmp_path.iterdir()) == []
