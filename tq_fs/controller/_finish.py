"""The end of a session, as its recorder does it: all that needs no knowledge of other sessions."""

from __future__ import annotations

from collections.abc import Callable

from tq_fs.errors import InvalidConfig
from tq_fs.keys import StepKey
from tq_fs.manifests import MANIFEST_SCHEMA, SessionManifest
from tq_fs.storage_unit import Located, Units
from tq_fs.trajectory import ClosedSession, encode_trajectory, trajectory_document


def draft_manifest(session: ClosedSession, store_id: str) -> SessionManifest:
    """Return a session's manifest, without epoch and time, which the Controller gives.

    Raises
    ------
    InvalidConfig
        No consumer, or one that is named twice.
    """
    consumers = session.consumers
    if not consumers or len(set(consumers)) != len(consumers):
        raise InvalidConfig(f"{list(consumers)}", subject="consumers", remedy="name each once")
    where = session.incarnation
    segments = session.segment_entries()
    needed = {f.step for s in segments for fs in s.fields.values() for f in fs}
    return SessionManifest(
        schema=MANIFEST_SCHEMA,
        store_id=store_id,
        partition=where.partition,
        session_id=where.session_id,
        incarnation_id=where.incarnation_id,
        epoch=0,
        created_ns=0,
        mode=session.mode,
        consumers=consumers,
        steps=tuple(s for s in session.step_entries() if s.index in needed),
        segments=segments,
    )


def finish(
    session: ClosedSession,
    store_id: str,
    units: Units,
    *,
    keep: Callable[[bytes], None] | None,
    publish: Callable[[SessionManifest], SessionManifest],
) -> tuple[SessionManifest, list[Located]]:
    """Finalize a session; return its manifest, and the Steps that no Segment refers to.

    Parameters
    ----------
    keep
        Writes the resident fields beside the manifest; None where they are not kept.
    publish
        Writes the manifest: the commit.
    """
    draft = draft_manifest(session, store_id)
    trajectory = None
    if keep is not None:
        trajectory = encode_trajectory(trajectory_document(store_id, session))
    units.settle(session.incarnation, draft.steps)
    if keep is not None and trajectory is not None:
        keep(trajectory)
    manifest = publish(draft)
    kept = {s.index for s in manifest.steps}
    unneeded = [s for s in session.step_entries() if s.index not in kept]
    path = session.incarnation
    return manifest, [Located(s.unit, StepKey(path, s.index).path) for s in unneeded]
