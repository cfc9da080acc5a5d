"""Which of a group's two copies is right, where front and object store differ in size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal

from tq_fs.backends._base import Backend
from tq_fs.backends._front import Found
from tq_fs.backends._objects import commit_of
from tq_fs.errors import ObjectMissing, StorageFailed

Measure = Callable[[bytes, Collection[str]], Mapping[str, int]]
"""From a group's commit, and the members that are there, the sizes that members must have.

Empty where the commit is damaged, or of a kind that says nothing.
"""
Verdict = Literal["clean", "only here", "damaged", "unclear"]


def measures_nothing(commit: bytes, names: Collection[str]) -> Mapping[str, int]:  # noqa: ARG001
    """Return nothing: the commits of groups of any kind."""
    return {}


def verdict(
    found: Found, there: Mapping[str, int], front: Backend, back: Backend, measure: Measure
) -> Verdict:
    """Compare a group on the front with the object store, where the commit was uploaded last.

    Parameters
    ----------
    there
        What the object store holds, by key, of the group's session at least.
    front, back
        Asked for the commits, where sizes differ though the group was uploaded.

    Returns
    -------
    Verdict
        ``clean``: both are the same. ``only here``: the front's is to be uploaded, again perhaps.
        ``damaged``: the front's is to go. ``unclear``: neither may be touched.
    """
    near, begin = found.sizes, f"{found.place}/"
    far = {key[len(begin) :]: size for key, size in there.items() if key.startswith(begin)}
    shared = near.keys() & far.keys()
    if len(shared) == len(near) and all(near[name] == far[name] for name in near):
        return "clean"
    if commit_of(near) not in far or all(near[name] == far[name] for name in shared):
        return "only here"  # an upload that was broken off, or objects that were removed
    return _of_unequal(found, far, front, back, measure)


def _of_unequal(
    found: Found, far: Mapping[str, int], front: Backend, back: Backend, measure: Measure
) -> Verdict:
    near = found.sizes
    try:
        is_near_right = _is_right(front, found.place, near, measure)
    except StorageFailed:  # the disk does not give the commit back
        is_near_right = False
    if is_near_right:
        return "only here"
    is_far_right = _is_right(back, found.place, far, measure)
    if is_far_right:
        return "damaged"
    if is_near_right is None and is_far_right is None and _is_cut(near, far):
        return "damaged"
    return "unclear"


def _is_right(
    backend: Backend, place: str, sizes: Mapping[str, int], measure: Measure
) -> bool | None:
    """Tell whether a copy measures what its commit says; None where that says nothing."""
    try:
        wanted = measure(backend.get(f"{place}/{commit_of(sizes)}"), sizes.keys())
    except ObjectMissing:
        return None
    if not wanted:
        return None
    return all(sizes.get(name) == size for name, size in wanted.items())


def _is_cut(near: Mapping[str, int], far: Mapping[str, int]) -> bool:
    """Tell whether the front's copy is the shorter one: a power cut shortens files."""
    return all(near[name] <= far[name] for name in near.keys() & far.keys())
