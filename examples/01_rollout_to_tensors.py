"""A rollout goes into a store and comes back out as the tensors that training reads.

A real mixture of experts (`Qwen3MoeForCausalLM`, small, with random weights) plays three agent
sessions. Every model invocation is recorded twice through the same API: into a store on disk, and
on the in-memory path that tq-fs takes out of the way. Both must give the same tensors, to the bit.
Then the trainer replays the routing it got from the disk (rollout routing replay, R3).

    pip install 'tq-fs[demo]'
    python examples/01_rollout_to_tensors.py
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence

import torch

import tq_fs
from tq_fs.demo import r3
from tq_fs.demo.compare import differences
from tq_fs.demo.engine import TinyMoe
from tq_fs.demo.scenario import Rollout, Scale, play

# 12 MoE layers that each send a token to 8 of 64 experts: 384 bytes of int32 for every token.
SCALE = Scale(sessions=3, prompt_tokens=192, tool_tokens=96, new_tokens=32)


def main() -> int:
    """Tell the story; 0 if both paths agree to the bit and replay reproduces the rollout."""
    print("1. The agents play.")
    moe = TinyMoe(**SCALE.model())
    rollouts = play(moe, SCALE)
    for rollout in rollouts:
        print(f"   {rollout.session_id}: {' -> '.join(told(rollout))}")

    fields = [
        tq_fs.logprobs(),
        tq_fs.routed_experts(layers=SCALE.layers, topk=SCALE.topk, experts=SCALE.experts),
    ]
    with (
        tempfile.TemporaryDirectory(prefix="tq-fs-example-") as folder,
        tq_fs.open_store(f"file://{folder}", fields=fields) as store,
        tq_fs.open_store(None, fields=fields) as memory,  # the same code, with nothing stored
    ):
        print("\n2. Every Step is recorded as soon as the engine has replied.")
        segments = [record(store, rollout) for rollout in rollouts]
        kept = [record(memory, rollout, quiet=True) for rollout in rollouts]

        print("\n3. Training hydrates the Segments it was sent references of.")
        batches = [store.hydrate(own) for own in segments]
        reference = [memory.hydrate(own) for own in kept]
        wrong = compare(segments, batches, reference)

        print("\n4. Training replays the routing that the rollout recorded (R3).")
        examples = [
            example
            for rollout, own, batch in zip(rollouts, segments, batches, strict=True)
            for example in r3.examples(rollout, own, batch)
        ]
        replayed = train(moe, examples)

        print("\n5. The checkpoint is saved: the Segments are no longer needed.")
        deleted = sum(store.release(own, "train") for own in segments)
        left = len(list(store.unreleased()))
        print(f"   {deleted} Steps deleted, {left} Segments left.")

    if wrong or not replayed:
        print(f"\nNOT identical: {wrong[0]}" if wrong else "\nReplay misses the rollout.")
        return 1
    count = sum(len(tensors) for batch in batches for tensors in batch.values())
    print(f"\nAll {count} tensors are bit-identical to the in-memory path's.")
    return 0


def told(rollout: Rollout) -> list[str]:
    """Say in words what happened in each turn."""
    words = {
        "create": "prompt",
        "append": "tool result",
        "branch": "another try from inside Step {}",
        "boundary": "history rewritten ({})",
    }
    return [words[turn.kind].format(turn.reason or turn.parent) for turn in rollout.turns]


def record(store: tq_fs.Store, rollout: Rollout, *, quiet: bool = False) -> list[tq_fs.Segment]:
    """Record one session in `tito` mode: a Step holds only the tokens that are new with it."""
    session = store.session(rollout.session_id, mode="tito")
    if not quiet:
        print(f"   {session.session_id}")
    for turn in rollout.turns:
        # The engine returns rows for the whole sequence. Those of the shared history are recorded
        # already, and keep the routing of the weights that generated them.
        first_row = session.first_row(turn.kind, turn.parent)
        values = {"logprobs": turn.logprobs, "routed_experts": turn.routed_experts[first_row:]}
        match turn.kind:
            case "create":
                step = session.create(turn.context, turn.response, **values)
            case "append":  # the context is the tool result alone
                step = session.append(turn.parent, turn.context, turn.response, **values)
            case "branch":  # another continuation: the context is its whole prompt
                step = session.branch(turn.parent, turn.context, turn.response, **values)
            case "boundary":  # the history was rewritten: again a whole prompt
                step = session.boundary(
                    turn.parent, turn.context, turn.response, reason=turn.reason, **values
                )
        if not quiet:
            describe(step, first_row, values["routed_experts"].nbytes)
    segments = session.finalize(consumers=["train"])
    if not quiet:
        for segment in segments:
            print(
                f"     Segment {segment.index}: Steps {list(segment.steps)}, "
                f"{len(segment.tokens)} tokens, {segment.loss_mask.sum()} of them generated"
            )
    return segments


def describe(step: tq_fs.StepRecord, first_row: int, nbytes: int) -> None:
    """Print what one Step holds and what of it was stored."""
    entry = step.stored.fields["routed_experts"]
    print(
        f"     Step {step.index} {step.kind:<8} {len(step.tokens):>4} tokens, routing rows "
        f"{first_row:>4} to {first_row + entry.shape[0]:>4}: "
        f"{nbytes:>7,} bytes of {entry.memory} -> {entry.nbytes:>7,} of {entry.dtype}"
    )


def compare(
    segments: Sequence[list[tq_fs.Segment]],
    batches: Sequence[dict[str, list[torch.Tensor]]],
    reference: Sequence[dict[str, list[torch.Tensor]]],
) -> list[str]:
    """Compare dtype, shape and every bit of every tensor; return what differs."""
    wrong: list[str] = []
    for own, batch, other in zip(segments, batches, reference, strict=True):
        wrong += differences(own, batch, other)
        for name, tensors in batch.items():
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
            print(f"   {own[0].session_id} {name}: {tensors[0].dtype} {shapes}")
    print(f"   {len(wrong)} tensors differ from the in-memory path's.")
    return wrong


def train(moe: TinyMoe, examples: Sequence[r3.Example]) -> bool:
    """Run the training forward pass in two precisions, without and with replay."""
    reproduced = r3.reproduce(moe, examples)
    print(f"   float32 replay gives the rollout's logits to {reproduced.largest:.1e}")
    print("   training in   routing    rows flipped   mean gap   largest gap")
    gaps = []
    for dtype in (torch.float32, torch.bfloat16):
        for replay in (False, True):
            gaps.append(gap := r3.gap(moe, examples, dtype, replay=replay))
            print(
                f"   {gap.dtype:<13} {'replayed' if replay else 'its own':<10} "
                f"{gap.flipped:>12.2%} {gap.mean:>10.1e} {gap.largest:>13.1e}"
            )
    print("   (gap: |rollout logprob - training logprob| over generated tokens)")
    free, replayed = gaps[-2:]
    return reproduced.ok and replayed.mean < free.mean


if __name__ == "__main__":
    sys.exit(main())
