"""What an operator does with a store: look into it, verify it, repair it, make room."""

from tq_fs.operate._findings import REMEDIES, WASTE, Finding, Verified
from tq_fs.operate._opened import GRACE_S, OpenedStore, opened_store
from tq_fs.operate._plan import Action
from tq_fs.operate._quarantine import QUARANTINE
from tq_fs.operate._repair import Repaired, check_quiet, collect_waste, repair_store
from tq_fs.operate._sessions import ListedSession, list_sessions
from tq_fs.operate._show import show_session
from tq_fs.operate._shown import ShownSegment, ShownSession, ShownStep
from tq_fs.operate._space import OLDER, Space, StoreSpace, age_classes, measure_space
from tq_fs.operate._verify import verify_store, waste_of

__all__ = [
    "GRACE_S",
    "OLDER",
    "QUARANTINE",
    "REMEDIES",
    "WASTE",
    "Action",
    "Finding",
    "ListedSession",
    "OpenedStore",
    "Repaired",
    "ShownSegment",
    "ShownSession",
    "ShownStep",
    "Space",
    "StoreSpace",
    "Verified",
    "age_classes",
    "check_quiet",
    "collect_waste",
    "list_sessions",
    "measure_space",
    "opened_store",
    "repair_store",
    "show_session",
    "verify_store",
    "waste_of",
]
