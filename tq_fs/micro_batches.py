"""Hydration micro-batch by micro-batch: lazily, one ahead, within a byte budget."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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


@dataclass(frozen=True, slots=True, eq=False)
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
    """A shard in micro-batches, each hydrated when its turn comes, or one ahead.

    Every iteration begins anew. A failure leaves nothing behind: iterate again.

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
    sizes
        Bytes of each sample once hydrated.
    pool
        Hydrates ahead; stays the caller's.
    check_open
        Raises where the store is closed, or not this process's.
    allocate
        Gives memory for a micro-batch.
    reuse
        Use two blocks in turn: faster, and the tensors of a micro-batch are valid only until the
        next one is taken. Otherwise each micro-batch has memory of its own, which goes when its
        tensors do.
    """

    def __init__(
        self,
        hydrator: Hydrator,
        samples: Sequence[Sample],
        select: Selection,
        runs: Sequence[range],
        sizes: Sequence[int],
        *,
        pool: Executor,
        check_open: Callable[[], None],
        allocate: Allocate = mapped_empty,
        reuse: bool = False,
    ) -> None:
        self._hydrator = hydrator
        self._samples = samples
        self._select = select
        self._runs = list(runs)
        self._nbytes = [sum(sizes[i] for i in run) for run in runs]
        self._pool = pool
        self._check_open = check_open
        self._allocate = allocate
        self._reuse = reuse
        self._arenas: list[Arena] = []
        self._ahead: dict[int, Future[MicroBatch]] = {}
        self._in_hand: int | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many micro-batches there are."""
        return len(self._runs)

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield all micro-batches, each while the next one is being hydrated."""
        try:
            for number in range(len(self._runs)):
                self._in_hand = None
                batch = self._take(number)
                self._in_hand = number
                self.prefetch()
                yield batch
        finally:
            self._in_hand = None

    def prefetch(self) -> None:
        """Begin to hydrate the micro-batch that comes next; does nothing where that has begun.

        Raises
        ------
        SessionClosed, WrongProcess
            The store was closed, or opened in another process.
        """
        self._begin(0 if self._in_hand is None else self._in_hand + 1)

    def _begin(self, number: int) -> None:
        with self._lock:
            if number in self._ahead or number >= len(self._runs):
                return
            self._check_open()
            self._ahead[number] = self._pool.submit(self._hydrate, number)

    def _take(self, number: int) -> MicroBatch:
        self._begin(number)
        with self._lock:
            ahead = self._ahead.pop(number)
            stale, self._ahead = self._ahead, {}
        for other in stale.values():  # of an iteration that was left
            other.cancel()
        return ahead.result()

    def _hydrate(self, number: int) -> MicroBatch:
        samples = tuple(self._samples[i] for i in self._runs[number])
        tensors = self._hydrator.tensors(samples, self._select, self._arena(number))
        return MicroBatch(samples, tensors)

    def _arena(self, number: int) -> Arena:
        """Return memory of its own, or the block whose turn it is."""
        if not self._reuse:
            return Arena(self._nbytes[number], self._allocate)
        if not self._arenas:
            largest = max(self._nbytes)
            self._arenas = [Arena(largest, self._allocate) for _ in range(min(2, len(self._runs)))]
        arena = self._arenas[number % len(self._arenas)]
        arena.reset()
        return arena
