"""From the memory type of ids to a narrower stored one, without ever truncating.

Routed experts are over nine tenths of a trajectory's bytes. An id out of range is an error that
names it. The one negative id, -1 (route unknown), is recorded beside the array, so that it survives
in every type, also where all 256 values of uint8 are legal ids.
"""

from __future__ import annotations

import numpy as np

from tq_fs.errors import ValueOutOfRange
from tq_fs.fields import NARROW_TYPES, UNKNOWN, Array, FieldSpec, narrowest

_BLOCK_ELEMENTS = 131072  # 512 KiB of int32: check and copy meet the block in the L2 cache


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
        return narrowest(0)
    if not spec.unknown and int(array.min()) < 0:
        return "int32"
    return narrowest(int(array.max()))


def id_bound(spec: FieldSpec, stored: str) -> int:
    """Return the exclusive upper bound of legal ids in `stored` type."""
    top = NARROW_TYPES[stored]
    return top if spec.limit is None else min(top, spec.limit)


def narrow_into(source: Array, target: Array, bound: int) -> bool:
    """Copy int32 ids into a narrower array of the same shape, checking the range on the way.

    One pass over memory: a block is checked and copied while it lies in the cache. A bound that is
    a power of two is checked by OR-ing the ids, which is cheaper than their maximum.

    Returns
    -------
    bool
        False as soon as a block holds an id outside of ``[0, bound)``; `target` is then undefined.
    """
    peak = np.bitwise_or.reduce if bound & (bound - 1) == 0 else np.maximum.reduce
    ids = source.view(np.uint32)
    if source.flags.c_contiguous and target.flags.c_contiguous:
        ids, target = ids.reshape(-1), target.reshape(-1)
    axis = 0 if ids.ndim == 1 else None  # of one axis, the cheaper call
    step = max(1, _BLOCK_ELEMENTS * len(ids) // max(1, ids.size))
    for start in range(0, len(ids), step):
        block = ids[start : start + step]
        if peak(block, axis) >= bound:
            return False
        np.copyto(target[start : start + step], block, casting="unsafe")
    return True


def narrowed(spec: FieldSpec, array: Array, subject: str) -> Array:
    """Return an int32 array in its stored type, for memory; other arrays as they are.

    Unknown routes have no place beside an array in memory: one that holds some stays int32.

    Raises
    ------
    ValueOutOfRange
        As :func:`split_unknown`.
    """
    if not spec.narrowable:
        return array
    stored = stored_type(spec, array)
    if array.size == 0:
        return array.astype(stored)
    bound = id_bound(spec, stored)
    if stored == spec.dtype:
        if not ids_plain(spec, array, bound):
            split_unknown(spec, array, bound, subject)
        return array
    out = np.empty(array.shape, stored)
    if narrow_into(array, out, bound):
        return out
    split_unknown(spec, array, bound, subject)
    return array


def ids_plain(spec: FieldSpec, array: Array, bound: int) -> bool:
    """Tell whether int32 values can stay as they are: numbers, or ids below `bound` and -1."""
    if array.size == 0 or (not spec.unknown and spec.limit is None):
        return True
    low, high = int(array.min()), int(array.max())
    return high < bound and low >= (UNKNOWN if spec.unknown else 0)


def split_unknown(spec: FieldSpec, array: Array, bound: int, subject: str) -> tuple[Array, Array]:
    """Separate unknown routes from ids: the slow path for Steps that :func:`narrow_into` refuses.

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
