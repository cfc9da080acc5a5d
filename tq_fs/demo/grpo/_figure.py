"""The picture: how far training is from the rollout, with replay and without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tq_fs.demo.grpo._learner import Iteration

# Of the palette by Okabe and Ito, which the colour-blind can tell apart.
FREE, REPLAYED, REWARD = "#D55E00", "#0072B2", "#444444"


def draw(history: Sequence[Iteration], path: Path) -> None:
    """Write a PNG with the logprob gap over the iterations, and the reward."""
    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    numbers = [iteration.number for iteration in history]
    for name, color, label in (
        ("free", FREE, "routed by training itself"),
        ("replayed", REPLAYED, "rollout's routing replayed (R3)"),
    ):
        gaps = [getattr(iteration.learned, name) for iteration in history]
        left.plot(numbers, [g.largest for g in gaps], "o--", color=color, label=f"{label}, largest")
        left.plot(numbers, [g.mean for g in gaps], "o-", color=color, label=f"{label}, mean")
    left.set_yscale("log")
    left.set_ylabel("gap of logprobs to the rollout [nat]")
    left.set_title("Training in bfloat16, rollout in float32")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    right.plot(numbers, [iteration.reward for iteration in history], "o-", color=REWARD)
    right.set_title("Mean reward")
    right.set_ylim(0, None)
    for axes in (left, right):
        _dress(axes, numbers)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150)


def _dress(axes: Axes, numbers: Sequence[int]) -> None:
    axes.set_xlabel("iteration")
    axes.set_xticks(list(numbers))
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
