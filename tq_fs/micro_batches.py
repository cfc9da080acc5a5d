"""Hydration micro-batch by micro-batch: lazily, one ahead, within a byte budget."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tq_fs.errors import BudgetTooSmall, InvalidConfig
from tq_fs.hydrate import Allocate, Arena, Hydrator, Selection
from tq_fs.memory import mapped_empty
from tq_fs.trajectory import Sample

if TYPE_CHECKING:
    import torch


def by_budget(sizes: Sequence[int], budget_bytes: int) -> list[range]:
    """Cut samples into runs that take at most `budget_bytes` each.

    Raises
    ------
    BudgetTooSmall
        One sample alone is larger.
    """
    runs: list[range] = []
    start = used = 0
    for i, size in enumerate(sizes):
        if size > budget_bytes:
            raise BudgetTooSmall(
                f"takes {size} bytes, a micro-batch may take {budget_bytes}",
                subject=f"sample {i}",
                remedy="raise budget_bytes, or select layers or tokens",
            )
        if used + size > budget_bytes:
            runs.append(range(start, i))
            start, used = i, 0
        used += size
    if start < len(sizes):
        runs.append(range(start, len(sizes)))
    return runs


def by_count(count: int, size: int) -> list[range]:
    """Cut `count` samples into runs of `size`."""
    if size < 1:
        raise InvalidConfig(f"{size} samples", subject="micro-batch", remedy="use at least 1")
    return [range(i, min(i + size, count)) for i in range(0, count, size)]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some samples and their tensors.

    Attributes
    ----------
    samples
        The samples, in their order.
    tensors
        Slime's fields by name, a tensor for each sample.
    """

    samples: tuple[Sample, ...]
    tensors: Mapping[str, list[torch.Tensor]]


class MicroBatches:
    """Iterates over micro-batches, hydrating each when its turn comes, or one ahead.

    Two blocks of memory are used in turn: the tensors of a micro-batch are valid until the next
    one is taken.

    Parameters
    ----------
    hydrator
        Hydrates; stays the caller's.
    samples
        All samples of the shard.
    select
        What of each sample.
    runs
        Which samples make up each micro-batch.
    pool
        Hydrates ahead; stays the caller's.
    allocate
        Gives the two blocks.
    """

    def __init__(
        self,
        hydrator: Hydrator,
        samples: Sequence[Sample],
        select: Selection,
        runs: Sequence[range],
        *,
        pool: Executor,
        allocate: Allocate = mapped_empty,
    ) -> None:
        self._hydrator = hydrator
        self._samples = samples
        self._select = select
        self._runs = list(runs)
        self._pool = pool
        self._allocate = allocate
        self._arenas: list[Arena] = []
        self._next = 0
        self._ahead: Future[MicroBatch] | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many micro-batches there are."""
        return len(self._runs)

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches that are left, each while the next one is being hydrated."""
        while self._next < len(self._runs):
            batch = self._take()
            self.prefetch()
            yield batch

    def prefetch(self) -> None:
        """Begin to hydrate the next micro-batch in the background; does nothing after the last."""
        with self._lock:
            if self._ahead is None and self._next < len(self._runs):
                self._ahead = self._pool.submit(self._hydrate, self._next)

    def _take(self) -> MicroBatch:
        self.prefetch()
        with self._lock:
            ahead, self._ahead = self._ahead, None
            self._next += 1
        assert ahead is not None
        return ahead.result()

    def _hydrate(self, number: int) -> MicroBatch:
        samples = tuple(self._samples[i] for i in self._runs[number])
        arena = self._arena(number)
        arena.reset()
        return MicroBatch(samples, self._hydrator.tensors(samples, self._select, arena))

    def _arena(self, number: int) -> Arena:
        """Return the block whose turn it is; both are as large as the largest micro-batch."""
        if not self._arenas:
            sizes = self._hydrator.sizes(self._samples, self._select)
            largest = max(sum(sizes[i] for i in run) for run in self._runs)
            self._arenas = [Arena(largest, self._allocate) for _ in range(min(2, len(self._runs)))]
        return self._arenas[number % len(self._arenas)]
