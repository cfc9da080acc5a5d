"""The conformance suite for backends: inherit it, give it a fixture, and every promise is checked.

>>> import pytest
>>> from tq_fs.backends import LocalBackend
>>> from tq_fs.testing import BackendSuite
>>> class TestMyBackend(BackendSuite):
...     @pytest.fixture
...     def backend(self, tmp_path):
...         backend = LocalBackend(tmp_path)
...         yield backend
...         backend.close()

Needs pytest, which the package itself does not.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest

from tq_fs.backends import Backend
from tq_fs.errors import InvalidKey, ObjectExists, ObjectMissing, ObjectShort, TqFsError

T = TypeVar("T")

MEMBERS = {"part/data": [b"0123456789"], "part/zarr.json": [b"[]"], "zarr.json": [b"{}"]}
"""A small group, shaped like a Step."""

ODD_KEYS = (
    "with space",
    "ünï/çødé/日本",
    "a%2Fb",
    "a:b;c,d",
    "q?*[x]{y}|<>",
    "back\\slash",
    "quote'\"`$HOME",
    "-rf",
    "~",
    "dots..inside/and.behind.",
    "x" * 200,
)
"""Keys without empty or dotted components: legal, however odd."""

INVALID_KEYS = (
    "",
    ".",
    "..",
    "../group",
    "group/..",
    "group/../group",
    "./group",
    "group/./part",
    "group//part",
    "/group",
    "group/",
    ".hidden",
    "group/.hidden",
    "nul\0byte",
)
"""Keys that every method refuses (:meth:`Backend.list` takes ``""``: the root)."""


def read(backend: Backend, key: str, nbytes: int, offset: int = 0) -> bytes:
    """Return `nbytes` of an object from `offset`, by the ranged way."""
    buffer = bytearray(nbytes)
    with backend.open(key) as source:
        source.readinto([buffer], offset)
    return bytes(buffer)


def tree(backend: Backend, prefix: str = "") -> list[str]:
    """Return the keys of all objects below `prefix`, sorted, by listing alone."""
    keys = []
    for name in backend.list(prefix):
        key = f"{prefix}/{name}" if prefix else name
        keys += tree(backend, key) or [key]
    return keys


def below(place: str, *members: str) -> list[str]:
    """Return the keys of a group's members, in the order that :func:`tree` has."""
    return [f"{place}/{member}" for member in sorted(members or MEMBERS)]


def in_threads(count: int, work: Callable[[int], T]) -> list[T]:
    """Return ``work(i)`` of `count` threads that begin together; raise the first failure."""
    start = threading.Barrier(count)

    def begin(i: int) -> T:
        start.wait()
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


class BackendSuite:
    """What every :class:`~tq_fs.backends.Backend` promises.

    A subclass overrides :meth:`backend` with a fixture that gives an empty backend and closes it.
    """

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        """Give an empty backend; override this."""
        raise NotImplementedError("override the backend fixture")

    # ------------------------------------------------------------ publish

    def test_published_members_are_readable(self, backend: Backend) -> None:
        """What was published comes back, member by member, whatever their order."""
        for order in (MEMBERS, dict(reversed(MEMBERS.items()))):
            for _ in range(4):  # a backend may do more for shapes that come again
                place = backend.publish("a/group", order)
                assert place == "a/group" or place.startswith("a/group/")
                assert tree(backend) == below(place)
                assert backend.get(f"{place}/part/data") == b"0123456789"
                assert read(backend, f"{place}/zarr.json", 2) == b"{}"
                backend.delete("a/group")

    @pytest.mark.parametrize(
        "buffers",
        [
            [],
            [b""],
            [np.empty((0, 3), np.float32)],
            [b"ab", bytearray(b"cd"), memoryview(b"ef")],
            [np.arange(6, dtype=np.float32).reshape(2, 3), b"tail"],
            [b"head", np.empty((0, 3), np.float32), b"", b"tail"],
            [bytes([i % 251]) * (1 + i % 3) for i in range(2500)],
            [b"", *[b"xy"] * 1024, np.empty((0, 3), np.float32), b"z"],
            [np.arange(3 * 2**20, dtype=np.uint32), b"tail"],
        ],
        ids=[
            "no buffer",
            "empty buffer",
            "empty array",
            "kinds",
            "array and bytes",
            "empty between",
            "2500 buffers",
            "1025 buffers and an empty one",
            "12 MiB",
        ],
    )
    def test_buffers_are_joined_in_order(self, backend: Backend, buffers: Sequence[object]) -> None:
        """Any number of buffers of any kind make one object; publishing it again succeeds."""
        want = b"".join(
            b.tobytes() if isinstance(b, np.ndarray) else bytes(b)  # type: ignore[call-overload]
            for b in buffers
        )
        for _ in range(2):
            place = backend.publish("g", {"data": buffers, "end": [b"!"], "last": []})
        assert backend.get(f"{place}/data") == want
        assert read(backend, f"{place}/data", len(want)) == want
        with pytest.raises(ObjectShort):
            read(backend, f"{place}/data", 1, len(want))

    def test_a_failed_publish_leaves_nothing_visible(self, backend: Backend) -> None:
        """A member that cannot be written takes those before it along."""
        with pytest.raises((TypeError, AttributeError)):
            backend.publish("a/g", {"first": [b"data"], "second": [object()], "third": []})
        assert tree(backend) == []
        with pytest.raises(ObjectMissing):
            read(backend, "a/g/first", 1)
        place = backend.publish("a/g", {"first": [b"data"], "second": [b"too"], "third": []})
        assert tree(backend) == below(place, "first", "second", "third")

    def test_a_group_appears_at_once(self, backend: Backend) -> None:
        """Whoever sees the last member sees all of them, whole."""
        names = [f"m{i}" for i in range(8)]
        body = np.arange(65536, dtype=np.uint8)
        written, seen = threading.Event(), threading.Event()

        def write() -> None:
            for i in range(2000):
                backend.publish(f"a/{i}", {n: [n.encode(), body] for n in names})
                if i >= 20 and seen.is_set():
                    break

        def watch() -> None:
            while not written.is_set():
                keys = [key for key, _ in backend.walk("a")]
                for place in [k.rpartition("/")[0] for k in keys if k.endswith(names[-1])]:
                    assert [*backend.list(place)] == names
                    for name in (names[-1], names[0]):
                        data = backend.get(f"{place}/{name}")
                        assert data == name.encode() + body.tobytes()
                        seen.set()

        with ThreadPoolExecutor(1) as pool:
            watcher = pool.submit(watch)
            try:
                write()
            finally:
                written.set()
            watcher.result()
        assert seen.is_set()

    def test_equal_content_may_be_published_again(self, backend: Backend) -> None:
        """The acknowledgement was lost; cut into other buffers and in other order it is equal."""
        place = backend.publish("g", MEMBERS, fresh=True)
        cut = {"part/data": [b"01234", b"", b"56789"]}
        for again in (
            MEMBERS,
            MEMBERS | {"zarr.json": [b"{", b"}"]},
            dict(reversed(MEMBERS.items())) | cut,
        ):
            assert backend.publish("g", again) == place
        assert tree(backend) == below(place)

    @pytest.mark.parametrize(
        "other",
        [
            MEMBERS | {"part/data": [b"0123456780"]},
            MEMBERS | {"part/data": [b"012345678"]},
            MEMBERS | {"part/data": [b"0123456789", b"a"]},
            MEMBERS | {"part/data": []},
            {m: MEMBERS[m] for m in ("part/data", "part/zarr.json")},
            {"zarr.json": [b"{}"]},
            MEMBERS | {"more": [b""]},
            {"part": [b"0123456789"], "zarr.json": [b"{}"]},
            {("other" if m == "part/data" else m): MEMBERS[m] for m in MEMBERS},
        ],
        ids=[
            "byte",
            "shorter",
            "longer",
            "empty",
            "one member fewer",
            "one folder fewer",
            "one member more",
            "object for folder",
            "name",
        ],
    )
    def test_other_content_is_refused(
        self, backend: Backend, other: dict[str, list[bytes]]
    ) -> None:
        """A taken prefix stays as it is, and the error names it."""
        place = backend.publish("a/g", MEMBERS)
        with pytest.raises(ObjectExists) as error:
            backend.publish("a/g", other)
        assert "a/g" in error.value.subject
        assert tree(backend) == below(place)
        assert backend.get(f"{place}/part/data") == b"0123456789"
        assert backend.get(f"{place}/zarr.json") == b"{}"

    def test_a_group_does_not_replace_objects(self, backend: Backend) -> None:
        """Not one of its name, nor what lies below it."""
        place = backend.publish("a/g", MEMBERS)
        backend.put("a/value", b"v")
        with pytest.raises(ObjectExists):
            backend.publish("a/value", MEMBERS)
        with pytest.raises(ObjectExists):
            backend.publish("a", MEMBERS)
        assert tree(backend) == [*below(place), "a/value"]
        assert backend.get("a/value") == b"v"

    # ------------------------------------------------------------ small objects

    def test_put_replaces(self, backend: Backend) -> None:
        """The last value counts, whatever its length."""
        for value in (b"first", b"", b"x" * 100_000, b"last"):
            backend.put("a/b/value", value)
            assert backend.get("a/b/value") == value
        assert tree(backend) == ["a/b/value"]

    def test_a_value_is_replaced_at_once(self, backend: Backend) -> None:
        """A reader gets one value or the other, never a mix, a part or nothing."""
        values = [b"a" * 70_000, b"b" * 90_000]
        backend.put("value", values[0])
        done = threading.Event()

        def watch() -> set[bytes]:
            seen = set()
            while not done.is_set():
                seen.add(backend.get("value"))
            return seen

        with ThreadPoolExecutor(1) as pool:
            watcher = pool.submit(watch)
            try:
                for i in range(100):
                    backend.put("value", values[i % 2])
            finally:
                done.set()
            assert watcher.result() <= set(values)

    # ------------------------------------------------------------ ranged reads

    def test_ranges_fill_buffers_one_after_the_other(self, backend: Backend) -> None:
        """Any range, into any buffers."""
        data = np.arange(20_000, dtype=np.uint16)
        raw = data.tobytes()
        place = backend.publish("g", {"data": [data]})
        parts = [bytearray(1), bytearray(0), memoryview(bytearray(7)), bytearray(4)]
        rows = np.empty((5, 3), np.uint16)
        single = [bytearray(1 + i % 2) for i in range(1500)]
        with backend.open(f"{place}/data") as source:
            source.readinto([*parts, rows], 3)
            source.readinto(single, 100)
            source.readinto([], 0)
        assert b"".join([*map(bytes, parts), rows.tobytes()]) == raw[3:45]
        assert b"".join(single) == raw[100 : 100 + sum(map(len, single))]

    def test_a_whole_object_is_read_into_an_array(self, backend: Backend) -> None:
        """More bytes than one small read, from any offset."""
        data = np.random.default_rng(0).integers(0, 256, 9 * 2**20, np.uint8)
        place = backend.publish("g", {"data": [data]})
        out = np.empty(data.size - 12_345, np.uint8)
        with backend.open(f"{place}/data") as source:
            source.readinto([out], 12_345)
        np.testing.assert_array_equal(out, data[12_345:])

    @pytest.mark.parametrize(
        ("offset", "buffers"),
        [(8, [4]), (0, [11]), (10, [2]), (0, [4, 4, 4]), (0, [1] * 1500), (100, [1])],
        ids=["across the end", "whole", "at the end", "several", "many", "beyond"],
    )
    def test_a_short_object_is_named_with_its_size(
        self, backend: Backend, offset: int, buffers: list[int]
    ) -> None:
        """The error says which object ends where, and how far the read would have gone."""
        key = f"{backend.publish('a/g', MEMBERS)}/part/data"
        with backend.open(key) as source, pytest.raises(ObjectShort) as error:
            source.readinto([bytearray(n) for n in buffers], offset)
        assert key in error.value.subject
        assert "10" in error.value.problem.replace(",", " ").split()
        assert str(offset + sum(buffers)) in error.value.problem.split()

    def test_absence_raises(self, backend: Backend) -> None:
        """No object, no default; a prefix is no object either."""
        place = backend.publish("a/g", MEMBERS)
        for key in ("nothing", "a/nothing", f"{place}/part/data/deeper", f"{place}/nothing"):
            with pytest.raises(ObjectMissing) as error:
                read(backend, key, 1)
            assert key in error.value.subject
            with pytest.raises(ObjectMissing):
                backend.get(key)
        for key in ("a", place, f"{place}/part"):
            with pytest.raises(ObjectMissing):
                read(backend, key, 1)
            with pytest.raises(ObjectMissing):
                backend.get(key)

    # ------------------------------------------------------------ list and delete

    def test_listing_gives_immediate_children_sorted(self, backend: Backend) -> None:
        """Names below a prefix, not below those; nothing where there is nothing."""
        places = {k: backend.publish(k, MEMBERS) for k in ("a/10", "a/9", "a/b/c", "a/B", "ab/x")}
        backend.put("a/value", b"")
        assert [*backend.list("")] == ["a", "ab"]
        assert [*backend.list("a")] == ["10", "9", "B", "b", "value"]
        assert [*backend.list(places["a/10"])] == ["part", "zarr.json"]
        for absent in ("nothing", "a/nothing/deeper", "a/value", f"{places['a/9']}/zarr.json"):
            assert [*backend.list(absent)] == []

    def test_walking_gives_all_keys_with_their_sizes(self, backend: Backend) -> None:
        """Whatever their depth; not those of a neighbour with a similar name."""
        for key in ("a/10", "a/b/c", "a-b/x", "ab/x"):
            backend.publish(key, MEMBERS)
        backend.put("a/value", b"12345")
        assert sorted(key for key, _ in backend.walk("")) == sorted(tree(backend))
        found = dict(backend.walk("a"))
        assert sorted(found) == sorted(tree(backend, "a"))
        assert found["a/value"] == 5
        assert sorted(found.values()) == [2, 2, 2, 2, 5, 10, 10]
        for absent in ("nothing", "a/value", "a/nothing/deeper"):
            assert [*backend.walk(absent)] == []

    def test_delete_removes_everything_below(self, backend: Backend) -> None:
        """Groups, objects and whole prefixes; neighbours with a similar name stay."""
        keys = ("a/b/1", "a/b/2", "a/bb", "c/1")
        places = {key: backend.publish(key, MEMBERS) for key in keys}
        backend.put("a/value", b"v")
        assert backend.delete("a/value")
        assert backend.delete("a/b")
        assert tree(backend) == [*below(places["a/bb"]), *below(places["c/1"])]
        for key in ("a/value", f"{places['a/b/1']}/zarr.json", f"{places['a/b/2']}/part/data"):
            with pytest.raises(ObjectMissing):
                read(backend, key, 1)
        assert backend.delete("a")
        assert backend.delete("c/1")
        assert [*backend.walk("")] == []
        assert tree(backend) in ([], ["a"], ["c"], ["a", "c"])  # empty folders may stay, or go

    def test_delete_is_idempotent(self, backend: Backend) -> None:
        """It says whether there was something, and frees the key."""
        assert not backend.delete("a/g")
        place = backend.publish("a/g", MEMBERS)
        assert backend.delete("a/g")
        assert not backend.delete("a/g")
        assert not backend.delete(f"{place}/part/data")
        place = backend.publish("a/g", {"zarr.json": [b"other"]})
        assert not backend.delete(f"{place}/zarr.json/deeper")
        assert tree(backend) == below(place, "zarr.json")

    # ------------------------------------------------------------ keys

    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_odd_keys_are_taken_literally(self, backend: Backend, key: str) -> None:
        """A key is text, not a pattern, path expression or option."""
        place = backend.publish(f"p/{key}", {"m": [b"group"]})
        backend.put(f"v/{key}", b"value")
        assert tree(backend) == [f"{place}/m", f"v/{key}"]
        assert backend.get(f"{place}/m") == b"group"
        assert read(backend, f"v/{key}", 5) == b"value"
        assert backend.delete(f"p/{key}")
        assert backend.delete(f"v/{key}")
        assert not backend.delete(f"v/{key}")

    @pytest.mark.parametrize("key", INVALID_KEYS)
    def test_invalid_keys_are_refused_by_every_method(self, backend: Backend, key: str) -> None:
        """Also where the same object could be reached by another spelling of its key."""
        place = backend.publish("group", MEMBERS)
        calls: list[Callable[[], object]] = [
            lambda: backend.publish(key, MEMBERS),
            lambda: backend.publish(f"{key}/new", MEMBERS),
            lambda: backend.put(key, b"x"),
            lambda: backend.get(f"{key}/zarr.json"),
            lambda: backend.open(key),
            lambda: backend.open(f"{key}/zarr.json"),
            lambda: backend.delete(key),
            lambda: [*backend.walk(key)] if key else backend.open(key),
        ]
        if key:
            calls.append(lambda: [*backend.list(key)])
        accepted = [i for i, call in enumerate(calls) if not _refuses(call)]
        assert accepted == []
        assert tree(backend) == below(place)

    @pytest.mark.parametrize("member", ["", "..", "../other", "a//b", "/a", "a/", "./a", ".a"])
    def test_invalid_member_names_are_refused(self, backend: Backend, member: str) -> None:
        """A member's key is its group's and its own name; it cannot leave the group."""
        with pytest.raises(InvalidKey):
            backend.publish("a/group", {"ok": [b"x"], member: [b"x"]})
        assert tree(backend) == []

    # ------------------------------------------------------------ many threads

    def test_one_of_many_contents_wins_a_key(self, backend: Backend) -> None:
        """All others are refused; no mix of two appears."""

        def publish(round_: int) -> Callable[[int], str]:
            def mine(i: int) -> str:
                content = {n: [bytes([i]) * 5000] for n in ("a", "b", "c")}
                try:
                    return backend.publish(f"k/{round_}", content)
                except ObjectExists:
                    return ""

            return mine

        for round_ in range(10):
            places = in_threads(8, publish(round_))
            (winner,) = [i for i, place in enumerate(places) if place]
            for name in ("a", "b", "c"):
                assert backend.get(f"{places[winner]}/{name}") == bytes([winner]) * 5000

    def test_equal_content_from_many_threads_succeeds(self, backend: Backend) -> None:
        """A retry may overtake the try before it."""
        for i in range(10):
            places = in_threads(8, lambda _, i=i: backend.publish(f"a/b/{i}", MEMBERS))  # type: ignore[misc]
            assert len(set(places)) == 1
            assert tree(backend, f"a/b/{i}") == below(places[0])

    def test_many_threads_publish_many_keys(self, backend: Backend) -> None:
        """Nothing is lost, nothing ends in another's place."""

        def publish(i: int) -> None:
            for j in range(25):
                backend.publish(f"s/{i % 3}/{i}-{j}", {"data": [f"{i}-{j}".encode()], "z": [b""]})

        in_threads(8, publish)
        keys = [k for k, _ in backend.walk("") if k.endswith("/data")]
        assert len(keys) == 200
        assert all(backend.get(k).decode() == k.split("/")[2] for k in keys)

    def test_siblings_may_be_deleted_while_others_are_published(self, backend: Backend) -> None:
        """A folder that a delete leaves empty may vanish under a publish, which must not mind."""

        def come_and_go(i: int) -> None:
            for j in range(60):
                key = f"steps/part/session/incarnation/{i}-{j}"
                place = backend.publish(key, MEMBERS)
                assert backend.get(f"{place}/part/data") == b"0123456789"
                assert backend.delete(key)

        in_threads(4, come_and_go)
        assert [*backend.walk("")] == []

    # ------------------------------------------------------------ life

    def test_pickles_as_configuration(self, backend: Backend) -> None:
        """A copy, as another process gets it, reads and writes the same data."""
        place = backend.publish("a/g", MEMBERS)
        copy: Backend = pickle.loads(pickle.dumps(backend))
        try:
            assert copy.get(f"{place}/part/data") == b"0123456789"
            other = copy.publish("a/h", MEMBERS)
            copy.put("value", b"v")
        finally:
            copy.close()
        assert read(backend, f"{other}/zarr.json", 2) == b"{}"
        assert backend.get("value") == b"v"

    def test_says_how_large_a_fast_read_is(self, backend: Backend) -> None:
        """Readers plan their requests by it."""
        assert 0 < backend.request_bytes <= 64 * 2**20

    def test_sync_and_close_may_be_called_again(self, backend: Backend) -> None:
        """Neither takes anything away."""
        backend.sync()
        place = backend.publish("g", MEMBERS)
        backend.sync()
        backend.sync()
        backend.settle("g")
        backend.settle("")
        backend.cool(["g", "nothing"])
        assert not backend.distrust("nothing/at/all") or backend.get(f"{place}/part/data")
        assert backend.get(f"{place}/zarr.json") == b"{}"
        backend.close()
        backend.close()


def _refuses(call: Callable[[], object]) -> bool:
    try:
        call()
    except InvalidKey:
        return True
    except TqFsError:
        return False
    return False
