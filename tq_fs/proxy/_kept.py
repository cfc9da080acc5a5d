"""Finalized sessions, until they are forgotten."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tq_fs.errors import SessionMissing
from tq_fs.proxy._entry import Entry
from tq_fs.proxy._wire import ReadRequest
from tq_fs.trajectory import Segment


class Kept:
    """Finalized incarnations in the order they came. Of one event loop.

    Attributes
    ----------
    nbytes
        Bytes of their Segments' arrays.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._entries: dict[int, Entry] = {}
        self._by_session: dict[str, list[Entry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        """Keep one more."""
        entry.nbytes = sum(map(_nbytes, entry.segments))
        self.nbytes += entry.nbytes
        self._entries[id(entry)] = entry
        self._by_session.setdefault(entry.session_id, []).insert(0, entry)

    def of(self, session_id: str) -> Sequence[Entry]:
        """Return the incarnations of a session id, the latest first."""
        return self._by_session.get(session_id, ())

    def asked_for(self, request: ReadRequest) -> list[Entry]:
        """Return those that a request asks for, in the order it names them or they came.

        Raises
        ------
        SessionMissing
            One that is named is not kept.
        """
        chosen: Iterable[Entry] = self._entries.values()
        if request.session_ids is not None:
            named = dict.fromkeys(request.session_ids)
            chosen = [entry for name in named for entry in reversed(self._named(name))]
        if request.instance_id is not None:
            chosen = (entry for entry in chosen if entry.instance_id == request.instance_id)
        return list(chosen)[: request.limit]

    def _named(self, session_id: str) -> Sequence[Entry]:
        found = self.of(session_id)
        if not found:
            raise SessionMissing(
                "is not finalized, or was forgotten",
                subject=f"session {session_id!r}",
                remedy="finalize it first",
            )
        return found

    def forget(self, entries: Iterable[Entry]) -> int:
        """Keep these no longer; returns how many were kept until now."""
        forgotten = 0
        for entry in entries:
            if self._entries.pop(id(entry), None) is None:
                continue
            mine = self._by_session[entry.session_id]
            mine.remove(entry)
            if not mine:
                del self._by_session[entry.session_id]
            self.nbytes -= entry.nbytes
            forgotten += 1
        return forgotten

    def forget_sessions(self, session_ids: Iterable[str]) -> int:
        """Keep no incarnation of these; returns how many were kept until now."""
        return self.forget([e for name in dict.fromkeys(session_ids) for e in self.of(name)])


def _nbytes(segment: Segment) -> int:
    arrays = sum(array.nbytes for array in segment.arrays.values())
    return segment.tokens.nbytes + segment.loss_mask.nbytes + arrays
