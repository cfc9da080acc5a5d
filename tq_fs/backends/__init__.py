"""Where bytes rest. A backend has never heard of a Step or a manifest."""

from tq_fs.backends._base import Backend, Buffer, ObjectReader
from tq_fs.backends._errors import mapped
from tq_fs.backends._local import STAGING, LocalBackend

__all__ = ["STAGING", "Backend", "Buffer", "LocalBackend", "ObjectReader", "mapped"]
