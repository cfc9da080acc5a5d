"""The demo's stages: roll out, compare, train with replay, measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from tq_fs.demo import figure, r3, report
from tq_fs.demo.compare import differences, digests_differ
from tq_fs.demo.engine import TinyMoe
from tq_fs.demo.measure import PathFailed, Watched, watch
from tq_fs.demo.replay import CONSUMER, PHASES, Task, copies_for
from tq_fs.demo.scenario import Rollout, Scale, play, rounds
from tq_fs.demo.where import Base, Where
from tq_fs.store import open_store

Advance = Callable[[], None]
PRECISIONS = (torch.float32, torch.bfloat16)
MOST_LINES = 20  # of what went wrong


class Demo:
    """One run of the demo.

    Parameters
    ----------
    scale
        How large it is.
    console
        Prints, and shows progress.
    """

    def __init__(self, scale: Scale, console: Console) -> None:
        self._scale = scale
        self._console = console
        self._different: list[str] = []
        self._broken: list[str] = []  # other promises that were not kept

    def run(self, base: Base, png: Path) -> int:
        """Take all stages and return the exit code; the last line printed is the verdict.

        Parameters
        ----------
        base
            What the stores lie below.
        png
            Where the figure goes.
        """
        started = time.monotonic()
        self._say(f"Stores below {base}.")
        moe, rollouts = self._roll_out()
        examples = self._compare(rollouts, base.below("rollouts"))
        self._train(moe, examples)
        try:
            memory, stored = self._measure(rollouts, base.below("replays"))
        except PathFailed as error:
            self._say(str(error))
            return 1
        self._report(memory, stored, png)
        self._say(f"Took {time.monotonic() - started:.0f} s.")
        return self._verdict(memory)

    # ------------------------------------------------------------ stages

    def _roll_out(self) -> tuple[TinyMoe, list[Rollout]]:
        scale = self._scale
        with self._progress("rolling out", rounds(scale)) as advance:
            moe = TinyMoe(**scale.model())
            rollouts = play(moe, scale, advance=advance)
        turns = sum(len(rollout.turns) for rollout in rollouts)
        self._say(
            f"Rolled out {len(rollouts)} sessions, {turns} Steps, on a Qwen3MoeForCausalLM with "
            f"random weights: {scale.layers} layers, top-{scale.topk} of {scale.experts} experts."
        )
        return moe, rollouts

    def _compare(self, rollouts: list[Rollout], where: Where) -> list[r3.Example]:
        """Take the rollouts through both paths in this process, and compare tensor by tensor."""
        examples: list[r3.Example] = []
        fields = self._scale.fields()
        with (
            open_store(where.url, fields=fields, config=where.config) as stored,
            open_store(None, fields=fields) as memory,
            self._progress("storing and hydrating", len(rollouts)) as advance,
        ):
            for rollout in rollouts:
                ours, theirs = (store.session(rollout.session_id) for store in (stored, memory))
                rollout.record(ours)
                rollout.record(theirs)
                segments = ours.finalize(consumers=[CONSUMER])
                batch = stored.hydrate(segments)
                reference = memory.hydrate(theirs.finalize(consumers=[CONSUMER]))
                self._different += differences(segments, batch, reference)
                examples += r3.examples(rollout, segments, batch)
                stored.release(segments, CONSUMER)
                advance()
        return examples

    def _train(self, moe: TinyMoe, examples: list[r3.Example]) -> None:
        """Replay hydrated routing in a training forward pass."""
        chosen = examples[: self._scale.replayed_segments]
        gaps = []
        with self._progress("training with R3", 1 + 2 * len(PRECISIONS)) as advance:
            reproduced = r3.reproduce(moe, chosen)
            advance()
            for dtype in PRECISIONS:
                for replay in (False, True):
                    gaps.append(r3.gap(moe, chosen, dtype, replay=replay))
                    advance()
        self._console.print(report.gap_table(gaps))
        self._say(
            f"float32 replay of {len(chosen)} Segments gives the rollout's logits of "
            f"{reproduced.steps} Steps to {reproduced.largest:.1e}."
        )
        if reproduced.skipped:
            self._say(
                f"{reproduced.skipped} more Steps cannot be compared: when the engine read their "
                "history again, it took another expert at a near-tie than the one recorded."
            )
        if not reproduced.ok:
            self._broken.append(f"float32 replay misses the rollout's logits: {reproduced}")
        if not gaps[-1].mean < gaps[-2].mean:
            self._broken.append("bfloat16 replay does not narrow the logprob gap")

    def _measure(self, rollouts: list[Rollout], where: Where) -> tuple[Watched, Watched]:
        """Run each path in a fresh process and watch its memory."""
        copies = copies_for(rollouts, self._scale)
        self._say(
            f"Each captured rollout is replayed {copies} times under ids of its own, through each "
            "path in a fresh process that holds no model. All Segments wait until all are "
            "recorded, as they do where rollouts outrun training."
        )
        watched = []
        for label, place in (("in-memory path", None), ("tq-fs", where)):
            task = Task(where=place, rollouts=rollouts, copies=copies, scale=self._scale)
            with self._progress(label, 100) as advance:
                watched.append(watch(task, _percent(advance)))
        memory, stored = watched
        self._different += digests_differ(stored.ledger.digests, memory.ledger.digests)
        if stored.ledger.deleted != stored.ledger.steps:
            self._broken.append(
                f"release deleted {stored.ledger.deleted} of {stored.ledger.steps} Steps"
            )
        return memory, stored

    def _report(self, memory: Watched, stored: Watched, png: Path) -> None:
        self._console.print(report.path_table(memory, stored))
        self._say(
            "Memory is resident memory, sampled from outside every 20 ms; it leaves out the page "
            "cache, which the kernel takes back when it needs to. Throughput counts bytes as in "
            "memory, with one thread recording; after release "
            "freed memory is trimmed, though the C library may keep a micro-batch's for reuse."
        )
        figure.draw(memory, stored, sum(memory.ledger.memory_bytes.values()), png)
        self._say(f"Memory over time: {png}")

    def _verdict(self, memory: Watched) -> int:
        broken = [f"NOT as promised: {line}" for line in self._broken]
        broken += [f"NOT identical: {name}" for name in self._different]
        for line in broken[-MOST_LINES:]:
            self._say(line)
        if broken:
            return 1
        self._say(
            f"All {len(memory.ledger.digests):,} tensors of {memory.ledger.segments:,} Segments "
            "are bit-identical to the in-memory path's."
        )
        return 0

    # ------------------------------------------------------------ console

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def _progress(self, label: str, total: int) -> Iterator[Advance]:
        """Show how far a stage of `total` equal parts is."""
        columns = TextColumn("{task.description:<22}"), BarColumn(), TaskProgressColumn()
        with Progress(*columns, TimeElapsedColumn(), console=self._console) as progress:
            bar = progress.add_task(label, total=total)
            yield lambda: progress.advance(bar)


def _percent(advance: Advance) -> Callable[[str, float], None]:
    """Return what turns phases, each some part done, into a hundred steps."""
    shown = 0

    def tell(phase: str, done: float) -> None:
        nonlocal shown
        percent = int(100 * (PHASES.index(phase) + done) / len(PHASES))
        while shown < percent:
            advance()
            shown += 1

    return tell
