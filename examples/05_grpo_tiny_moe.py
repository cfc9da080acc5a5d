"""GRPO on a real mixture of experts: agents, Proxy, store, and training that replays the routing.

A small `Qwen3MoeForCausalLM` with random weights is trained by reinforcement learning, all of it on
the CPU. Three processes:

    engine      speaks SGLang's /generate; samples in float32 and says which experts it took
    tq-fs proxy stands before it; agents speak OpenAI's chat completions to it, it records
    this one    plays eight agents at once, and trains in bfloat16

Agents write drafts, measure them with a tool and compact their history once, so that a session has
two Segments. The reward is the share of lowercase letters. Training takes the experts that the
rollout took (R3), and weighs tokens by the ratio of both probabilities. The engine gets the new
weights before the next iteration.

    pip install 'tq-fs[demo,proxy,fast-s3]' 'moto[server]'
    python examples/05_grpo_tiny_moe.py --store s3 --figure gap.png

With the same --seed the losses and weights are the same to the bit, wherever the store is: what a
turn draws depends on its session and its number, not on who came first. Killed at any moment (kill
-9) and started anew with the same --work and store, a run goes on from its last checkpoint; what is
in the store of that iteration's rollouts is taken from there. With --store off all are made anew.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

import tq_fs
from tq_fs.bench.servers import juicefs_binary, minio_server, moto_server
from tq_fs.demo import grpo
from tq_fs.demo.engine import TinyMoe
from tq_fs.demo.tokenizer import VOCAB
from tq_fs.proxy import ProxyClient

ENGINE = Path(__file__).with_name("04_rollout_engine.py")
BUCKET = "tq-fs-grpo"
# 4 MoE layers that each send a token to 4 of 16 experts.
SCALE = {"layers": 4, "experts": 16, "topk": 4, "hidden": 64, "vocab": VOCAB}
LEARNING_RATE, CLIP = 0.003, 0.2
BUDGET_BYTES = 128 * 1024  # of a micro-batch's hydrated fields: a few Segments


def main(arguments: Sequence[str] | None = None) -> int:
    """Tell the story."""
    options = parsed(arguments)
    disable_progress_bar()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    with ExitStack() as opened:
        work = options.work or Path(opened.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        place = opened.enter_context(place_of(options, work))
        say(f"Trajectories go to {place.url or 'nowhere: values travel in the Segments'}.")
        history, weights = train(options, work, place)
    if options.figure is not None:
        grpo.draw(history, options.figure)
        say(f"Logprob gap over the iterations: {options.figure}")
    say(table(history))
    if options.json:
        rows = [iteration.plain() for iteration in history]
        print(json.dumps({"iterations": rows, "weights": weights}))
    return 0


def train(
    options: argparse.Namespace, work: Path, place: grpo.Place
) -> tuple[list[grpo.Iteration], str]:
    """Start everything, go on where the last checkpoint ends, and return all iterations."""
    moe = TinyMoe(**SCALE, seed=options.seed)
    learner = grpo.Learner(moe, learning_rate=LEARNING_RATE, clip=CLIP)
    batch = grpo.Batch(prompts=options.prompts, samples=options.samples, at_once=options.at_once)
    script = grpo.Script(new_tokens=options.new_tokens, seed=options.seed)
    run = {**SCALE, **asdict(batch), **asdict(script)}
    del run["at_once"]  # changes nothing
    checkpoints = grpo.Checkpoints(work / "checkpoints", run)
    history = checkpoints.load(learner)
    if history is None:
        history = []
        checkpoints.save(learner, history)
    model = checkpoints.path(len(history))
    with (
        grpo.serving(engine_command(model), work / "engine.log") as engine,
        grpo.serving(proxy_command(model, engine, place, work), work / "proxy.log") as proxy,
        place.open([tq_fs.logprobs(), tq_fs.routed_experts_of_model(model)]) as store,
    ):
        client = ProxyClient(proxy)
        rollouts = grpo.Rollouts(client, proxy, store, batch, script)
        if history:
            say(f"Goes on after {len(history)} iterations.")
            rollouts.forget_before(len(history))
        for number in range(len(history), options.stop_after or options.iterations):
            client.pause()
            grpo.give_weights(engine, checkpoints.path(number), number)
            client.resume()
            say(f"iteration {number}: rolls out with weights {number}")
            sessions, taken = rollouts.collect(number)
            say(f"iteration {number}: {len(sessions)} sessions, {taken} of them from the store")
            history.append(step(number, learner, sessions, store, taken))
            saved = checkpoints.save(learner, history)
            say(f"iteration {number}: checkpoint {saved.name} saved")
            deleted = rollouts.release([s for own in sessions.values() for s in own], number)
            say(told(history[-1], deleted))
    return history, digest(moe)


def step(
    number: int,
    learner: grpo.Learner,
    sessions: Mapping[str, Sequence[tq_fs.Segment]],
    store: tq_fs.Store,
    taken: int,
) -> grpo.Iteration:
    """Weigh the sessions against the others of their prompt, and take one optimizer step."""
    rewards = {name: grpo.reward(segments) for name, segments in sessions.items()}
    advantages = grpo.advantages(rewards, {name: grpo.group_of(name) for name in sessions})
    segments = [segment for own in sessions.values() for segment in own]
    left = iter(segments)
    batches = store.micro_batches(segments, budget_bytes=BUDGET_BYTES, reuse=True)
    learned = learner.learn(
        (([next(left) for _ in batch.samples], batch.tensors) for batch in batches),
        advantages,
        tokens=sum(int(segment.loss_mask.sum()) for segment in segments),
    )
    mean = sum(rewards.values()) / len(rewards)
    return grpo.Iteration(number=number, reward=mean, taken=taken, learned=learned)


# ---------------------------------------------------------------- where things are


@contextmanager
def place_of(options: argparse.Namespace, work: Path) -> Iterator[grpo.Place]:
    """Give where trajectories lie; for S3 start a server where none is named."""
    store_id = f"grpo-{options.seed}"
    if options.store == "off":
        yield grpo.Place(url=None, store_id=store_id)
    elif options.store == "file":
        yield grpo.Place(url=(work / "store").resolve().as_uri(), store_id=store_id)
    elif options.s3_url:
        yield grpo.Place(url=options.s3_url, store_id=store_id)
    else:  # MinIO's code keeps the bucket in the folder; moto's ends with this process
        starting = minio_server(work / "bucket") if juicefs_binary() else moto_server()
        with starting as server:
            os.environ.update(server.environment())
            server.make_bucket(BUCKET)
            yield grpo.Place(url=f"s3://{BUCKET}/runs", store_id=store_id)


def engine_command(model: Path) -> list[str]:
    """Return how the rollout engine is started."""
    return [str(ENGINE), "--model", str(model), "--port", "0"]


def proxy_command(model: Path, engine: str, place: grpo.Place, work: Path) -> list[str]:
    """Return how the Proxy is started."""
    ends = ["--model", str(model), "--upstream", engine, "--port", "0"]
    return ["-m", "tq_fs.cli", "proxy", *ends, *place.flags(work)]


# ---------------------------------------------------------------- what is said


def say(text: str) -> None:
    """Print at once: who watches may want to kill us at this very line."""
    print(text, flush=True)


def told(iteration: grpo.Iteration, deleted: int) -> str:
    """Return an iteration in a line."""
    learned = iteration.learned
    return (
        f"iteration {iteration.number}: loss {learned.loss:+.6f}, reward {iteration.reward:.3f}, "
        f"logprob gap mean {learned.replayed.mean:.4f} (without replay {learned.free.mean:.4f}), "
        f"largest {learned.replayed.largest:.3f} ({learned.free.largest:.3f}); "
        f"{learned.tokens} tokens in {learned.micro_batches} micro-batches, {deleted} Steps deleted"
    )


def table(history: Sequence[grpo.Iteration]) -> str:
    """Return all iterations as a table."""
    head = ("iteration", "loss", "reward", "gap, replayed", "largest", "gap, free", "largest")
    lines = [("  ".join(f"{name:>13}" for name in head))]
    for it in history:
        gaps = (it.learned.replayed, it.learned.free)
        cells = [f"{it.number:>13}", f"{it.learned.loss:>13.6f}", f"{it.reward:>13.3f}"]
        cells += [f"{value:>13.5f}" for gap in gaps for value in (gap.mean, gap.largest)]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def digest(moe: TinyMoe) -> str:
    """Return the SHA-256 of all weights."""
    found = sha256()
    for name, weight in sorted(moe.model.state_dict().items()):
        found.update(name.encode() + weight.numpy().tobytes())
    return found.hexdigest()


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--store", choices=("off", "file", "s3"), default="file", help="where trajectories lie")
    add("--s3-url", help="s3://bucket/prefix, for --store s3 (default: a server of our own)")
    add("--work", type=Path, help="folder for checkpoints and logs, to go on from (default: none)")
    add("--seed", type=int, default=0)
    add("--iterations", type=int, default=3)
    add("--prompts", type=int, default=2)
    add("--samples", type=int, default=4, help="sessions of each prompt")
    add("--at-once", type=int, default=8, help="sessions that are played at the same time")
    add("--new-tokens", type=int, default=16, help="most tokens of a turn")
    add("--stop-after", type=int, metavar="N", help="end after N iterations, as a kill would")
    add("--figure", type=Path, metavar="FILE.png")
    add("--json", action="store_true", help="print all figures as JSON at the end")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
