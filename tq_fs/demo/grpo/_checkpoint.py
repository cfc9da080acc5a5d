"""Checkpoints of training: weights, optimizer and what was learned; whole or not there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from tq_fs.demo.grpo._learner import Iteration, Learner
from tq_fs.demo.weights import save_model, take_weights
from tq_fs.errors import InvalidConfig


class Checkpoints:
    """A folder of checkpoints, one for each number of iterations trained.

    Parameters
    ----------
    folder
        Made where it is not there. Each checkpoint is a model's folder, from which an engine and a
        Proxy can be started.
    run
        What must be the same in a run that goes on; a mapping of plain values.
    """

    def __init__(self, folder: Path, run: dict[str, object]) -> None:
        self._folder = folder
        self._run = json.loads(json.dumps(run))
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, trained: int) -> Path:
        """Return the folder of the model after so many iterations."""
        return self._folder / f"{trained:06d}"

    def save(self, learner: Learner, history: Sequence[Iteration]) -> Path:
        """Write a checkpoint, then remove those before the last one; return its folder."""
        target = self.path(len(history))
        making = self._folder / f".{target.name}"
        shutil.rmtree(making, ignore_errors=True)
        save_model(learner.moe, making)
        torch.save(learner.optimizer.state_dict(), making / "optimizer.pt")
        state = {"run": self._run, "history": [iteration.plain() for iteration in history]}
        (making / "history.json").write_text(json.dumps(state, indent=1))
        shutil.rmtree(target, ignore_errors=True)
        os.rename(making, target)
        for old in self._all()[:-2]:
            shutil.rmtree(old)
        return target

    def load(self, learner: Learner) -> list[Iteration] | None:
        """Put the last checkpoint into a learner; return its history, None where there is none.

        Raises
        ------
        InvalidConfig
            It belongs to a run with other settings.
        """
        found = self._all()
        if not found:
            return None
        state = json.loads((found[-1] / "history.json").read_text())
        if state["run"] != self._run:
            raise InvalidConfig(
                f"holds a run with {state['run']}, this one has {self._run}",
                subject=str(self._folder),
                remedy="give another --work, or the same settings",
            )
        take_weights(learner.moe, found[-1])
        learner.optimizer.load_state_dict(torch.load(found[-1] / "optimizer.pt"))
        return [Iteration.of(values) for values in state["history"]]

    def _all(self) -> list[Path]:
        return sorted(p for p in self._folder.iterdir() if not p.name.startswith("."))
