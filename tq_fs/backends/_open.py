"""From a URL to the backend that serves it."""

from __future__ import annotations

import importlib.util
from urllib.parse import urlsplit

from tq_fs.backends._fsspec import FsspecBackend
from tq_fs.backends._objects import ObjectBackend
from tq_fs.backends._obstore import ObstoreBackend
from tq_fs.backends._retry import Retry
from tq_fs.errors import DependencyMissing, InvalidConfig
from tq_fs.storage_options import StorageOptions, without_secrets

_S3 = ("s3", "s3a")
_UNWRITABLE = ("http", "https")
_KNOWN = (
    "file:///absolute/folder, s3://bucket/prefix, and what fsspec serves: memory://, gs://, "
    "abfs://, sftp:// …"
)


def open_object_backend(
    url: str,
    *,
    driver: str,
    options: StorageOptions,
    retry: Retry,
    timeout_s: float,
) -> ObjectBackend:
    """Return the backend of a URL; nothing is connected yet.

    Parameters
    ----------
    driver
        ``obstore``, ``s3fs`` (fsspec), or ``auto``: the first where it is installed and serves the
        URL.

    Raises
    ------
    InvalidConfig
        The URL or an option makes no sense, or the driver does not serve it.
    DependencyMissing
    """
    scheme = urlsplit(url).scheme
    shown = without_secrets(url)
    if not scheme or "://" not in url:
        raise InvalidConfig("is no URL of a store", subject=repr(shown), remedy=f"known: {_KNOWN}")
    if scheme in _UNWRITABLE:
        raise InvalidConfig(
            f"{scheme}:// cannot be written to", subject=repr(shown), remedy=f"known: {_KNOWN}"
        )
    if not _installed("fsspec"):
        raise DependencyMissing(
            "fsspec is not installed", subject=shown, remedy="pip install 'tq-fs[s3]'"
        )
    if scheme in _S3 and not _installed("s3fs"):
        raise DependencyMissing(
            "s3fs is not installed", subject="an s3:// store", remedy="pip install 'tq-fs[s3]'"
        )
    if driver == "obstore" and scheme not in _S3:
        raise InvalidConfig(
            f"serves s3:// only, not {scheme}://", subject="driver obstore", remedy="use auto"
        )
    if driver == "obstore" and not _installed("obstore"):
        raise DependencyMissing(
            "obstore is not installed",
            subject="driver obstore",
            remedy="pip install 'tq-fs[fast-s3]'",
        )
    fast = driver == "obstore" or (driver == "auto" and scheme in _S3 and _installed("obstore"))
    kind = ObstoreBackend if fast else FsspecBackend
    return kind(url, options, retry=retry, timeout_s=timeout_s)


def _installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None
