"""A connection whose bytes are sealed in large frames, once TLS has told who speaks.

A frame is the length of what it holds, that sealed, and a tag. A length is checked before anything
is received for it; the frames of a direction are numbered, and none is skipped. What an answer owes
is known, so that an end in between shows; between two messages it is the ordinary one.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Iterator, Sequence

from tq_fs.channel._cipher import TAG_BYTES, Secret
from tq_fs.channel._handshake import Tls, agree
from tq_fs.channel._stream import Forged, Gone, Stream
from tq_fs.memory import aligned_empty

FRAME_BYTES = 512 * 1024  # at most, of what is sealed
_JOINED_BYTES = 32 * 1024  # copied together rather than framed each
_LENGTH = struct.Struct("<I")
_AROUND = _LENGTH.size + TAG_BYTES
_GOING_BYTES = FRAME_BYTES + _JOINED_BYTES + 2 * _AROUND
_COMING_BYTES = FRAME_BYTES + TAG_BYTES
_NOTHING = memoryview(b"")


class SealedStream(Stream):
    """A connection that is encrypted, with ends that know each other. Not to be used after a fork.

    Where a frame breaks off or is not genuine it forgets its keys, and nothing passes any more.

    Parameters
    ----------
    sock, timeout_s
        See :class:`Stream`; all of the handshake has as long.
    context, server
        The settings of this end's TLS, and which one it is.

    Raises
    ------
    ssl.SSLError, Gone, TimeoutError, ConnectionError, ProtocolMismatch
        The handshake failed.
    """

    plain = False

    def __init__(
        self,
        sock: socket.socket,
        timeout_s: float | None,
        context: ssl.SSLContext,
        *,
        server: bool,
    ) -> None:
        super().__init__(sock, timeout_s)
        tls = Tls(
            context,
            server=server,
            send=super().send,
            receive=self._receive,
            timeout_s=timeout_s,
        )
        ours, theirs = agree(tls, server=server)
        ways = (b"unit", b"user") if server else (b"user", b"unit")
        self._sealer: Secret | None = Secret(ours, ways[0])
        self._opener: Secret | None = Secret(theirs, ways[1])
        self._length = memoryview(bytearray(_LENGTH.size))
        self._rest = _NOTHING  # of a frame, what nobody has asked for yet
        # Made when they are needed, and written to as far as frames are large.
        self._going = self._coming = self._opened = _NOTHING

    def send(self, buffers: Sequence[memoryview], *, more: bool = False) -> None:
        """Send all of `buffers`; see :meth:`Stream.send`."""
        sealer = _held(self._sealer)
        going = self._going = self._going or aligned_empty(_GOING_BYTES).data
        used = 0
        try:
            for plain in frames(buffers):
                if used + len(plain) + _AROUND > _GOING_BYTES:
                    super().send([going[:used]])
                    used = 0
                used += _seal(sealer, plain, going[used:])
            super().send([going[:used]], more=more)
        except BaseException:
            self._forget()
            raise

    def fill(self, view: memoryview) -> None:
        """Receive as many bytes as `view` has; see :meth:`Stream.fill`."""
        while view:
            if self._rest:
                view = view[self._take(view) :]
            else:
                opener = _held(self._opener)
                have = self._receive(self._length, socket.MSG_WAITALL)
                view = view[self._open(opener, view, have) :]

    def begin(self, view: memoryview) -> int:
        """Receive what has come, a byte at least; see :meth:`Stream.begin`."""
        if self._rest:
            return self._take(view)
        opener = _held(self._opener)
        have = self._receive(self._length, 0)
        try:
            return self._open(opener, view, have)
        except TimeoutError as error:
            raise ConnectionAbortedError("no more came of a frame") from error

    def is_idle(self) -> bool:
        """Tell whether the connection stands and nothing has come."""
        return not self._rest and super().is_idle()

    def close(self) -> None:
        """Close the connection, and forget its keys; idempotent."""
        super().close()
        self._forget()

    def _open(self, opener: Secret, view: memoryview, have: int) -> int:
        """Receive a frame, of whose length `have` bytes are here; return what `view` took of it."""
        try:
            return self._open_whole(opener, view, have)
        except Gone as error:
            self._forget()
            raise ConnectionAbortedError("the connection ended within a frame") from error
        except BaseException:
            self._forget()
            raise

    def _open_whole(self, opener: Secret, view: memoryview, have: int) -> int:
        super().fill(self._length[have:])
        nbytes: int = _LENGTH.unpack(self._length)[0]
        if not 0 < nbytes <= FRAME_BYTES:
            raise Forged(f"a frame of {nbytes} bytes, {FRAME_BYTES} are the most")
        coming = self._coming = self._coming or aligned_empty(_COMING_BYTES).data
        sealed = coming[: nbytes + TAG_BYTES]
        super().fill(sealed)
        if nbytes <= len(view):
            opener.open(sealed, self._length, view[:nbytes])
            return nbytes
        opened = self._opened = self._opened or aligned_empty(FRAME_BYTES).data
        opener.open(sealed, self._length, opened[:nbytes])
        self._rest = opened[:nbytes]
        return self._take(view)

    def _take(self, view: memoryview) -> int:
        got = min(len(view), len(self._rest))
        view[:got] = self._rest[:got]
        self._rest = self._rest[got:]
        return got

    def _forget(self) -> None:
        self._sealer = self._opener = None
        self._rest = _NOTHING


def frames(buffers: Sequence[memoryview]) -> Iterator[bytes | memoryview]:
    """Yield what goes into a frame each: small buffers joined, large ones cut.

    A large one begins a frame, so that the other end finds it where it wants it: a frame that fits
    into what is to be filled is opened there.
    """
    small: list[memoryview] = []
    for buffer in buffers:
        if sum(map(len, small)) + len(buffer) > _JOINED_BYTES and small:
            yield b"".join(small)
            small = []
        if len(buffer) <= _JOINED_BYTES:
            small.append(buffer)
            continue
        for start in range(0, len(buffer), FRAME_BYTES):
            yield buffer[start : start + FRAME_BYTES]
    if small:
        yield b"".join(small)


def _seal(sealer: Secret, plain: bytes | memoryview, into: memoryview) -> int:
    """Write a frame of `plain` to `into`; return its length."""
    nbytes = len(plain)
    length = _LENGTH.pack(nbytes)
    into[: _LENGTH.size] = length
    sealer.seal(plain, length, into[_LENGTH.size : nbytes + _AROUND])
    return nbytes + _AROUND


def _held(secret: Secret | None) -> Secret:
    if secret is None:
        raise ConnectionAbortedError("the connection was closed, or broke off within a frame")
    return secret
