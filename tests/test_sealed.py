"""What a sealed connection promises against whoever lies between its ends, and when it breaks."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import os
import pickle
import signal
import socket
import struct
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests._rollouts import spawn_child
from tests.test_channel import IDENTITY, eventually, serving
from tq_fs.channel import ChannelBackend, ChannelServer, Identity, Limits, _cipher
from tq_fs.channel._cipher import Secret
from tq_fs.channel._handshake import Tls, agree
from tq_fs.channel._sealed import FRAME_BYTES, SealedStream, frames
from tq_fs.channel._stream import Forged, Gone, Stream
from tq_fs.errors import (
    DependencyMissing,
    ProtocolMismatch,
    StorageDenied,
    StorageFailed,
    StorageUnreachable,
)
from tq_fs.testing import MEMBERS, read

MiB = 1024**2
TO_UNIT, TO_USER = "to the unit", "to the user"
Meddle = Callable[[str, int, bytes], Iterable[bytes]]


# ---------------------------------------------------------------- who lies between


class Cut(ConnectionError):
    """The relay ends a connection after these bytes."""


def untouched(way: str, number: int, frame: bytes) -> list[bytes]:
    return [frame]


class Relay:
    """Passes connections on to a unit, sees every byte, and does to the frames what it is told.

    What comes before the first frame is TLS: records, whose second byte no frame of ours begins
    with as long as messages are shorter than 768 bytes or longer than 1023.
    """

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp:").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        self.meddle: Meddle = untouched
        self.seen: dict[str, list[bytes]] = defaultdict(list)
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._accepts = threading.Thread(target=self._accept)
        self._accepts.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepts.join()
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """End all connections."""
        for sock in self._open:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                user, _ = self._listener.accept()
            except OSError:
                return
            unit = socket.create_connection(self._target)
            self._open += [user, unit]
            self._threads.append(threading.Thread(target=self._connect, args=(user, unit)))
            self._threads[-1].start()

    def _connect(self, user: socket.socket, unit: socket.socket) -> None:
        sealed = threading.Event()
        with user, unit, ThreadPoolExecutor(2) as pool:
            pool.submit(self._pass, TO_UNIT, user, unit, sealed)
            pool.submit(self._pass, TO_USER, unit, user, sealed)

    def _pass(
        self, way: str, source: socket.socket, to: socket.socket, sealed: threading.Event
    ) -> None:
        try:
            for number in self._records(way, source, to, sealed):
                length = receive(source, 4)
                frame = length + receive(source, struct.unpack("<I", length)[0] + 16)
                self.seen[way].append(frame)
                for part in self.meddle(way, number, frame):
                    to.sendall(part)
        except Cut as cut:
            to.sendall(cut.args[0])
        except OSError:
            pass
        for sock in (source, to):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _records(
        self, way: str, source: socket.socket, to: socket.socket, sealed: threading.Event
    ) -> Iterator[int]:
        """Pass TLS on, then count frames."""
        while head := source.recv(3, socket.MSG_PEEK | socket.MSG_WAITALL):
            if sealed.is_set() or head[1:2] != b"\x03":
                sealed.set()
                yield from itertools.count()
            head = receive(source, 5)
            record = head + receive(source, int.from_bytes(head[3:], "big"))
            self.seen[way].append(record)
            to.sendall(record)


def receive(sock: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        more = sock.recv(nbytes - len(found))
        if not more:
            raise ConnectionAbortedError
        found += more
    return found


class Relayed(NamedTuple):
    server: ChannelServer
    relay: Relay
    client: ChannelBackend


@contextmanager
def relayed(folder: Path, *, patience_s: float = 5, **named: Any) -> Iterator[Relayed]:
    """A unit, a client of it, and a relay between them."""
    limits = Limits(quiet_s=patience_s)
    with (
        serving(folder, way="tls", limits=limits) as (server, _),
        closing(Relay(server.endpoints[0])) as relay,
        closing(
            ChannelBackend(
                relay.endpoint,
                store_id="s",
                unit="u",
                identity=IDENTITY,
                timeout_s=patience_s,
                **named,
            )
        ) as client,
    ):
        yield Relayed(server, relay, client)


def flip(frame: bytes, at: int, bit: int = 1) -> bytes:
    changed = bytearray(frame)
    changed[at] ^= bit
    return bytes(changed)


def relength(frame: bytes, nbytes: int) -> bytes:
    return struct.pack("<I", struct.unpack("<I", frame[:4])[0] + nbytes) + frame[4:]


CHANGES: dict[str, Callable[[bytes], list[bytes]]] = {
    "a bit of the data": lambda frame: [flip(frame, 4)],
    "the last bit of the data": lambda frame: [flip(frame, -17, 128)],
    "a bit of the tag": lambda frame: [flip(frame, -1)],
    "shorter": lambda frame: [relength(frame, -1)],
    "longer": lambda frame: [relength(frame, 1)],
    "far too long": lambda frame: [flip(frame, 3, 128)],
    "an empty one before it": lambda frame: [bytes(4 + 16), frame],
    "twice": lambda frame: [frame, frame],
    "left out": lambda frame: [],
    "another one before it": lambda frame: [struct.pack("<I", 16) + os.urandom(32), frame],
    "an alert of TLS before it": lambda frame: [b"\x15\x03\x03\0\x13" + os.urandom(19), frame],
    "an update of keys before it": lambda frame: [b"\x17\x03\x03\0\x16" + os.urandom(22), frame],
}


def second_large(way: str, change: Callable[[bytes], list[bytes]]) -> Meddle:
    """Change the second of the large frames that go one way: it is in the middle of a message."""
    large = itertools.count()

    def meddle(of: str, _: int, frame: bytes) -> list[bytes]:
        chosen = of == way and len(frame) > FRAME_BYTES and next(large) == 1
        return change(frame) if chosen else [frame]

    return meddle


def swapped(way: str) -> Meddle:
    """Change places of the second and the third large frame."""
    large = itertools.count()
    held: list[bytes] = []

    def meddle(of: str, _: int, frame: bytes) -> list[bytes]:
        if of != way or len(frame) <= FRAME_BYTES:
            return [frame]
        if next(large) == 1:
            held.append(frame)
            return []
        return [frame, *(held.pop() for _ in held[:])]

    return meddle


@pytest.mark.parametrize("way", [TO_UNIT, TO_USER])
@pytest.mark.parametrize("kind", [*CHANGES, "swapped with the next"])
def test_what_is_done_to_a_frame_ends_its_lane_and_is_told(
    tmp_path: Path, kind: str, way: str
) -> None:
    """In the middle of a large write, or of a large answer; what was there stays as it was."""
    old, new = os.urandom(3 * MiB), os.urandom(3 * MiB)
    with relayed(tmp_path) as (server, relay, client):
        client.put("a", old)
        assert not server.counts.get("malformed")
        relay.meddle = second_large(way, CHANGES[kind]) if kind in CHANGES else swapped(way)
        if way == TO_UNIT:
            with pytest.raises(StorageUnreachable, match="is gone, or not there"):
                client.put("a", new)
            assert eventually(lambda: server.counts.get("malformed") == 1)
        else:
            with pytest.raises(StorageUnreachable, match="was changed on its way"):
                client.get("a")
        relay.meddle = untouched
        assert client.get("a") == old
        assert eventually(lambda: server.lanes == 1)
        assert server.held_bytes == 0


def test_a_part_that_was_asked_for_ahead_and_came_changed_is_asked_for_again(
    tmp_path: Path,
) -> None:
    want = os.urandom(3 * MiB)
    with relayed(tmp_path) as (_, relay, client):
        client.put("a", want)
        relay.meddle = second_large(TO_USER, lambda frame: [flip(frame, 99)])
        got = bytearray(3 * MiB)
        with client.open("a") as source:
            source.ahead(0, 3 * MiB)
            for start in range(0, 3 * MiB, MiB):
                source.readinto([memoryview(got)[start : start + MiB]], start)
        assert got == want


@pytest.mark.parametrize("way", [TO_UNIT, TO_USER])
@pytest.mark.parametrize("keep", [0, 3, 4, 1000], ids=["none", "of the length", "length", "half"])
def test_a_message_that_is_cut_off_is_not_taken_for_whole(
    tmp_path: Path, way: str, keep: int
) -> None:
    """Also between two frames, where the end of a connection is an ordinary one by itself."""
    old = os.urandom(3 * MiB)
    with relayed(tmp_path) as (server, relay, client):
        client.put("a", old)

        def cut(frame: bytes) -> list[bytes]:
            raise Cut(frame[:keep])

        relay.meddle = second_large(way, cut)
        with pytest.raises(StorageUnreachable):
            client.put("a", bytes(3 * MiB)) if way == TO_UNIT else client.get("a")
        relay.meddle = untouched
        assert client.get("a") == old
        assert eventually(lambda: server.lanes == 1)


def test_an_end_between_messages_is_the_ordinary_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with relayed(tmp_path) as (server, relay, client):
        client.put("a", b"x")
        relay.cut()
        assert eventually(lambda: server.lanes == 0)
        assert client.get("a") == b"x"
        assert set(server.counts) == {"requests", "received_bytes", "sent_bytes"}
    assert not [record for record in caplog.records if record.name.startswith("tq_fs.channel")]


@pytest.mark.parametrize("way", [TO_UNIT, TO_USER])
def test_silence_within_a_frame_is_not_waited_for_without_end(tmp_path: Path, way: str) -> None:
    """Also within the first frame of a message; between messages a lane may be silent for long."""
    with relayed(tmp_path, patience_s=0.5) as (server, relay, client):
        client.put("a", b"x")
        assert server.lanes == 1
        assert not eventually(lambda: server.lanes == 0, seconds=1.2)
        for keep in (2, 20):

            def meddle(of: str, _: int, frame: bytes, keep: int = keep) -> list[bytes]:
                return [frame[:keep] if of == way else frame]

            relay.meddle = meddle
            with pytest.raises(StorageUnreachable):
                client.get("a")
            assert eventually(lambda: server.lanes == 0)
            relay.meddle = untouched
            assert client.get("a") == b"x"


def test_nothing_that_is_said_can_be_read_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what is stored, nor names, nor the keys."""
    used = recorded(monkeypatch)
    secret = os.urandom(2 * MiB + 7)
    with relayed(tmp_path) as (_, relay, client):
        client.publish("steps/geheim", {"x": [secret], **MEMBERS})
        assert client.get("steps/geheim/x") == secret
        assert read(client, "steps/geheim/x", MiB) == secret[:MiB]
        assert "steps/geheim/x" in dict(client.walk("steps/geheim"))
        relay.cut()
        seen = b"".join(b"".join(parts) for parts in relay.seen.values())
    assert len(seen) > 2 * len(secret)
    hidden = [secret[at : at + 8] for at in range(0, len(secret) - 8, 999)]
    names = [b"geheim", b"steps", b"zarr.json"]
    keys = {record.key[at : at + 8] for record in used for at in (0, 8, 16, 24)}
    assert len(keys) >= 8
    assert [part for part in (*hidden, *names, *keys) if part in seen] == []


# ---------------------------------------------------------------- keys and numbers


class Used(NamedTuple):
    verb: str
    key: bytes
    nonce: bytes


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Used]:
    """Note the key and the nonce of everything that is sealed or opened from now on."""
    used: list[Used] = []
    kind, invalid = _cipher.load()

    class Recorder:
        def __init__(self, key: bytes) -> None:
            self._key, self._cipher = key, kind(key)

        def encrypt_into(self, nonce: bytes, *rest: Any) -> None:
            used.append(Used("seal", self._key, nonce))
            self._cipher.encrypt_into(nonce, *rest)

        def decrypt_into(self, nonce: bytes, *rest: Any) -> None:
            used.append(Used("open", self._key, nonce))
            self._cipher.decrypt_into(nonce, *rest)

    monkeypatch.setattr(_cipher, "load", lambda: (Recorder, invalid))
    return used


def test_no_number_is_used_twice_with_a_key_and_each_direction_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = recorded(monkeypatch)
    monkeypatch.setattr(_cipher, "_KEY_FRAMES", 5)
    with serving(tmp_path, way="tls") as (server, client):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda i: client.put(f"v/{i}", bytes(MiB + i)), range(24)))
            assert [*pool.map(lambda i: len(client.get(f"v/{i}")), range(24))] == [
                MiB + i for i in range(24)
            ]
        lanes = server.lanes
    sealed = [record[1:] for record in used if record.verb == "seal"]
    assert len(set(sealed)) == len(sealed) > 24 * 4 * 2
    assert {record[1:] for record in used if record.verb == "open"} == set(sealed)
    by_key = defaultdict(set)
    for key, nonce in sealed:
        by_key[key].add(nonce[:4])
    assert all(len(directions) == 1 for directions in by_key.values())
    assert {direction for found in by_key.values() for direction in found} == {b"unit", b"user"}
    assert len(by_key) > 2 * lanes + 24 * 4 * 2 // 5 - 2 * lanes
    assert all(len(key) == 32 for key in by_key)


def test_a_key_is_followed_by_another_one_that_does_not_tell_it() -> None:
    ours, theirs = Secret(bytes(32), b"user"), Secret(bytes(32), b"user")
    for secret in (ours, theirs):
        secret._numbers = itertools.count(_cipher._KEY_FRAMES - 1)
    for expected in (bytes(32), ours._key, None):
        into = memoryview(bytearray(16 + 5))
        ours.seal(b"hello", b"5", into)
        got = memoryview(bytearray(5))
        theirs.open(into, b"5", got)
        assert bytes(got) == b"hello"
        assert expected is None or ours._key == theirs._key
    assert ours._key != bytes(32)
    assert next(ours._numbers) == _cipher._KEY_FRAMES + 2


def test_numbers_do_not_begin_again() -> None:
    for verb in ("seal", "open"):
        secret = Secret(bytes(32), b"user")
        secret._numbers = itertools.count(2**64 - 1)
        with suppress(Forged):
            getattr(secret, verb)(
                bytes(17), b"", memoryview(bytearray(33 if verb == "seal" else 1))
            )
        for _ in range(2):
            with pytest.raises(ConnectionError, match="no more frames"):
                getattr(secret, verb)(bytes(17), b"", memoryview(bytearray(33)))


def test_a_number_is_used_up_by_what_fails() -> None:
    secret = Secret(bytes(32), b"user")
    with pytest.raises(ValueError, match="buffer must be"):
        secret.seal(b"hello", b"", memoryview(bytearray(3)))
    assert next(secret._numbers) == 1


def test_a_key_stays_in_its_process_and_is_not_shown() -> None:
    key = os.urandom(32)
    secret = Secret(key, b"user")
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="stays where it is"):
            way(secret)
    assert not any(word in repr(secret) for word in (key.hex(), repr(key), str(key)))
    child = os.fork()
    if child == 0:
        try:
            secret.seal(b"", b"", memoryview(bytearray(16)))
        except ConnectionError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    secret.seal(b"", b"", memoryview(bytearray(16)))


def test_without_what_seals_nothing_encrypted_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And neither end waits for the first connection to say so."""
    aead = "cryptography.hazmat.primitives.ciphers.aead"

    class Old:
        """Of a version without what it takes."""

    for problem, module in (("not installed", None), ("older than version 47", Old)):
        monkeypatch.setitem(sys.modules, aead, module and type("aead", (), {"AESGCM": Old}))
        for server in (True, False):
            with pytest.raises(DependencyMissing, match=f"{problem}; pip install 'tq-fs"):
                IDENTITY.context(server=server)
        with serving(tmp_path, way="tcp") as (_, client):
            client.put("a", b"x")


# ---------------------------------------------------------------- the handshake


@pytest.mark.parametrize("liar", ["unit", "user"])
def test_nothing_is_sealed_for_who_has_another_identity(
    monkeypatch: pytest.MonkeyPatch, liar: str
) -> None:
    used = recorded(monkeypatch)
    others = Identity.new("s")
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as pool, ours, theirs:
        identity = others if liar == "unit" else IDENTITY
        unit = pool.submit(SealedStream, ours, 5, identity.context(server=True), server=True)
        identity = others if liar == "user" else IDENTITY
        with pytest.raises(OSError, match=r"(?i)certificate|alert"):
            SealedStream(theirs, 5, identity.context(server=False), server=False)
        assert isinstance(unit.exception(5), OSError)
    assert used == []


def test_a_client_of_another_store_is_denied(tmp_path: Path) -> None:
    with serving(tmp_path, way="tls") as (server, _):
        stranger = ChannelBackend(
            server.endpoints[0], store_id="s", unit="u", identity=Identity.new("s"), timeout_s=5
        )
        with closing(stranger), pytest.raises(StorageDenied, match="was refused"):
            stranger.get("a")
        assert eventually(lambda: server.counts.get("refused") == 1)


HEAD = b"tqfk\x01\x01"


@pytest.mark.parametrize(
    "said",
    [
        b"tqfk\x02\x01" + bytes(64),
        b"tqfk\x01\x02" + bytes(64),
        bytes(64),
        HEAD + bytes(63),
        HEAD + bytes(65),
    ],
    ids=["version", "algorithm", "no head", "short", "long"],
)
def test_keys_of_another_kind_are_refused(said: bytes) -> None:
    with half_agreed(lambda tls: tls.write(said)) as user:
        assert isinstance(user, ProtocolMismatch)
        assert "same version of tq-fs everywhere" in str(user)


def test_nothing_may_follow_the_keys_over_tls() -> None:
    def twice(tls: Tls) -> None:
        tls._tls.write(HEAD + os.urandom(64))
        tls.write(b"and")

    with half_agreed(twice) as user:
        assert isinstance(user, Forged)
    with half_agreed(lambda tls: tls.write(HEAD + os.urandom(64))) as user:
        assert isinstance(user, SealedStream)


@contextmanager
def half_agreed(speak: Callable[[Tls], None]) -> Iterator[SealedStream | BaseException | None]:
    """What becomes of a user's end whose unit says something of its own over TLS."""
    ours, theirs = socket.socketpair()
    context = IDENTITY.context(server=False)
    with ThreadPoolExecutor(1) as pool, ours, theirs:
        user = pool.submit(SealedStream, theirs, 5, context, server=False)
        tls = tls_of(ours, server=True)
        tls.shake_hands()
        speak(tls)
        yield user.exception(5) or user.result()


def tls_of(sock: socket.socket, *, server: bool) -> Tls:
    stream = Stream(sock, 5)
    return Tls(
        IDENTITY.context(server=server),
        server=server,
        send=stream.send,
        receive=stream._receive,
        timeout_s=5,
    )


def test_a_user_that_goes_on_over_tls_is_let_go(tmp_path: Path) -> None:
    with serving(tmp_path, way="tls") as (server, client), dial(server) as sock:
        client.put("a", b"x")
        tls = tls_of(sock, server=False)
        agree(tls, server=False)
        assert eventually(lambda: server.lanes == 2)
        tls.write(bytes(5000))
        with suppress(OSError):  # the unit was first
            sock.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            assert sock.recv(1) == b""
        assert eventually(lambda: server.lanes == 1)
        assert client.get("a") == b"x"


def test_a_handshake_has_an_end(tmp_path: Path) -> None:
    """Whoever dribbles is let go, though a byte comes in time again and again."""
    with serving(tmp_path, way="tls", limits=Limits(quiet_s=0.5)) as (server, _):
        with dial(server) as sock, suppress(OSError):
            for byte in b"\x16\x03\x01\x40\0" + bytes(100):
                sock.sendall(bytes([byte]))
                if eventually(lambda: server.counts.get("refused") == 1, seconds=0.1):
                    break
        assert server.counts["refused"] == 1


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=1, max_size=200))
def test_random_bytes_after_the_handshake_do_no_harm(data: bytes) -> None:
    with apart() as (_, unit, _, wire_):
        wire_.sendall(data)
        wire_.shutdown(socket.SHUT_WR)
        got = bytearray(1)
        with pytest.raises(ConnectionError) as caught:
            unit.fill(memoryview(got))
        assert not isinstance(caught.value, Gone)
        assert got == b"\0"
        with pytest.raises(ConnectionError, match="was closed, or broke off"):
            unit.send([memoryview(b"x")])


def dial(server: ChannelServer) -> socket.socket:
    host, _, port = server.endpoints[0].removeprefix("tcp:").rpartition(":")
    return socket.create_connection((host, int(port)), 5)


# ---------------------------------------------------------------- two ends, and what is between


class Apart(NamedTuple):
    """Two ends, and the sockets that they believe to be each other."""

    user: SealedStream
    unit: SealedStream
    by_user: socket.socket
    by_unit: socket.socket


@contextmanager
def apart() -> Iterator[Apart]:
    """Two ends that have shaken hands, and then nobody passes on what they say."""
    user, by_user = socket.socketpair()
    unit, by_unit = socket.socketpair()
    with ThreadPoolExecutor(2) as pool, by_user, by_unit:
        made = [
            pool.submit(SealedStream, sock, 5, IDENTITY.context(server=server), server=server)
            for sock, server in ((user, False), (unit, True))
        ]
        while not all(end.done() for end in made):
            for source, to in ((by_user, by_unit), (by_unit, by_user)):
                source.setblocking(False)
                with suppress(BlockingIOError):
                    to.sendall(source.recv(65536))
                source.setblocking(True)
        ends = [end.result() for end in made]
        with closing(ends[0]), closing(ends[1]):
            yield Apart(ends[0], ends[1], by_user, by_unit)


def frame_of(sock: socket.socket) -> bytes:
    length = receive(sock, 4)
    return length + receive(sock, struct.unpack("<I", length)[0] + 16)


def test_a_frame_that_is_sent_back_is_not_taken() -> None:
    """Both ends send their first frame, of the same number; each gets its own."""
    with apart() as (user, unit, by_user, by_unit):
        for end, sock in ((user, by_user), (unit, by_unit)):
            end.send([memoryview(b"hello")])
            sock.sendall(frame_of(sock))
            with pytest.raises(Forged):
                end.fill(memoryview(bytearray(5)))


def test_a_frame_of_another_connection_is_not_taken() -> None:
    with apart() as one, apart() as other:
        one.user.send([memoryview(b"hello")])
        frame = frame_of(one.by_user)
        other.by_unit.sendall(frame)
        with pytest.raises(Forged):
            other.unit.fill(memoryview(bytearray(5)))
        one.by_unit.sendall(frame)
        one.unit.fill(memoryview(got := bytearray(5)))
        assert got == b"hello"


@pytest.mark.parametrize("nbytes", [0, FRAME_BYTES + 1, 2**32 - 1])
def test_a_length_that_cannot_be_is_refused_before_anything_is_made_for_it(nbytes: int) -> None:
    with apart() as (_, unit, _, by_unit):
        by_unit.sendall(struct.pack("<I", nbytes) + b"more")
        with pytest.raises(Forged, match=f"a frame of {nbytes} bytes, {FRAME_BYTES} are the most"):
            unit.fill(memoryview(bytearray(5)))
        assert len(unit._coming) == len(unit._opened) == 0
        assert unit._socket.recv(9) == b"more"


def test_the_largest_frame_is_taken() -> None:
    data = memoryview(os.urandom(FRAME_BYTES))
    with apart() as (user, unit, by_user, by_unit), ThreadPoolExecutor(1) as pool:
        sent = pool.submit(user.send, [data])
        frame = frame_of(by_user)
        sent.result()
        passed = pool.submit(by_unit.sendall, frame)
        unit.fill(memoryview(got := bytearray(FRAME_BYTES)))
        passed.result()
        assert got == data
        assert len(unit._opened) == 0  # it was opened where it belongs


def test_a_connection_that_broke_off_within_a_frame_says_nothing_more() -> None:
    with apart() as (user, unit, by_user, by_unit):
        user.set_timeout(0.2)
        with pytest.raises(TimeoutError):
            user.send([memoryview(bytes(64 * MiB))])
        with pytest.raises(ConnectionError, match="broke off"):
            user.send([memoryview(b"x")])
        unit.set_timeout(0.2)
        with pytest.raises(TimeoutError):
            unit.begin(memoryview(bytearray(9)))
        by_unit.sendall(frame_of(by_user)[:100])
        with pytest.raises(TimeoutError):
            unit.fill(memoryview(bytearray(9)))
        with pytest.raises(ConnectionError, match="broke off"):
            unit.fill(memoryview(bytearray(9)))


def test_a_wait_that_ends_within_a_frame_is_none_for_a_message() -> None:
    with apart() as (_, unit, _, by_unit):
        unit.set_timeout(0.1)
        with pytest.raises(TimeoutError):
            unit.begin(memoryview(bytearray(9)))
        by_unit.sendall(b"\5\0")
        with pytest.raises(ConnectionError, match="no more came of a frame"):
            unit.begin(memoryview(bytearray(9)))


def test_a_connection_that_was_closed_has_no_keys() -> None:
    with apart() as (user, unit, *_):
        for end in (user, unit):
            assert isinstance(end._sealer, Secret)
            end.close()
            end.close()
            assert end._sealer is end._opener is None


def test_what_was_opened_and_not_asked_for_yet_is_not_idle() -> None:
    with apart() as (user, unit, by_user, by_unit):
        assert unit.is_idle()
        user.send([memoryview(b"hello"), memoryview(b"you")])
        by_unit.sendall(frame_of(by_user))
        assert eventually(lambda: not unit.is_idle())
        assert unit.begin(memoryview(got := bytearray(3))) == 3
        assert not unit.is_idle()
        assert unit.begin(memoryview(bytearray(2))) == 2
        unit.fill(memoryview(bytearray(3)))
        assert (bytes(got), unit.is_idle()) == (b"hel", True)


@settings(deadline=None)
@given(st.lists(st.integers(1, 3 * FRAME_BYTES), max_size=9))
def test_frames_hold_everything_in_order_and_not_too_much(sizes: list[int]) -> None:
    data = memoryview(os.urandom(sum(sizes)))
    ends = list(itertools.accumulate(sizes, initial=0))
    parts = [data[start:end] for start, end in itertools.pairwise(ends)]
    found = list(frames(parts))
    assert b"".join(found) == data
    assert all(0 < len(frame) <= FRAME_BYTES for frame in found)
    assert len(found) <= sum(2 - (-size // FRAME_BYTES) for size in sizes)


def test_reading_a_step_takes_a_few_frames(tmp_path: Path) -> None:
    with relayed(tmp_path) as (_, relay, client):
        client.put("a", bytes(655_360))
        before = {way: len(frames) for way, frames in relay.seen.items()}
        assert read(client, "a", 655_360) == bytes(655_360)
        assert len(relay.seen[TO_UNIT]) - before[TO_UNIT] == 1
        lengths = [len(frame) - 4 - 16 for frame in relay.seen[TO_USER][before[TO_USER] :]]
        assert lengths == [16, FRAME_BYTES, 655_360 - FRAME_BYTES]


def test_small_buffers_share_a_frame_and_large_ones_begin_one() -> None:
    sizes = [60, 655_360, 4, 1500, 8192, 1500, 1500]  # a Step: its header, and its files
    found = [len(frame) for frame in frames([memoryview(bytes(n)) for n in sizes])]
    assert found == [60, FRAME_BYTES, 655_360 - FRAME_BYTES, 4 + 1500 + 8192 + 1500 + 1500]


# ---------------------------------------------------------------- ends that die

UNIT = """
import sys
from tq_fs.backends import LocalBackend
from tq_fs.channel import ChannelServer, Identity
folder, identity = sys.argv[1:]
server = ChannelServer(
    LocalBackend(folder),
    store_id="s",
    unit="u",
    remote=["tcp:127.0.0.1:0"],
    roots=None,
    identity=Identity.load(identity),
)
print(server.endpoints[0], flush=True)
sys.stdin.read()
"""


def has(count: int, done: list[int]) -> bool:
    return len(done) > count


def test_a_unit_that_is_killed_amid_frames_has_whole_objects_or_none(tmp_path: Path) -> None:
    IDENTITY.save(tmp_path / "identity")
    seen: set[int] = set()
    for _ in range(2):
        done: list[int] = []
        with spawn_child(UNIT, tmp_path / "unit", tmp_path / "identity") as child:
            assert child.stdout is not None
            endpoint = child.stdout.readline().strip()
            client = ChannelBackend(
                endpoint, store_id="s", unit="u", identity=IDENTITY, timeout_s=10
            )
            found = set(map(int, client.list("v")))
            assert seen <= found
            for i in found:
                assert client.get(f"v/{i}") == bytes([i % 251]) * 1_300_000

            def write(worker: int, client: ChannelBackend = client, done: list[int] = done) -> None:
                for i in itertools.count(worker, 2):
                    client.put(f"v/{i}", bytes([i % 251]) * 1_300_000)
                    done.append(i)

            with ThreadPoolExecutor(2) as pool:
                writers = [pool.submit(write, i) for i in range(2)]
                assert eventually(functools.partial(has, 20, done))
                child.send_signal(signal.SIGKILL)
                for writer in writers:
                    assert isinstance(writer.exception(20), StorageUnreachable)
            client.close()
            seen |= set(done)


def test_users_that_die_amid_a_frame_give_their_room_back(tmp_path: Path) -> None:
    with relayed(tmp_path) as (server, relay, client):
        client.put("a", b"x")

        def cut(frame: bytes) -> list[bytes]:
            raise Cut(frame[:300_000])

        for _ in range(3):
            relay.meddle = second_large(TO_UNIT, cut)
            with pytest.raises(StorageFailed):
                client.put("b", bytes(3 * MiB))
            assert eventually(lambda: server.held_bytes == server.lanes == 0)
        relay.meddle = untouched
        assert list(client.list("")) == ["a"]
