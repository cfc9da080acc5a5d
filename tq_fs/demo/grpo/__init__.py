"""Pieces of a small GRPO run through the Proxy; ``examples/05_grpo_tiny_moe.py`` tells it."""

from tq_fs.demo.grpo._agent import Agent, Script, turn_seed
from tq_fs.demo.grpo._checkpoint import Checkpoints
from tq_fs.demo.grpo._figure import draw
from tq_fs.demo.grpo._learner import Gap, Iteration, Learned, Learner
from tq_fs.demo.grpo._place import Place
from tq_fs.demo.grpo._policy import advantages, clipped_loss, reward
from tq_fs.demo.grpo._processes import give_weights, serving
from tq_fs.demo.grpo._rollouts import Batch, Rollouts, group_of

__all__ = [
    "Agent",
    "Batch",
    "Checkpoints",
    "Gap",
    "Iteration",
    "Learned",
    "Learner",
    "Place",
    "Rollouts",
    "Script",
    "advantages",
    "clipped_loss",
    "draw",
    "give_weights",
    "group_of",
    "reward",
    "serving",
    "turn_seed",
]
