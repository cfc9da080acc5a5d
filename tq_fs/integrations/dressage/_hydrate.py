"""From samples with layouts to tensors, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import msgspec

from tq_fs.errors import InvalidConfig, InvalidSegment, ValueMissing, WidthChanged
from tq_fs.fields import FieldSpec
from tq_fs.hydrate import Allocate, Hydrator, Selection
from tq_fs.integrations.dressage._models import Layout, LayoutSample, Ref
from tq_fs.integrations.dressage._reader import LayoutReader, Outlines, incarnation_of, whose
from tq_fs.keys import Incarnation
from tq_fs.memory import mapped_empty
from tq_fs.micro_batches import MicroBatch, MicroBatches, by_budget, by_count
from tq_fs.trajectory import Sample
from tq_fs.values import ValueStore


class Source(NamedTuple):
    """Where values are, and what their keys stand for.

    Attributes
    ----------
    values
        The store; stays the caller's.
    indexes
        Returns for keys of a partition what TransferQueue calls their samples, in one call.
    """

    values: ValueStore
    indexes: Callable[[Sequence[str], str], Mapping[str, int]]


def source_here() -> Source:
    """Return what this process reaches by its TransferQueue client.

    Raises
    ------
    DependencyMissing, InvalidConfig
    """
    from tq_fs.integrations.transfer_queue import _here  # noqa: PLC0415  # needs TransferQueue

    client = _here.client_here()
    return Source(
        _here.values_of(client),
        lambda keys, partition: _here.indexes_of(client, keys, partition),
    )


def refs_of(
    keys: Sequence[str], field: str, *, partition_id: str, source: Source | None = None
) -> list[Ref]:
    """Return references to values that were put, which stand for those and for no later ones.

    Parameters
    ----------
    keys, field, partition_id
        As ``transfer_queue.kv_put`` had them.
    source
        None for this process's TransferQueue.

    Raises
    ------
    ValueMissing
        One was never put, or it was cleared.
    """
    values, indexes_of = source or source_here()
    if not keys:
        return []
    indexes = indexes_of(keys, partition_id)
    (found,) = values.calls.find([(partition_id, indexes[key]) for key in keys], [field])
    refs = []
    for key, value in zip(keys, found, strict=True):
        ref = Ref(store_id=values.store_id, partition=partition_id, key=key, field=field)
        if value is None:
            raise ValueMissing("is not there: it was never put, or cleared", subject=str(ref))
        refs.append(msgspec.structs.replace(ref, incarnation_id=incarnation_of(value)))
    return refs


def hydrate(
    samples: Sequence[LayoutSample],
    *,
    size: int | None = None,
    budget_bytes: int | None = None,
    select: Selection = Selection(),  # noqa: B008  # frozen
    reuse: bool = False,
    allocate: Allocate = mapped_empty,
    source: Source | None = None,
) -> Iterator[MicroBatch]:
    """Hydrate samples in micro-batches, each while the one before is in use.

    Only rows and layers that are selected are read, and what samples of a micro-batch share once;
    what is shared by several micro-batches stays in the store's cache, as far as that is large
    enough. At most two micro-batches are in memory, beside those whose tensors are still held.

    Parameters
    ----------
    samples
        With their layouts.
    size
        Samples in a micro-batch, or
    budget_bytes
        bytes of its tensors.
    select
        Fields (``logprobs``, ``routed_experts``), layers and tokens.
    reuse
        Hydrate into two blocks in turn: faster, but the tensors of a micro-batch are overwritten as
        soon as the next one is taken.
    allocate
        Gives memory: a uint8 array of so many bytes (pinned, say).
    source
        Where the values are; None for this process's TransferQueue, which has to keep its data in
        tq-fs.

    Yields
    ------
    MicroBatch
        ``rollout_log_probs``, float32 ``[response_length]``, and ``rollout_routed_experts``, int32
        ``[T-1, layers, topk]``, of each sample; zeros where it is removed. ``ref`` of its samples
        is their number in `samples`.

    Raises
    ------
    InvalidConfig
        Neither `size` nor `budget_bytes` is given, or both are.
    BudgetTooSmall
        One sample alone is larger.
    InvalidSelection
        A selection lies outside of a sample, or a sample is longer than its layouts.
    InvalidSegment, InvalidField, WidthChanged, RowCountMismatch
        Values are not what the layouts say.
    ValueMissing, WrongStore, StaleReference
        A value is not there, or it is not the one that is meant.
    ChunkCorrupt, ObjectShort, UnitLost
        What is stored is not what was written, or is gone.
    """
    if (size is None) == (budget_bytes is None):
        raise InvalidConfig("give either size or budget_bytes", subject="hydrate")
    specs = _specs(samples)
    chosen = [_chosen(sample, select.fields) for sample in samples]
    plain = [_plain(number, sample) for number, sample in enumerate(chosen)]
    sizes = Hydrator(specs, Outlines(chosen)).sizes(plain, select)
    if size is not None:
        runs = by_count(len(plain), size)
    else:
        assert budget_bytes is not None
        runs = by_budget(sizes, budget_bytes)
    values, indexes_of = source or source_here()
    reader = LayoutReader(values, chosen, _indexes(chosen, indexes_of))
    hydrator = Hydrator(specs, reader)

    def run() -> Iterator[MicroBatch]:
        with ThreadPoolExecutor(1, "tq-fs-layouts") as ahead:
            yield from MicroBatches(
                hydrator,
                plain,
                select,
                runs,
                sizes,
                pool=ahead,
                check_open=lambda: None,
                allocate=allocate,
                reuse=reuse,
            )

    return run()


def _specs(samples: Sequence[LayoutSample]) -> list[FieldSpec]:
    """Declare the fields that layouts are of; all layouts agree on the shape of a row."""
    found: dict[str, FieldSpec] = {}
    uses: dict[Incarnation, str] = {}
    for number, sample in enumerate(samples):
        for layout in sample.layouts.values():
            spec = layout.spec()
            first = found.setdefault(layout.field, spec)
            if first != spec:
                raise WidthChanged(
                    f"has rows of {list(layout.inner)}, an earlier one {list(first.inner or ())}",
                    subject=f"layout of {layout.logical_field} of sample {number}",
                )
            _check_use(layout, uses)
    return [found[name] for name in sorted(found)]


def _check_use(layout: Layout, uses: dict[Incarnation, str]) -> None:
    for fragment in layout.fragments:
        if uses.setdefault(whose(fragment.ref), layout.field) != layout.field:
            raise InvalidSegment(
                "is of another field in another layout",
                subject=f"layout of {layout.logical_field}, {fragment.ref}",
            )


def _chosen(sample: LayoutSample, fields: Sequence[str] | None) -> LayoutSample:
    """Return a sample with the layouts that are needed of it."""
    if fields is None:
        return sample
    return replace(sample, layouts={n: v for n, v in sample.layouts.items() if n in fields})


def _plain(number: int, sample: LayoutSample) -> Sample:
    return Sample(
        ref=str(number),
        tokens=sample.tokens,
        response_length=sample.response_length,
        removed=sample.removed,
    )


def _indexes(
    samples: Sequence[LayoutSample],
    indexes_of: Callable[[Sequence[str], str], Mapping[str, int]],
) -> dict[tuple[str, str], int]:
    """Return what the keys of all references stand for, with one call for each partition."""
    keys: dict[str, dict[str, None]] = {}
    for sample in samples:
        if not sample.removed:
            for layout in sample.layouts.values():
                for fragment in layout.fragments:
                    keys.setdefault(fragment.ref.partition, {})[fragment.ref.key] = None
    return {
        (partition, key): index
        for partition, names in keys.items()
        for key, index in indexes_of(list(names), partition).items()
    }
