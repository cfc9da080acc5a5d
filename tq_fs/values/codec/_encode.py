"""One value to a head and arrays."""

from __future__ import annotations

import struct
from collections.abc import Callable
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
from msgspec.msgpack import Ext

from tq_fs.errors import ValueUnsupported
from tq_fs.values.codec._builder import Builder, Refused, check_depth, mark
from tq_fs.values.codec._foreign import foreign, ndarray
from tq_fs.values.codec._forms import ARRAY_BYTES, Array, ArrayForm
from tq_fs.values.codec._head import Leaf, Mark, seal, sole_head
from tq_fs.values.codec._numbers import chunk_part, list_part

_PATH_CHARACTERS = 60


class EncodedValue(NamedTuple):
    """A value as it is stored.

    Attributes
    ----------
    head
        All but the large arrays.
    arrays
        Arrays of at least `ARRAY_BYTES`, C-contiguous and in their stored types. They share memory
        with the value where they can: store them before it changes.
    forms
        What each of `arrays` is.
    """

    head: bytes
    arrays: tuple[Array, ...]
    forms: tuple[ArrayForm, ...]


def encode(value: Any, *, allow_pickle: bool = False, subject: str = "") -> EncodedValue:
    """Return `value` as bytes and arrays, from which `decode` makes an equal value.

    Types, element types, shapes, orders and bits are kept. What is not: memory layout (arrays come
    back C-contiguous), the graph and device of tensors (detached, on the CPU), and whether two
    parts are the same object.

    Parameters
    ----------
    value
        None, bool, int, float, complex, str, bytes, bytearray, range, slice, numpy arrays, scalars
        and dtypes, torch tensors (nested ones too), dtypes and sizes, tensordict's TensorDict; and
        lists, tuples, sets, frozensets and dicts of them, 100 deep. No subclasses: they would come
        back as something else.
    allow_pickle
        Pickle parts of other types.
    subject
        What errors name.

    Raises
    ------
    ValueUnsupported
        A part has another type; the message says where and which.
    """
    builder = Builder(_node, allow_pickle)
    try:
        root = builder.node(value, 0)
    except Refused as refused:
        path = "".join(reversed(refused.path))
        if len(path) > _PATH_CHARACTERS:
            path = f"{path[: _PATH_CHARACTERS // 2]}…{path[-_PATH_CHARACTERS // 2 :]}"
        raise ValueUnsupported(
            f"value{path} {refused.problem}", subject=subject, remedy=refused.remedy
        ) from refused.__cause__
    forms = tuple(part.form for part in builder.parts)
    arrays = tuple(part.array for part in builder.parts)
    if type(root) is Ext and root.code == Leaf.ARRAY:
        return EncodedValue(sole_head(forms[0]), arrays, forms)
    return EncodedValue(seal(forms, root), arrays, forms)


def _node(builder: Builder, value: Any, depth: int) -> Any:
    build = _BUILD.get(type(value), foreign)
    return build(builder, value, depth)


def _int(_: Builder, value: int, __: int) -> Any:
    if -(2**63) <= value < 2**64:
        return value
    return Ext(int(Leaf.INT), value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _str(builder: Builder, value: str, _: int) -> Any:
    if len(value) < ARRAY_BYTES // 4 and _is_unicode(value):
        return value
    data = value.encode("utf-8", "surrogatepass")
    if len(data) >= ARRAY_BYTES:
        return builder.blob(data, "str")
    return value if _is_unicode(value) else Ext(int(Leaf.TEXT), data)


def _bytes(builder: Builder, value: bytes, _: int) -> Any:
    return value if len(value) < ARRAY_BYTES else builder.blob(value, "bytes")


def _bytearray(builder: Builder, value: bytearray, _: int) -> Any:
    if len(value) < ARRAY_BYTES:
        return Ext(int(Leaf.BYTEARRAY), bytes(value))
    return builder.blob(value, "bytearray")


def _complex(_: Builder, value: complex, __: int) -> Ext:
    return Ext(int(Leaf.COMPLEX), struct.pack("<dd", value.real, value.imag))


def _list(builder: Builder, value: list[Any], depth: int) -> Any:
    part = list_part(value)
    return builder.items(value, depth) if part is None else builder.leaf(part)


def _tuple(builder: Builder, value: tuple[Any, ...], depth: int) -> list[Any]:
    return [mark(Mark.TUPLE), *builder.items(value, depth)]


def _set(builder: Builder, value: set[Any], depth: int) -> list[Any]:
    return [mark(Mark.SET), *builder.items(value, depth, "{{{}}}")]


def _frozenset(builder: Builder, value: frozenset[Any], depth: int) -> list[Any]:
    return [mark(Mark.FROZENSET), *builder.items(value, depth, "{{{}}}")]


def _dict(builder: Builder, value: dict[Any, Any], depth: int) -> Any:
    check_depth(depth)
    chunk = chunk_part(value) if "data" in value else None
    nodes: list[Any] = []
    key: Any = None
    try:
        for key, item in value.items():
            whole = chunk is not None and key == "data"
            nodes.append(builder.leaf(chunk) if chunk and whole else builder.node(item, depth + 1))
    except Refused as refused:
        refused.path.append(f"[{key!r}]" if type(key) in _SHORT else f"[key {len(nodes)}]")
        raise
    if all(type(key) is str and _is_unicode(key) for key in value):
        return dict(zip(value, nodes, strict=True))
    keys = builder.items(value, depth, ".keys()[{}]")
    pairs = zip(keys, nodes, strict=True)
    return [mark(Mark.DICT), *(node for pair in pairs for node in pair)]


def _range(builder: Builder, value: range, depth: int) -> list[Any]:
    return [mark(Mark.RANGE), *builder.items((value.start, value.stop, value.step), depth)]


def _slice(builder: Builder, value: slice, depth: int) -> list[Any]:
    return [mark(Mark.SLICE), *builder.items((value.start, value.stop, value.step), depth)]


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates
        return False
    return True


def _itself(_: Builder, value: Any, __: int) -> Any:
    return value


_SHORT = {str, int, float, bool, bytes, NoneType}
_BUILD: dict[type, Callable[[Builder, Any, int], Any]] = {
    NoneType: _itself,
    bool: _itself,
    float: _itself,
    int: _int,
    str: _str,
    bytes: _bytes,
    bytearray: _bytearray,
    complex: _complex,
    list: _list,
    tuple: _tuple,
    set: _set,
    frozenset: _frozenset,
    dict: _dict,
    range: _range,
    slice: _slice,
    np.ndarray: ndarray,
}
