"""A session as ``tq-fs show`` tells it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tq_fs.operate._sessions import ListedSession


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownStep:
    """One Step of a session.

    Attributes
    ----------
    index, tokens
        As in the manifest.
    kind, parent
        ``create``, ``append``, ``branch`` …, and the Step it hangs on. Where the session's
        trajectory was not kept, `kind` is empty and the parent is the Step before it in a Segment.
    versions
        Runs of weight versions, ``[version, tokens]``.
    unit
        Name of the StorageUnit that took it.
    place
        Where it lies in the store.
    tiers
        Where a whole copy lies: ``store``, ``front``, ``back``; empty for nowhere.
    needed
        Whether an unreleased Segment refers to it, or none can tell.
    nbytes
        Stored bytes of its fields.
    fields
        Stored type and shape of each field.
    """

    index: int
    tokens: int
    kind: str = ""
    parent: int | None = None
    versions: tuple[tuple[str, int], ...] = ()
    unit: str = ""
    place: str = ""
    tiers: tuple[str, ...] = ()
    needed: bool = True
    nbytes: int = 0
    fields: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSegment:
    """One Segment of a session.

    Attributes
    ----------
    ref
        Its reference.
    view, index, tokens, response_tokens
        As in the manifest.
    steps
        The Steps its fields come from.
    released_by
        Consumers that have released it.
    """

    ref: str
    view: str
    index: int
    tokens: int
    response_tokens: int
    steps: tuple[int, ...]
    released_by: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSession:
    """One incarnation of a session.

    Attributes
    ----------
    summary
        As ``tq-fs ls`` tells it.
    mode
        How Steps hold tokens; empty where no manifest says so.
    steps, segments
        All of them, in their order.
    recorded
        Whether the lineage is as it was recorded: the session's trajectory was kept.
    problem
        Why the trajectory cannot be used; empty where it can, or was not kept.
    """

    summary: ListedSession
    mode: str = ""
    steps: tuple[ShownStep, ...] = ()
    segments: tuple[ShownSegment, ...] = ()
    recorded: bool = False
    problem: str = ""
