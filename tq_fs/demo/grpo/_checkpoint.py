"""Checkpoints of training: weights, optimizer and what was learned; whole or not there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tq_fs.demo.grpo._learner import Iteration, Learner
from tq_fs.errors import InvalidConfig

WEIGHTS = "model.safetensors"  # what the engine is given, too


class Checkpoints:
    """A folder of checkpoints, one for each number of iterations trained.

    Parameters
    ----------
    folder
        Made where it is not there. Each checkpoint is a copy of the model's folder, so that an
        engine can be started from it.
    model
        The folder of the model: its configuration and its tokenizer.
    run
        What must be the same in a run that goes on; a mapping of plain values.
    """

    def __init__(self, folder: Path, model: Path, run: dict[str, object]) -> None:
        self._folder = folder
        self._model = model
        self._run = json.loads(json.dumps(run))
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, trained: int) -> Path:
        """Return where the weights lie after so many iterations."""
        return self._folder / f"{trained:06d}"

    def save(self, learner: Learner, history: Sequence[Iteration]) -> Path:
        """Write a checkpoint, then remove those before the last one; return its folder."""
        target = self.path(len(history))
        making = self._folder / f".{target.name}"
        shutil.rmtree(making, ignore_errors=True)
        shutil.copytree(self._model, making)
        save_file(learner.moe.model.state_dict(), making / WEIGHTS)
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
        learner.moe.model.load_state_dict(load_file(found[-1] / WEIGHTS))
        learner.optimizer.load_state_dict(torch.load(found[-1] / "optimizer.pt"))
        return [Iteration.of(values) for values in state["history"]]

    def _all(self) -> list[Path]:
        return sorted(p for p in self._folder.iterdir() if not p.name.startswith("."))
