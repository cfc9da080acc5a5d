"""The pieces of the GRPO example: what is learned, from what, and what a checkpoint keeps."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

import torch

from tq_fs import Segment
from tq_fs.demo.engine import TinyMoe
from tq_fs.demo.grpo import (
    Agent,
    Batch,
    Checkpoints,
    Gap,
    Iteration,
    Learned,
    Learner,
    Script,
    advantages,
    clipped_loss,
    draw,
    group_of,
    reward,
    serving,
    turn_seed,
)
from tq_fs.demo.weights import load_model
from tq_fs.errors import InvalidConfig, UpstreamRefused, UpstreamUnavailable

PROMPT, NEW = 40, 16
Column = list[torch.Tensor]


def small_moe() -> TinyMoe:
    return TinyMoe(layers=4, experts=16, topk=4, hidden=64, vocab=265)


def segment(tokens: Any, mask: Sequence[int], session_id: str = "s") -> Segment:
    generated = list(mask)
    return Segment(
        ref=None,
        session_id=session_id,
        view="lineage",
        index=0,
        steps=(0,),
        tokens=np.asarray(tokens, np.int32),
        loss_mask=np.asarray(generated, np.uint8),
        versions=(),
        response_length=len(generated) - generated.index(1),
        arrays={},
    )


def rolled_out(moe: TinyMoe) -> tuple[list[Segment], dict[str, Column]]:
    """Four sessions; a tool's result in the midst of each response."""
    random = np.random.default_rng(0)
    segments: list[Segment] = []
    columns: dict[str, Column] = {"rollout_log_probs": [], "rollout_routed_experts": []}
    for number in range(4):
        prompt = random.integers(0, 256, PROMPT, dtype=np.int32)
        (reply,) = moe.generate([prompt], max_new_tokens=NEW, seeds=[number])
        mask = [0] * PROMPT + [1, 1, 0, 0] + [1] * (NEW - 4)
        segments.append(segment(reply.tokens, mask, f"s{number}"))
        logprobs = reply.output_logprobs * np.asarray(mask[PROMPT:], np.float32)
        columns["rollout_log_probs"].append(torch.from_numpy(logprobs))
        columns["rollout_routed_experts"].append(torch.from_numpy(reply.routed_experts))
    return segments, columns


def weights(moe: TinyMoe) -> dict[str, bytes]:
    return {name: w.numpy().tobytes() for name, w in moe.model.state_dict().items()}


# ---------------------------------------------------------------- policy


def test_the_reward_is_the_share_of_lowercase_among_generated_bytes_only() -> None:
    first = segment([*b"aaaaAbc", 262], [0, 0, 0, 0, 1, 1, 1, 1])
    second = segment([*b"zz1"], [0, 1, 1])
    assert reward([first, second]) == 3 / 6


def test_an_advantage_is_told_from_its_own_group_in_standard_deviations() -> None:
    rewards = {"a/1": 1.0, "a/2": 7.0, "b/1": 0.5, "b/2": 0.5}
    found = advantages(rewards, {name: group_of(name) for name in rewards})
    assert found["a/1"] == pytest.approx(-1, abs=1e-5)
    assert found["a/2"] == pytest.approx(1, abs=1e-5)
    assert found["b/1"] == found["b/2"] == 0


@pytest.mark.parametrize(
    ("gap", "advantage", "loss", "follows"),
    [
        (0.0, 2.0, -2.0, True),
        (0.1, 1.0, -math.exp(0.1), True),
        (0.5, 1.0, -1.2, False),  # it is likelier than it was already
        (-0.5, 1.0, -math.exp(-0.5), True),
        (-0.5, -1.0, 0.8, False),
        (0.5, -1.0, math.exp(0.5), True),
    ],
)
def test_a_ratio_is_followed_until_it_has_gone_far_enough(
    gap: float, advantage: float, loss: float, follows: bool
) -> None:
    trained = torch.tensor([-1.0 + gap], requires_grad=True)
    found = clipped_loss(trained, torch.tensor([-1.0]), advantage, 0.2)
    found.backward()  # type: ignore[no-untyped-call]
    assert found.item() == pytest.approx(loss)
    assert trained.grad is not None
    assert bool(trained.grad.item()) == follows


# ---------------------------------------------------------------- learning


def learn(cuts: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> tuple[Any, dict[str, bytes]]:
    """Take one step on the same rollouts, in micro-batches that end at `cuts`."""
    moe = small_moe()
    segments, columns = rolled_out(moe)
    learner = Learner(moe, learning_rate=0.01, clip=0.2, dtype=dtype)
    batches = [
        (segments[a:b], {name: values[a:b] for name, values in columns.items()})
        for a, b in zip([0, *cuts], [*cuts, len(segments)], strict=True)
    ]
    told = dict(zip(["s0", "s1", "s2", "s3"], (1.0, -1.0, 0.5, -0.5), strict=True))
    learned = learner.learn(batches, told, tokens=sum(int(s.loss_mask.sum()) for s in segments))
    return learned, weights(moe)


def test_how_micro_batches_are_cut_does_not_change_a_bit() -> None:
    whole, after = learn([])
    cut, same = learn([1, 3])
    assert after == same
    assert (whole.loss, whole.replayed, whole.free) == (cut.loss, cut.replayed, cut.free)
    assert (whole.micro_batches, cut.micro_batches) == (1, 3)
    assert after != weights(small_moe())


def test_replay_closes_the_gap_and_only_generated_tokens_count() -> None:
    learned, _ = learn([])
    assert learned.replayed.mean < learned.free.mean
    assert learned.replayed.largest < learned.free.largest
    assert learned.tokens == 4 * (NEW - 2)
    exact, _ = learn([], torch.float32)
    assert exact.replayed.largest < 1e-4


def test_a_step_makes_the_better_session_likelier() -> None:
    moe = small_moe()
    segments, columns = rolled_out(moe)
    learner = Learner(moe, learning_rate=0.01, clip=0.2, dtype=torch.float32)

    def likelihood(number: int) -> float:
        with torch.no_grad():
            logits = moe.forward(segments[number].tokens)
            every = moe.token_logprobs(logits, segments[number].tokens)[-NEW:]
        return float(every[torch.tensor(segments[number].loss_mask[-NEW:] == 1)].sum())

    before = [likelihood(0), likelihood(1)]
    first = {name: values[:2] for name, values in columns.items()}
    learner.learn([(segments[:2], first)], {"s0": 1.0, "s1": -1.0}, tokens=28)
    assert likelihood(0) > before[0]
    assert likelihood(1) < before[1]


# ---------------------------------------------------------------- checkpoints


def iteration(number: int) -> Iteration:
    gap = Gap(mean=0.1, largest=1 / 3)
    learned = Learned(loss=-1e-9, replayed=gap, free=gap, tokens=7, micro_batches=2)
    return Iteration(number=number, reward=0.1 + 0.2, taken=number, learned=learned)


def test_a_checkpoint_gives_back_weights_optimizer_and_history(tmp_path: Path) -> None:
    run: dict[str, object] = {"seed": 1}
    moe = small_moe()
    learner = Learner(moe, learning_rate=0.01, clip=0.2)
    checkpoints = Checkpoints(tmp_path / "c", run)
    assert checkpoints.load(learner) is None
    segments, columns = rolled_out(moe)
    told = {f"s{n}": 1.0 for n in range(4)}
    history = []
    for number in range(3):
        learner.learn([(segments, columns)], told, tokens=56)
        history.append(iteration(number))
        folder = checkpoints.save(learner, history)
        assert weights(load_model(folder)) == weights(moe)  # an engine can be started from it
    other = Learner(small_moe(), learning_rate=0.01, clip=0.2)
    assert Checkpoints(tmp_path / "c", run).load(other) == history
    assert weights(other.moe) == weights(moe)
    for one in (learner, other):  # Adam's moments too
        one.learn([(segments, columns)], told, tokens=56)
    assert weights(other.moe) == weights(moe)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["000002", "000003"]


def test_a_half_written_checkpoint_is_none_and_another_run_is_refused(tmp_path: Path) -> None:
    learner = Learner(small_moe(), learning_rate=0.01, clip=0.2)
    checkpoints = Checkpoints(tmp_path / "c", {"seed": 1})
    (tmp_path / "c" / ".000000").mkdir()  # killed while it was written
    assert checkpoints.load(learner) is None
    checkpoints.save(learner, [])
    assert checkpoints.load(learner) == []
    assert checkpoints.save(learner, [iteration(0)]).name == "000001"
    with pytest.raises(InvalidConfig, match=r"'seed': 1.*'seed': 2"):
        Checkpoints(tmp_path / "c", {"seed": 2}).load(learner)


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    draw([iteration(0), iteration(1)], tmp_path / "new" / "gap.png")
    assert (tmp_path / "new" / "gap.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- agent


@contextmanager
def answering(reply: dict[str, Any], status: int = 200) -> Iterator[tuple[str, list[Any]]]:
    """A server that answers every request with one message, and what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, dict(self.headers), body))
            answer = json.dumps({"choices": [{"message": reply}]}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_agent_measures_each_draft_and_compacts_its_history_once() -> None:
    reply = {"role": "assistant", "content": "abC"}
    with answering(reply) as (url, asked):
        Agent(url, "x/1", "x", "rain", Script(drafts=2, new_tokens=5, seed=3)).play()
    roles = [[m["role"] for m in body["messages"]] for _, _, body in asked]
    first = ["system", "user"]
    assert roles == [first, [*first, "assistant", "tool"]] * 2
    told = [body["messages"][1]["content"] for _, _, body in asked]
    assert told[0] == told[1] == "Write a few words about rain."
    assert told[2] == told[3]
    assert "draft 2 had 2 lowercase letters of 3 characters" in told[2]
    assert asked[1][2]["messages"][2] == reply
    assert all(h["X-Session-Id"] == "x/1" and h["X-Instance-Id"] == "x" for _, h, _ in asked)
    assert [body["seed"] for _, _, body in asked] == [turn_seed(3, "x/1", n) for n in range(4)]
    assert len({body["seed"] for _, _, body in asked}) == 4


def test_calls_that_the_model_makes_are_answered_by_their_ids() -> None:
    calls = [{"id": "call_7", "type": "function", "function": {"name": "measure"}}]
    with answering({"role": "assistant", "content": None, "tool_calls": calls}) as (url, asked):
        Agent(url, "s", "g", "salt", Script()).play()
    assert asked[1][2]["messages"][3]["tool_call_id"] == "call_7"


def test_an_answer_that_is_an_error_ends_the_session() -> None:
    with answering({}, 503) as (url, _), pytest.raises(UpstreamRefused, match="503"):
        Agent(url, "s", "g", "salt", Script()).play()


def test_sessions_are_named_in_their_order() -> None:
    names = Batch(prompts=2, samples=2).sessions(11)
    assert names == sorted(names)
    assert {group_of(name) for name in names} == {
        "iteration-0011/prompt-0",
        "iteration-0011/prompt-1",
    }


# ---------------------------------------------------------------- servers


def test_a_server_gives_its_url_and_ends_with_the_block(tmp_path: Path) -> None:
    code = "import os, time; print('http://here', os.getpid(), flush=True); time.sleep(1000)"
    with serving(["-c", code], tmp_path / "log") as url:
        pid = int(url.split()[1])
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()


def test_a_server_that_does_not_come_up_is_told_with_its_log(tmp_path: Path) -> None:
    with (
        pytest.raises(UpstreamUnavailable, match="ZeroDivisionError"),
        serving(["-c", "1 / 0"], tmp_path / "log"),
    ):
        pass
