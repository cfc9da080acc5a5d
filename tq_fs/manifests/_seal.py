"""The seal of binary documents: a CRC-32C before their bytes."""

from __future__ import annotations

import msgspec
from crc32c import crc32c

from tq_fs.errors import ManifestCorrupt


class _Sealed(msgspec.Struct, frozen=True, array_like=True):
    crc32c: int
    body: bytes


def seal(body: bytes) -> bytes:
    """Return msgpack of ``[CRC-32C of the body, body]``."""
    return msgspec.msgpack.encode(_Sealed(crc32c(body), body))


def unseal(data: bytes, subject: str) -> bytes:
    """Return the body, once it agrees with its checksum.

    Raises
    ------
    ManifestCorrupt
    """
    try:
        sealed = msgspec.msgpack.decode(data, type=_Sealed)
    except msgspec.DecodeError as error:
        raise ManifestCorrupt(f"cannot be read: {error}", subject=subject) from error
    if crc32c(sealed.body) != sealed.crc32c:
        raise ManifestCorrupt("does not have the checksum of its bytes", subject=subject)
    return sealed.body
