"""A backend that lies on another node: every call goes to a unit over the channel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from tq_fs.backends import Buffer, PerProcess, check_key, leave_to_parent
from tq_fs.channel import _wire as wire
from tq_fs.channel._identity import Identity
from tq_fs.channel._lanes import Lane, Lanes
from tq_fs.errors import RetryError, StorageFailed, TqFsError

T = TypeVar("T")
Names: TypeAlias = list[tuple[str, Any]]


class Retries(Protocol):
    """Tries a request again, as :class:`tq_fs.backends.Retry` does."""

    def call(self, request: Callable[[], T], *, renew: Callable[[], None]) -> T:
        """Return what `request` returns, once it succeeds."""


class ChannelBackend:
    """A unit's :class:`~tq_fs.backends.Backend`, from anywhere. Pickles as its configuration.

    Connections are made when they are needed, once in each process, forks included, and kept.

    Parameters
    ----------
    endpoint
        Where the unit listens: ``unix:/folder/socket`` on its own host, else ``tcp:host:port``; or
        what tells it whenever a connection is made, for a unit that may come back elsewhere.
    store_id
        The store that the unit has to serve.
    unit
        The unit's name, in messages.
    identity
        For an endpoint that is encrypted.
    retry
        When to try again to reach it. None: not at all, a lost unit is reported at once.
    timeout_s
        Seconds to wait for an answer; a write may wait for room besides.
    epoch, holder
        Of the Controller that writes through it; 0 for everybody else.
    named
        Insist on the unit of that name: another one of the store may have taken its port.
    """

    request_bytes = 1 * wire.MiB

    def __init__(
        self,
        endpoint: str | Callable[[], str],
        *,
        store_id: str,
        unit: str,
        identity: Identity | None = None,
        retry: Retries | None = None,
        timeout_s: float = 30.0,
        epoch: int = 0,
        holder: str = "",
        named: bool = False,
    ) -> None:
        self._made_of = (endpoint, store_id, unit, identity, retry, timeout_s, epoch, holder, named)
        self._subject = f"unit {unit}"
        self._timeout_s = timeout_s
        self._retry = retry
        self._lanes = PerProcess(self._connect)
        self.sent_bytes = 0
        self.received_bytes = 0

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as configuration; the copy makes its own connections."""
        return _again, self._made_of

    def _connect(self) -> Lanes:
        endpoint, store_id, unit, identity, _, timeout_s, epoch, holder, named = self._made_of
        lanes = Lanes(
            endpoint,
            identity,
            hello=wire.Hello(wire.VERSION, store_id, epoch, holder, unit if named else ""),
            subject=self._subject,
            timeout_s=timeout_s,
        )
        leave_to_parent(lanes)
        return lanes

    # ------------------------------------------------------------ write

    def publish(
        self, prefix: str, members: Mapping[str, Sequence[Buffer]], *, fresh: bool = False
    ) -> str:
        """Send a group to the unit, which publishes it; see the protocol."""
        place, _ = self.publish_noted(prefix, members, b"", fresh=fresh)
        return place

    def publish_noted(
        self,
        prefix: str,
        members: Mapping[str, Sequence[Buffer]],
        note: bytes,
        *,
        fresh: bool = False,
    ) -> tuple[str, bytes]:
        """Send a group with a note for who is told of it.

        Returns
        -------
        str, bytes
            The group's place, and what the noted one answers. Both come only once all is done, and
            may have been done twice.
        """
        views = {name: _views(buffers) for name, buffers in members.items()}
        sizes = [(name, sum(view.nbytes for view in parts)) for name, parts in views.items()]
        body = [view for parts in views.values() for view in parts]
        tries = 0

        def send(lane: Lane) -> tuple[str, bytes]:
            nonlocal tries
            tries += 1  # what was sent once may be there, though nobody said so
            request = wire.Publish(prefix, sizes, fresh and tries == 1, note)
            done = self._write(lane, request, body)
            if not isinstance(done.value, str):
                raise StorageFailed("names no place", subject=self._name(prefix))
            return done.value, done.answer

        return self._call(send)

    def put(self, key: str, data: bytes, *, urgent: bool = False) -> None:
        """Write one small object whole; see the protocol."""
        self._call(lambda lane: self._write(lane, wire.Put(key, urgent), _views([data])))

    def _write(self, lane: Lane, request: wire.AnyRequest, body: Sequence[memoryview]) -> wire.Done:
        patience_s = lane.welcome.deadline_s + self._timeout_s
        answer = lane.ask(request, body, timeout_s=patience_s)
        self.sent_bytes += sum(view.nbytes for view in body)
        return _done(answer)

    # ------------------------------------------------------------ read

    def get(self, key: str) -> bytes:
        """Return a small object."""

        def ask(lane: Lane) -> bytes:
            lane.ask(wire.Get(key))
            data = bytearray(lane.owed)
            lane.fill(memoryview(data))
            return bytes(data)

        data = self._call(ask)
        self.received_bytes += len(data)
        return data

    def open(self, key: str) -> RemoteReader:
        """Open an object for ranged reads; that it is missing shows at the first one."""
        check_key(key)
        return RemoteReader(self, key)

    def read(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        """Fill `views`, one after the other, with an object's bytes from `offset`."""
        nbytes = sum(view.nbytes for view in views)

        def ask(lane: Lane) -> None:
            lane.ask(wire.Read(key, offset, nbytes))
            for view in views:
                lane.fill(view)

        self._call(ask)
        self.received_bytes += nbytes

    def begin(self, key: str, offset: int, nbytes: int) -> Coming | None:
        """Ask for bytes of an object and return them as they come; None where that fails.

        Whoever then reads the ordinary way hears why.
        """
        lanes = self._lanes.get()
        lane = None
        try:
            lane = lanes.take()
            lane.ask(wire.Read(key, offset, nbytes))
        except TqFsError:
            if lane is not None:
                lanes.give(lane)
            return None
        return Coming(lanes, lane, offset)

    # ------------------------------------------------------------ call

    def call(self, name: str, body: bytes = b"", *, long: bool = False) -> bytes:
        """Call something of the other end by name; sent again where the answer is lost.

        Parameters
        ----------
        long
            It may take long: whoever waits hears that it is being done.

        Raises
        ------
        ProtocolMismatch
            There is no such call.
        """

        def ask(lane: Lane) -> bytes:
            lane.ask(wire.Call(name, long), _views([body]))
            data = bytearray(lane.owed)
            lane.fill(memoryview(data))
            return bytes(data)

        return self._call(ask)

    # ------------------------------------------------------------ list

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the names right below `prefix`, sorted."""
        return iter([name for name, _ in self._names(wire.List(prefix, deep=False))])

    def walk(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield key and size of each object below `prefix`."""
        return iter(self._names(wire.List(prefix, deep=True)))

    def stamp(self, key: str) -> str:
        """Return an object's stamp; empty where the unit's backend knows none."""
        return str(self._ask(wire.Stamp(key)))

    def stamps(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Yield key and stamp of each object below `prefix`."""
        return iter(self._names(wire.Stamps(prefix)))

    def _names(self, request: wire.List | wire.Stamps) -> Names:
        def ask(lane: Lane) -> Names:
            names: Names = []
            answer = lane.ask(request)
            while isinstance(answer, wire.Listed):
                names += answer.names
                if answer.last:
                    return names
                answer = lane.ask(wire.More())
            raise StorageFailed("lists nothing", subject=self._name(request.prefix))

        return self._call(ask)

    # ------------------------------------------------------------ the rest

    def delete(self, prefix: str) -> bool:
        """Remove an object or everything below a prefix."""
        return bool(self._ask(wire.Delete(prefix)))

    def distrust(self, key: str) -> bool:
        """Return True: the bytes may have changed on their way, or the unit's may have."""
        self._ask(wire.Distrust(key))
        return True

    def cool(self, prefixes: Iterable[str]) -> None:
        """Pass on that groups will hardly be read again."""
        if named := [*prefixes]:
            self._ask(wire.Cool(named))

    def settle(self, prefix: str) -> None:
        """Wait until everything below `prefix` lies where the unit's policy wants it."""
        self._ask(wire.Settle(prefix))

    def sync(self) -> None:
        """Wait until everything is as durable as the unit's device can make it."""
        self._ask(wire.Sync())

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._lanes.get().close()

    # ------------------------------------------------------------ inside

    def _ask(self, request: wire.AnyRequest) -> Any:
        return _done(self._call(lambda lane: lane.ask(request))).value

    def _call(self, work: Callable[[Lane], T]) -> T:
        def once() -> T:
            with self._lanes.get().lane() as lane:
                return work(lane)

        if self._retry is None:
            return once()
        return self._retry.call(once, renew=lambda: None)

    def _name(self, key: str) -> str:
        return f"{self._subject}, {key}"


def _again(
    endpoint: str | Callable[[], str],
    store_id: str,
    unit: str,
    identity: Identity | None,
    retry: Retries | None,
    timeout_s: float,
    epoch: int,
    holder: str,
    named: bool,
) -> ChannelBackend:
    return ChannelBackend(
        endpoint,
        store_id=store_id,
        unit=unit,
        identity=identity,
        retry=retry,
        timeout_s=timeout_s,
        epoch=epoch,
        holder=holder,
        named=named,
    )


class Coming:
    """Bytes of an object that are on their way, in order; holds a lane until they are here."""

    def __init__(self, lanes: Lanes, lane: Lane, offset: int) -> None:
        self._lanes = lanes
        self._lane = lane
        self.offset = offset

    def take(self, views: Sequence[memoryview]) -> bool:
        """Fill `views` with what comes next; return whether that was the end.

        Raises
        ------
        StorageUnreachable
            The unit broke off.
        """
        for view in views:
            self._lane.fill(view)
            self.offset += view.nbytes
        return not self._lane.owed

    def holds(self, nbytes: int) -> bool:
        """Tell whether as many are still to come."""
        return nbytes <= self._lane.owed

    def end(self) -> None:
        """Give the lane back, which is closed where something is still to come."""
        self._lanes.give(self._lane)


class RemoteReader:
    """An object of a unit; an :class:`~tq_fs.backends.ObjectReader`."""

    __slots__ = ("_backend", "_coming", "_key")

    def __init__(self, backend: ChannelBackend, key: str) -> None:
        self._backend = backend
        self._key = key
        self._coming: Coming | None = None

    def readinto(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Fill `buffers`, one after the other, with the object's bytes from `offset`."""
        views = _views(buffers)
        if self._coming is None or not self._take(self._coming, views, offset):
            self._backend.read(self._key, offset, views)

    def ahead(self, offset: int, nbytes: int) -> None:
        """Ask for bytes that will be read next."""
        self._end()
        self._coming = self._backend.begin(self._key, offset, nbytes)

    def __enter__(self) -> RemoteReader:
        """Return the reader."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Let go of what is still coming."""
        self._end()

    def _take(self, coming: Coming, views: Sequence[memoryview], offset: int) -> bool:
        """Fill from what is coming; return False where something else is wanted, or it broke."""
        nbytes = sum(view.nbytes for view in views)
        if offset != coming.offset or not coming.holds(nbytes):
            return False
        try:
            ended = coming.take(views)
        except RetryError:
            self._end()
            return False
        self._backend.received_bytes += nbytes
        if ended:
            self._end()
        return True

    def _end(self) -> None:
        if self._coming is not None:
            self._coming.end()
            self._coming = None


def _views(buffers: Sequence[Buffer]) -> list[memoryview]:
    """Return buffers as bytes; empty ones, which have no such view, are left out."""
    return [memoryview(b).cast("B") for b in buffers if memoryview(b).nbytes]


def _done(answer: wire.AnyAnswer) -> wire.Done:
    if not isinstance(answer, wire.Done):
        raise StorageFailed(f"was {type(answer).__name__}", subject="an answer of a unit")
    return answer
