"""Where bytes rest. A backend has never heard of a Step or a manifest."""

from tq_fs.backends._base import Backend, Buffer, ObjectReader
from tq_fs.backends._errors import mapped
from tq_fs.backends._local import LocalBackend

__all__ = ["Backend", "Buffer", "LocalBackend", "ObjectReader", "mapped"]
