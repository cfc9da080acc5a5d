"""What can be wrong with a store, and what an operator does about it."""

from __future__ import annotations

from dataclasses import dataclass, field

REMEDIES = {
    "corrupt": "the bytes changed on the device: restore the Step, or let repair set it aside",
    "truncated": "an object is shorter or longer than was written: as for corrupt",
    "missing": "a needed Step, or a part of it, is gone: restore it, or let repair set it aside",
    "no-data": "none of the Steps is there: restore them, or let repair set the manifest aside",
    "mismatch": "a Step says other things of itself than its manifest: as for corrupt",
    "unreadable": "the manifest, or what was released, cannot be used: restore it, or repair",
    "failed": "the disk does not give it back: see to disk and permissions; repair leaves it alone",
    "trajectory": "the resident fields cannot be used: restore them, or let repair set them aside",
    "too-new": "written by a later version: use that one; repair leaves it alone",
    "orphan": "Steps of a session that was never finalized: gc removes them",
    "leftover": "Steps that nothing needs any more: gc removes them",
    "unfinished": "documents of a session that was never finalized: gc removes them",
}
WASTE = frozenset({"orphan", "leftover", "unfinished"})
"""What takes room, and is needed by nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    Attributes
    ----------
    kind
        One of :data:`REMEDIES`.
    path
        Of the session incarnation.
    place
        What it is about: an object, a Step's place, or where the session's documents or Steps lie.
    detail
        What is wrong with it, with the numbers.
    step
        The Step's index; None where it is about no single one.
    tier
        Where that lies; empty where it is about no single one.
    nbytes
        Bytes that would come free; of waste only.
    """

    kind: str
    path: str
    place: str
    detail: str
    step: int | None = None
    tier: str = ""
    nbytes: int = 0


@dataclass(slots=True)
class Verified:
    """What was looked at, and what was found.

    Attributes
    ----------
    sessions, segments, steps, chunks, nbytes
        Finalized sessions and their Segments; their Steps, chunks and bytes that were read.
    open_sessions
        Sessions without a manifest that may still be recorded.
    unchecked_nbytes
        Bytes of chunks that were stored without a checksum: only their size was compared.
    findings
        What is wrong.
    """

    sessions: int = 0
    segments: int = 0
    steps: int = 0
    chunks: int = 0
    nbytes: int = 0
    open_sessions: int = 0
    unchecked_nbytes: int = 0
    findings: list[Finding] = field(default_factory=list)

    def kinds(self) -> dict[str, int]:
        """Return how many findings there are of each kind."""
        counts = dict.fromkeys(REMEDIES, 0)
        for finding in self.findings:
            counts[finding.kind] += 1
        return {kind: count for kind, count in counts.items() if count}
