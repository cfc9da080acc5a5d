"""One rank's part of a shard, micro-batch by micro-batch, checked before it is trained on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tq_fs.errors import InvalidConfig
from tq_fs.fields import FieldSpec
from tq_fs.rollout._checks import TensorCheck
from tq_fs.rollout._ranks import Range, Rank
from tq_fs.store import Store
from tq_fs.trajectory import Segment

if TYPE_CHECKING:
    import torch


class ShardReader:
    """Hydrates a rank's layers and tokens of Segments. Needs no Ray.

    Parameters
    ----------
    store
        Is read; stays the caller's.
    fields
        Declared fields.
    rank
        Whose part.
    budget_bytes
        Bytes of a micro-batch's tensors; two are in memory.
    routed_layers
        Layers of the model that have a router; None for all that are recorded.
    """

    def __init__(
        self,
        store: Store,
        fields: Sequence[FieldSpec],
        rank: Rank,
        *,
        budget_bytes: int,
        routed_layers: Sequence[int] | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._names = rank.fields(fields)
        self._layers = _layers(fields, rank)
        self._budget_bytes = budget_bytes
        self._check = TensorCheck(fields, rank, self._layers, routed_layers)

    def read(
        self, segments: Sequence[Segment], *, removed: Collection[int] = (), about: str = "a shard"
    ) -> Iterator[tuple[list[Segment], Mapping[str, list[torch.Tensor]]]]:
        """Yield the Segments with their tensors, each micro-batch while the next one is read.

        Tensors are overwritten when the next micro-batch is taken.

        Parameters
        ----------
        segments
            A shard's, in the order in which they are trained on.
        removed
            Places of those that training ignores: nothing of them is read, their fields and their
            loss mask are zeros.
        about
            Names the shard, for messages.

        Raises
        ------
        RowCountMismatch, WidthChanged, InvalidField
            See :class:`TensorCheck`.
        TqFsError
            What reading raises.
        """
        left = iter([(s, i in removed) for i, s in enumerate(segments)])
        batches = self._store.micro_batches(
            [s.sample(removed=i in removed) for i, s in enumerate(segments)],
            budget_bytes=self._budget_bytes,
            fields=self._names,
            layers=self._layers,
            tokens=self._rank.tokens,
            reuse=True,
        )
        for batch in batches:  # the next one is being read while this one is used
            mine = [next(left) for _ in batch.samples]
            for place, (segment, gone) in enumerate(mine):
                own = {name: values[place] for name, values in batch.tensors.items()}
                self._check.check(segment, own, removed=gone, about=about)
            yield [_ignored(s) if gone else s for s, gone in mine], batch.tensors


def _ignored(segment: Segment) -> Segment:
    """Return a Segment without a token that is trained on."""
    return replace(segment, loss_mask=np.zeros_like(segment.loss_mask))


def _layers(fields: Sequence[FieldSpec], rank: Rank) -> Range | None:
    """Return the layers of a rank; None for all."""
    if rank.parallel.pipeline == 1:
        return None
    counts = {spec.inner[0] if spec.inner else None for spec in fields if spec.layered}
    if len(counts) > 1 or None in counts:
        raise InvalidConfig(
            f"{len(counts)} of them, or one that is not declared",
            subject="numbers of layers among the fields",
            remedy="declare routed_experts(layers=…): pipeline stages are cut from that",
        )
    return rank.layers(counts.pop() or 0) if counts else None
