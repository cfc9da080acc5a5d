"""Random rollouts, and what must come out of them, computed without tq_fs.

An engine reports, with each invocation, rows for the *whole* sequence. What training must see of a
chain is then one rule in both modes: each row from the first invocation that reported it. The
expected tensors here are made by that rule from the whole reports, not from what was recorded.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

import tq_fs
from tq_fs import FieldSpec, Session, StepInput, StepRecord, plan
from tq_fs.backends import LocalBackend
from tq_fs.manifests import Mode, View
from tq_fs.steps import _arrays, _layout, _metadata
from tq_fs.trajectory import StepKind

Array = npt.NDArray[Any]
Random = np.random.Generator
Make = Callable[[Random, int], Array]
Range = tuple[int, int]

VIEWS: tuple[View, ...] = ("lineage", "timeline")


# ---------------------------------------------------------------- fields


@dataclass(frozen=True)
class Field:
    """A declared field and how to make random rows of it."""

    spec: FieldSpec
    make: Make


def logprob_bits(random: Random, rows: int) -> Array:
    """Return float32 of any bits at all: NaNs with payloads, infinities, subnormals, -0.0."""
    return random.integers(0, 2**32, rows, dtype=np.uint32).view(np.float32)


def routes(
    random: Random, rows: int, layers: int, topk: int, below: int, holes: str = "none"
) -> Array:
    """Return int32 ``[rows, layers, topk]``, with -1 in the places that `holes` says."""
    ids = random.integers(0, below, (rows, layers, topk), dtype=np.int64).astype(np.int32)
    if holes == "rows":
        ids[random.random(rows) < 0.4] = -1
    elif holes == "values":
        ids[random.random(ids.shape) < 0.2] = -1
    elif holes == "all":
        ids[...] = -1
    return ids


def standard_fields(layers: int = 4, topk: int = 2, experts: int = 256) -> list[Field]:
    """Return logprobs and routed experts of a small model."""
    return [
        Field(tq_fs.logprobs(), logprob_bits),
        Field(
            tq_fs.routed_experts(layers=layers, topk=topk, experts=experts),
            lambda random, rows: routes(random, rows, layers, topk, experts),
        ),
    ]


def specs(fields: Iterable[Field]) -> list[FieldSpec]:
    return [f.spec for f in fields]


# ---------------------------------------------------------------- rollouts


@dataclass(frozen=True)
class Op:
    """A turn of a rollout before it has values: what kind, on which earlier Step, how long."""

    kind: StepKind
    pick: int = 0
    context: int = 3
    response: int = 4
    only_response: bool = False
    versions: int = 1


@dataclass(frozen=True)
class Turn:
    """One invocation.

    `own` are the new tokens of an append and the whole sequence of every other kind; `whole` is
    what the engine reports in it, for the whole sequence; `merged` holds each row of the chain from
    the first invocation that reported it.
    """

    index: int
    kind: StepKind
    parent: int | None
    chain: int
    own: Array
    response: int
    sequence: Array
    version: str
    only_response: bool
    whole: dict[str, Array]
    merged: dict[str, Array]
    runs: tuple[tuple[str, int], ...] = ()

    def labels(self, tokens: int) -> list[str]:
        """Return the weight version of each of the last `tokens` tokens up to this turn's end."""
        out = [v for v, n in self.runs for _ in range(n)] or [self.version] * self.response
        return [self.runs[0][0] if self.runs else self.version] * (tokens - len(out)) + out


@dataclass
class Rollout:
    """The turns of one session."""

    fields: list[Field]
    mode: Mode
    turns: list[Turn] = field(default_factory=list)

    def play(self, ops: Iterable[Op], random: Random) -> Rollout:
        """Add turns; a pick that cannot be is turned into the nearest that can."""
        for op in ops:
            self.turns.append(self._turn(op, random))
        return self

    def _turn(self, op: Op, random: Random) -> Turn:
        kind, context = op.kind, op.context
        index = len(self.turns)
        if kind == "create" or not self.turns:
            kind, parent = "create", None
        elif kind == "append":
            continued = {t.parent for t in self.turns if t.kind == "append"}
            tips = [t for t in self.turns if t.index not in continued]
            parent = tips[op.pick % len(tips)]
        else:
            parent = self.turns[op.pick % len(self.turns)]
        appended = parent if kind == "append" else None
        if appended is None and context + op.response == 0:
            context = 1
        own = random.integers(0, 2**31 - 1, context + op.response, dtype=np.int32)
        before = appended.sequence if appended else own[:0]
        sequence = np.concatenate([before, own])
        whole = self._report(op, random, sequence)
        merged = whole
        if appended:
            merged = {
                name: np.concatenate([old, whole[name][len(old) :]])
                for name, old in appended.merged.items()
            }
        return Turn(
            index=index,
            kind=kind,
            parent=parent.index if parent else None,
            chain=appended.chain if appended else index,
            own=own,
            response=op.response,
            sequence=sequence,
            version=f"v{int(random.integers(0, 3))}",
            only_response=op.only_response,
            whole=whole,
            merged=merged,
            runs=_runs(op, random),
        )

    def _report(self, op: Op, random: Random, sequence: Array) -> dict[str, Array]:
        report = {}
        for f in self.fields:
            rows = len(sequence) - (f.spec.rows == "transitions")
            array = f.make(random, rows)
            if op.only_response and f.spec.context_fill is not None:
                array[: rows - op.response] = f.spec.context_fill
            report[f.spec.name] = array
        return report

    # ------------------------------------------------------------ recorded

    def first_row(self, turn: Turn, rows: str = "transitions") -> int:
        """Return the first row of the whole report that the Step holds."""
        if turn.kind != "append" or self.mode == "snapshot":
            return 0
        before = len(turn.sequence) - len(turn.own)
        return before - (rows == "transitions")

    def step(self, turn: Turn) -> StepInput:
        """Return the turn as it is handed to a session."""
        values = {}
        for f in self.fields:
            array = turn.whole[f.spec.name][self.first_row(turn, f.spec.rows) :]
            if turn.only_response and f.spec.context_fill is not None:
                array = array[len(array) - turn.response :]
            values[f.spec.name] = array
        cut = len(turn.own) - turn.response
        return StepInput(
            kind=turn.kind,
            parent=turn.parent,
            context=turn.own[:cut],
            response=turn.own[cut:],
            version="" if turn.runs else turn.version,
            versions=turn.runs,
            values=values,
        )

    def record(self, session: Session) -> list[StepRecord]:
        """Record all turns, one after the other."""
        return [session.record(self.step(turn)) for turn in self.turns]

    # ------------------------------------------------------------ expected

    def expected(self, view: View) -> list[Expected]:
        """Return what a view's Segments must be, in their order."""
        if view == "lineage":
            heads = [t.chain for t in self.turns if t.chain == t.index]
            return [self._chain([t for t in self.turns if t.chain == head]) for head in heads]
        if self.mode == "snapshot":
            return [self._alone(t) for t in self.turns]
        lasts = [list(run)[-1] for _, run in itertools.groupby(self.turns, lambda t: t.chain)]
        return [
            self._chain([t for t in self.turns if t.chain == last.chain and t.index <= last.index])
            for last in lasts
        ]

    def _chain(self, turns: Sequence[Turn]) -> Expected:
        mask: list[int] = []
        versions: list[str] = []
        for t in turns:
            mask += [0] * (len(t.own) - t.response) + [1] * t.response
            versions += t.labels(len(t.own))
        last, first = turns[-1], turns[0]
        return Expected(
            steps=tuple(t.index for t in turns),
            tokens=last.sequence,
            mask=mask,
            versions=versions,
            response_length=len(last.sequence) - (len(first.own) - first.response),
            arrays=last.merged,
        )

    def _alone(self, turn: Turn) -> Expected:
        total = len(turn.sequence)
        return Expected(
            steps=(turn.index,),
            tokens=turn.sequence,
            mask=[0] * (total - turn.response) + [1] * turn.response,
            versions=turn.labels(total),
            response_length=turn.response,
            arrays=turn.whole,
        )


def _runs(op: Op, random: Random) -> tuple[tuple[str, int], ...]:
    """Return runs of several weight versions, some of them empty; none where there is one."""
    if op.versions == 1:
        return ()
    cuts = sorted(random.integers(0, op.response, op.versions - 1, endpoint=True).tolist())
    lengths = np.diff([0, *cuts, op.response]).tolist()
    return tuple((f"v{int(random.integers(0, 3))}", n) for n in lengths)


@dataclass(frozen=True)
class Expected:
    """What a Segment must be."""

    steps: tuple[int, ...]
    tokens: Array
    mask: list[int]
    versions: list[str]
    response_length: int
    arrays: dict[str, Array]

    def slime(
        self,
        fields: Iterable[FieldSpec],
        *,
        tokens: int | None = None,
        ranges: Sequence[Range] | None = None,
        layers: Range | None = None,
    ) -> dict[str, Array]:
        """Return the arrays training must see of a sample, picked out row by row."""
        whole = len(self.tokens)
        length = whole if tokens is None else min(tokens, whole)
        response = max(0, self.response_length - (whole - length))
        chosen = [(0, length)] if ranges is None else ranges
        places = [at for first, last in chosen for at in range(first, min(last, length))]
        out = {}
        for spec in fields:
            low, high = 0, length
            if spec.rows == "transitions":
                high -= 1
            if spec.name == "logprobs":
                low = length - response
            array = self.arrays[spec.name][[p for p in places if low <= p < high]]
            if layers is not None and spec.layered:
                array = array[:, layers[0] : layers[1]]
            name = "log_probs" if spec.name == "logprobs" else spec.name
            out[f"rollout_{name}"] = array
        return out


def assert_bits(have: Any, want: Array, about: object = "") -> None:
    """Compare type, shape and every bit."""
    array = have.numpy() if hasattr(have, "numpy") else have
    assert array.dtype == want.dtype, about
    assert array.shape == want.shape, about
    assert array.tobytes() == want.tobytes(), about


def assert_batch(
    have: dict[str, list[Any]], want: Sequence[dict[str, Array]], about: object = ""
) -> None:
    """Compare a hydrated batch with what each sample must be."""
    names = set().union(*want) if want else set(have)
    assert set(have) == names, about
    for name in names:
        assert len(have[name]) == len(want), about
        for i, sample in enumerate(want):
            assert_bits(have[name][i], sample[name], (about, name, i))


def assert_segment(segment: tq_fs.Segment, want: Expected) -> None:
    """Compare what travels of a Segment."""
    assert segment.steps == want.steps
    assert_bits(segment.tokens, want.tokens)
    assert segment.loss_mask.tolist() == want.mask
    assert segment.response_length == want.response_length
    runs = [(v, len(list(r))) for v, r in itertools.groupby(want.versions)]
    assert list(segment.versions) == runs


def short_rollout(
    fields: list[Field], seed: int, mode: Mode = "tito", turns: int = 3, response: int = 5
) -> Rollout:
    """Return a create Step and the Steps appended to it."""
    ops = [Op("create", response=response)]
    ops += [Op("append", 0, context=2, response=response)] * (turns - 1)
    return Rollout(fields, mode).play(ops, np.random.default_rng(seed))


def turning_rollout(
    fields: list[Field] | None = None, seed: int = 8, mode: Mode = "tito"
) -> Rollout:
    """Return two chains that take turns, so that the views share Steps; the last has no rows."""
    ops = [Op("create"), Op("create"), Op("append", 0), Op("append", 0), Op("append", 0, 0, 0)]
    return Rollout(fields or standard_fields(), mode).play(ops, np.random.default_rng(seed))


# ---------------------------------------------------------------- stores


def open_store(folder: Path, fields: Iterable[Field], **settings: Any) -> tq_fs.Store:
    """Open a store below a folder, without groups prepared ahead unless they are asked for."""
    settings.setdefault("prepared_groups", 0)
    return tq_fs.open_store(folder.as_uri(), fields=specs(fields), **settings)


def tree(folder: Path) -> set[str]:
    """Return the path of every file below a folder, the lock and the reserve left out."""
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()}
    return {f for f in files if not f.endswith(("/.lock", ".staging/reserve"))}


def empty_folders(folder: Path) -> set[str]:
    """Return the folders below a store that hold nothing, but for those every store has."""
    kept = {".staging", "steps", "manifests"}
    found = (p for p in folder.rglob("*") if p.is_dir() and not any(p.iterdir()))
    return {str(p.relative_to(folder)) for p in found if p.name not in kept}


def visible_steps(folder: Path) -> set[str]:
    """Return the folders of all published Steps below a store."""
    return {
        str(p.parent.relative_to(folder))
        for p in folder.glob("**/steps/*/*/*/*/zarr.json")
        if ".staging" not in p.parts
    }


def sealed(document: dict[str, Any]) -> bytes:
    """Return an edited document under a checksum that agrees with it."""
    body = json.dumps({k: v for k, v in document.items() if k != "crc32c"}).encode()[1:]
    return b'{"crc32c":"%08x",%s' % (crc32c(body), body)


@contextmanager
def small_chunks(whole: int = 8, inner: int = 4, span: int = 256) -> Iterator[None]:
    """Cut arrays into chunks of a few rows, and requests at a few bytes."""
    before = _layout.WHOLE_ROWS, _layout.INNER_ROWS, plan.SPAN_BYTES
    _set_chunks(whole, inner, span)
    try:
        yield
    finally:
        _set_chunks(*before)


def _set_chunks(whole: int, inner: int, span: int) -> None:
    _layout.WHOLE_ROWS, _layout.INNER_ROWS, plan.SPAN_BYTES = whole, inner, span
    for value in [*vars(_layout).values(), *vars(_arrays).values(), *vars(_metadata).values()]:
        if hasattr(value, "cache_clear"):
            value.cache_clear()


class CountingBackend(LocalBackend):
    """Notes what is read: (key, offset, bytes) of each request."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.requests: list[tuple[str, int, int]] = []

    def open(self, key: str) -> Any:
        return _Counted(self, key, super().open(key))

    @property
    def nbytes(self) -> int:
        return sum(n for _, _, n in self.requests)

    def of(self, name: str) -> list[tuple[str, int, int]]:
        """Return the requests for one array's objects."""
        return [r for r in self.requests if f"/{name}/" in r[0]]


class _Counted:
    def __init__(self, backend: CountingBackend, key: str, inner: Any) -> None:
        self._backend, self._key, self._inner = backend, key, inner

    def readinto(self, buffers: Sequence[Any], offset: int) -> None:
        nbytes = sum(memoryview(b).nbytes for b in buffers)
        self._backend.requests.append((self._key, offset, nbytes))
        self._inner.readinto(buffers, offset)

    def ahead(self, offset: int, nbytes: int) -> None:
        self._inner.ahead(offset, nbytes)

    def __enter__(self) -> _Counted:
        self._inner.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._inner.__exit__(*exc)


# ---------------------------------------------------------------- other processes


def run_child(
    code: str, *arguments: object, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a new process that can import these helpers as ``_rollouts``."""
    with spawn_child(code, *arguments) as process:
        out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def spawn_child(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start Python code in a new process that can import these helpers as ``_rollouts``."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(Path(tq_fs.__file__).parents[1])])
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# ---------------------------------------------------------------- ordinary sessions

FIELDS = standard_fields()


def record(
    store: tq_fs.Store, session_id: str, seed: int = 0, partition: str = "train", **finalize: Any
) -> tuple[list[tq_fs.Segment], list[dict[str, Any]]]:
    """Record and finalize a session; return its lineage Segments and what they must hydrate to."""
    rollout = short_rollout(FIELDS, seed)
    session = store.session(session_id, partition=partition)
    rollout.record(session)
    want = [e.slime(specs(FIELDS)) for e in rollout.expected("lineage")]
    return session.finalize(**finalize), want


def refs_of(segments: list[tq_fs.Segment]) -> list[str]:
    return [s.ref for s in segments if s.ref is not None]


def contents(folder: Path) -> dict[str, bytes]:
    return {p: (folder / p).read_bytes() for p in tree(folder)}
