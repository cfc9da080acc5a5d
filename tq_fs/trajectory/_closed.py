"""A session that takes no more Steps: all that its manifest and its Segments are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tq_fs.fields import FieldSpec
from tq_fs.keys import Incarnation, SegmentRef
from tq_fs.manifests import Mode, SegmentEntry, View
from tq_fs.steps import StepEntry
from tq_fs.trajectory._records import StepRecord
from tq_fs.trajectory._segments import Segment, build_segment, chains, segment_entry


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClosedSession:
    """A session as it is finalized, or read back later.

    Attributes
    ----------
    incarnation
        Which session it is.
    mode, views, consumers
        How its Steps hold tokens, how they are arranged, and who must release each Segment.
    records
        Its Steps.
    stored, resident
        Fields that went to the store, and those that stay in memory.
    extra
        What every Segment carries along.
    """

    incarnation: Incarnation
    mode: Mode
    views: tuple[View, ...]
    consumers: tuple[str, ...]
    records: Sequence[StepRecord]
    stored: Sequence[FieldSpec]
    resident: Sequence[FieldSpec]
    extra: Mapping[str, Any]

    def segments(self, store_id: str | None) -> list[Segment]:
        """Build all Segments of all views; without references where `store_id` is None."""
        return [
            build_segment(
                chain,
                self.resident,
                ref=None if store_id is None else str(self._ref(store_id, view, index)),
                session_id=self.incarnation.session_id,
                view=view,
                index=index,
                extra=self.extra,
            )
            for view in self.views
            for index, chain in enumerate(chains(self.records, view))
        ]

    def segment_entries(self) -> tuple[SegmentEntry, ...]:
        """Describe all Segments of all views for a manifest."""
        return tuple(
            segment_entry(chain, self.stored, view, index)
            for view in self.views
            for index, chain in enumerate(chains(self.records, view))
        )

    def step_entries(self) -> list[StepEntry]:
        """Return what the store says of the Steps."""
        return [r.stored for r in self.records if r.stored is not None]

    def _ref(self, store_id: str, view: View, index: int) -> SegmentRef:
        return SegmentRef(store_id, self.incarnation, view, index)
