"""Arrays and tensors to their stored types, and back."""

from __future__ import annotations

import base64
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from tq_fs.errors import DependencyMissing
from tq_fs.values.codec._forms import (
    STORED,
    Array,
    ArrayForm,
    Part,
    dtype_of,
    dtype_text,
    native_name,
)
from tq_fs.values.codec._forms import plain_form as _plain

# Torch's types that numpy lacks: the integers that carry their bits.
_CARRIERS = {
    "bfloat16": "uint16",
    "complex32": "uint32",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
    "float4_e2m1fn_x2": "uint8",
}


def loaded_torch() -> ModuleType | None:
    """Return torch if this process has it: without, no value is a tensor."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") else None  # another thread may be importing it


def import_torch() -> Any:
    """Return torch, to make tensors.

    Raises
    ------
    DependencyMissing
    """
    try:
        import torch  # noqa: PLC0415  # the package loads without it
    except ImportError as error:
        raise DependencyMissing(
            "the value holds tensors, which need torch", remedy="pip install 'tq-fs[torch]'"
        ) from error
    return torch


def numpy_part(array: Array) -> Part | None:
    """Return a plain array as stored; None where its type cannot come back the same.

    The stored array shares the memory of a C-contiguous `array`. Types that Zarr lacks (other byte
    orders, text, records, long doubles) become bytes, times become ``int64``.
    """
    if not array.flags.c_contiguous:
        array = array.copy(order="C")
    if name := native_name(array.dtype):
        return Part(_plain(array.shape, name, f"numpy:{name}"), array)
    text = dtype_text(array.dtype)
    if text is None:
        return None
    stored = _as_bytes(array)
    if array.dtype.kind in "mM" and array.dtype.isnative:
        stored = array.view(np.int64)
    return Part(_plain(stored.shape, stored.dtype.name, f"numpy:{text}"), stored)


def _as_bytes(array: Array) -> Array:
    shape = (*array.shape, array.dtype.itemsize)
    if array.dtype.itemsize == 0:
        return np.empty(shape, np.uint8)
    return array.reshape(-1).view(np.uint8).reshape(shape)


@functools.lru_cache(maxsize=64)
def _torch_names(dtype: Any) -> tuple[str, str] | None:
    """Return a torch type's name and that of its stored type; None where it has none."""
    name = str(dtype).removeprefix("torch.")
    stored = name if name in STORED else _CARRIERS.get(name)
    return None if stored is None else (name, stored)


def tensor_part(tensor: Any) -> Part | None:
    """Return a plain dense tensor as stored; None where it cannot come back the same.

    Detached from its graph, and moved to the CPU if it is elsewhere. The stored array shares the
    memory of a contiguous CPU tensor.
    """
    torch: Any = loaded_torch()
    names = _torch_names(tensor.dtype)
    if names is None or tensor.layout is not torch.strided or tensor.is_meta or _is_named(tensor):
        return None
    name, stored = names
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    if stored != name:
        tensor = tensor.view(getattr(torch, stored))
    array = tensor.numpy()
    return Part(_plain(array.shape, stored, f"torch:{name}"), array)


def _is_named(tensor: Any) -> bool:
    """Whether its axes have names: a prototype that later versions of torch no longer have."""
    has_names = getattr(tensor, "has_names", None)
    return has_names is not None and bool(has_names())


def restore(form: ArrayForm, array: Array) -> Any:
    """Return what `array`, of the stored type, was in memory; over the same memory if possible.

    `array` may hold fewer rows than the form says, so that a part of a value can be read.

    Raises
    ------
    DependencyMissing
        It was a tensor, and torch is not installed.
    KeyError, TypeError, ValueError
        No form of ours.
    """
    kind, _, name = form.memory.partition(":")
    if form.flat:
        array = array.reshape(-1)
    if form.narrowed and name != "int":
        array = array.astype(dtype_of(name))
    return _RESTORE[kind](name, array)


def _to_numpy(name: str, array: Array) -> Array:
    dtype = dtype_of(name)
    if dtype == array.dtype:
        return array
    if dtype.kind in "mM" and dtype.isnative:
        return array.view(dtype)
    if dtype.itemsize == 0:
        return np.empty(array.shape[:-1], dtype)
    return array.reshape(-1).view(dtype).reshape(array.shape[:-1])


def _to_torch(name: str, array: Array) -> Any:
    torch = import_torch()
    tensor = torch.from_numpy(array)
    return tensor.view(getattr(torch, name)) if name in _CARRIERS else tensor


def _to_list(name: str, array: Array) -> list[Any]:
    wide = array.astype(np.float64) if name == "float" else array
    numbers: list[Any] = wide.tolist()
    return numbers


def _to_base64(_: str, array: Array) -> str:
    return base64.b64encode(array.data if array.size else b"").decode("ascii")


_RESTORE: dict[str, Callable[[str, Array], Any]] = {
    "numpy": _to_numpy,
    "torch": _to_torch,
    "list": _to_list,
    "base64": _to_base64,
    "bytes": lambda _, array: array.tobytes(),
    "bytearray": lambda _, array: bytearray(array.tobytes()),
    "str": lambda _, array: array.tobytes().decode("utf-8", "surrogatepass"),
}
