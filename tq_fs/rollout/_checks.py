"""What a rank hydrated, held against what training asks of it. Pure.

slime asserts the same of whole samples; here it holds for a rank's layers and tokens. A sample of T
tokens whose last R are the response must have:

===============  =============================  =========================================
field            rows                           of a rank
===============  =============================  =========================================
routed experts   T - 1, each [layers, topk]     those of the tokens it is fed; its layers
logprobs         R                              those of the tokens it predicts
===============  =============================  =========================================

and no layer whose routes are all 0. Samples that training ignores have zeros, and are exempt from
that alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tq_fs.errors import InvalidField, RowCountMismatch, WidthChanged
from tq_fs.fields import LOGPROBS, ROUTED_EXPERTS, FieldSpec, check_routed
from tq_fs.hydrate import slime_name
from tq_fs.rollout._ranks import Range, Rank
from tq_fs.trajectory import Segment

if TYPE_CHECKING:
    import torch


class TensorCheck:
    """Refuses tensors of another shape than a rank's part of a Segment has.

    Parameters
    ----------
    fields
        Declared fields.
    rank
        Whose part.
    layers
        Layers it reads; None for all.
    routed_layers
        Layers of the model that have a router; None for all that are recorded.
    """

    def __init__(
        self,
        fields: Sequence[FieldSpec],
        rank: Rank,
        layers: Range | None,
        routed_layers: Sequence[int] | None = None,
    ) -> None:
        used = rank.fields(fields)
        self._fields = [spec for spec in fields if spec.name in used]
        self._rank = rank
        self._layers = layers
        self._routed = None if routed_layers is None else frozenset(routed_layers)

    def check(
        self, segment: Segment, tensors: Mapping[str, torch.Tensor], *, removed: bool, about: str
    ) -> None:
        """Check what was hydrated of one Segment.

        Parameters
        ----------
        segment
            With tokens, loss mask and response length.
        tensors
            Its tensor of each field, by slime's names.
        removed
            Whether training ignores it.
        about
            Names the rollout, for messages.

        Raises
        ------
        RowCountMismatch, WidthChanged
            By Segment, field and numbers.
        InvalidField
            A wrong type, a loss mask or a response that does not fit, or a layer of zeros.
        """
        name = f"{about}, {segment.session_id!r} {segment.view} {segment.index}"
        _check_segment(segment, name)
        for spec in self._fields:
            tensor = tensors[slime_name(spec)]
            self._check_shape(segment, spec, tensor, f"{name}, {slime_name(spec)}")
            if spec.name == ROUTED_EXPERTS and not removed:
                check_routed(
                    tensor.numpy(), self._routers(tensor.shape[1]), f"{name}, {slime_name(spec)}"
                )

    def _check_shape(
        self, segment: Segment, spec: FieldSpec, tensor: torch.Tensor, name: str
    ) -> None:
        if tensor.dtype != _torch_type(spec):
            raise InvalidField(f"{tensor.dtype} where {spec.dtype} belongs", subject=name)
        rows = self._rows(segment, spec)
        if len(tensor) != rows:
            raise RowCountMismatch(
                f"{len(tensor)} rows where {len(segment.tokens)} tokens with a response of "
                f"{segment.response_length} call for {rows}",
                subject=name,
                remedy="see that rank and store are of the same run and the same sample",
            )
        inner = self._inner(spec)
        if inner is not None and tuple(tensor.shape[1:]) != inner:
            raise WidthChanged(
                f"rows of shape {list(tensor.shape[1:])} where {list(inner)} is expected",
                subject=name,
                remedy="check layers and top-k against the model that is trained",
            )

    def _rows(self, segment: Segment, spec: FieldSpec) -> int:
        """Return how many rows the rank has of a field: all, or those of its tokens."""
        length = len(segment.tokens)
        low, high = 0, length
        if spec.rows == "transitions":
            high = max(0, length - 1)
        if spec.name == LOGPROBS:
            low = length - segment.response_length
        mine = self._rank.tokens(length, spec)
        return sum(max(0, min(stop, high) - max(start, low)) for start, stop in mine)

    def _inner(self, spec: FieldSpec) -> tuple[int, ...] | None:
        if spec.inner is None or not spec.layered or self._layers is None:
            return spec.inner
        return (self._layers[1] - self._layers[0], *spec.inner[1:])

    def _routers(self, count: int) -> list[int]:
        """Return which of the tensor's layers have a router."""
        first = 0 if self._layers is None else self._layers[0]
        every = range(count)
        return [i for i in every if self._routed is None or first + i in self._routed]


def _check_segment(segment: Segment, name: str) -> None:
    length = len(segment.tokens)
    if not 0 <= segment.response_length <= length:
        raise InvalidField(
            f"a response of {segment.response_length} in {length} tokens", subject=name
        )
    if len(segment.loss_mask) != length:
        raise InvalidField(
            f"a loss mask of {len(segment.loss_mask)} for {length} tokens", subject=name
        )
    before = segment.loss_mask[: length - segment.response_length]
    if before.any():
        raise InvalidField(
            f"{int(before.sum())} tokens before the response are in the loss mask", subject=name
        )


def _torch_type(spec: FieldSpec) -> torch.dtype:
    import torch  # noqa: PLC0415  # only trainers have it

    found: torch.dtype = getattr(torch, spec.dtype)
    return found
