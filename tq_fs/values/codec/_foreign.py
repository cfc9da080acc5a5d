"""Parts of a value that are numpy's, torch's or tensordict's."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from msgspec import msgpack
from msgspec.msgpack import Ext

from tq_fs.values.codec._arrays import loaded_torch, numpy_part, tensor_part
from tq_fs.values.codec._builder import Builder, mark, type_name
from tq_fs.values.codec._forms import Array, dtype_text
from tq_fs.values.codec._head import Leaf, Mark


def foreign(builder: Builder, value: Any, depth: int) -> Any:
    """Return the node of a value that is of none of Python's own types."""
    if isinstance(value, np.generic):
        return _scalar(builder, value)
    if isinstance(value, np.dtype):
        text = dtype_text(value)
        return builder.other(value) if text is None else Ext(int(Leaf.DTYPE), text.encode())
    torch: Any = loaded_torch()
    if torch is not None and isinstance(value, (torch.Tensor, torch.Size, torch.dtype)):
        return _of_torch(builder, value, torch)
    tensordict: Any = sys.modules.get("tensordict")
    if tensordict is not None:
        return _of_tensordict(builder, value, depth, tensordict)
    return builder.other(value)


def _of_torch(builder: Builder, value: Any, torch: Any) -> Any:
    if type(value) is torch.Size:
        return [mark(Mark.TORCH_SIZE), *value]
    if type(value) is torch.dtype:
        return Ext(int(Leaf.TORCH_DTYPE), str(value).removeprefix("torch.").encode())
    return _tensor(builder, value, torch)


def _of_tensordict(builder: Builder, value: Any, depth: int, tensordict: Any) -> Any:
    if type(value) is getattr(tensordict, "TensorDict", None):
        members = builder.items([dict(value.items())], depth, "")
        names, placed = list(value.names or ()), value.device is not None
        return [mark(Mark.TENSORDICT), list(value.batch_size), names, placed, *members]
    if type(value) is getattr(tensordict, "NonTensorData", None):
        data = builder.items([value.data], depth, ".data")
        return [mark(Mark.NON_TENSOR), list(value.batch_size), *data]
    return builder.other(value)


def ndarray(builder: Builder, value: Array, depth: int) -> Any:
    """Return the node of a plain numpy array."""
    if value.dtype.char == "O" and value.dtype.metadata is None:
        items = builder.items(value.flat, depth, ".flat[{}]")
        return [mark(Mark.OBJECTS), list(value.shape), *items]
    part = numpy_part(value)
    if part is None:
        return builder.other(value, f"is a numpy array of dtype {value.dtype}")
    return builder.leaf(part)


def _scalar(builder: Builder, value: np.generic) -> Any:
    kind = type(value)
    if isinstance(value, np.str_) and kind is np.str_:  # numpy's own way drops trailing NULs
        data, text = str.encode(value, "utf-8", "surrogatepass"), "str"
    elif isinstance(value, np.bytes_) and kind is np.bytes_:
        data, text = bytes.__getitem__(value, slice(None)), "bytes"
    elif value.dtype.type is kind and (described := dtype_text(value.dtype)) is not None:
        data, text = np.asarray(value).tobytes(), described
    else:
        return builder.other(value)
    return Ext(int(Leaf.SCALAR), msgpack.encode((text, data)))


def _tensor(builder: Builder, value: Any, torch: Any) -> Any:
    if type(value) is torch.Tensor and not value.is_nested:
        part = tensor_part(value)
        if part is not None:
            return builder.leaf(part)
    elif value.is_nested and value.layout is torch.jagged:
        return _jagged(builder, value)
    elif value.is_nested and type(value) is torch.Tensor:
        return _nested(builder, value, torch)
    return builder.other(value, f"is a {type_name(value)} of {value.dtype} and {value.layout}")


def _jagged(builder: Builder, value: Any) -> Any:
    plain = value.detach()
    members = (plain.values(), plain.offsets(), plain.lengths())
    parts = [None if member is None else tensor_part(member) for member in members]
    if parts[0] is None:
        return builder.other(value, f"is a nested tensor of {value.dtype}")
    leaves = [None if part is None else builder.leaf(part) for part in parts]
    return [mark(Mark.JAGGED), *leaves, plain._ragged_idx]


def _nested(builder: Builder, value: Any, torch: Any) -> Any:
    plain = value.detach().contiguous()
    if plain.size(0):
        sizes, values = plain._nested_tensor_size(), plain.values()
    else:
        sizes, values = torch.empty(0, 0, dtype=torch.int64), torch.empty(0, dtype=plain.dtype)
    if sizes.numel() and bool((sizes[:, 1:] == sizes[0, 1:]).all()):
        inner = [int(n) for n in sizes[0, 1:]]
        values = values.reshape([int(sizes[:, 0].sum()), *inner])
    part, shapes = tensor_part(values), tensor_part(sizes)
    if part is None or shapes is None:
        return builder.other(value, f"is a nested tensor of {value.dtype}")
    return [mark(Mark.NESTED), builder.leaf(part), builder.leaf(shapes)]
