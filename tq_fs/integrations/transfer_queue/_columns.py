"""Between TransferQueue's TensorDicts and the values of single samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_non_tensor

from tq_fs.errors import InvalidField
from tq_fs.values import Column, Joined

Parser = Callable[[Any], Any]


def plain(data: TensorDict) -> TensorDict:
    """Return data whose columns give one value for each sample.

    What is no tensor is taken as TransferQueue takes it: a list or an array as long as there are
    samples holds their values; anything else is one value for all of them.

    Raises
    ------
    InvalidField
        A column is itself a TensorDict: what it gives for a sample would come back as something
        else.
    """
    changed: dict[str, Any] = {}
    for name in data.keys():  # noqa: SIM118  # a TensorDict's own iterate over samples
        column = data.get(name)
        if isinstance(column, NonTensorData):
            value = column.data
            if not (isinstance(value, list | tuple | np.ndarray) and len(value) == len(data)):
                changed[name] = NonTensorStack(*[value] * len(data))
        elif isinstance(column, TensorDictBase) and not is_non_tensor(column):
            raise InvalidField(
                f"is a {type(column).__name__}", subject=str(name), remedy="put its columns"
            )
    if not changed:
        return data
    return TensorDict({**dict(data.items()), **changed}, batch_size=data.batch_size)


def columns_of(data: TensorDict, parser: Parser | None = None) -> dict[str, Sequence[Any]]:
    """Return each field's values, one for each sample.

    Parameters
    ----------
    parser
        Turns references (URLs, say) into what they stand for, in place; as
        ``transfer_queue.kv_put`` has it.

    Raises
    ------
    InvalidField
        The parser has changed fields or their lengths.
    """
    columns: dict[str, Any] = {str(name): data[name] for name in data.keys()}  # noqa: SIM118
    if parser is not None:
        columns = _parsed(columns, parser, len(data))
    return {name: _values(column) for name, column in columns.items()}


def nbytes_of(data: TensorDict) -> int:
    """Return the bytes of the tensors, roughly: without looking at what is no tensor."""
    return sum(
        column.numel() * column.element_size()
        for column in data.values()
        if isinstance(column, torch.Tensor)
    )


def _parsed(columns: Mapping[str, Any], parser: Parser, samples: int) -> dict[str, Any]:
    plain = {n: c if _is_dense(c) else _values(c) for n, c in columns.items()}
    parser(plain)
    changed = sorted(plain.keys() ^ columns.keys())
    if changed:
        raise InvalidField("were added or taken away by data_parser", subject=str(changed))
    for name, column in plain.items():
        if len(column) != samples:
            raise InvalidField(
                f"has {len(column)} values for {samples} samples after data_parser", subject=name
            )
    return plain


def _is_dense(column: Any) -> bool:
    return isinstance(column, torch.Tensor) and not column.is_nested


def _values(column: Any) -> Sequence[Any]:
    if isinstance(column, torch.Tensor):
        return column.unbind()
    if hasattr(column, "tolist") and not hasattr(column, "__array__"):
        found: list[Any] = column.tolist()
        return found
    return list(column)


def batch_of(columns: Mapping[str, Column], samples: int) -> TensorDict:
    """Return values as TransferQueue gives them: tensors nested, all else in stacks."""
    batch = {name: _packed(column) for name, column in columns.items()}
    return TensorDict(batch, batch_size=samples)


def _packed(column: Column) -> Any:
    if isinstance(column, Joined):
        return _joined(column)
    if not all(isinstance(value, torch.Tensor) for value in column):
        return NonTensorStack(*column)
    if len({value.dtype for value in column}) > 1:
        return NonTensorStack(*column)  # a tensor of all would have one type
    if all(value.dim() == 0 for value in column):
        return torch.stack(column)
    for layout in (torch.jagged, torch.strided):
        try:
            return torch.nested.as_nested_tensor(column, layout=layout)
        except (RuntimeError, TypeError):
            continue  # components that such a layout has no place for
    return NonTensorStack(*column)


def _joined(column: Joined) -> torch.Tensor:
    """Return a nested tensor over the memory that its components were read into."""
    lengths = column.lengths
    dtype = getattr(torch, column.memory.partition(":")[2])
    values = torch.from_numpy(column.block)
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int64)
    return torch.nested.nested_tensor_from_jagged(
        values if values.dtype == dtype else values.view(dtype),
        offsets,
        min_seqlen=min(lengths),
        max_seqlen=max(lengths),
    )
