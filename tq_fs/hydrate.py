"""From references back to what training reads: Slime's fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tq_fs.errors import BudgetTooSmall, DependencyMissing, FieldMissing, InvalidSelection
from tq_fs.fields import LOGPROBS, FieldSpec
from tq_fs.manifests import Resolved
from tq_fs.memory import align, mapped_empty
from tq_fs.plan import Range, field_rows, selection
from tq_fs.reader import Read
from tq_fs.trajectory import Sample

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]
Allocate = Callable[[int], npt.NDArray[np.uint8]]
TokensOf = Callable[[int, FieldSpec], Sequence[Range]]
PREFIX = "rollout_"
_RESOLVED = 16  # samples at a time: in a cluster each time is a call, and manifests may be large


class Arena:
    """One block of memory that micro-batches are hydrated into, one after the other.

    Parameters
    ----------
    nbytes
        Its size.
    allocate
        Gives the memory: a uint8 array of so many bytes (pinned, say).
    """

    def __init__(self, nbytes: int, allocate: Allocate = mapped_empty) -> None:
        self._memory = allocate(nbytes)
        self._used = 0

    def reset(self) -> None:
        """Let the whole block be used again; earlier arrays are overwritten."""
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialised array in the block.

        Raises
        ------
        BudgetTooSmall
        """
        nbytes = align(prod(shape) * dtype.itemsize)
        if self._used + nbytes > self._memory.size:
            raise BudgetTooSmall(
                f"{self._used + nbytes} bytes, the arena has {self._memory.size}",
                subject="micro-batch",
                remedy="raise budget_bytes, or select layers or tokens",
            )
        block = self._memory[self._used : self._used + prod(shape) * dtype.itemsize]
        self._used += nbytes
        return block.view(dtype).reshape(shape)


class _Shape(NamedTuple):
    """One field of one sample: its row ranges in the Segment, and the array they give."""

    spec: FieldSpec
    rows: tuple[Range, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return align(prod(self.shape) * self.dtype.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What of each sample is hydrated.

    Attributes
    ----------
    fields
        Names; None for all declared fields.
    layers
        Half-open layer range of fields that have layers (a pipeline rank's).
    tokens
        Half-open token ranges of the sample, one after the other. None for all. Ranges are cut to
        the sample's length. Of transitions fields the rows of these tokens are taken, of logprobs
        those that belong to the response. Or a function that gives them for a sample of so many
        tokens and a field, as a context rank's chunks are cut (:meth:`tq_fs.rollout.Rank.tokens`).
    """

    fields: tuple[str, ...] | None = None
    layers: Range | None = None
    tokens: tuple[Range, ...] | TokensOf | None = None


class Reader(Protocol):
    """What gives fields that are not in memory: the SegmentReader, or one of layouts."""

    def resolve(self, refs: Iterable[str]) -> list[Resolved]:
        """Return what references stand for."""

    def fetch(self, reads: Sequence[Read], *, layers: Range | None = None) -> None:
        """Fill the destinations of several reads; what they share is read once."""


class Hydrator:
    """Turns samples into arrays and tensors. Safe to call from many threads.

    Parameters
    ----------
    specs
        Declared fields.
    reader
        Reads what is stored; None where all fields are in memory.
    """

    def __init__(self, specs: Sequence[FieldSpec], reader: Reader | None) -> None:
        self._specs = tuple(specs)
        self._reader = reader

    def arrays(
        self, samples: Sequence[Sample], select: Selection, arena: Arena | None = None
    ) -> dict[str, list[Array]]:
        """Return ``rollout_<field>`` arrays of each sample.

        ``rollout_logprobs`` is called ``rollout_log_probs``, as in Slime, and holds the response
        only: float32 ``[response_length]``. ``rollout_routed_experts`` is int32
        ``[T-1, layers, topk]``. Removed samples get zeros, and nothing of them is read.

        Raises
        ------
        StaleReference, SegmentMissing, StepMissing, ChunkCorrupt, ObjectShort
        BudgetTooSmall
            The samples do not fit the arena.
        """
        out: dict[str, list[Array]] = {slime_name(s): [] for s in self._chosen(select)}
        reads: list[Read] = []
        for sample, resolved in zip(samples, self._resolved(samples, select), strict=True):
            for shape in self._shapes(sample, resolved, select):
                array = _room(shape, arena)
                out[slime_name(shape.spec)].append(array)
                if sample.removed:
                    array[...] = 0
                elif shape.spec.name in sample.arrays:
                    _copy_resident(sample.arrays[shape.spec.name], shape, select.layers, array)
                else:
                    assert resolved is not None
                    reads.append(Read(resolved, shape.spec.name, shape.rows, array))
        if reads and self._reader is not None:
            self._reader.fetch(reads, layers=select.layers)
        return out

    def tensors(
        self, samples: Sequence[Sample], select: Selection, arena: Arena | None = None
    ) -> dict[str, list[torch.Tensor]]:
        """Return what :meth:`arrays` does as CPU tensors over the same memory."""
        try:
            import torch  # noqa: PLC0415  # the package loads without it
        except ImportError as error:
            raise DependencyMissing(
                "hydrating into tensors needs torch", remedy="pip install 'tq-fs[torch]'"
            ) from error
        arrays = self.arrays(samples, select, arena)
        return {name: [torch.from_numpy(a) for a in values] for name, values in arrays.items()}

    def sizes(self, samples: Sequence[Sample], select: Selection) -> list[int]:
        """Return the bytes each sample takes once hydrated. Nothing is read."""
        sizes = []
        for first in range(0, len(samples), _RESOLVED):  # a shard's manifests may be many
            some = samples[first : first + _RESOLVED]
            for sample, where in zip(some, self._resolved(some, select), strict=True):
                sizes.append(sum(shape.nbytes for shape in self._shapes(sample, where, select)))
        return sizes

    # ------------------------------------------------------------ inside

    def _chosen(self, select: Selection) -> list[FieldSpec]:
        if select.fields is None:
            return list(self._specs)
        known = {s.name: s for s in self._specs}
        unknown = set(select.fields) - set(known)
        if unknown:
            raise FieldMissing(f"{sorted(unknown)} is not declared", subject="fields")
        return [known[name] for name in select.fields]

    def _resolved(self, samples: Sequence[Sample], select: Selection) -> list[Resolved | None]:
        """Resolve what has to be read, in one batch."""
        names = [s.name for s in self._chosen(select)]
        needed = [self._needs_store(sample, names) for sample in samples]
        refs = [s.ref for s, need in zip(samples, needed, strict=True) if need and s.ref]
        found = iter(self._reader.resolve(refs) if self._reader is not None and refs else ())
        return [next(found) if need else None for need in needed]

    def _needs_store(self, sample: Sample, names: Sequence[str]) -> bool:
        stored = [n for n in names if n not in sample.arrays]
        if not stored or (sample.removed and self._widths_known(stored)):
            return False
        if sample.ref is None or self._reader is None:
            raise FieldMissing(
                f"{stored} are neither in the sample nor in a store",
                subject=f"sample {sample.ref or 'without reference'}",
            )
        return True

    def _widths_known(self, names: Sequence[str]) -> bool:
        return all(s.inner is not None for s in self._specs if s.name in names)

    def _shapes(
        self, sample: Sample, resolved: Resolved | None, select: Selection
    ) -> Iterator[_Shape]:
        for spec in self._chosen(select):
            rows = _rows(spec, sample, select.tokens)
            count = sum(stop - start for start, stop in rows)
            shape, dtype = _shape(spec, sample, resolved, count, select.layers)
            yield _Shape(spec, rows, shape, dtype)


def slime_name(spec: FieldSpec) -> str:
    """Return what training calls a field."""
    return f"{PREFIX}log_probs" if spec.name == LOGPROBS else f"{PREFIX}{spec.name}"


def _room(shape: _Shape, arena: Arena | None) -> Array:
    if arena is not None:
        return arena.take(shape.shape, shape.dtype)
    return np.empty(shape.shape, shape.dtype)


def _rows(
    spec: FieldSpec, sample: Sample, tokens: tuple[Range, ...] | TokensOf | None
) -> tuple[Range, ...]:
    """Return which rows of the Segment's field a sample takes."""
    if not 0 <= sample.response_length <= sample.tokens:
        raise InvalidSelection(
            f"a response of {sample.response_length} in a sample of {sample.tokens} tokens",
            subject=str(sample.ref),
        )
    low, high = 0, max(0, sample.tokens - 1) if spec.rows == "transitions" else sample.tokens
    if spec.name == LOGPROBS:
        low = sample.tokens - sample.response_length
    if tokens is None:
        return ((low, high),)
    rows = []
    for start, stop in tokens(sample.tokens, spec) if callable(tokens) else tokens:
        if not 0 <= start <= stop:
            raise InvalidSelection(f"[{start}, {stop}) is no token range", subject=str(sample.ref))
        first = min(max(start, low), high)
        rows.append((first, max(first, min(stop, high))))
    return tuple(rows)


def _shape(
    spec: FieldSpec, sample: Sample, resolved: Resolved | None, rows: int, layers: Range | None
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if resolved is not None and spec.name not in sample.arrays:
        length = field_rows(resolved, spec.name)
        if sample.tokens > resolved.segment.tokens:
            raise InvalidSelection(
                f"the sample has {sample.tokens} tokens, its Segment {resolved.segment.tokens} "
                f"({length} rows)",
                subject=str(sample.ref),
            )
        return selection(resolved, spec.name, rows, layers)
    array = sample.arrays.get(spec.name)
    if array is not None and sample.tokens > len(array) + (spec.rows == "transitions"):
        raise InvalidSelection(
            f"the sample has {sample.tokens} tokens, its {spec.name} {len(array)} rows",
            subject=str(sample.ref),
        )
    inner = spec.inner if array is None else array.shape[1:]
    assert inner is not None
    if spec.layered and layers is not None:
        if not 0 <= layers[0] <= layers[1] <= inner[0]:
            raise InvalidSelection(
                f"[{layers[0]}, {layers[1]}) does not lie in [0, {inner[0]})",
                subject=f"layers of {spec.name}",
            )
        inner = (layers[1] - layers[0], *inner[1:])
    return (rows, *inner), np.dtype(spec.dtype)


def _copy_resident(source: Array, shape: _Shape, layers: Range | None, target: Array) -> None:
    if shape.spec.layered and layers is not None:
        source = source[:, layers[0] : layers[1]]
    at = 0
    for start, stop in shape.rows:
        np.copyto(target[at : at + stop - start], source[start:stop])
        at += stop - start
