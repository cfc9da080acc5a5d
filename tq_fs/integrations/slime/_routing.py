"""A shard's routed experts, read when a micro-batch needs them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, overload

import numpy as np
import numpy.typing as npt

from tq_fs.errors import BudgetTooSmall, InvalidConfig
from tq_fs.fields import FieldSpec
from tq_fs.hydrate import Allocate
from tq_fs.integrations.slime._rows import Piece, Place, padding
from tq_fs.memory import mapped_empty
from tq_fs.store import Store
from tq_fs.trajectory import Sample

if TYPE_CHECKING:
    import torch

Routes = npt.NDArray[np.int32]
_ID_BYTES = 4


class RoutingColumn(Sequence["torch.Tensor"]):
    """A column of the train data: for each sample int32 ``[T-1, layers, topk]`` on the CPU.

    Asked for a sample, it hydrates the micro-batch that the sample is in and keeps it until one of
    another is asked for. What was handed out is memory of its own, which goes with the tensors.

    Parameters
    ----------
    store
        Is read; stays the caller's.
    samples
        The shard.
    spec
        The declared field.
    micro_batches
        Indexes of each micro-batch's samples.
    budget_bytes
        Bound of a micro-batch's tensors.
    allocate
        Gives memory for a micro-batch.

    Raises
    ------
    BudgetTooSmall
        A micro-batch is larger, by number; nothing was read.
    """

    def __init__(
        self,
        store: Store,
        samples: Sequence[Sample],
        spec: FieldSpec,
        micro_batches: Sequence[Sequence[int]],
        *,
        budget_bytes: int,
        allocate: Allocate = mapped_empty,
    ) -> None:
        self._store = store
        self._samples = samples
        self._spec = spec
        self._micro_batches = [list(indexes) for indexes in micro_batches]
        self._where = {i: n for n, indexes in enumerate(self._micro_batches) for i in indexes}
        self._allocate = allocate
        self._number: int | None = None
        self._tensors: dict[int, torch.Tensor] = {}
        row = prod(spec.inner or ()) * _ID_BYTES
        for number, indexes in enumerate(self._micro_batches):
            rows = sum(max(0, samples[i].tokens - 1) for i in indexes)
            check_budget(number, rows * row, budget_bytes)

    def __len__(self) -> int:
        """Return how many samples there are."""
        return len(self._samples)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        """Return a sample's tensor."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        number = self._where.get(at)
        if number is None:  # of no micro-batch
            return self._hydrate([at])[at]
        if number != self._number:
            self._number, self._tensors = None, {}  # gone before others come
            self._tensors = self._hydrate(self._micro_batches[number])
            self._number = number
        return self._tensors[at]

    def _hydrate(self, indexes: Sequence[int]) -> dict[int, torch.Tensor]:
        batches = self._store.micro_batches(
            [self._samples[i] for i in indexes],
            size=len(indexes),
            fields=[self._spec.name],
            allocate=self._allocate,
        )
        (batch,) = batches
        return dict(zip(indexes, batch.tensors[f"rollout_{self._spec.name}"], strict=True))


class RankRouting:
    """What one rank replays of its shard: its layers, and its rows of each micro-batch.

    Parameters
    ----------
    store
        Is read; stays the caller's.
    samples
        The shard.
    spec
        The declared field; its rows have the shape ``(layers, topk)`` of the whole model.
    place
        The rank's place among those that share a micro-batch.
    micro_batches
        Indexes of each micro-batch's samples.
    budget_bytes
        Bound of a micro-batch's rows on this rank.
    allocate
        Gives memory for them.
    """

    def __init__(
        self,
        store: Store,
        samples: Sequence[Sample],
        spec: FieldSpec,
        place: Place,
        micro_batches: Sequence[Sequence[int]],
        *,
        budget_bytes: int,
        allocate: Allocate = mapped_empty,
    ) -> None:
        if spec.inner is None or spec.limit is None:
            raise InvalidConfig("layers, topk and experts are not declared", subject=spec.name)
        self._store = store
        self._samples = samples
        self._name = spec.name
        self._layers, self._topk = spec.inner
        self._experts = spec.limit
        self._place = place
        self._micro_batches = [list(indexes) for indexes in micro_batches]
        self._budget_bytes = budget_bytes
        self._allocate = allocate

    def __len__(self) -> int:
        """Return how many micro-batches there are."""
        return len(self._micro_batches)

    def read(self, number: int, layers: Sequence[int]) -> Routes:
        """Return the routes of a micro-batch, layer by layer: int32 ``[layers, rows, topk]``.

        A layer's rows are those of slime's own slice of the whole tensors, to the bit.

        Parameters
        ----------
        number
            The micro-batch.
        layers
            Layers of the model, ascending; those between the first and the last are read.

        Raises
        ------
        BudgetTooSmall
            The result is larger than the budget; nothing was read.
        SegmentMissing, StaleReference, StepMissing, InvalidSelection
            By sample.
        """
        samples = [self._samples[i] for i in self._micro_batches[number]]
        pieces = self._place.rows([s.tokens for s in samples])
        shape = (len(layers), sum(p.rows for p in pieces), self._topk)
        nbytes = prod(shape) * _ID_BYTES
        check_budget(number, nbytes, self._budget_bytes)
        out: Routes = self._allocate(nbytes)[:nbytes].view(np.int32).reshape(shape)
        if layers:
            self._fill(out, samples, pieces, layers)
        return out

    def _fill(
        self,
        out: Routes,
        samples: Sequence[Sample],
        pieces: Sequence[Piece],
        layers: Sequence[int],
    ) -> None:
        whole = (layers[0], layers[-1] + 1)
        wanted = [layer - whole[0] for layer in layers]
        at = 0
        for piece in pieces:
            rows = out[:, at : at + piece.rows]
            at += piece.rows
            if piece.sample is None:
                found = padding(
                    piece, layers, of=self._layers, topk=self._topk, experts=self._experts
                )
            else:
                found = self._stored(samples[piece.sample], piece, whole)[:, wanted]
            np.copyto(rows, found.transpose(1, 0, 2))

    def _stored(self, sample: Sample, piece: Piece, layers: tuple[int, int]) -> Routes:
        tensors = self._store.hydrate(
            [sample], fields=[self._name], layers=layers, tokens=(piece.start, piece.stop)
        )
        found: Routes = tensors[f"rollout_{self._name}"][0].numpy()
        return found


def check_budget(number: int, nbytes: int, budget_bytes: int) -> None:
    """Refuse a micro-batch that is too large to be hydrated at once."""
    if nbytes > budget_bytes:
        raise BudgetTooSmall(
            f"{nbytes} bytes of routed experts, {budget_bytes} are allowed",
            subject=f"micro-batch {number}",
            remedy="raise tq_fs_budget_bytes, use SlicingActorMixin, or lower max_tokens_per_gpu",
        )
