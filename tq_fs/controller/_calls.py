"""What a store asks its Controller, wherever that one is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from tq_fs.keys import Incarnation, SegmentRef
from tq_fs.manifests import Resolved
from tq_fs.trajectory import ClosedSession


class ControllerCalls(Protocol):
    """The calls of :class:`~tq_fs.controller.Controller` that stores and sessions make."""

    def open_session(self, partition: str, session_id: str) -> Incarnation:
        """Begin a new incarnation of a session id."""

    def finalize(self, session: ClosedSession) -> Any:
        """Write a session's manifest; its Segments can be resolved from then on."""

    def discard(self, incarnation: Incarnation) -> None:
        """Delete all that an open session has written; idempotent."""

    def trajectory(self, ref: SegmentRef) -> ClosedSession:
        """Return the finalized session of a Segment with its resident fields."""

    def resolve(self, refs: Iterable[str]) -> list[Resolved]:
        """Return what references stand for, in their order."""

    def unreleased(
        self, consumer: str | None = None, partition: str | None = None, *, held: bool = False
    ) -> Iterator[str]:
        """Yield the references that a consumer, or any consumer, has still to release."""

    def release(self, refs: Iterable[str], consumer: str, rollout_id: int | None = None) -> int:
        """Note that a consumer needs Segments no more; return how many Steps that deleted."""

    def checkpoint_saved(self, rollout_id: int) -> int:
        """Release what was held for a rollout, or for an earlier one."""
