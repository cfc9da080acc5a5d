"""Where bytes rest. A backend has never heard of a Step or a manifest."""

from tq_fs.backends._base import COMMIT, Backend, Buffer, ObjectReader, Readable, Stamping
from tq_fs.backends._errors import check_key, mapped
from tq_fs.backends._files import LocalObject
from tq_fs.backends._forks import PerProcess, leave_to_parent
from tq_fs.backends._fsspec import FsspecBackend
from tq_fs.backends._local import STAGING, LocalBackend
from tq_fs.backends._node_cache import NodeCache
from tq_fs.backends._objects import ObjectBackend, is_attempt
from tq_fs.backends._obstore import ObstoreBackend
from tq_fs.backends._open import open_object_backend
from tq_fs.backends._retry import Retry
from tq_fs.backends._tiered import TieredBackend

__all__ = [
    "COMMIT",
    "STAGING",
    "Backend",
    "Buffer",
    "FsspecBackend",
    "LocalBackend",
    "LocalObject",
    "NodeCache",
    "ObjectBackend",
    "ObjectReader",
    "ObstoreBackend",
    "PerProcess",
    "Readable",
    "Retry",
    "Stamping",
    "TieredBackend",
    "check_key",
    "is_attempt",
    "leave_to_parent",
    "mapped",
    "open_object_backend",
]
