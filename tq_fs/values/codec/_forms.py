"""What a stored array was in memory: its form, and the names of dtypes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ARRAY_BYTES = 64 * 1024

STORED = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip

_NATIVE = {np.dtype(name).char: name for name in STORED}
_KINDS = "biufcmMSUV"


class RoutedChunk(msgspec.Struct, frozen=True):
    """What a chunk of routed experts says of itself.

    Attributes
    ----------
    prefix, output
        ``prefix_token_count`` and ``output_token_count`` [tokens]; the chunk has
        ``prefix + output - 1`` rows.
    is_first
        ``is_first_chunk``: the generation's first, before any preemption.
    """

    prefix: int
    output: int
    is_first: bool

    @property
    def rows(self) -> int:
        """Rows of the chunk: the last token was not routed yet."""
        return self.prefix + self.output - 1


class ArrayForm(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an array is stored, and what it becomes in memory.

    Attributes
    ----------
    shape
        Shape as stored.
    dtype
        Stored type, one of `STORED`; little-endian.
    memory
        ``<kind>:<type>``: ``numpy:float32``, ``torch:bfloat16``, ``list:float``, ``base64:int32``;
        or ``bytes``, ``bytearray``, ``str`` (UTF-8), ``pickle``. A numpy type that Zarr lacks is
        stored as bytes along an axis of its own, the last.
    narrowed
        Stored in a smaller integer type than it has in memory.
    flat
        One-dimensional in memory, stored as rows.
    chunk
        Set where it is the ``data`` of a chunk of routed experts; its rows are the first axis.
    cut
        Set where it is the ``data`` of a chunk that was cut already and says of itself only how
        many rows it has: the first axis.
    """

    shape: tuple[int, ...]
    dtype: str
    memory: str
    narrowed: bool = False
    flat: bool = False
    chunk: RoutedChunk | None = None
    cut: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the array as stored, before compression."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Part(NamedTuple):
    """An array in its stored type, and its form."""

    form: ArrayForm
    array: Array


@functools.lru_cache(maxsize=4096)
def plain_form(shape: tuple[int, ...], dtype: str, memory: str) -> ArrayForm:
    """Return the form of an array that is stored as it is."""
    return ArrayForm(shape, dtype, memory)


def native_name(dtype: np.dtype[Any]) -> str | None:
    """Return the name of a type that Zarr has too; None for others, ``longlong`` included."""
    return _NATIVE.get(dtype.char) if dtype.isnative and dtype.metadata is None else None


def dtype_text(dtype: np.dtype[Any]) -> str | None:
    """Return a text from which `dtype_of` makes the same type; None where there is none."""
    described = _describe(dtype)
    if described is None:
        return None
    text = described if isinstance(described, str) else msgspec.json.encode(described).decode()
    again = dtype_of(text)
    same = again == dtype and again.type is dtype.type and _describe(again) == described
    return text if same else None


@functools.lru_cache(maxsize=1024)
def dtype_of(text: str) -> np.dtype[Any]:
    """Return the type that `dtype_text` described.

    Raises
    ------
    ValueError, TypeError
        Nothing it could have written.
    """
    found: np.dtype[Any] = _build(msgspec.json.decode(text) if text[:1] in ("{", "[") else text)
    return found


def _describe(dtype: np.dtype[Any]) -> Any:
    if dtype.metadata is not None or dtype.hasobject or dtype.kind not in _KINDS:
        return None
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        inner = _describe(base)
        return None if inner is None else [inner, list(shape)]
    if dtype.names is not None:
        return _describe_fields(dtype)
    if name := native_name(dtype):
        return name
    if np.dtype(dtype.str).char == dtype.char:
        return dtype.str
    return dtype.str[0] + dtype.char  # longlong, where int64 is long


def _fields(dtype: np.dtype[Any]) -> Mapping[str, Any]:
    return dtype.fields or {}


def _describe_fields(dtype: np.dtype[Any]) -> dict[str, Any] | None:
    fields = [_fields(dtype)[name] for name in dtype.names or ()]
    formats = [_describe(field[0]) for field in fields]
    titles = [field[2] if len(field) > 2 else None for field in fields]
    if None in formats or not all(title is None or type(title) is str for title in titles):
        return None
    return {
        "names": list(dtype.names or ()),
        "formats": formats,
        "offsets": [field[1] for field in fields],
        "titles": titles,
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
    }


def _build(described: Any) -> Any:
    if isinstance(described, str):
        return np.dtype(described)
    if isinstance(described, list):
        base, shape = described
        return np.dtype((_build(base), tuple(shape)))
    fields: Any = {**described, "formats": [_build(f) for f in described["formats"]]}
    return np.dtype(fields)
