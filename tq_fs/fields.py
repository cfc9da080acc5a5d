"""What a per-token field is, and how its values are checked, narrowed and widened.

A field has a *memory* type (what Proxy and trainer see) and a *stored* type. Routed experts are
int32 in memory; stored they are as narrow as the ids allow, because they are over nine tenths of
a trajectory's bytes. Narrowing never truncates: an id out of range is an error that names it. The
one negative id, -1 (route unknown), is recorded beside the array, so that it survives in every
type, also where all 256 values of uint8 are legal ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
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
_NARROW_TYPES = ("uint8", "uint16", "int32")
_BLOCK_ELEMENTS = 131072  # 512 KiB of int32: check and copy meet the block in the L2 cache


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
        return np.dtype(self.dtype) == np.int32

    def row_count(self, tokens: int, *, opens_chain: bool) -> int:
        """Return how many rows a Step of `tokens` own tokens has.

        A Step that opens a chain has one transition fewer than tokens; one that continues a chain
        brings the transition from its predecessor's last token along.
        """
        return tokens - 1 if self.rows == "transitions" and opens_chain else tokens


def _check_stored(spec: FieldSpec) -> None:
    if spec.stored in ("auto", spec.dtype):
        return
    if not spec.narrowable or spec.stored not in _NARROW_TYPES:
        raise InvalidConfig(
            f"{spec.dtype} values cannot be stored as {spec.stored}",
            subject=spec.name,
            remedy=f"use auto, {spec.dtype}" + (", uint8 or uint16" if spec.narrowable else ""),
        )
    if spec.limit is not None and spec.limit - 1 > np.iinfo(spec.stored).max:
        raise InvalidConfig(
            f"{spec.limit} experts do not fit {spec.stored}",
            subject=spec.name,
            remedy=f"store as {narrowest(spec.limit - 1)} or auto",
        )


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


def routed_experts_of_model(
    config: str | Path | Mapping[str, Any], *, dense_layers: bool = False, stored: str = "auto"
) -> FieldSpec:
    """Declare ``routed_experts`` from a model's ``config.json``.

    Parameters
    ----------
    config
        The file, its folder, or the parsed mapping.
    dense_layers
        Whether the engine records rows for dense layers too.
    stored
        Stored type.

    Raises
    ------
    InvalidConfig
        The configuration describes no mixture of experts.
    """
    values = _read_model_config(config)
    values = values.get("text_config") or values
    experts = _first(values, "num_experts", "n_routed_experts", "num_local_experts")
    topk = _first(values, "num_experts_per_tok", "moe_topk", "moe_top_k")
    layers = _first(values, "num_hidden_layers")
    if not (experts and topk and layers):
        raise InvalidConfig(
            "the model's configuration names no experts, top-k or layers",
            subject=str(config)[:120],
            remedy="give layers, topk and experts yourself",
        )
    if not dense_layers:
        layers = sum(_is_moe_layer(values, i) for i in range(layers))
    return routed_experts(layers=layers, topk=topk, experts=experts, stored=stored)


def _read_model_config(config: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"cannot be read: {error}", subject=str(path)) from error
    if not isinstance(values, dict):
        raise InvalidConfig("holds no JSON object", subject=str(path))
    return values


def _first(values: Mapping[str, Any], *names: str) -> int:
    return next((int(values[name]) for name in names if values.get(name)), 0)


def _is_moe_layer(values: Mapping[str, Any], index: int) -> bool:
    """Tell whether layer `index` routes, by the keys of Qwen, DeepSeek, GLM and MiniMax."""
    if index in (values.get("mlp_only_layers") or ()):
        return False
    if index < int(values.get("first_k_dense_replace") or 0):
        return False
    every = values.get("moe_layer_freq") or 1
    if isinstance(every, list):
        return bool(every[index])
    if index % int(every):
        return False
    return (index + 1) % int(values.get("decoder_sparse_step") or 1) == 0


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

    An array that is already of that type is returned as it is, so that every NaN keeps its bits.

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
    except ValueError as error:
        raise InvalidField(f"rows differ in shape ({error})", subject=about) from error
    if array.size == 0 and array.dtype.kind == "f":  # an empty list, of no type or width
        shape = (0, *(spec.inner or ())) if array.ndim == 1 else array.shape
        array = np.empty(shape, want)
    kinds = "f" if want.kind == "f" else "iu" if want.kind in "iu" else want.kind
    if array.dtype.kind not in (kinds + "iu" if kinds == "f" else kinds):
        raise InvalidField(f"{array.dtype} values where {want} ones are expected", subject=about)
    if want.kind in "iu" and not np.can_cast(array.dtype, want):
        _check_bounds(array, want, about)
    return np.ascontiguousarray(array, dtype=want) if array.ndim else array.astype(want)


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


def with_inner(spec: FieldSpec, array: Array) -> FieldSpec:
    """Return `spec` with its row shape fixed to that of `array`, where it was open."""
    return spec if spec.inner is not None else replace(spec, inner=array.shape[1:])


# ---------------------------------------------------------------- narrow and widen


def narrowest(largest: int) -> str:
    """Return the narrowest stored type that holds ids from 0 to `largest`."""
    return next((t for t in _NARROW_TYPES if largest <= np.iinfo(t).max), "int32")


def stored_type(spec: FieldSpec, array: Array) -> str:
    """Return the type a Step's array is stored in.

    ``auto`` takes the narrowest type for the model's expert count, or, where that is not known,
    for this Step's ids; Steps of one Segment may therefore differ.
    """
    if spec.stored != "auto" or not spec.narrowable:
        return spec.dtype if spec.stored == "auto" else spec.stored
    if spec.limit is not None:
        return narrowest(spec.limit - 1)
    if not array.size:
        return _NARROW_TYPES[0]
    if not spec.unknown and int(array.min()) < 0:
        return "int32"
    return narrowest(int(array.max()))


def id_bound(spec: FieldSpec, stored: str) -> int:
    """Return the exclusive upper bound of legal ids in `stored` type."""
    top = int(np.iinfo(stored).max) + 1
    return top if spec.limit is None else min(top, spec.limit)


def narrow_blocks(source: Array, target: Array, bound: int) -> Iterator[Array | None]:
    """Copy int32 ids into a narrower array of the same shape, checking the range on the way.

    One pass over memory: a block is checked and copied, and what else is to be done with it can
    be done, while it lies in the cache. A bound that is a power of two is checked by OR-ing the
    ids, which is cheaper than their maximum.

    Yields
    ------
    array or None
        Each block of `target` once it is filled, flat where `target` is contiguous. None, as the
        last item, when a block holds an id outside of ``[0, bound)``; `target` is then undefined.
    """
    peak = np.bitwise_or.reduce if bound & (bound - 1) == 0 else np.maximum.reduce
    ids = source.view(np.uint32)
    if source.flags.c_contiguous and target.flags.c_contiguous:
        ids, target = ids.reshape(-1), target.reshape(-1)
    step = max(1, _BLOCK_ELEMENTS * len(ids) // max(1, ids.size))
    for start in range(0, len(ids), step):
        block, filled = ids[start : start + step], target[start : start + step]
        if int(peak(block, axis=None)) >= bound:
            yield None
            return
        np.copyto(filled, block, casting="unsafe")
        yield filled


def narrow_into(source: Array, target: Array, bound: int) -> bool:
    """Run :func:`narrow_blocks` to its end; return whether every id was in range."""
    return all(block is not None for block in narrow_blocks(source, target, bound))


def split_unknown(spec: FieldSpec, array: Array, bound: int, subject: str) -> tuple[Array, Array]:
    """Separate unknown routes from ids: the slow path for Steps that :func:`narrow_blocks` refuses.

    Returns
    -------
    ids, mask
        `array` with 0 in the place of -1, and a bool array of its shape that is True there.

    Raises
    ------
    ValueOutOfRange
        Names token row, layer, slot, value and type of the first id that is neither.
    """
    mask = array == UNKNOWN if spec.unknown else np.zeros(array.shape, bool)
    wrong = ((array < 0) | (array >= bound)) & ~mask
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueOutOfRange(
            f"id {array[at]} at {_place(at)} is not in [0, {bound}), the range of "
            f"{narrowest(bound - 1)}{'' if spec.limit != bound else ' and of the experts'}",
            subject=f"{subject}, {spec.name}",
            remedy="check the model's expert count, or store a wider type",
        )
    return np.where(mask, 0, array).astype(array.dtype), mask


def _place(at: tuple[int, ...]) -> str:
    names = ("row", "layer", "slot")
    return ", ".join(f"{n} {i}" for n, i in zip(names, at, strict=False))


def runs_of(rows: Array) -> list[tuple[int, int]]:
    """Return the half-open runs of True in a one-dimensional bool array."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], rows, [False])).astype(np.int8)))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
