"""Who speaks, and with which keys: TLS 1.3 tells the one and carries the other, and is done then.

The server draws the keys once the client has proved who it is, and says them in the only message
that TLS carries. That a client has them its first frame shows, and the answer that the server has:
nothing is confirmed besides.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from tq_fs.channel._cipher import KEY_BYTES
from tq_fs.channel._stream import Forged
from tq_fs.errors import ProtocolMismatch

T = TypeVar("T")

_HEAD = b"tqfk\x01\x01"  # magic, version, AES-256-GCM; the server's key and the client's follow
_READ_BYTES = 16 * 1024


def agree(tls: Tls, *, server: bool) -> tuple[bytes, bytes]:
    """Shake hands, and return the keys of what this end sends and of what it receives.

    Raises
    ------
    ssl.SSLError, Gone, TimeoutError, ConnectionError
        The other end has not this store's identity, or broke off.
    ProtocolMismatch
        It has, and speaks otherwise.
    """
    tls.shake_hands()
    if server:
        tls.check_end()
        keys = os.urandom(2 * KEY_BYTES)
        tls.write(_HEAD + keys)
        return keys[:KEY_BYTES], keys[KEY_BYTES:]
    said = tls.read()
    tls.check_end()
    keys = said.removeprefix(_HEAD)
    if len(said) != len(_HEAD) + 2 * KEY_BYTES or len(keys) != 2 * KEY_BYTES:
        raise ProtocolMismatch(
            "agrees on keys in another way",
            subject="a unit",
            remedy="run the same version of tq-fs everywhere",
        )
    return keys[KEY_BYTES:], keys[:KEY_BYTES]


class Tls:
    """TLS over a connection that somebody else sends and receives on; through memory.

    Parameters
    ----------
    context, server
        The settings of this end, and which one it is.
    send, receive
        Of the connection; see :class:`~tq_fs.channel._stream.Stream`.
    timeout_s
        Seconds for all of it; None for no bound.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        *,
        server: bool,
        send: Callable[[Sequence[memoryview]], None],
        receive: Callable[[memoryview, int], int],
        timeout_s: float | None,
    ) -> None:
        self._coming, self._going = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._coming, self._going, server_side=server)
        self._send, self._receive = send, receive
        self._until = None if timeout_s is None else time.monotonic() + timeout_s
        self._buffer = memoryview(bytearray(_READ_BYTES))

    def shake_hands(self) -> None:
        """Hear who the other end is, and tell who this one is."""
        self._run(self._tls.do_handshake)

    def write(self, data: bytes) -> None:
        """Send a message that fits into a record."""
        self._run(lambda: self._tls.write(data))

    def read(self) -> bytes:
        """Receive a message."""
        return self._run(lambda: self._tls.read(_READ_BYTES))

    def check_end(self) -> None:
        """Check that nothing else has come over TLS.

        Raises
        ------
        Forged
        """
        if self._coming.pending or self._tls.pending():
            raise Forged("more was said over TLS than is to be said")

    def _run(self, step: Callable[[], T]) -> T:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                pass
            finally:
                self._flush()  # why it failed, too
            self._feed()

    def _feed(self) -> None:
        if self._until is not None and time.monotonic() > self._until:
            raise TimeoutError("hands were not shaken in time")
        got = self._receive(self._buffer, 0)
        self._coming.write(self._buffer[:got])

    def _flush(self) -> None:
        if self._going.pending:
            self._send([memoryview(self._going.read())])
