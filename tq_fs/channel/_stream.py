"""A connection that sends and fills whole buffers. Used by one thread."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

_MOST_BUFFERS = 1024  # IOV_MAX on Linux
_SOCKET_BYTES = 4 * 1024**2  # what is on its way in the kernel
_TIMEVAL = struct.Struct("ll")


class Gone(ConnectionError):
    """The other end has closed the connection."""


class Forged(ConnectionError):
    """What came is not what the other end sent, or not all of it and in this order."""


class Stream:
    """A plain connection.

    Parameters
    ----------
    sock
        Becomes the stream's, which closes it.
    timeout_s
        See :meth:`set_timeout`.
    """

    plain = True

    def __init__(self, sock: socket.socket, timeout_s: float | None) -> None:
        self._socket = sock
        self._news = select.poll()
        self._news.register(sock, select.POLLIN)
        tune(sock)
        sock.setblocking(True)
        self.set_timeout(timeout_s)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._socket.fileno()

    def set_timeout(self, seconds: float | None) -> None:
        """Bound how long a call waits for a byte to come or go; None for no bound."""
        whole = max(0.001, seconds) if seconds is not None else 0.0
        value = _TIMEVAL.pack(int(whole), int(whole % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def send(self, buffers: Sequence[memoryview], *, more: bool = False) -> None:
        """Send all of `buffers`.

        Parameters
        ----------
        buffers
            None of them is empty.
        more
            Something follows at once.

        Raises
        ------
        TimeoutError, ConnectionError
        """
        rest = buffers
        flags = socket.MSG_MORE if more else 0
        while rest:
            try:
                sent = self._socket.sendmsg(rest[:_MOST_BUFFERS], [], flags)
            except BlockingIOError as error:
                raise TimeoutError("nothing was taken") from error
            rest = _after(rest, sent)

    def fill(self, view: memoryview) -> None:
        """Receive as many bytes as `view` has.

        Raises
        ------
        Gone
            The other end closed the connection.
        TimeoutError, ConnectionError
        """
        while view:
            view = view[self._receive(view, socket.MSG_WAITALL) :]

    def begin(self, view: memoryview) -> int:
        """Receive what has come, a byte at least, at most what `view` holds; return how much.

        Raises
        ------
        Gone, TimeoutError, ConnectionError
            Nothing was received.
        """
        return self._receive(view, 0)

    def _receive(self, view: memoryview, flags: int) -> int:
        try:
            got = self._socket.recv_into(view, 0, flags)
        except BlockingIOError as error:
            raise TimeoutError("nothing came") from error
        if not got:
            raise Gone("the other end closed the connection")
        return got

    def is_idle(self) -> bool:
        """Tell whether the connection stands and nothing has come."""
        return not self._news.poll(0)

    def end(self) -> None:
        """End the connection, also while another thread is at it, whose is the closing.

        Its descriptor stays taken: that thread may be about to use the number.
        """
        with suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection for every process that holds it; idempotent."""
        self.end()
        self._socket.close()


def tune(sock: socket.socket) -> None:
    """Make a connection send at once, hold more on its way, and notice a host that is gone."""
    if sock.family != socket.AF_UNIX:
        _tune_tcp(sock)
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)


def _tune_tcp(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    # Room from the start, and for more where TCP finds that it needs it: SO_RCVBUF would keep it
    # from looking, and is bounded by what is far too little on many hosts.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _SOCKET_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    if sock.getsockname()[0] == sock.getpeername()[0]:
        with suppress(OSError):  # where it is not allowed, it is slower
            # Nothing is congested within a host, and BBR would set a timer for each 64 KiB.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _after(buffers: Sequence[memoryview], nbytes: int) -> Sequence[memoryview]:
    """Return what remains of `buffers` after their first `nbytes`."""
    for i, buffer in enumerate(buffers):
        if nbytes < buffer.nbytes:
            return [buffer[nbytes:], *buffers[i + 1 :]]
        nbytes -= buffer.nbytes
    return ()
