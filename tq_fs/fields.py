"""What a per-token field is, and which values it takes.

A field has a *memory* type (what Proxy and trainer see) and a *stored* type. Routed experts are
int32 in memory; stored they are as narrow as the ids allow (:mod:`tq_fs.narrow`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tq_fs.errors import (
    InvalidConfig,
    InvalidField,
    RowCountMismatch,
    ValueOutOfRange,
    WidthChanged,
)

Array = npt.NDArray[Any]
Rows = Literal["tokens", "transitions"]

LOGPROBS = "logprobs"
ROUTED_EXPERTS = "routed_experts"
UNKNOWN = -1
_MEMORY_TYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
_TAKEN = frozenset({"kind", "parent", "context", "response", "version", "reason", "values"})
NARROW_TYPES = {"uint8": 2**8, "uint16": 2**16, "int32": 2**31}  # narrowest first; ids are below


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec:
    """Declaration of one per-token field.

    Attributes
    ----------
    name
        Name of the field and of its Zarr array.
    dtype
        Type in memory (a numpy name).
    inner
        Shape of one row: ``()`` for logprobs, ``(layers, topk)`` for routed experts. None: taken
        from the first Step of each session.
    rows
        ``tokens``: one row per token. ``transitions``: one row per token but the sequence's last.
    stored
        Stored type: a numpy name, or ``auto`` for the narrowest that holds every value.
    limit
        Ids are below this (the expert count), where it is known.
    unknown
        Whether -1 is legal and means "not known".
    layered
        Whether the first axis of a row is layers, which readers select from.
    context_fill
        Value of rows the engine does not report (logprobs of context tokens).
    codec
        ``none``, ``lz4`` (blosc-lz4-bitshuffle), ``zstd`` or ``auto``.
    """

    name: str
    dtype: str
    inner: tuple[int, ...] | None = ()
    rows: Rows = "tokens"
    stored: str = "auto"
    limit: int | None = None
    unknown: bool = False
    layered: bool = False
    context_fill: float | None = None
    codec: str = "auto"

    def __post_init__(self) -> None:
        """Refuse declarations that could not be stored."""
        if self.name in _TAKEN:
            raise InvalidConfig("is a word of the API", subject=self.name, remedy="rename it")
        if not self.name.isidentifier() or self.name.endswith("_unknown"):
            raise InvalidConfig(
                "a field's name is an identifier that does not end in _unknown", subject=self.name
            )
        if self.dtype not in _MEMORY_TYPES:
            raise InvalidConfig(
                f"{self.dtype!r} is no type of a field",
                subject=self.name,
                remedy=f"known are {', '.join(_MEMORY_TYPES)}",
            )
        if self.layered and self.inner == ():
            raise InvalidConfig("rows without an axis have no layers", subject=self.name)
        if self.limit is not None and self.limit < 1:
            raise InvalidConfig(f"no id is below {self.limit}", subject=self.name)
        if self.inner is not None and any(n < 1 for n in self.inner):
            raise InvalidConfig(f"rows of shape {list(self.inner)} hold nothing", subject=self.name)
        if self.codec not in ("auto", "none", "lz4", "zstd"):
            raise InvalidConfig(
                f"unknown codec {self.codec!r}", subject=self.name, remedy="auto, none, lz4 or zstd"
            )
        _check_stored(self)

    @property
    def narrowable(self) -> bool:
        """Whether the field holds ids that can be stored in fewer bytes."""
        return self.dtype == "int32"

    def row_count(self, tokens: int, *, opens_chain: bool) -> int:
        """Return how many rows a Step of `tokens` own tokens has.

        A Step that opens a chain has one transition fewer than tokens; one that continues a chain
        brings the transition from its predecessor's last token along.
        """
        return tokens - 1 if self.rows == "transitions" and opens_chain else tokens


def _check_stored(spec: FieldSpec) -> None:
    if spec.stored in ("auto", spec.dtype):
        return
    if not spec.narrowable or spec.stored not in NARROW_TYPES:
        raise InvalidConfig(
            f"{spec.dtype} values cannot be stored as {spec.stored}",
            subject=spec.name,
            remedy=f"use auto, {spec.dtype}" + (", uint8 or uint16" if spec.narrowable else ""),
        )
    if spec.limit is not None and spec.limit > NARROW_TYPES[spec.stored]:
        raise InvalidConfig(
            f"{spec.limit} experts do not fit {spec.stored}",
            subject=spec.name,
            remedy=f"store as {narrowest(spec.limit - 1)} or auto",
        )


def narrowest(largest: int) -> str:
    """Return the narrowest stored type that holds ids from 0 to `largest`."""
    return next((t for t, end in NARROW_TYPES.items() if largest < end), "int32")


def logprobs() -> FieldSpec:
    """Declare ``logprobs``: float32, one per token, 0.0 on context tokens."""
    return FieldSpec(name=LOGPROBS, dtype="float32", stored="float32", context_fill=0.0)


def routed_experts(
    *,
    layers: int | None = None,
    topk: int | None = None,
    experts: int | None = None,
    stored: str = "auto",
    codec: str = "auto",
) -> FieldSpec:
    """Declare ``routed_experts``: int32 ``[T-1, layers, topk]`` in memory.

    Parameters
    ----------
    layers, topk
        Shape of a row; None for both: taken from each session's first Step.
    experts
        Expert count of the model: ids are below it.
    stored
        ``uint8``, ``uint16``, ``int32`` or ``auto``.
    codec
        See :class:`FieldSpec`.
    """
    if (layers is None) != (topk is None):
        raise InvalidConfig("give layers and topk together", subject=ROUTED_EXPERTS)
    return FieldSpec(
        name=ROUTED_EXPERTS,
        dtype="int32",
        inner=None if layers is None or topk is None else (layers, topk),
        rows="transitions",
        stored=stored,
        limit=experts,
        unknown=True,
        layered=True,
        codec=codec,
    )


def select(specs: Sequence[FieldSpec], names: Iterable[str] | None) -> frozenset[str]:
    """Return the fields to take out of the way: what ``--transfer-params`` names.

    None selects all. What is not selected stays on the in-memory path.

    Raises
    ------
    InvalidConfig
        A name is not a declared field.
    """
    known = {spec.name for spec in specs}
    if len(known) != len(specs):
        raise InvalidConfig("a field is declared twice", subject=", ".join(s.name for s in specs))
    chosen = known if names is None else set(names)
    if chosen - known:
        raise InvalidConfig(
            f"unknown fields {sorted(chosen - known)}",
            subject="transfer params",
            remedy=f"choose from {sorted(known)}",
        )
    return frozenset(chosen)


# ---------------------------------------------------------------- checks at the edge


def coerce(spec: FieldSpec, values: npt.ArrayLike, subject: str = "") -> Array:
    """Return `values` as a C-contiguous array of the field's memory type, or refuse them.

    An array that is already of that type is returned as it is, so that every NaN keeps its bits;
    unless it is a small part of a larger one, which it would keep in memory.

    Raises
    ------
    InvalidField
        Not numeric, of a kind that would lose information, or ragged.
    ValueOutOfRange
        An integer does not fit the memory type.
    """
    want = np.dtype(spec.dtype)
    about = f"{subject}, {spec.name}" if subject else spec.name
    try:
        array = np.asarray(values)
    except (RuntimeError, TypeError, ValueError) as error:  # ragged, or a tensor numpy cannot take
        raise InvalidField(f"is no plain array ({error})", subject=about) from error
    if array.size == 0 and array.dtype.kind == "f":  # an empty list, of no type or width
        shape = (0, *(spec.inner or ())) if array.ndim == 1 else array.shape
        array = np.empty(shape, want)
    kinds = "f" if want.kind == "f" else "iu" if want.kind in "iu" else want.kind
    if array.dtype.kind not in (kinds + "iu" if kinds == "f" else kinds):
        raise InvalidField(f"{array.dtype} values where {want} ones are expected", subject=about)
    if want.kind in "iu" and not np.can_cast(array.dtype, want):
        _check_bounds(array, want, about)
    if array.ndim == 0:
        return array.astype(want)
    return _alone(np.ascontiguousarray(array, dtype=want))


def _alone(array: Array) -> Array:
    """Return an array, or a copy of it where it is less than half of what it keeps in memory."""
    base = array.base
    return (
        array.copy() if isinstance(base, np.ndarray) and base.nbytes > 2 * array.nbytes else array
    )


def _check_bounds(array: Array, want: np.dtype[Any], about: str) -> None:
    info = np.iinfo(want)
    if array.size and (array.min() < info.min or array.max() > info.max):
        raise ValueOutOfRange(
            f"values from {array.min()} to {array.max()} in {want}", subject=about
        )


def check_rows(spec: FieldSpec, array: Array, rows: int, subject: str) -> None:
    """Refuse an array that has not `rows` rows of the field's shape.

    Raises
    ------
    RowCountMismatch, WidthChanged
    """
    about = f"{subject}, {spec.name}"
    if array.ndim == 0 or array.shape[0] != rows:
        have = array.shape[0] if array.ndim else "no"
        raise RowCountMismatch(
            f"{have} rows where the Step's tokens call for {rows}",
            subject=about,
            remedy="send the rows of this Step's own tokens",
        )
    if spec.inner is not None and array.shape[1:] != spec.inner:
        raise WidthChanged(
            f"rows of shape {list(array.shape[1:])} where {list(spec.inner)} is expected",
            subject=about,
            remedy="check layers and top-k against the model that generated",
        )


def check_routed(rows: Array, layers: Sequence[int], subject: str) -> None:
    """Refuse routes with a layer that was never filled in, as slime does.

    A router sends no token to one expert twice, so that zeros alone are none of its doing; where
    it sends each to one only they may be.

    Parameters
    ----------
    rows
        Routes ``[rows, layers, topk]``.
    layers
        Which of the axis' layers have a router.
    subject
        Whose they are.

    Raises
    ------
    InvalidField
    """
    if rows.shape[0] == 0 or rows.shape[2] < 2:
        return
    empty = [layer for layer in layers if not rows[:, layer].any()]
    if empty:
        raise InvalidField(
            f"the routes of layers {empty} are all 0",
            subject=subject,
            remedy="see whether the engine's pipeline stages put their routes together",
        )


def with_inner(spec: FieldSpec, array: Array) -> FieldSpec:
    """Return `spec` with its row shape fixed to that of `array`, where it was open."""
    return spec if spec.inner is not None else replace(spec, inner=array.shape[1:])
