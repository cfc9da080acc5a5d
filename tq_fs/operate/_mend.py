"""Making a Step whole again: from its copy in another tier, or from what its manifest says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from tq_fs.backends import COMMIT, Backend
from tq_fs.errors import ObjectMissing, StorageDenied, StorageFailed
from tq_fs.keys import StepKey
from tq_fs.manifests import SessionManifest
from tq_fs.operate._findings import Finding
from tq_fs.operate._opened import OpenedStore, held_at
from tq_fs.operate._step_check import arrays_of
from tq_fs.recovery import is_whole
from tq_fs.steps import StepEntry, array_json, attributes_json, group_json

_MOST_BYTES = 8  # of a description that differ: more, and it may be another Step's


@dataclass(frozen=True, slots=True)
class Mend:
    """How a Step becomes whole again.

    Attributes
    ----------
    act
        Does it.
    detail
        Says what is done.
    """

    act: Callable[[], None]
    detail: str


def mending(
    store: OpenedStore, manifest: SessionManifest, step: StepEntry, findings: Sequence[Finding]
) -> Mend | None:
    """Return how a Step is mended; None where it cannot be."""
    place = step.place(manifest.incarnation.path)
    held = {n: held_at(t, manifest.incarnation.path).get(place) for n, t in store.tiers.items()}
    bad = {finding.tier for finding in findings}
    good = [
        n for n, mine in held.items() if mine and n not in bad and is_whole(step.objects(), mine)
    ]
    if "" in bad:
        return None  # it is nowhere
    if good:
        source, members = store.tiers[good[0]], list(held[good[0]] or ())
        targets = [store.tiers[name] for name in sorted(bad)]
        act = partial(_copy_all, source, targets, place, members)
        return Mend(act, f"its copy in {', '.join(sorted(bad))} is made anew from {good[0]}")
    return _of_metadata(store, manifest, step, findings)


def _copy_all(
    source: Backend, targets: Sequence[Backend], place: str, members: Sequence[str]
) -> None:
    for name in sorted(members, key=lambda name: name == COMMIT):  # the commit last
        data = source.get(f"{place}/{name}")
        for target in targets:
            target.put(f"{place}/{name}", data)


def _of_metadata(
    store: OpenedStore, manifest: SessionManifest, step: StepEntry, findings: Sequence[Finding]
) -> Mend | None:
    """Return how a Step is mended of which only descriptions are damaged."""
    known = described(manifest, step)
    place = step.place(manifest.incarnation.path)
    damaged = {(f.tier, f.place[len(place) + 1 :]) for f in findings}
    if any(name not in known for _, name in damaged):
        return None
    for tier, name in damaged:
        if name == COMMIT and not _is_nearly(store.tiers[tier], f"{place}/{name}", known[name]):
            return None

    def act() -> None:
        for tier, name in sorted(damaged, key=lambda pair: pair[1] == COMMIT):
            store.tiers[tier].put(f"{place}/{name}", known[name])

    return Mend(
        act, "its Zarr metadata is written anew, as the manifest says; its values are whole"
    )


def described(manifest: SessionManifest, step: StepEntry) -> Mapping[str, bytes]:
    """Return the metadata of a Step, by the names of its objects, as it was written."""
    arrays = tuple((name, entry.layout) for name, entry in arrays_of(step))
    own = msgspec.structs.replace(step, unit="local", attempt="")
    attributes = attributes_json(manifest.store_id, StepKey(manifest.incarnation, step.index), own)
    found = {f"{name}/{COMMIT}": array_json(layout) for name, layout in arrays}
    return {**found, COMMIT: group_json(arrays, attributes)}


def _is_nearly(backend: Backend, key: str, wanted: bytes) -> bool:
    """Tell whether an object is another one but for a few bytes."""
    try:
        have = backend.get(key)
    except (ObjectMissing, StorageDenied, StorageFailed):
        return False
    differing = sum(a != b for a, b in zip(have, wanted, strict=False))
    return len(have) == len(wanted) and differing <= _MOST_BYTES
