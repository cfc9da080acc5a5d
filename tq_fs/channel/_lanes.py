"""The client's end: connections that are opened once and lent to whoever has a request.

A lane has one user at a time and one request under way. One whose answer was not read to its end is
closed and never lent again.
"""

from __future__ import annotations

import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tq_fs.channel import _wire as wire
from tq_fs.channel._endpoint import connect
from tq_fs.channel._identity import Identity
from tq_fs.channel._sealed import SealedStream
from tq_fs.channel._stream import Forged, Stream
from tq_fs.errors import ProtocolMismatch, StorageDenied, StorageFailed, StorageUnreachable


class Lane:
    """One connection to a unit. Used by one thread at a time.

    Parameters
    ----------
    stream
        The connection, which waits for `timeout_s`; becomes the lane's.
    hello
        What to say first: the store that the unit has to serve.
    subject
        The unit, in messages.
    timeout_s
        Seconds to wait for the next byte of an answer.

    Attributes
    ----------
    welcome
        What the unit says of itself.

    Raises
    ------
    StorageUnreachable, StorageDenied, WrongStore, ProtocolMismatch
    """

    def __init__(
        self, stream: Stream, *, hello: wire.Hello, subject: str, timeout_s: float
    ) -> None:
        self._stream = stream
        self._subject = subject
        self._timeout_s: float | None = timeout_s
        self._set_timeout_s: float | None = timeout_s
        self._owed = 0  # bytes of the last answer that were not read yet
        self._broken = False
        self._prefix = memoryview(bytearray(wire.PREFIX.size))
        answer = self.ask(hello)
        if not isinstance(answer, wire.Welcome):
            raise ProtocolMismatch(f"answered {type(answer).__name__}", subject=subject)
        self.welcome = answer

    @property
    def is_free(self) -> bool:
        """Whether it can be lent again: nothing is owed, whatever the unit said."""
        return not self._broken and not self._owed

    def is_fresh(self) -> bool:
        """Tell whether the connection still stands."""
        return self._stream.is_idle()

    def close(self) -> None:
        """Close the connection: a write that has not ended will not be published."""
        self._broken = True
        self._stream.close()

    def ask(
        self,
        request: wire.AnyRequest,
        body: Sequence[memoryview] = (),
        *,
        timeout_s: float | None = 0,
    ) -> wire.AnyAnswer:
        """Send a request and return its answer; bytes behind that are left for :meth:`fill`.

        Parameters
        ----------
        request, body
            What to ask, and the bytes that belong to it.
        timeout_s
            Seconds to wait; 0 for the lane's own, None for as long as the unit lives.

        Raises
        ------
        StorageUnreachable
            No answer.
        TqFsError
            What the unit says.
        """
        header = wire.encoder.encode(request)
        nbytes = sum(part.nbytes for part in body)
        prefix = wire.PREFIX.pack(wire.MAGIC, len(header), nbytes)
        self._wait_for(self._timeout_s if timeout_s == 0 else timeout_s)
        self._broken = True  # unless all of it goes well
        try:
            self._stream.send([memoryview(prefix + header), *body])
            while isinstance(answer := self._receive(), wire.Busy):
                pass
        except OSError as error:
            raise unreachable(error, self._subject) from error
        self._broken = False
        if isinstance(answer, wire.Failed):
            raise wire.error_of(answer)
        return answer

    def fill(self, view: memoryview) -> None:
        """Receive bytes behind the answer.

        Raises
        ------
        StorageUnreachable
            The unit broke off.
        """
        try:
            self._stream.fill(view)
        except OSError as error:
            raise unreachable(error, self._subject) from error
        self._owed -= view.nbytes

    @property
    def owed(self) -> int:
        """Bytes behind the answer that were not received yet."""
        return self._owed

    def _receive(self) -> wire.AnyAnswer:
        self._stream.fill(self._prefix)
        magic, length, self._owed = wire.PREFIX.unpack(self._prefix)
        if magic != wire.MAGIC or length > wire.MOST_HEADER:
            raise ProtocolMismatch(
                "answers in another language",
                subject=self._subject,
                remedy="check what listens there",
            )
        if not length:
            return _DATA
        header = bytearray(length)
        self._stream.fill(memoryview(header))
        return wire.decode_answer(header, self._subject)

    def _wait_for(self, timeout_s: float | None) -> None:
        if timeout_s != self._set_timeout_s:
            self._stream.set_timeout(timeout_s)
            self._set_timeout_s = timeout_s


_DATA = wire.Data()


def unreachable(error: OSError, subject: str) -> StorageUnreachable | StorageDenied:
    """Return our error of a connection that failed."""
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return StorageDenied(
            f"the connection was refused: {error.reason or error}",
            subject=subject,
            remedy="get the identity from the Controller of the same store",
        )
    if isinstance(error, Forged):
        return StorageUnreachable(
            f"what came was changed on its way ({error})",
            subject=subject,
            remedy="look for what lies between this process and the unit, and meddles or is faulty",
        )
    what = "no answer in time" if isinstance(error, TimeoutError) else "is gone, or not there"
    return StorageUnreachable(
        f"{what} ({error})",
        subject=subject,
        remedy="see whether the unit's process and node are alive, and its log",
    )


class Lanes:
    """The lanes of one process to one unit. Safe to call from many threads.

    Parameters
    ----------
    endpoint
        Where the unit listens, or what tells it.
    identity
        For a unit that is encrypted.
    hello, subject, timeout_s
        See :class:`Lane`.
    """

    def __init__(
        self,
        endpoint: str | Callable[[], str],
        identity: Identity | None,
        *,
        hello: wire.Hello,
        subject: str,
        timeout_s: float,
    ) -> None:
        self._endpoint = endpoint
        self._tls = None if identity is None else identity.context(server=False)
        self._hello = hello
        self._subject = subject
        self._timeout_s = timeout_s
        self._free: deque[Lane] = deque()
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        """Lend a lane; one that is owed bytes, or broke, is closed instead of kept."""
        lane = self.take()
        try:
            yield lane
        finally:
            self.give(lane)

    def take(self) -> Lane:
        """Return a lane that nobody uses.

        Raises
        ------
        StorageUnreachable, StorageDenied
        """
        while True:
            with self._lock:
                if self._closed:
                    raise StorageFailed("was closed", subject=self._subject)
                lane = self._free.pop() if self._free else None
            if lane is None:
                return self._open()
            if lane.is_fresh():
                return lane
            lane.close()

    def give(self, lane: Lane) -> None:
        """Give a lane back."""
        with self._lock:
            if lane.is_free and not self._closed:
                self._free.append(lane)
                return
        lane.close()

    def close(self) -> None:
        """Close all lanes; one in use when its user gives it back."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, deque()
        for lane in free:
            lane.close()

    def _open(self) -> Lane:
        stream = self._stream()
        try:
            return Lane(
                stream,
                hello=self._hello,
                subject=self._subject,
                timeout_s=self._timeout_s,
            )
        except BaseException:
            stream.close()
            raise

    def _stream(self) -> Stream:
        endpoint = self._endpoint if isinstance(self._endpoint, str) else self._endpoint()
        try:
            sock = connect(endpoint, self._timeout_s)
            try:
                if self._tls is None or endpoint.startswith("unix:"):
                    return Stream(sock, self._timeout_s)
                return SealedStream(sock, self._timeout_s, self._tls, server=False)
            except BaseException:
                sock.close()
                raise
        except OSError as error:
            raise unreachable(error, f"{self._subject} at {endpoint}") from error
