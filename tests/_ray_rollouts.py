"""What actors do in tests on Ray: their processes import it by its name."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests._rollouts import Range, Rollout, short_rollout, specs, standard_fields
from tq_fs import Segment, Session
from tq_fs.errors import ValueOutOfRange
from tq_fs.rollout import Rank

if TYPE_CHECKING:
    import torch

LAYERS = 40
FIELDS = standard_fields(layers=LAYERS, topk=8)
SPECS = tuple(specs(FIELDS))
Digests = dict[tuple[str, int, str], tuple[str, tuple[int, ...], str]]


def rollout_of(session_id: str) -> Rollout:
    """Sixteen turns of one chain: a quarter of its tokens lies in a quarter of its Steps."""
    return short_rollout(FIELDS, int(session_id[1:]), turns=16, response=60)


class Agent:
    """Plays the session that its id stands for."""

    def play(self, session: Session) -> None:
        rollout_of(session.session_id).record(session)


class FailingAgent:
    """Records a Step and then fails."""

    def play(self, session: Session) -> None:
        rollout = rollout_of(session.session_id)
        session.record(rollout.step(rollout.turns[0]))
        raise RuntimeError("the engine is gone")


def digest(array: Any) -> tuple[str, tuple[int, ...], str]:
    return str(array.dtype), tuple(array.shape), hashlib.sha256(array.tobytes()).hexdigest()


def digests(segments: Sequence[Segment], tensors: Mapping[str, Sequence[torch.Tensor]]) -> Digests:
    return {
        (segment.session_id, segment.index, name): digest(tensor.numpy())
        for name, values in tensors.items()
        for segment, tensor in zip(segments, values, strict=True)
    }


def expected(session_ids: Sequence[str], rank: Rank) -> Digests:
    """What a rank must get of sessions, from what the engine reported."""
    found: Digests = {}
    for session_id in session_ids:
        for index, want in enumerate(rollout_of(session_id).expected("lineage")):
            for spec in SPECS:
                if spec.name not in rank.fields(SPECS):
                    continue
                ranges: list[Range] = rank.tokens(len(want.tokens), spec)
                arrays = want.slime([spec], ranges=ranges, layers=rank.layers(LAYERS))
                for name, array in arrays.items():
                    found[session_id, index, name] = digest(array)
    return found


def keep_even(segments: Sequence[Segment]) -> list[bool]:
    """Leave out the sessions of odd numbers."""
    return [int(segment.session_id[1:]) % 2 == 0 for segment in segments]


class Weigh:
    """A step: how many tokens of each session are trained on, and whether its fields are zeros."""

    def __call__(
        self, segments: Sequence[Segment], tensors: Mapping[str, Sequence[torch.Tensor]]
    ) -> dict[str, tuple[int, bool]]:
        return {
            segment.session_id: (
                int(segment.loss_mask.sum()),
                not any(values[place].any() for values in tensors.values()),
            )
            for place, segment in enumerate(segments)
        }


@dataclass
class Look:
    """A step: digests of what it is given, and the folders below `root` that its process opened.

    Listens from the moment it arrives in the process, before that opens the store.
    """

    root: str

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.opened: set[str] = set()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir") and arguments:
            path = str(arguments[0])
            if path.startswith(self.root):
                self.opened.add(path[len(self.root) :].split("/")[1])

    def __call__(
        self, segments: Sequence[Segment], tensors: Mapping[str, Sequence[torch.Tensor]]
    ) -> tuple[Digests, set[str]]:
        return digests(segments, tensors), set(self.opened)


@dataclass
class Once:
    """A step that goes wrong when it is first called anywhere, and gives digests from then on."""

    marker: Path

    def __call__(
        self, segments: Sequence[Segment], tensors: Mapping[str, Sequence[torch.Tensor]]
    ) -> Digests:
        try:
            self.marker.touch(exist_ok=False)
        except FileExistsError:
            return digests(segments, tensors)
        self.go_wrong()
        raise AssertionError("unreachable")

    def go_wrong(self) -> None:
        raise NotImplementedError


class DieOnce(Once):
    def go_wrong(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class FailOnce(Once):
    def go_wrong(self) -> None:
        raise ValueOutOfRange("the loss is no number")
