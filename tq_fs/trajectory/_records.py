"""StepRecords: one model invocation each, and how it hangs on earlier ones.

A *chain* is a Step that opens it (create, branch, or the first after a boundary) and the Steps
appended to it. In ``tito`` mode an append Step holds only its own tokens (context delta and
response), so that the tokens of a chain are the tokens of its Steps put together; in ``snapshot``
mode every Step holds the whole sequence.

Rows of routing, so that a Segment of T tokens has T-1 (Dressage's rules):

========  ==================================  ==================  ===================
mode      Step                                rows                first row
========  ==================================  ==================  ===================
snapshot  every Step                          len(tokens) - 1     0
tito      create, branch, after a boundary    len(tokens) - 1     0
tito      append                              len(own tokens)     previous prefix - 1
========  ==================================  ==================  ===================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tq_fs.fields import FieldSpec
from tq_fs.steps import StepEntry

Tokens = npt.NDArray[np.int32]
Array = npt.NDArray[Any]
StepKind = Literal["create", "append", "branch", "boundary"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRecord:
    """What the Proxy keeps of a Step; fields that went to the store are not among it.

    Attributes
    ----------
    index
        Number of the Step in its session.
    kind
        How it hangs on `parent`.
    parent
        Index of the Step it follows; None for create.
    prefix
        Tokens of the sequence before those this Step holds; 0 where it holds the whole sequence.
    tokens
        Token ids the Step holds, int32 ``[n]``: context, then response.
    response
        How many of the last tokens were generated.
    versions
        Weight versions by run, ``(version, tokens)``, over `tokens`; prompt tokens count to the
        first. At least one run.
    reason
        Why a boundary was drawn.
    arrays
        Fields that stay on the in-memory path, by name.
    stored
        What the store says of the others; None where there are none.
    """

    index: int
    kind: StepKind
    parent: int | None
    prefix: int
    tokens: Tokens
    response: int
    versions: tuple[tuple[str, int], ...]
    reason: str = ""
    arrays: Mapping[str, Array]
    stored: StepEntry | None = None

    @property
    def opens_chain(self) -> bool:
        """Whether a chain starts here."""
        return self.kind != "append"

    @property
    def version(self) -> str:
        """Weight version of the last token."""
        return self.versions[-1][0]

    @property
    def total(self) -> int:
        """Tokens of the whole sequence up to and including this Step."""
        return self.prefix + len(self.tokens)

    def span(self, spec: FieldSpec) -> tuple[int, int]:
        """Return the half-open range of the sequence's rows that the Step holds of a field."""
        if spec.rows == "tokens":
            return self.prefix, self.total
        return max(self.prefix - 1, 0), self.total - 1
