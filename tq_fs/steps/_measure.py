"""How large the objects of a Step's group have to be, as the group itself says."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tq_fs.errors import CorruptError
from tq_fs.steps._entry import MASK_SUFFIX, StepEntry, read_attributes
from tq_fs.steps._metadata import array_json

_DOCUMENT = "zarr.json"


def measure_group(group_json: bytes, names: Collection[str]) -> Mapping[str, int]:
    """Return the sizes that objects of a group must have [bytes]; nothing where it is no Step's.

    Parameters
    ----------
    group_json
        The group's ``zarr.json``, damaged perhaps.
    names
        Objects that are there: with the ``zarr.json`` of any array, those of all have to be.
    """
    try:
        step = read_attributes(group_json, _DOCUMENT).step
        return {**step.objects(), **_documents(step, names)}
    except (CorruptError, ArithmeticError, TypeError, ValueError):  # it says what cannot be
        return {}


def _documents(step: StepEntry, names: Collection[str]) -> Mapping[str, int]:
    arrays = dict(step.fields)
    arrays |= {n + MASK_SUFFIX: a.mask for n, a in step.fields.items() if a.mask is not None}
    found = {f"{n}/{_DOCUMENT}": len(array_json(a.layout)) for n, a in arrays.items()}
    return {} if found.keys().isdisjoint(names) else found  # the compact layout has none
