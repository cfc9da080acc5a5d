"""What an operator does with a store: look into it, verify it, repair it, make room."""

from tq_fs.operate._findings import REMEDIES, WASTE, Finding, Verified
from tq_fs.operate._opened import GRACE_S, OpenedStore, opened_store
from tq_fs.operate._sessions import ListedSession, list_sessions
from tq_fs.operate._space import Space, StoreSpace, age_classes, measure_space
from tq_fs.operate._verify import verify_store, waste_of

__all__ = [
    "GRACE_S",
    "REMEDIES",
    "WASTE",
    "Finding",
    "ListedSession",
    "OpenedStore",
    "Space",
    "StoreSpace",
    "Verified",
    "age_classes",
    "list_sessions",
    "measure_space",
    "opened_store",
    "verify_store",
    "waste_of",
]
