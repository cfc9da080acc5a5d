"""Which rows of routing a training rank replays. Pure.

slime feeds a rank the tokens of its context-parallel part of a micro-batch, and pads them; routing
has to lie beside them row by row. A sample of T tokens has T-1 rows and one of padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Split = Literal["zigzag", "contiguous"]


class Piece(NamedTuple):
    """Some rows that follow each other.

    `sample` is a place in the micro-batch and `start`, `stop` are rows of it, half-open; where it
    is None they are rows of padding, which repeats nothing: each has routes of its own.
    """

    sample: int | None
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank's place among those that share a micro-batch.

    Attributes
    ----------
    context, contexts
        Rank and size of context parallelism.
    tensor, tensors
        Rank and size of tensor parallelism.
    split
        ``zigzag``: each sample is cut into ``2·contexts`` chunks and rank r gets chunks r and
        ``2·contexts - 1 - r``. ``contiguous`` (slime's ``--allgather-cp``): the whole micro-batch
        is cut into as many chunks as there are ranks.
    multiple
        slime's ``data_pad_size_multiplier``.
    sequence_parallel
        Whether tensor ranks share the rows out among them as well.
    """

    context: int = 0
    contexts: int = 1
    tensor: int = 0
    tensors: int = 1
    split: Split = "zigzag"
    multiple: int = 1
    sequence_parallel: bool = False

    def rows(self, lengths: Sequence[int]) -> list[Piece]:
        """Return the rows that this rank replays of a micro-batch, in their order.

        Parameters
        ----------
        lengths
            Tokens of its samples.
        """
        if self.split == "contiguous":
            whole = [piece for i, length in enumerate(lengths) for piece in _sample(i, length)]
            whole = _padded(whole, self.contexts * self.tensors * self.multiple)
            mine = _share(whole, self.context, self.contexts)
        else:
            mine = [p for i, length in enumerate(lengths) for p in self._zigzag(i, length)]
            mine = _padded(mine, self.tensors * self.multiple)
        return _share(mine, self.tensor, self.tensors) if self.sequence_parallel else mine

    def _zigzag(self, sample: int, length: int) -> Iterator[Piece]:
        whole = _sample(sample, length)
        if self.contexts == 1:
            yield from whole
            return
        count = 2 * self.contexts
        size = -(-length // count)
        whole = _padded(whole, count * size)
        for chunk in (self.context, count - 1 - self.context):
            yield from _cut(whole, chunk * size, (chunk + 1) * size)

    def predicted(self, length: int) -> list[tuple[int, int]]:
        """Return the tokens of a sample whose logprobs this rank has, half-open: two ranges.

        A rank predicts the tokens that follow those it is fed. slime shares logprobs out zig-zag
        also where it feeds contiguous parts.
        """
        count = 2 * self.contexts
        size = -(-length // count)
        mine = (self.context, count - 1 - self.context)
        return [(chunk * size + 1, (chunk + 1) * size + 1) for chunk in mine]


def _sample(sample: int, length: int) -> list[Piece]:
    return [Piece(sample, 0, max(0, length - 1)), Piece(None, 0, 1)]


def _padded(pieces: list[Piece], multiple: int) -> list[Piece]:
    """Return the pieces with rows of padding up to a multiple."""
    missing = -sum(p.rows for p in pieces) % max(1, multiple)
    return [*pieces, Piece(None, 0, missing)] if missing else pieces


def _share(pieces: list[Piece], part: int, parts: int) -> list[Piece]:
    size = sum(p.rows for p in pieces) // parts
    return list(_cut(pieces, part * size, (part + 1) * size))


def _cut(pieces: Sequence[Piece], start: int, stop: int) -> Iterator[Piece]:
    """Yield what lies in a half-open range of rows."""
    at = 0
    for piece in pieces:
        first, last = max(start, at), min(stop, at + piece.rows)
        if first < last:
            yield Piece(piece.sample, piece.start + first - at, piece.start + last - at)
        at += piece.rows


def padding(
    piece: Piece, layers: Sequence[int], *, of: int, topk: int, experts: int
) -> npt.NDArray[Any]:
    """Return the routes of rows of padding, int32 ``[rows, layers, topk]``.

    slime counts through all experts, over the rows, the layers and the k, so that no expert gets
    more of them than others.

    Parameters
    ----------
    layers
        Which of the model's layers.
    of
        How many layers the model has.
    """
    rows = np.arange(piece.start, piece.stop, dtype=np.int64)[:, None, None] * (of * topk)
    places = np.asarray(layers, np.int64)[None, :, None] * topk
    return ((rows + places + np.arange(topk)) % experts).astype(np.int32)
