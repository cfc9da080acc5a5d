"""LocalBackend: the suite, and what only a local file system can do to it."""

from __future__ import annotations

import errno
import itertools
import os
import queue
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import pytest

from tq_fs.backends import Backend, LocalBackend, _durability
from tq_fs.backends._durability import GroupSync
from tq_fs.errors import (
    InvalidConfig,
    InvalidKey,
    ObjectExists,
    ObjectMissing,
    StorageDenied,
    StorageFailed,
    StorageFull,
    TqFsError,
)
from tq_fs.testing import MEMBERS, BackendSuite, in_threads, read, tree

AHEAD = (0, 4)
DURABILITY = ("none", "batch", "step")


def staged(root: Path) -> list[str]:
    return sorted(os.listdir(root / ".staging"))


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def in_order(count: int, call: Callable[[int], None]) -> None:
    for i in range(count):
        call(i)


class TestLocalBackend(BackendSuite):
    @pytest.fixture(
        params=[(d, a) for d in DURABILITY for a in AHEAD], ids=lambda p: f"{p[0]}-ahead{p[1]}"
    )
    def backend(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
        durability, ahead = request.param
        backend = LocalBackend(tmp_path / "root", durability=durability, ahead=ahead)
        yield backend
        backend.close()
        assert staged(tmp_path / "root") == []


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[LocalBackend]:
    backend = LocalBackend(tmp_path / "root", ahead=4)
    yield backend
    backend.close()


# ---------------------------------------------------------------- keys and descriptors


def test_a_path_outside_of_the_root_is_no_key(backend: LocalBackend, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    secret = tmp_path / "outside" / "secret"
    secret.write_text("secret")
    for call in (
        backend.open,
        backend.get,
        backend.delete,
        lambda key: backend.put(key, b""),
        lambda key: backend.publish(key, MEMBERS),
    ):
        with pytest.raises(InvalidKey):
            call(str(secret))
    with pytest.raises(InvalidKey):
        list(backend.list(str(tmp_path)))
    with pytest.raises(InvalidKey):
        backend.open("../outside/secret")
    assert secret.read_text() == "secret"


def test_hidden_names_are_not_listed(backend: LocalBackend) -> None:
    backend.publish("a/g", MEMBERS)
    (backend.root / ".hidden").mkdir()
    (backend.root / "a" / ".nfs0001").touch()
    assert tree(backend) == [f"a/g/{m}" for m in MEMBERS]


def test_folders_that_a_delete_leaves_empty_go_with_it(backend: LocalBackend) -> None:
    """Else years of sessions leave a folder each."""
    for key in ("steps/part/a/1/0", "steps/part/b/1/0"):
        backend.publish(key, MEMBERS)
    backend.delete("steps/part/a/1/0")
    assert list(backend.list("steps/part")) == ["b"]
    backend.delete("steps/part/b/1/0")
    assert list(backend.list("steps")) == []


def test_unknown_durability_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="none, batch, step"):
        LocalBackend(tmp_path / "root", durability="fsync")
    assert not (tmp_path / "root").exists()


def test_nothing_leaks(tmp_path: Path) -> None:
    before, threads = open_descriptors(), threading.active_count()
    backend = LocalBackend(tmp_path, ahead=4)
    shapes = [{f"m{i}/data": [b"x"], "y": [b""], "z": [b"{}"]} for i in range(6)]
    for i in range(120):
        backend.publish(f"a/{i}", shapes[i % 6] if i % 3 else shapes[0])
        with pytest.raises((TypeError, AttributeError)):
            backend.publish(f"b/{i}", {"m0/data": [b"x"], "y": [b""], "z": [object()]})
        if i % 2:
            backend.publish(f"a/{i}", shapes[i % 6] if i % 3 else shapes[0])
            backend.delete(f"a/{i}")
        with pytest.raises(ObjectMissing):
            backend.open("a/nothing")
        read(backend, "a/0/z", 2)
        list(backend.list("a"))
    assert len(staged(tmp_path)) <= 5 * 4, "ready groups are bounded, whatever the shapes"
    backend.close()
    assert staged(tmp_path) == []
    assert open_descriptors() == before
    assert threading.active_count() == threads
    assert len(os.listdir(tmp_path / "a")) == 60


def test_alternating_shapes_from_many_threads(backend: LocalBackend) -> None:
    def publish(i: int) -> None:
        for j in range(40):
            names = [f"f{k}/c.0" for k in range((i + j) % 7 + 1)]
            backend.publish(f"{i}/{j}", {n: [n.encode(), b"%d-%d" % (i, j)] for n in names})

    in_threads(6, publish)
    for i in range(6):
        for j in range(40):
            names = [f"f{k}/c.0" for k in range((i + j) % 7 + 1)]
            assert tree(backend, f"{i}/{j}") == [f"{i}/{j}/{n}" for n in names]
            assert all(
                backend.get(f"{i}/{j}/{n}") == b"%s%d-%d" % (n.encode(), i, j) for n in names
            )
    backend.close()
    assert staged(backend.root) == []


def shape(kind: int, members: int = 4) -> dict[str, list[bytes]]:
    return {f"{kind}/{i}": [b"x"] for i in range(members)}


def ready(root: Path) -> int:
    """Return how many groups are ready once no more are made."""
    before, now = -1, len(staged(root))
    deadline = time.monotonic() + 20
    while now != before and time.monotonic() < deadline:
        time.sleep(0.2)
        before, now = now, len(staged(root))
    return now


def test_groups_of_all_shapes_are_made_ahead(tmp_path: Path) -> None:
    """Also after one without members, which is nothing to make."""
    backend = LocalBackend(tmp_path, ahead=4)
    for i, members in enumerate([{}, {}, {}, MEMBERS, MEMBERS, MEMBERS]):
        backend.publish(f"a/{i}", members)
    assert ready(tmp_path) == 4, "a writer need not make its own"
    backend.close()


@pytest.mark.parametrize("members", [0, 1, 2])
def test_small_groups_are_not_made_ahead(tmp_path: Path, members: int) -> None:
    backend = LocalBackend(tmp_path, ahead=4)
    for i in range(6):
        backend.publish(f"a/{i}", shape(0, members))
    assert ready(tmp_path) == 0
    backend.close()


def test_all_shapes_together_have_so_many_groups_ahead(tmp_path: Path) -> None:
    """Whether they come one after the other or in turn; a shape that went leaves none."""
    numbers = itertools.count()
    backend = LocalBackend(tmp_path, ahead=8)

    def publish(kind: int) -> None:
        backend.publish(f"a/{next(numbers)}", shape(kind))

    in_order(3, lambda _: publish(0))
    assert ready(tmp_path) == 8
    for kind in (1, 2, 3, 4, 4, 4):  # the first shape goes with all its groups ready
        publish(kind)
    assert 0 < ready(tmp_path) <= 8
    for kind in range(5):
        in_order(3, lambda _, kind=kind: publish(kind))  # type: ignore[misc]
        assert 0 < ready(tmp_path) <= 8
    for kinds in (2, 3, 7):
        in_order(60, lambda i, kinds=kinds: publish(i % kinds))  # type: ignore[misc]
        assert ready(tmp_path) <= 8
    backend.close()
    assert staged(tmp_path) == []


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """Let the process open few files; give the share of them that may be held."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (320, hard))
    yield 320 // 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("members", [5, 13, 41])
def test_an_eighth_of_the_descriptors_is_held_at_most(
    tmp_path: Path, few_descriptors: int, members: int
) -> None:
    before = open_descriptors()
    backend = LocalBackend(tmp_path, ahead=32)
    own = len(open_descriptors()) - len(before)
    for i in range(6):
        backend.publish(f"a/{i}", shape(0, members))
    assert ready(tmp_path) == few_descriptors // members
    held = len(open_descriptors()) - len(before) - own
    assert held == few_descriptors // members * members
    for i in range(6, 12):
        backend.publish(f"a/{i}", shape(1, members))
    ready(tmp_path)
    assert len(open_descriptors()) - len(before) - own <= few_descriptors, "of all shapes"
    backend.close()
    assert open_descriptors() == before


def test_a_deleted_group_stays_readable_where_it_is_open(backend: LocalBackend) -> None:
    backend.publish("a/old", {"data": [b"old bytes"]})
    buffer = bytearray(9)
    with backend.open("a/old/data") as source:
        assert backend.delete("a/old")
        for i in range(100):
            backend.publish(f"a/{i}", {"data": [b"NEW BYTES"]})
        source.readinto([buffer], 0)
    assert buffer == b"old bytes"


def test_a_closed_backend_does_not_reach_into_another(tmp_path: Path) -> None:
    closed = LocalBackend(tmp_path / "closed", ahead=0)
    closed.publish("g", MEMBERS)
    closed.close()
    other = LocalBackend(tmp_path / "other", ahead=0)  # gets the same descriptors
    other.publish("secret", MEMBERS)
    for call in (
        lambda: closed.open("secret/zarr.json"),
        lambda: closed.get("secret/zarr.json"),
        lambda: list(closed.list("")),
        lambda: closed.publish("h", MEMBERS),
        lambda: closed.put("value", b"v"),
        lambda: closed.delete("secret"),
    ):
        with pytest.raises(TqFsError):
            call()
    assert tree(other) == [f"secret/{m}" for m in MEMBERS]
    assert staged(tmp_path / "other") == []
    other.close()


def test_a_read_only_backend_reads_and_touches_nothing(backend: LocalBackend) -> None:
    with pytest.raises(ObjectMissing):
        LocalBackend(backend.root / "nothing", read_only=True)
    assert not (backend.root / "nothing").exists()
    backend.publish("a/g", MEMBERS)
    reader = LocalBackend(backend.root, read_only=True)
    assert reader.get("a/g/zarr.json") == b"{}"
    assert tree(reader) == tree(backend) == [f"a/g/{m}" for m in MEMBERS]
    for call in (
        lambda: reader.publish("a/h", MEMBERS),
        lambda: reader.put("value", b"v"),
        lambda: reader.delete("a/g"),
    ):
        with pytest.raises(TqFsError):
            call()
    assert tree(backend) == [f"a/g/{m}" for m in MEMBERS]
    reader.close()


def test_a_parent_that_vanishes_while_it_is_made_is_made_again(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a delete of the last sibling does, at the worst moment."""
    mkdir = os.mkdir
    vanished: list[str] = []

    def make_and_lose(path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        mkdir(path, mode, dir_fd=dir_fd)
        if path == "steps/a" and not vanished:
            os.rmdir(path, dir_fd=dir_fd)
            vanished.append(path)

    monkeypatch.setattr(os, "mkdir", make_and_lose)
    backend.publish("steps/a/b/0", MEMBERS)
    assert vanished
    assert tree(backend) == [f"steps/a/b/0/{m}" for m in MEMBERS]


# ---------------------------------------------------------------- a device that fails


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a small file system, or mount it again with other options."""
    folder = tmp_path / "device"
    folder.mkdir()

    if shutil.which("mount") is None:
        pytest.skip("has no mount command")

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 and not folder.is_mount():
            pytest.skip(f"may not mount a file system: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # also if files leak


@pytest.mark.root
@pytest.mark.parametrize("durability", DURABILITY)
@pytest.mark.parametrize("ahead", AHEAD)
def test_a_full_device_leaves_nothing_and_takes_the_retry(
    device: Callable[[str], Path], durability: str, ahead: int
) -> None:
    root = device("size=1m")
    backend = LocalBackend(root, durability=durability, ahead=ahead)
    half, large = (
        {"m/data": [b"o" * 600_000], "m/z": [b""], "z": [b"{}"]},
        {"m/data": [b"n" * 700_000], "m/z": [b""], "z": [b"{}"]},
    )
    try:
        backend.publish("a/old", half)
        for _ in range(3):
            with pytest.raises(StorageFull) as error:
                backend.publish("a/new", large)
        assert "a/new" in error.value.subject
        assert "release" in error.value.remedy
        with pytest.raises(StorageFull):
            backend.put("value", b"n" * 700_000)
        assert tree(backend) == ["a/old/m/data", "a/old/m/z", "a/old/z"]
        used = sum(f.stat().st_size for f in (root / ".staging").rglob("*") if f.is_file())
        assert used == 0
        assert ahead or staged(root) == []
        backend.delete("a/old")
        backend.publish("a/new", large)
        assert backend.get("a/new/m/data") == b"n" * 700_000
    finally:
        backend.close()
    assert staged(root) == []


def fill(path: Path) -> None:
    """Take all room of a file system, to the last page."""
    with path.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"f" * 4096)


@pytest.mark.root
@pytest.mark.parametrize("durability", DURABILITY)
def test_a_small_object_finds_room_on_a_full_device(
    device: Callable[[str], Path], durability: str
) -> None:
    """Once: without a release record nothing can be released, which makes room for the next."""
    root = device("size=1m")
    backend = LocalBackend(root, durability=durability, ahead=0)
    try:
        backend.publish("a/g", {"data": [b"x" * 400_000]})
        assert backend.sweep() == 0
        assert staged(root) == ["reserve"]
        for value in (b"first", b"second"):
            fill(root / ".filler")
            with pytest.raises(StorageFull):
                backend.publish("a/h", MEMBERS)
            with pytest.raises(StorageFull):
                backend.put("value", value)  # makes no room, and gets none
            backend.put("value", value, urgent=True)
            assert backend.get("value") == value
            fill(root / ".filler")
            with pytest.raises(StorageFull):
                backend.put("other", value, urgent=True)
            assert staged(root) == []
            assert not backend.delete("nothing")
            assert staged(root) == []
            assert backend.delete("a/g")
            assert staged(root) == ["reserve"]
            assert (root / ".staging" / "reserve").stat().st_blocks * 512 >= 256 * 1024
            (root / ".filler").unlink()
            backend.publish("a/g", {"data": [b"x" * 400_000]})
    finally:
        backend.close()
    assert staged(root) == []


def test_a_value_does_not_replace_a_group(backend: LocalBackend) -> None:
    backend.publish("a/g", MEMBERS)
    with pytest.raises(ObjectExists, match="prefix"):
        backend.put("a/g", b"v")
    assert tree(backend) == [f"a/g/{member}" for member in MEMBERS]


def test_a_key_may_hold_a_line_break(backend: LocalBackend) -> None:
    backend.publish("p/line\nbreak", {"m": [b"group"]})
    backend.put("v/line\nbreak", b"value")
    assert tree(backend) == ["p/line\nbreak/m", "v/line\nbreak"]
    assert backend.get("v/line\nbreak") == b"value"


@pytest.mark.root
def test_no_room_is_kept_before_a_sweep(device: Callable[[str], Path]) -> None:
    """Only the one process that writes may sweep, and keeps it."""
    root = device("size=1m")
    backend = LocalBackend(root)
    try:
        fill(root / ".filler")
        with pytest.raises(StorageFull):
            backend.put("value", b"v")
        (root / ".filler").unlink()
        backend.put("value", b"v")
        assert backend.delete("value")
        assert staged(root) == []
    finally:
        backend.close()


@pytest.mark.root
@pytest.mark.parametrize("ahead", AHEAD)
def test_a_device_without_inodes_is_full(device: Callable[[str], Path], ahead: int) -> None:
    root = device("size=1m,nr_inodes=30")
    backend = LocalBackend(root, ahead=ahead)
    try:
        with pytest.raises(StorageFull):
            in_order(30, lambda i: [backend.publish(f"a/{i}", MEMBERS)].clear())
        whole = len(list(backend.list("a")))
        assert 0 < whole < 30
        assert len(tree(backend)) == whole * len(MEMBERS)
        backend.delete("a")
        backend.publish("a/again", MEMBERS)
    finally:
        backend.close()
    assert staged(root) == []


@pytest.mark.root
@pytest.mark.parametrize("ahead", AHEAD)
def test_a_read_only_device_denies_writes_and_still_reads(
    device: Callable[[str], Path], ahead: int
) -> None:
    root = device("size=1m")
    backend = LocalBackend(root, ahead=ahead)
    try:
        backend.publish("a/g", MEMBERS)
        device("remount,ro")
        for call in (
            lambda: backend.publish("a/h", MEMBERS),
            lambda: backend.put("value", b"v"),
            lambda: backend.delete("a/g"),
        ):
            with pytest.raises(StorageDenied) as error:
                call()
            assert "mount options" in error.value.remedy
        assert tree(backend) == [f"a/g/{m}" for m in MEMBERS]
        assert read(backend, "a/g/part/data", 10) == b"0123456789"
        device("remount,rw")
        backend.publish("a/h", MEMBERS)
    finally:
        backend.close()


# ---------------------------------------------------------------- a process that is killed

WRITER = """
import os, signal, sys
from tq_fs.backends import LocalBackend
from tq_fs.testing import MEMBERS

root, ahead, target = sys.argv[1], int(sys.argv[2]), sys.argv[3]
armed = False

def at(point):
    if armed and point == target:
        os.kill(os.getpid(), signal.SIGKILL)

backend = LocalBackend(root, durability="step", ahead=ahead, at=at)
for i in range(3):
    backend.publish(f"before/{i}", MEMBERS)
backend.publish("a/old", MEMBERS)
backend.put("a/value", b"old")
armed = True
backend.publish("a/b/new", MEMBERS)
backend.put("a/value", b"new")
backend.delete("a/old")
"""


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("point", LocalBackend.POINTS)
def test_a_killed_process_leaves_whole_groups_only(tmp_path: Path, point: str, ahead: int) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(ahead), point]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, f"{point!r} was not reached: {done.stderr}"

    reached = LocalBackend.POINTS.index(point)
    new = reached >= LocalBackend.POINTS.index("renamed")
    value = b"new" if reached > LocalBackend.POINTS.index("value written") else b"old"
    old = reached < LocalBackend.POINTS.index("delete renamed")
    backend = LocalBackend(tmp_path, durability="step", ahead=ahead)
    try:
        groups = ["a/b/new"] * new + ["a/old"] * old
        assert tree(backend, "a") == [*(f"{g}/{m}" for g in groups for m in MEMBERS), "a/value"]
        for group in [*groups, "before/0", "before/1", "before/2"]:
            assert all(backend.get(f"{group}/{m}") == b"".join(b) for m, b in MEMBERS.items())
        assert backend.get("a/value") == value

        left = len(staged(tmp_path))
        assert left or point in ("renamed", "acknowledged", "value renamed", "value acknowledged")
        assert backend.sweep() == left
        assert staged(tmp_path) == ["reserve"]

        backend.publish("a/b/new", MEMBERS)
        backend.put("a/value", b"new")
        assert backend.delete("a/old") == old
        assert tree(backend, "a") == [*(f"a/b/new/{m}" for m in MEMBERS), "a/value"]
        assert backend.get("a/b/new/part/data") == b"0123456789"
        assert backend.get("a/value") == b"new"
    finally:
        backend.close()
    assert staged(tmp_path) == []


# ---------------------------------------------------------------- durability


class Recorder:
    """The points a backend passes, and the syncs that really happen between them."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.lose_at = ""
        self.failure: OSError | None = None
        self.fails = ""  # the one sync that does; all, where it is empty
        self._root = root
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))
        real = _durability.sync_file_system
        monkeypatch.setattr(_durability, "sync_file_system", self._wrap("syncfs", real))

    def at(self, point: str) -> None:
        self.events.append(point)
        if point == self.lose_at:
            raise ConnectionAbortedError(point)

    def between(self, first: str, last: str) -> set[str]:
        start = self.events.index(first)
        return set(self.events[start + 1 : self.events.index(last, start)])

    def syncs(self) -> set[str]:
        return {e for e in self.events if e not in LocalBackend.POINTS}

    def _wrap(self, name: str, call: Callable[[int], None]) -> Callable[[int], None]:
        def sync(fd: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            hidden = ".staging" in path.parts
            self.events.append(
                f"{name} {'staged' if hidden else os.path.relpath(path, self._root)}"
            )
            if self.failure is not None and self.fails in ("", self.events[-1]):
                raise self.failure
            call(fd)

        return sync


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(tmp_path, monkeypatch)


def test_none_syncs_nothing(tmp_path: Path, recorder: Recorder) -> None:
    backend = LocalBackend(tmp_path, durability="none", at=recorder.at)
    backend.publish("a/b/g", MEMBERS)
    backend.put("a/value", b"v")
    assert recorder.syncs() == set()
    backend.sync()
    assert recorder.syncs() == {"syncfs ."}
    backend.close()


@pytest.mark.parametrize("durability", ["batch", "step"])
def test_the_root_itself_is_synced_when_it_is_opened(
    tmp_path: Path, recorder: Recorder, durability: str
) -> None:
    LocalBackend(tmp_path, durability=durability, at=recorder.at).close()
    assert recorder.syncs() == {"fsync .", "fsync .."}


def test_batch_syncs_the_file_system_before_the_acknowledgement(
    tmp_path: Path, recorder: Recorder
) -> None:
    backend = LocalBackend(tmp_path, durability="batch", at=recorder.at)
    backend.publish("a/b/g", MEMBERS)
    assert recorder.between("renamed", "acknowledged") == {"syncfs ."}
    recorder.events.clear()
    backend.put("a/value", b"v")
    assert recorder.events == [
        "value written",
        "value renamed",
        "syncfs .",
        "value acknowledged",
    ]
    backend.close()


def test_step_syncs_files_before_the_rename_and_folders_after(
    tmp_path: Path, recorder: Recorder
) -> None:
    backend = LocalBackend(tmp_path, durability="step", at=recorder.at)
    recorder.events.clear()
    backend.publish("a/b/g", MEMBERS)
    assert recorder.events == [
        "staged",
        *["fdatasync staged"] * len(MEMBERS),
        "members written",
        *["fsync staged"] * 2,
        "members synced",
        "renamed",
        *("fsync a/b", "fsync a", "fsync ."),
        "acknowledged",
    ]
    recorder.events.clear()
    backend.put("a/value", b"v")
    assert recorder.between("value renamed", "value acknowledged") == {"fsync a"}
    assert recorder.events[:3] == ["fdatasync staged", "value written", "value renamed"]
    recorder.events.clear()
    backend.put("value", b"v")
    assert recorder.between("value renamed", "value acknowledged") == {"fsync ."}
    assert recorder.events[:3] == ["fdatasync staged", "value written", "value renamed"]
    backend.close()


def test_a_folder_s_own_entry_is_synced_once_and_again_when_it_is_made_anew(
    tmp_path: Path, recorder: Recorder
) -> None:
    backend = LocalBackend(tmp_path, durability="step", at=recorder.at)

    def folders(key: str) -> list[str]:
        recorder.events.clear()
        backend.publish(key, MEMBERS)
        return [e for e in recorder.events if e.startswith("fsync ") and e != "fsync staged"]

    assert folders("a/b/0") == ["fsync a/b", "fsync a", "fsync ."]
    assert folders("a/b/1") == ["fsync a/b"]
    assert folders("a/c/0") == ["fsync a/c", "fsync a"]
    assert backend.delete("a/c/0")
    assert not (tmp_path / "a/c").exists()
    assert folders("a/c/0") == ["fsync a/c", "fsync a"]
    assert backend.delete("a")
    assert folders("a/b/0") == ["fsync a/b", "fsync a", "fsync ."]
    backend.close()


@pytest.mark.parametrize("made_by", ["somebody", "a lost publish"])
def test_folders_that_were_there_are_synced_before_the_acknowledgement(
    tmp_path: Path, recorder: Recorder, made_by: str
) -> None:
    """Whoever made them may not have come to sync them."""
    backend = LocalBackend(tmp_path, durability="step", at=recorder.at)
    if made_by == "somebody":
        (tmp_path / "a" / "b").mkdir(parents=True)
    else:
        recorder.lose_at = "renamed"
        with pytest.raises(StorageFailed):
            backend.publish("a/b/lost", MEMBERS)
        recorder.lose_at = ""
    recorder.events.clear()
    backend.publish("a/b/g", MEMBERS)
    assert recorder.between("renamed", "acknowledged") == {"fsync a/b", "fsync a", "fsync ."}
    backend.close()


def test_a_folder_whose_sync_failed_is_synced_again(tmp_path: Path, recorder: Recorder) -> None:
    backend = LocalBackend(tmp_path, durability="step", at=recorder.at)
    recorder.failure, recorder.fails = OSError(errno.EIO, os.strerror(errno.EIO)), "fsync ."
    with pytest.raises(StorageFailed):
        backend.publish("a/b/0", MEMBERS)
    recorder.failure = None
    recorder.events.clear()
    backend.publish("a/b/1", MEMBERS)
    assert "fsync ." in recorder.events
    backend.close()


@pytest.mark.parametrize(("durability", "sync"), [("batch", "syncfs ."), ("step", "fsync a/b")])
def test_a_retry_after_a_lost_acknowledgement_is_as_durable(
    tmp_path: Path, recorder: Recorder, durability: str, sync: str
) -> None:
    backend = LocalBackend(tmp_path, durability=durability, at=recorder.at)
    recorder.lose_at = "renamed"
    with pytest.raises(StorageFailed):
        backend.publish("a/b/g", MEMBERS)
    recorder.lose_at = ""
    recorder.events.clear()
    backend.publish("a/b/g", MEMBERS)
    assert sync in recorder.events, "acknowledged, and not on the device"
    backend.close()


@pytest.mark.parametrize("durability", ["batch", "step"])
def test_nothing_is_acknowledged_while_syncs_fail(
    tmp_path: Path, recorder: Recorder, durability: str
) -> None:
    backend = LocalBackend(tmp_path, durability=durability, at=recorder.at)
    recorder.failure = OSError(errno.EIO, os.strerror(errno.EIO))
    for _ in range(2):
        with pytest.raises(StorageFailed) as error:
            backend.publish("a/b/g", MEMBERS)
        assert "a/b/g" in error.value.subject
        with pytest.raises(StorageFailed):
            backend.put("a/value", b"v")
    assert "acknowledged" not in recorder.events
    recorder.failure = None
    if durability == "batch":  # the kernel tells once, and forgets what it could not write
        with pytest.raises(StorageFailed, match="open it again"):
            backend.publish("a/b/g", MEMBERS)
        with pytest.raises(StorageFailed, match="open it again"):
            backend.put("a/value", b"v")
        with pytest.raises(StorageFailed, match="open it again"):
            backend.sync()
        assert "acknowledged" not in recorder.events
        backend.close()
        backend = LocalBackend(tmp_path, durability=durability, at=recorder.at)
    backend.publish("a/b/g", MEMBERS)
    backend.put("a/value", b"v")
    assert tree(backend) == [*(f"a/b/g/{m}" for m in MEMBERS), "a/value"]
    backend.close()
    assert staged(tmp_path) == []


class Device:
    """A device whose syncs begin when they are asked for and end when the test says so."""

    def __init__(self) -> None:
        self.began: queue.Queue[None] = queue.Queue()
        self.end: queue.Queue[BaseException | None] = queue.Queue()

    def sync(self, fd: int) -> None:
        self.began.put(None)
        error = self.end.get(timeout=20)
        if error is not None:
            raise error


@pytest.mark.parametrize("failure", [None, OSError(errno.EIO, "gone bad")], ids=["ends", "fails"])
def test_a_sync_counts_for_those_who_came_before_it_began(
    monkeypatch: pytest.MonkeyPatch, failure: OSError | None
) -> None:
    device = Device()
    monkeypatch.setattr(_durability, "sync_file_system", device.sync)
    sync = GroupSync(-1)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(sync.wait)
        device.began.get(timeout=20)
        late = [pool.submit(sync.wait) for _ in range(3)]
        wait(late, timeout=0.2)
        device.end.put(None)
        assert first.exception(timeout=20) is None
        device.began.get(timeout=20)
        wait(late, timeout=0.2)
        assert not any(f.done() for f in late), "the first sync may have missed their writes"
        device.end.put(failure)
        errors = [f.exception(timeout=20) for f in late]
    assert device.began.empty(), "one sync serves all who wait"
    if failure is None:
        assert errors == [None] * 3
    else:
        assert [getattr(e, "errno", None) for e in errors] == [errno.EIO] * 3


def test_no_sync_after_a_failed_one_acknowledges_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would succeed, and say nothing of the pages that the kernel gave up before."""
    device = Device()
    monkeypatch.setattr(_durability, "sync_file_system", device.sync)
    sync = GroupSync(-1)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(sync.wait)
        device.began.get(timeout=20)
        late = [pool.submit(sync.wait) for _ in range(3)]
        wait(late, timeout=0.2)
        device.end.put(OSError(errno.EIO, "gone bad"))
        for _ in range(4):
            device.end.put(None)
        errors = [f.exception(timeout=20) for f in (first, *late, pool.submit(sync.wait))]
    assert [getattr(e, "errno", None) for e in errors] == [errno.EIO] * 5
    assert device.began.empty()


def test_an_interrupted_sync_counts_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(_durability, "sync_file_system", device.sync)
    sync = GroupSync(-1)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(sync.wait)
        device.began.get(timeout=20)
        late = [pool.submit(sync.wait) for _ in range(3)]
        wait(late, timeout=0.2)
        device.end.put(None)
        first.result(timeout=20)
        device.end.put(KeyboardInterrupt())
        for _ in range(4):
            device.end.put(None)
        errors = [f.exception(timeout=20) for f in (*late, pool.submit(sync.wait))]
    assert sum(isinstance(e, KeyboardInterrupt) for e in errors) == 1, "who led"
    assert sum(isinstance(e, OSError) for e in errors) == 3


def test_no_waiter_misses_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait, and whenever they wake up."""
    rounds = itertools.count()
    failed = threading.Event()

    def fail_once(fd: int) -> None:
        time.sleep(0.002)  # others come and wait meanwhile
        if next(rounds) == 10:
            failed.set()
            raise OSError(errno.EIO, "gone bad")

    monkeypatch.setattr(_durability, "sync_file_system", fail_once)
    sync = GroupSync(-1)

    def acknowledged(_: int) -> int:
        wrong = 0
        for _ in range(300):
            late = failed.is_set()
            fails = _fails(sync.wait)
            wrong += late and not fails
        return wrong

    assert sum(in_threads(8, acknowledged)) == 0
    assert failed.is_set()
    assert next(rounds) == 11


def _fails(call: Callable[[], None]) -> bool:
    try:
        call()
    except OSError:
        return True
    return False
