"""Lists of numbers, and chunks of routed experts, as typed arrays."""

from __future__ import annotations

import base64
import itertools
from typing import Any

import numpy as np

from tq_fs.values.codec._arrays import loaded_torch, tensor_part
from tq_fs.values.codec._forms import Array, ArrayForm, Part, RoutedChunk, dtype_text

FEW_NUMBERS = 16
CHUNK_KEYS = frozenset({"data", "prefix_token_count", "output_token_count", "is_first_chunk"})
CUT_KEYS = frozenset({"data", "row_count", "dtype"})

_INTEGERS = ("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64")
_EXPERTS = ("uint8", "uint16", "int32")
_MOST_AXES = 8


def list_part(numbers: list[Any]) -> Part | None:
    """Return a list of only floats, or only ints, as an array; None for other and short lists.

    Floats are narrowed to ``float32`` where every one, with its sign and NaN bits, comes back from
    it; ints to the narrowest type that holds them.
    """
    if len(numbers) < FEW_NUMBERS:
        return None
    kinds = set(map(type, numbers))
    if kinds == {float}:
        return _floats(np.array(numbers, np.float64))
    if kinds != {int}:
        return None
    wide = _int64(numbers)
    return None if wide is None else _integers(wide)


def _floats(wide: Array) -> Part:
    with np.errstate(all="ignore"):
        narrow = wide.astype(np.float32)
        again = narrow.astype(np.float64)
    exact = np.array_equal(again.view(np.int64), wide.view(np.int64))
    stored = narrow if exact else wide
    return Part(ArrayForm(stored.shape, stored.dtype.name, "list:float"), stored)


def _integers(wide: Array) -> Part:
    stored = wide.astype(_narrowest(wide, _INTEGERS))
    return Part(ArrayForm(stored.shape, stored.dtype.name, "list:int"), stored)


def _int64(numbers: list[Any]) -> Array | None:
    try:
        return np.array(numbers, np.int64)
    except OverflowError:
        return None


def _narrowest(array: Array, choice: tuple[str, ...]) -> str | None:
    low, high = int(array.min()), int(array.max())
    ranges = ((name, np.iinfo(name)) for name in choice)
    return next((name for name, r in ranges if r.min <= low and high <= r.max), None)


def chunk_part(value: dict[Any, Any]) -> Part | None:
    """Return ``data`` of a chunk of routed experts as rows; None where it does not fit the rule.

    SGLang sends ``routed_experts`` as base64 of little-endian ``int32``, row-major ``[prefix +
    output - 1, layers, topk]``, without layers and topk: a row has as many ids as come out even.
    ``data`` may also be bytes, an integer array or tensor, or nested lists of ints.

    Dressage, as forked at ``HaoDong0027/Dressage@2fcdcae``, puts chunks that are cut already: they
    have `CUT_KEYS`, their ids are of the ``dtype`` they name, and their rows are ``row_count``.
    """
    if value.keys() >= CHUNK_KEYS:
        chunk = _chunk(value)
        return None if chunk is None else _rows_part(value["data"], chunk.rows, "int32", chunk)
    return _cut_part(value) if value.keys() >= CUT_KEYS else None


def _cut_part(value: dict[Any, Any]) -> Part | None:
    rows, dtype = value["row_count"], value["dtype"]
    if type(rows) is not int or rows <= 0 or type(dtype) is not str or dtype not in _EXPERTS:
        return None
    return _rows_part(value["data"], rows, dtype, None)


def _rows_part(data: Any, rows: int, dtype: str, chunk: RoutedChunk | None) -> Part | None:
    """Return ids as rows; None where they are none, or not the ``dtype`` that a cut chunk names."""
    found = _experts(data, dtype)
    if found is None:
        return None
    memory, ids = found
    flat, cut = ids.ndim == 1, chunk is None
    if ids.size == 0 or (ids.size % rows if flat else len(ids) != rows):
        return None
    if cut and ids.itemsize < np.dtype(dtype).itemsize:
        return None  # bytes of ids, maybe
    name = _narrowest(ids, _EXPERTS[: _EXPERTS.index(dtype) + 1])
    if name is None:
        return None
    stored = np.ascontiguousarray(ids.reshape(rows, -1) if flat else ids, np.dtype(name))
    narrowed = name != memory.partition(":")[2]
    form = ArrayForm(stored.shape, name, memory, narrowed=narrowed, flat=flat, chunk=chunk, cut=cut)
    return Part(form, stored)


def _chunk(value: dict[Any, Any]) -> RoutedChunk | None:
    prefix, output = value["prefix_token_count"], value["output_token_count"]
    first = value["is_first_chunk"]
    if type(prefix) is not int or type(output) is not int or type(first) is not bool:
        return None
    if prefix < 0 or output < 0 or not 0 < prefix + output - 1 < 2**62:
        return None
    return RoutedChunk(prefix, output, first)


def _experts(data: Any, dtype: str) -> tuple[str, Array] | None:
    """Return how ids are in memory, and the ids; None where they are no integers.

    `dtype` is what they are in bytes and base64.
    """
    kind = type(data)
    if kind is str or kind is bytes:
        return _from_bytes(data, dtype)
    if kind is list:
        nested = _from_lists(data)
        return None if nested is None else ("list:int", nested)
    if kind is np.ndarray:
        return _from_array(data)
    torch: Any = loaded_torch()
    return _from_tensor(data) if torch is not None and kind is torch.Tensor else None


def _from_bytes(data: str | bytes, dtype: str) -> tuple[str, Array] | None:
    memory = f"bytes:{dtype}"
    if isinstance(data, str):
        memory = f"base64:{dtype}"
        try:
            raw = base64.b64decode(data, validate=True)
        except ValueError:
            return None
        if not data.isascii() or base64.b64encode(raw) != data.encode("ascii"):
            return None
        data = raw
    little = np.dtype(dtype).newbyteorder("<")
    return None if len(data) % little.itemsize else (memory, np.frombuffer(data, little))


def _from_array(data: Array) -> tuple[str, Array] | None:
    text = dtype_text(data.dtype) if data.dtype.kind in "iu" and data.ndim else None
    return None if text is None else (f"numpy:{text}", data)


def _from_tensor(data: Any) -> tuple[str, Array] | None:
    if data.is_nested or data.dim() == 0:
        return None
    part = tensor_part(data)
    if part is None or part.array.dtype.kind not in "iu":
        return None
    return (
        (part.form.memory, part.array) if part.form.memory == f"torch:{part.form.dtype}" else None
    )


def _from_lists(data: list[Any]) -> Array | None:
    """Return lists of lists of ints as an array; None where they are not rectangular."""
    shape, level = [len(data)], data
    while level and type(level[0]) is list and len(shape) < _MOST_AXES:
        if set(map(type, level)) != {list} or len(set(map(len, level))) != 1:
            return None
        shape.append(len(level[0]))
        level = list(itertools.chain.from_iterable(level))
    ids = _int64(level) if set(map(type, level)) == {int} else None
    return None if ids is None else ids.reshape(shape)
