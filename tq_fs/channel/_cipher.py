"""AES-256-GCM over the frames of a connection: a key for each direction, numbers for nonces."""

from __future__ import annotations

import hmac
import itertools
import os
import struct
from typing import Any

from tq_fs.backends import Buffer
from tq_fs.channel._stream import Forged
from tq_fs.errors import DependencyMissing

KEY_BYTES = 32
TAG_BYTES = 16
_NONCE = struct.Struct("<4sQ")
_MOST_FRAMES = 2**64
_KEY_FRAMES = 2**18  # with 512 KiB in each 2**33 blocks; RFC 8446, 5.5 stops at 2**34.5
_NEXT_KEY = b"tq-fs channel, next key"


class Secret:
    """What seals or opens the frames of one direction, in order. Used by one thread.

    A nonce is the direction and the frame's number, so that a frame opens in its own place only. A
    key is for a quarter million frames; both ends make the next one of it then, and forget it. In a
    process that was forked it does nothing: two processes would use the same numbers.

    Parameters
    ----------
    key
        Fresh, and of this direction only.
    direction
        Four bytes.

    Raises
    ------
    DependencyMissing
    """

    __slots__ = ("_cipher", "_direction", "_invalid", "_key", "_numbers", "_owner")

    def __init__(self, key: bytes, direction: bytes) -> None:
        kind, self._invalid = load()
        self._cipher = kind(key)
        self._key = key
        self._direction = direction
        self._numbers = itertools.count()
        self._owner = os.getpid()

    def __reduce__(self) -> tuple[object, ...]:
        """Refuse to be pickled or copied: a copy would use the same numbers."""
        raise TypeError("the key of a connection stays where it is")

    def seal(self, plain: Buffer, length: Buffer, into: memoryview) -> None:
        """Write what becomes of `plain`, and its tag, to `into`; `length` goes with it as it is.

        Raises
        ------
        ConnectionError
            The numbers are used up, or this is another process.
        """
        self._cipher.encrypt_into(self._nonce(), plain, length, into)

    def open(self, sealed: Buffer, length: Buffer, into: memoryview) -> None:
        """Write what `sealed` was made of to `into`, which holds nothing of worth where it fails.

        Raises
        ------
        Forged
            It is not the frame that the other end sealed at this place, with this length.
        ConnectionError
            See :meth:`seal`.
        """
        try:
            self._cipher.decrypt_into(self._nonce(), sealed, length, into)
        except self._invalid as error:
            raise Forged("a frame is not what the other end sent next") from error

    def _nonce(self) -> bytes:
        """Return the next number as a nonce; it is used up, whatever becomes of the frame."""
        number = next(self._numbers)  # at once, so that even two threads had two
        if number >= _MOST_FRAMES or os.getpid() != self._owner:
            raise ConnectionAbortedError("no more frames with this key, or in this process")
        if number and number % _KEY_FRAMES == 0:
            self._key = hmac.digest(self._key, _NEXT_KEY, "sha256")
            self._cipher = type(self._cipher)(self._key)
        return _NONCE.pack(self._direction, number)


def load() -> tuple[Any, type[Exception]]:
    """Return the cipher and what it raises for a wrong tag.

    Raises
    ------
    DependencyMissing
        `cryptography` is not installed, or of before version 47.
    """
    try:
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415  # optional
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415
    except ImportError as error:
        raise missing("cryptography is not installed") from error
    if not hasattr(AESGCM, "decrypt_into"):
        raise missing("cryptography is older than version 47")
    return AESGCM, InvalidTag


def missing(problem: str) -> DependencyMissing:
    """Return the error of an encrypted channel without what it needs."""
    return DependencyMissing(
        problem,
        subject="an encrypted channel",
        remedy="pip install 'tq-fs[cluster]', or use encryption: none in a private network",
    )
