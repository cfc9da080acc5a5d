"""A head and arrays to the value that they were."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from tq_fs.errors import DependencyMissing, ManifestCorrupt, ValueUnsupported
from tq_fs.values.codec._arrays import import_torch, restore
from tq_fs.values.codec._forms import Array, ArrayForm, Part, dtype_of
from tq_fs.values.codec._head import Leaf, Mark, read_inline, reading, unseal

_UNREADABLE = (pickle.UnpicklingError, EOFError)


def decode(
    head: bytes | memoryview,
    arrays: Sequence[Array],
    *,
    allow_pickle: bool = False,
    subject: str = "",
) -> Any:
    """Return the value that `encode` made `head` and `arrays` of.

    Parameters
    ----------
    head
        Not kept: what comes back has memory of its own.
    arrays
        The arrays stored outside, by number, in their stored shapes and types. They belong to the
        value from now on, which is built over their memory.
    allow_pickle
        Load pickled parts. A pickle runs code of who wrote it.
    subject
        What errors name.

    Raises
    ------
    ManifestCorrupt
        The head, or an array, is not what was written.
    FormatTooNew
        Written by a later version.
    ValueUnsupported
        A part is pickled, and `allow_pickle` is not set.
    DependencyMissing
        A part needs a library, or a class, that cannot be imported.
    """
    with reading(subject):
        forms, root = unseal(head)
        if len(forms) != len(arrays):
            raise ManifestCorrupt(f"a value of {len(forms)} arrays comes with {len(arrays)}")
        for number, (form, array) in enumerate(zip(forms, arrays, strict=True)):
            _check(number, form, array)
        return _Decoder(forms, arrays, allow_pickle).value(root)


def _check(number: int, form: ArrayForm, array: Array) -> None:
    if array.shape != form.shape or array.dtype != form.dtype:
        raise ManifestCorrupt(
            f"array {number} is {array.dtype}{list(array.shape)} where "
            f"{form.dtype}{list(form.shape)} belongs"
        )


class _Made:
    """A list that is finished: a long one of numbers is not walked again."""

    __slots__ = ("value",)

    def __init__(self, value: list[Any]) -> None:
        self.value = value


class _Decoder:
    """Puts one value together."""

    def __init__(
        self, forms: tuple[ArrayForm, ...], arrays: Sequence[Array], allow_pickle: bool
    ) -> None:
        self._rest = {number: Part(*pair) for number, pair in enumerate(zip(forms, arrays))}  # noqa: B905
        self._allow_pickle = allow_pickle
        self._composed = False

    def value(self, root: msgspec.Raw) -> Any:
        """Return the value whose root this is."""
        node = msgspec.msgpack.decode(root, ext_hook=self._extension)
        if self._rest:
            raise ManifestCorrupt(f"a value does not use its arrays {sorted(self._rest)}")
        return _compose(node) if self._composed else node

    def _extension(self, code: int, data: memoryview) -> Any:
        if code in _COMPOSE:
            self._composed = True
            return Mark(code)
        leaf = self._leaf(code, data)
        if type(leaf) is list:
            self._composed = True
            return _Made(leaf)
        return leaf

    def _leaf(self, code: int, data: memoryview) -> Any:
        if code == Leaf.INLINE:
            return self._restore(read_inline(data))
        if code == Leaf.ARRAY:
            return self._restore(self._rest.pop(int.from_bytes(data, "little")))
        return _LEAVES[code](data)

    def _restore(self, part: Part) -> Any:
        if part.form.memory != "pickle":
            return restore(part.form, part.array)
        if not self._allow_pickle:
            raise ValueUnsupported(
                "a part of the value is a pickle",
                remedy="set allow_pickle: true if you trust who wrote it",
            )
        return _unpickle(part.array)


def _unpickle(array: Array) -> Any:
    try:
        return pickle.loads(array.data)
    except (ImportError, AttributeError) as error:
        raise DependencyMissing(
            f"a pickled part of the value cannot be loaded: {error}",
            remedy="make its class importable here",
        ) from error
    except _UNREADABLE as error:
        raise ManifestCorrupt(f"a pickled part of the value cannot be loaded: {error}") from error


def _compose(node: Any) -> Any:
    kind = type(node)
    if kind is dict:
        return {key: _compose(item) for key, item in node.items()}
    if kind is _Made:
        return node.value
    if kind is not list:
        return node
    if node and type(node[0]) is Mark:
        return _COMPOSE[node[0]]([_compose(item) for item in node[1:]])
    return [_compose(item) for item in node]


def _scalar(data: memoryview) -> Any:
    text, raw = msgspec.msgpack.decode(data, type=tuple[str, bytes])
    if text == "str":
        return np.str_(raw.decode("utf-8", "surrogatepass"))
    if text == "bytes":
        return np.bytes_(raw)
    dtype = dtype_of(text)
    if dtype.itemsize != len(raw):
        raise ManifestCorrupt(f"a {dtype} of {dtype.itemsize} bytes has {len(raw)}")
    return np.ndarray((1,), dtype, raw).copy()[0]


def _torch_dtype(data: memoryview) -> Any:
    torch = import_torch()
    found = getattr(torch, str(data, "ascii"))
    if not isinstance(found, torch.dtype):
        raise ManifestCorrupt(f"{found} is no dtype of torch")
    return found


_LEAVES: dict[int, Callable[[memoryview], Any]] = {
    Leaf.INT: lambda data: int.from_bytes(data, "little", signed=True),
    Leaf.COMPLEX: lambda data: complex(*struct.unpack("<dd", data)),
    Leaf.TEXT: lambda data: str(data, "utf-8", "surrogatepass"),
    Leaf.BYTEARRAY: bytearray,
    Leaf.SCALAR: _scalar,
    Leaf.DTYPE: lambda data: dtype_of(str(data, "utf-8")),
    Leaf.TORCH_DTYPE: _torch_dtype,
}


def _dict(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _objects(items: list[Any]) -> Array:
    shape, *rest = items
    return np.fromiter(rest, dtype=object, count=len(rest)).reshape(shape)


def _nested(items: list[Any]) -> Any:
    """Return a strided nested tensor over the memory of its values."""
    torch = import_torch()
    values, sizes = items
    if len(sizes) == 0:
        return torch.nested.nested_tensor([], dtype=values.dtype)
    strides = torch.ones_like(sizes)
    if sizes.shape[1] > 1:
        strides[:, :-1] = sizes[:, 1:].flip(1).cumprod(1).flip(1)
    counts = sizes.prod(1)
    if int(counts.sum()) != values.numel() or bool((sizes < 0).any()):
        raise ManifestCorrupt("the components of a nested tensor do not add up")
    return torch._nested_view_from_buffer(
        values.reshape(-1), sizes, strides, counts.cumsum(0) - counts
    )


def _jagged(items: list[Any]) -> Any:
    torch = import_torch()
    values, offsets, lengths, axis = items
    return torch.nested.nested_tensor_from_jagged(
        values, offsets=offsets, lengths=lengths, jagged_dim=axis
    )


def _tensordict() -> Any:
    try:
        import tensordict  # noqa: PLC0415  # the package loads without it
    except ImportError as error:
        raise DependencyMissing(
            "the value holds a TensorDict", remedy="pip install tensordict"
        ) from error
    return tensordict


def _tensor_dict(items: list[Any]) -> Any:
    batch_size, names, placed, members = items
    device = "cpu" if placed else None
    kind = _tensordict().TensorDict
    return kind(members, batch_size=batch_size, names=names or None, device=device)


def _non_tensor(items: list[Any]) -> Any:
    batch_size, data = items
    return _tensordict().NonTensorData(data=data, batch_size=batch_size)


_COMPOSE: dict[int, Callable[[list[Any]], Any]] = {
    Mark.TUPLE: tuple,
    Mark.SET: set,
    Mark.FROZENSET: frozenset,
    Mark.DICT: _dict,
    Mark.OBJECTS: _objects,
    Mark.RANGE: lambda items: range(*items),
    Mark.SLICE: lambda items: slice(*items),
    Mark.TORCH_SIZE: lambda items: import_torch().Size(items),
    Mark.NESTED: _nested,
    Mark.JAGGED: _jagged,
    Mark.TENSORDICT: _tensor_dict,
    Mark.NON_TENSOR: _non_tensor,
}
