"""One mapper from the operating system's errors to ours."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from tq_fs.errors import (
    InvalidKey,
    ObjectMissing,
    StorageDenied,
    StorageFailed,
    StorageFull,
    TqFsError,
)

_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}  # a prefix is no object


def translate(error: OSError, subject: str) -> TqFsError:
    """Return our error for an OSError that befell `subject`."""
    text = error.strerror or str(error)
    if error.errno in _FULL:
        return StorageFull(
            text,
            subject=subject,
            remedy="release trained Segments, or give the store a larger device",
        )
    if error.errno in _DENIED:
        return StorageDenied(text, subject=subject, remedy="check owner, mode and mount options")
    if error.errno == errno.ENAMETOOLONG:
        return InvalidKey(text, subject=subject, remedy="use a shorter folder or ids")
    if error.errno in _MISSING:
        return ObjectMissing("no such object", subject=subject)
    return StorageFailed(f"{text} (errno {error.errno})", subject=subject)


def check_key(key: str) -> None:
    """Refuse a key that could lead out of a backend or into its own folders.

    Raises
    ------
    InvalidKey
    """
    if key[:1] in ("", ".", "/") or "/." in key or "//" in key or key[-1] == "/" or "\0" in key:
        raise InvalidKey("not a key of a backend", subject=repr(key)[:200])


@contextmanager
def mapped(subject: str) -> Iterator[None]:
    """Raise our errors in the place of OSErrors."""
    try:
        yield
    except OSError as error:
        raise translate(error, subject) from error
