"""What is written and read: single objects, whole Steps, large objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tq_fs.backends import Buffer
from tq_fs.bench._data import Shape, as_encoded, make_payloads, step_key
from tq_fs.steps import EncodeOptions, FieldArray, Scratch, encode_step

STEP = Shape(2048, 40, 8, "uint8")  # 0.66 MB
LARGE_BYTES = 8 * 1024 * 1024
_DIFFERENT = 8  # so many that they do not all lie in the processor's cache


class Group(NamedTuple):
    """Objects that are written one behind the other.

    Attributes
    ----------
    name
        Of the folder they lie in.
    members
        Their buffers, as a Step has them.
    wanted
        Names of those that are read back.
    """

    name: str
    members: Mapping[str, Sequence[Buffer]]
    wanted: tuple[str, ...]

    def content(self, member: str) -> bytes:
        """Return an object's bytes."""
        return b"".join(memoryview(b).cast("B") for b in self.members[member])


class Load(NamedTuple):
    """Groups that one run writes or reads.

    Attributes
    ----------
    key
        What the names of its figures begin with.
    title
        In words.
    groups
        As many as a run takes.
    """

    key: str
    title: str
    groups: Sequence[Group]

    def group_bytes(self, verb: str) -> int:
        """Return the bytes of a group that are written, or read back."""
        first = self.groups[0]
        names = first.members if verb == "put" else first.wanted
        return sum(len(first.content(name)) for name in names)


def small_objects(count: int) -> Load:
    """Return single objects of 0.66 MB: the routed experts of a Step with their checksum."""
    groups = []
    for step in _steps(count):
        name = next(n for n in step.members if n.startswith("routed_experts/"))
        groups.append(Group(step.name, {"c.0": step.members[name]}, ("c.0",)))
    return Load("", "objects of 0.66 MB", groups)


def steps(count: int) -> Load:
    """Return Steps of 0.66 MB as an object store gets them: two fields and one ``zarr.json``."""
    return Load("step.", "Steps of 0.66 MB", _steps(count))


def large_objects(count: int) -> Load:
    """Return single objects of 8 MiB, from one buffer."""
    rng = np.random.default_rng(0)
    data = [rng.integers(0, 256, LARGE_BYTES, np.uint8) for _ in range(min(count, _DIFFERENT))]
    groups = [Group(f"{i:06d}", {"c.0": (data[i % len(data)],)}, ("c.0",)) for i in range(count)]
    return Load("large.", "objects of 8 MiB", groups)


def _steps(count: int) -> list[Group]:
    payloads = make_payloads(STEP, min(count, _DIFFERENT))
    specs = as_encoded(STEP)
    groups = []
    for i in range(count):
        payload = payloads[i % len(payloads)]
        arrays = [FieldArray(specs[0], payload.logprobs), FieldArray(specs[1], payload.narrow)]
        options = EncodeOptions(compact=True)
        step = encode_step("bench", step_key(i), STEP.tokens, arrays, options, Scratch())
        wanted = tuple(name for name in step.members if "/" in name)
        groups.append(Group(f"{i:06d}", step.members, wanted))
    return groups


class Destination:
    """Memory that a load is read into, its pages touched before.

    Parameters
    ----------
    load
        What will be read.
    """

    def __init__(self, load: Load) -> None:
        self._groups = load.groups
        size = sum(len(g.content(n)) for g in load.groups for n in g.wanted)
        self._all = np.zeros(size, np.uint8)
        self._parts: dict[tuple[str, str], npt.NDArray[np.uint8]] = {}
        at = 0
        for group in load.groups:
            for name in group.wanted:
                size = len(group.content(name))
                self._parts[group.name, name] = self._all[at : at + size]
                at += size

    def of(self, group: Group, member: str) -> npt.NDArray[np.uint8]:
        """Return where an object goes."""
        return self._parts[group.name, member]

    def clear(self) -> None:
        """Forget what was read, so that the next one has to read it."""
        self._all[:] = 0

    def wrong(self) -> str | None:
        """Return the name of an object that is not there bit for bit; None if all are."""
        for group in self._groups:
            for name in group.wanted:
                if self._parts[group.name, name].tobytes() != group.content(name):
                    return f"{group.name}/{name}"
        return None
