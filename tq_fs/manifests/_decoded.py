"""Manifests as they are looked things up in: decoded, and the last used ones only."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass

from tq_fs.keys import Incarnation, SegmentRef
from tq_fs.manifests._models import SegmentEntry, SessionManifest
from tq_fs.steps import StepEntry


@dataclass(frozen=True, slots=True)
class Resolved:
    """A reference with what it stands for.

    Attributes
    ----------
    ref
        The reference.
    segment
        Its entry in the manifest.
    steps
        The manifest's Steps by index.
    shared
        Indexes of the Steps that several of its Segments refer to.
    """

    ref: SegmentRef
    segment: SegmentEntry
    steps: dict[int, StepEntry]
    shared: frozenset[int]

    def place(self, step: int) -> str:
        """Return where a Step's group lies."""
        return self.steps[step].place(self.ref.incarnation.path)

    def array(self, step: int, field: str) -> str:  # noqa: ARG002
        """Return the name of a field's array in a Step's group."""
        return field


@dataclass(frozen=True, slots=True)
class DecodedManifest:
    """A manifest, and its parts by name.

    Attributes
    ----------
    manifest
        The document.
    steps, segments
        Its Steps by index, and its Segments by view and index.
    shared
        Indexes of the Steps that several Segments refer to.
    nbytes
        Size of its JSON.
    """

    manifest: SessionManifest
    steps: dict[int, StepEntry]
    segments: dict[tuple[str, int], SegmentEntry]
    shared: frozenset[int]
    nbytes: int

    @classmethod
    def of(cls, manifest: SessionManifest, nbytes: int) -> DecodedManifest:
        """Sort a manifest's parts."""
        return cls(
            manifest=manifest,
            steps={step.index: step for step in manifest.steps},
            segments={(s.view, s.index): s for s in manifest.segments},
            shared=_shared(manifest),
            nbytes=nbytes,
        )

    def resolve(self, ref: SegmentRef) -> Resolved | None:
        """Return what a reference stands for; None where there is no such Segment."""
        segment = self.segments.get((ref.view, ref.index))
        return None if segment is None else Resolved(ref, segment, self.steps, self.shared)


class DecodedManifests:
    """The last used manifests. Safe to call from many threads.

    Parameters
    ----------
    limit_bytes
        Bound, counted in bytes of JSON; decoded they take about five times that.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[Incarnation, DecodedManifest] = OrderedDict()
        self._nbytes = 0

    def get(self, incarnation: Incarnation) -> DecodedManifest | None:
        """Return a manifest that is kept, and make it the youngest."""
        with self._lock:
            found = self._kept.get(incarnation)
            if found is not None:
                self._kept.move_to_end(incarnation)
            return found

    def put(self, manifest: SessionManifest, nbytes: int) -> DecodedManifest:
        """Keep a manifest, letting go of the oldest ones."""
        entry = DecodedManifest.of(manifest, nbytes)
        with self._lock:
            old = self._kept.pop(manifest.incarnation, None)
            self._kept[manifest.incarnation] = entry
            self._nbytes += nbytes - (old.nbytes if old else 0)
            while self._nbytes > self._limit_bytes and len(self._kept) > 1:
                self._nbytes -= self._kept.popitem(last=False)[1].nbytes
        return entry

    def drop(self, incarnation: Incarnation) -> None:
        """Let go of a manifest; idempotent."""
        with self._lock:
            gone = self._kept.pop(incarnation, None)
            self._nbytes -= gone.nbytes if gone else 0


def _shared(manifest: SessionManifest) -> frozenset[int]:
    counts = Counter(
        step
        for segment in manifest.segments
        for step in {f.step for fragments in segment.fields.values() for f in fragments}
    )
    return frozenset(step for step, count in counts.items() if count > 1)
