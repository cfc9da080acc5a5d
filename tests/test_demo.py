"""The demo and the first example: they run end to end, and say so when something is wrong."""

from __future__ import annotations

import importlib.util
import io
import operator
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    pytest.importorskip("psutil")

import tq_fs
from tq_fs import StoreConfig
from tq_fs.demo import compare, replay
from tq_fs.demo.engine import TinyMoe
from tq_fs.demo.measure import PathFailed, watch
from tq_fs.demo.r3 import examples as examples_of
from tq_fs.demo.r3 import gap, reproduce
from tq_fs.demo.run import run
from tq_fs.demo.scenario import TINY, Rollout, play, rounds
from tq_fs.demo.where import Where
from tq_fs.errors import ChunkCorrupt
from tq_fs.session import Session

EXAMPLE = Path(__file__).parent.parent / "examples" / "01_rollout_to_tensors.py"
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def moe() -> TinyMoe:
    return TinyMoe(**TINY.model())


@pytest.fixture(scope="module")
def rollouts(moe: TinyMoe) -> list[Rollout]:
    return play(moe, TINY)


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_01", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_tiny(tmp_path: Path, **settings: Any) -> tuple[int, str, Path]:
    """Exit code, printed text and figure of a tiny demo."""
    console = Console(file=io.StringIO(), width=100)
    figure = tmp_path / "figures" / "memory.png"
    config = StoreConfig(**settings)
    code = run(
        folder=tmp_path / "stores", figure=figure, scale=TINY, console=console, config=config
    )
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue(), figure


def flip_routing_byte(folder: Path) -> None:
    """Change one expert id to its neighbour in some stored Step, behind the store's back."""
    chunks = folder.rglob("routed_experts/c.*")
    chunk = min(path for path in chunks if path.stat().st_size)  # not one prepared for a writer
    data = bytearray(chunk.read_bytes())
    data[0] ^= 1
    chunk.write_bytes(data)


@pytest.fixture
def tamper(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Path]], None]:
    """Flip one byte on disk each time a session is finalized, once there is one."""
    original = Session.finalize

    def arm(folder: Callable[[], Path]) -> None:
        def finalize(self: Session, **options: Any) -> list[tq_fs.Segment]:
            segments = original(self, **options)
            if segments[0].ref is not None:
                flip_routing_byte(folder())
            return segments

        monkeypatch.setattr(Session, "finalize", finalize)

    return arm


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


# ---------------------------------------------------------------- the example


def test_example_ends_bit_identical(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.main() == 0
    printed = capsys.readouterr().out
    assert "bit-identical" in last_line(printed)
    assert "14 Steps deleted, 0 Segments left" in printed


def test_example_names_the_tensor_that_differs(
    example: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tamper: Callable[[Callable[[], Path]], None],
) -> None:
    monkeypatch.setattr(tq_fs, "open_store", partial(tq_fs.open_store, checksum=False))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tamper(lambda: tmp_path)
    assert example.main() == 1
    assert "NOT identical: session-0, lineage Segment 0, rollout_routed_experts: 1 of" in (
        last_line(capsys.readouterr().out)
    )


# ---------------------------------------------------------------- the demo


def test_demo_runs_end_to_end(tmp_path: Path) -> None:
    code, printed, figure = run_tiny(tmp_path)
    assert code == 0, printed
    assert "bit-identical" in last_line(printed)
    assert "Each captured rollout is replayed" in printed
    for row in ("Steps", "uint8", "record and finalize", "hydrate", "peak growth", "bfloat16"):
        assert row in printed
    picture = figure.read_bytes()
    assert picture.startswith(PNG_MAGIC)
    assert 20_000 < len(picture) < 1_000_000
    chunks = (tmp_path / "stores").rglob("routed_experts/c.*")
    assert [path for path in chunks if path.stat().st_size] == []  # all released


def test_demo_names_the_tensor_that_differs(
    tmp_path: Path, tamper: Callable[[Callable[[], Path]], None]
) -> None:
    tamper(lambda: tmp_path / "stores" / "rollouts")
    code, printed, _ = run_tiny(tmp_path, checksum=False)
    assert code == 1
    assert "NOT identical: session-" in last_line(printed)
    assert "rollout_routed_experts: 1 of" in last_line(printed)
    assert "bit-identical" not in printed


def test_demo_does_not_train_on_a_chunk_that_fails_its_checksum(
    tmp_path: Path, tamper: Callable[[Callable[[], Path]], None]
) -> None:
    tamper(lambda: tmp_path / "stores" / "rollouts")
    with pytest.raises(ChunkCorrupt):
        run_tiny(tmp_path)


def test_demo_shows_the_error_of_a_path_that_fails(tmp_path: Path) -> None:
    (tmp_path / "stores").mkdir()
    (tmp_path / "stores" / "replays").write_text("in the way of the store")
    code, printed, figure = run_tiny(tmp_path)
    assert code == 1
    assert "Traceback" in printed
    assert str(tmp_path / "stores" / "replays") in printed
    assert not figure.exists()


def test_demo_says_which_library_is_missing() -> None:
    script = """
import sys
from pathlib import Path
from rich.console import Console
sys.modules["torch"] = None  # as if not installed
from tq_fs.demo.run import run
from tq_fs.errors import DependencyMissing
try:
    run(figure=Path("never.png"), console=Console())
except DependencyMissing as error:
    print(error)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "torch cannot be imported; pip install 'tq-fs[demo]'" in done.stdout


# ---------------------------------------------------------------- its parts


def test_scenario_has_every_kind_of_step(rollouts: list[Rollout]) -> None:
    kinds = {turn.kind for rollout in rollouts for turn in rollout.turns}
    assert kinds == {"create", "append", "branch", "boundary"}
    assert max(len(rollout.turns) for rollout in rollouts) == rounds(TINY)


def test_replay_of_damaged_data_is_named_by_its_digest(
    tmp_path: Path, rollouts: list[Rollout]
) -> None:
    task = replay.Task(
        where=Where(f"file://{tmp_path}", StoreConfig(checksum=False)),
        rollouts=rollouts,
        copies=2,
        scale=TINY,
    )
    memory = replay.replay(replace(task, where=None), _quiet)
    ledger = replay.Ledger()
    with task.open() as store:
        segments = replay.record(store, task, ledger, _quiet)
        flip_routing_byte(tmp_path)
        replay.compare(store, segments, TINY, ledger, _quiet)
    (name,) = compare.digests_differ(ledger.digests, memory.digests)
    assert name.startswith("session-")
    assert name.endswith("rollout_routed_experts")
    assert ledger.memory_bytes == memory.memory_bytes


def test_watch_sees_memory_that_the_in_memory_path_holds(rollouts: list[Rollout]) -> None:
    scale = replace(TINY, payload_bytes=24 * 1024 * 1024, budget_bytes=1024 * 1024)
    copies = replay.copies_for(rollouts, scale)
    watched = watch(replay.Task(where=None, rollouts=rollouts, copies=copies, scale=scale))
    assert watched.ledger.memory_bytes["routed_experts"] >= scale.payload_bytes
    assert watched.peak_growth > 0.9 * scale.payload_bytes
    assert [phase.name for phase in watched.phases][-1] == "release"


def test_watch_raises_what_the_path_raised(rollouts: list[Rollout]) -> None:
    task = replay.Task(
        where=Where("nope://there/x", StoreConfig()), rollouts=rollouts, copies=1, scale=TINY
    )
    with pytest.raises(PathFailed, match="InvalidConfig"):
        watch(task)


def test_watch_fails_where_the_process_ends_without_a_result(
    rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_fs.demo.measure.main", operator.is_)
    task = replay.Task(where=None, rollouts=rollouts, copies=1, scale=TINY)
    with pytest.raises(PathFailed, match="exit code 0"):
        watch(task)


def test_differences_see_dtype_shape_and_every_bit(rollouts: list[Rollout]) -> None:
    with tq_fs.open_store(None, fields=TINY.fields()) as store:
        session = store.session("s")
        rollouts[2].record(session)
        segments = session.finalize()

    def differ(a: torch.Tensor, b: torch.Tensor) -> list[str]:
        return list(compare.differences(segments, {"f": [a]}, {"f": [b]}))

    nan = torch.tensor([float("nan"), 0.0])
    assert differ(nan, nan.clone()) == []
    assert "1 of 2 values, first at [1]" in differ(nan, torch.tensor([float("nan"), -0.0]))[0]
    assert "[2] and torch.float32 [1, 2]" in differ(nan, nan[None])[0]
    assert "torch.int32" in differ(nan, nan.view(torch.int32))[0]
    assert compare.digest(nan) != compare.digest(nan.view(torch.int32))
    assert compare.digest(torch.empty(0, 3)) != compare.digest(torch.empty(0, 2))


def test_replay_of_other_routing_misses_the_rollouts_logits(
    moe: TinyMoe, rollouts: list[Rollout]
) -> None:
    with tq_fs.open_store(None, fields=TINY.fields()) as store:
        session = store.session("s")
        rollouts[2].record(session)
        segments = session.finalize()
        (example,) = examples_of(rollouts[2], segments, store.hydrate(segments))
    assert reproduce(moe, [example]).ok
    assert gap(moe, [example], torch.float32, replay=True).largest < 1e-4
    other = torch.from_numpy((example.routing.numpy() + 1) % TINY.experts).to(torch.int32)
    wrong = replace(example, routing=other)
    assert not reproduce(moe, [wrong]).ok
    assert gap(moe, [wrong], torch.float32, replay=False).flipped > 0.5
    assert gap(moe, [wrong], torch.float32, replay=True).mean > 1e-2


def _quiet(_phase: str, _done: float) -> None:
    pass
