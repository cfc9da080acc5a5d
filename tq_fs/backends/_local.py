"""Groups of files on a local file system: written in a staging folder, published by one rename."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tq_fs.backends._base import Buffer
from tq_fs.backends._durability import Durability, GroupSync, check_durability
from tq_fs.backends._errors import check_key, mapped, translate
from tq_fs.backends._files import LocalObject, parts, sync_folder, write
from tq_fs.backends._staging import Staged, Staging, folders_of
from tq_fs.errors import ObjectExists, ObjectMissing, ObjectShort, ReadOnlyStore, StorageFull

STAGING = ".staging"
_PART_BYTES = 1024 * 1024
_RACES = 16
_RESERVE = "reserve"
_RESERVE_BYTES = 256 * 1024
_MOST_SETTLED = 10_000
_PRUNED_DEPTH = 4  # as deep as groups have parents
_READ = os.O_RDONLY | os.O_CLOEXEC
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


def _at_nothing(point: str) -> None:
    """Do nothing: the default for `at`."""


class LocalBackend:
    """A :class:`~tq_fs.backends.Backend` over a folder of a local file system.

    One process at a time may write (the store sees to it); any number may read. Pickles as its
    configuration.

    Parameters
    ----------
    root
        The folder; made where it is missing.
    durability
        ``none``: a write is done when it is renamed; survives a killed process, not a power cut.
        ``batch``: and when a sync shared with other writers has ended. ``step``: and when its own
        files and folders are synced.
    ahead
        Empty groups to keep ready (see :mod:`tq_fs.backends._staging`); each holds as many open
        descriptors as a group has members.
    read_only
        Refuse to make the folder.
    at
        Called with the name of each point of a write or delete as it is passed; for tests that
        kill the process there.
    """

    request_bytes = 512 * 1024  # half of a common L2 cache: checked and widened while it is warm

    POINTS = (
        "staged",
        "members written",
        "members synced",
        "renamed",
        "acknowledged",
        "value written",
        "value renamed",
        "value acknowledged",
        "delete renamed",
    )

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        durability: str = "none",
        ahead: int = 32,
        read_only: bool = False,
        at: Callable[[str], None] = _at_nothing,
    ) -> None:
        self.root = Path(root).absolute()
        self.durability: Durability = check_durability(durability)
        self._ahead = ahead
        self._read_only = read_only
        self._at = at
        self._fds: list[int] = []
        self._stage = -1
        self._keeps_reserve = self._reserved = False
        self._settled: set[str] = set()  # folders whose entry in their parent is synced
        with mapped(str(self.root)):
            if not read_only:
                (self.root / STAGING).mkdir(parents=True, exist_ok=True)
            self._root = self._keep(os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            if not read_only:
                self._stage = self._keep(os.open(self.root / STAGING, _FOLDER))
        if not read_only:
            if self.durability != "none":
                with mapped(str(self.root)):
                    sync_folder(".", self._root)
                    sync_folder("..", self._root)
            self._staging = Staging(self._stage, ahead=ahead)
        self._group_sync = GroupSync(self._root)

    @property
    def read_only(self) -> bool:
        """Whether writes are refused."""
        return self._read_only

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as configuration; the copy opens its own descriptors."""
        return _reopen, (str(self.root), self.durability, self._ahead, self._read_only)

    # ------------------------------------------------------------ write

    def publish(
        self,
        prefix: str,
        members: Mapping[str, Sequence[Buffer]],
        *,
        fresh: bool = False,  # noqa: ARG002  # looking costs nothing: the rename does it
    ) -> str:
        """Make all members readable under `prefix` at once; see the protocol."""
        check_key(prefix)
        self._check_writable()
        try:
            staged = self._staging.take(members)
            try:
                self._fill(staged, members)
                published = self._rename(staged.name, prefix)
            except BaseException:
                self._staging.drop(staged)
                raise
            if not published:
                self._staging.drop(staged)
                self._accept_equal(prefix, members)
            self._at("renamed")
            self._settle(prefix)  # a lost acknowledgement may have been one that never came
        except OSError as error:
            raise translate(error, self._name(prefix)) from error
        self._at("acknowledged")
        return prefix

    def put(self, key: str, data: bytes, *, urgent: bool = False) -> None:
        """Write one small object whole, replacing what was there at once."""
        check_key(key)
        self._check_writable()
        try:
            self._put(key, data)
        except StorageFull:
            if not (urgent and self._spend_reserve()):
                raise
            self._put(key, data)

    def _put(self, key: str, data: bytes) -> None:
        with mapped(self._name(key)):
            name = self._staging.name()
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
            try:
                write(os.open(name, flags, 0o644, dir_fd=self._stage), [data], self._sync_file)
                self._at("value written")
                if not self._rename(name, key):
                    raise ObjectExists("is a prefix, not an object", subject=self._name(key))
                self._at("value renamed")
            except BaseException:
                self._discard(name)
                raise
            self._settle(key)
            self._at("value acknowledged")

    def _fill(self, staged: Staged, members: Mapping[str, Sequence[Buffer]]) -> None:
        self._at("staged")
        sync = self._sync_file
        for buffers in reversed(list(members.values())):  # large ones, which empty the cache, last
            write(staged.fds.pop(), buffers, sync)
        self._at("members written")
        if sync is not None:
            for folder in (*folders_of(members), "."):
                sync_folder(f"{staged.name}/{folder}", self._stage)
            self._at("members synced")

    @property
    def _sync_file(self) -> Callable[[int], None] | None:
        return os.fdatasync if self.durability == "step" else None

    def _rename(self, name: str, key: str) -> bool:
        """Move a staged file or folder to its key; False where the key is taken by a folder."""
        for _ in range(_RACES):
            try:
                os.rename(name, key, src_dir_fd=self._stage, dst_dir_fd=self._root)
            except FileNotFoundError:
                # First of its session, or a delete removed the empty parent a moment ago.
                with suppress(FileNotFoundError):
                    self._make_parents(os.path.dirname(key))
            except (FileExistsError, IsADirectoryError, NotADirectoryError):
                return False
            except OSError as error:
                if error.errno == errno.ENOTEMPTY:
                    return False
                raise
            else:
                return True
        raise FileNotFoundError(errno.ENOENT, "its folder is being removed again and again", key)

    def _make_parents(self, parent: str) -> None:
        at = ""
        for part in parent.split("/"):
            at = f"{at}/{part}" if at else part
            if at in self._settled and not self._is_there(at):
                self._settled.discard(at)  # before it is made anew, and others meet it
            with suppress(FileExistsError):
                os.mkdir(at, dir_fd=self._root)

    def _is_there(self, key: str) -> bool:
        try:
            os.stat(key, dir_fd=self._root)
        except FileNotFoundError:
            return False
        return True

    def _settle(self, key: str) -> None:
        """Wait until the policy lets a write be acknowledged."""
        if self.durability == "step":
            self._sync_entries(key)
        elif self.durability == "batch":
            self._group_sync.wait()

    def _sync_entries(self, key: str) -> None:
        """Sync the folder that holds `key`, and those above it that are not synced yet."""
        if len(self._settled) > _MOST_SETTLED:
            self._settled.clear()
        folder = os.path.dirname(key)
        sync_folder(folder or ".", self._root)
        synced = []
        while folder and folder not in self._settled:
            parent = os.path.dirname(folder)
            sync_folder(parent or ".", self._root)
            synced.append(folder)
            folder = parent
        self._settled.update(synced)  # not before: who meets one of them here stops there

    def _accept_equal(self, prefix: str, members: Mapping[str, Sequence[Buffer]]) -> None:
        """Let a repeated write pass; refuse one of other content."""
        differs = set(members) ^ set(self._files_below(prefix))
        differs |= {m for m in members if m not in differs and not self._holds(prefix, m, members)}
        if differs:
            raise ObjectExists(
                f"is taken by other content (differs in {min(differs)})",
                subject=self._name(prefix),
                remedy="Steps are written once: use a new Step index or session incarnation",
            )

    def _files_below(self, prefix: str) -> Iterator[str]:
        root = self.root / prefix
        for folder, _, names in os.walk(root):
            for name in names:
                yield Path(folder, name).relative_to(root).as_posix()

    def _holds(self, prefix: str, member: str, members: Mapping[str, Sequence[Buffer]]) -> bool:
        key = f"{prefix}/{member}"
        try:
            with self.open(key) as there:
                offset = 0
                for part in parts(members[member]):
                    have = bytearray(len(part))
                    there.readinto([have], offset)
                    if have != part:
                        return False
                    offset += len(part)
            return os.stat(key, dir_fd=self._root).st_size == offset
        except (ObjectMissing, ObjectShort):
            return False

    # ------------------------------------------------------------ read

    def open(self, key: str) -> LocalObject:
        """Open an object for ranged reads."""
        check_key(key)
        try:
            return LocalObject(os.open(key, _READ, dir_fd=self._root), self.root, key)
        except OSError as error:
            raise translate(error, self._name(key)) from error

    def get(self, key: str) -> bytes:
        """Return a small object."""
        check_key(key)
        with mapped(self._name(key)):
            fd = os.open(key, _READ, dir_fd=self._root)
            try:
                return b"".join(iter(lambda: os.read(fd, _PART_BYTES), b""))
            finally:
                os.close(fd)

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the names right below `prefix`, sorted."""
        if prefix:
            check_key(prefix)
        try:
            fd = os.open(prefix or ".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._root)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise translate(error, self._name(prefix)) from error
        try:
            names = sorted(n for n in os.listdir(fd) if not n.startswith("."))
        finally:
            os.close(fd)
        yield from names

    def walk(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield key and size of each object below `prefix`; those of a prefix follow each other."""
        return ((key, found.st_size) for key, found in self._files(prefix))

    def stamp(self, key: str) -> str:
        """Return what tells whether an object was written again; see the protocol."""
        check_key(key)
        with mapped(self._name(key)):
            return _stamp(os.stat(key, dir_fd=self._root))

    def stamps(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Yield key and stamp of each object below `prefix`, in the order of a walk."""
        return ((key, _stamp(found)) for key, found in self._files(prefix))

    def _files(self, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield key and state of each file below `prefix`; the folder's own listing says what is."""
        if prefix:
            check_key(prefix)
        for entry in self._scan(prefix):
            key = f"{prefix}/{entry.name}" if prefix else entry.name
            try:
                if entry.is_dir():
                    yield from self._files(key)
                    continue
                found = entry.stat()
            except FileNotFoundError:
                continue  # deleted since it was listed
            except OSError as error:
                raise translate(error, self._name(key)) from error
            yield key, found

    def _scan(self, prefix: str) -> Sequence[os.DirEntry[str]]:
        """Return what lies right below `prefix`, sorted by name."""
        try:
            with os.scandir(f"{self.root}/{prefix}") as entries:
                return sorted((e for e in entries if e.name[0] != "."), key=_by_name)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise translate(error, self._name(prefix)) from error

    def distrust(self, key: str) -> bool:  # noqa: ARG002
        """Return False: what a file holds is all there is."""
        return False

    # ------------------------------------------------------------ remove

    def delete(self, prefix: str) -> bool:
        """Remove an object or everything below a prefix; at once, as a reader sees it."""
        check_key(prefix)
        self._check_writable()
        with mapped(self._name(prefix)):
            trash = self._staging.name()
            try:
                os.rename(prefix, trash, src_dir_fd=self._root, dst_dir_fd=self._stage)
            except (FileNotFoundError, NotADirectoryError):
                return False
            self._at("delete renamed")
            self._discard(trash)
            self._prune(os.path.dirname(prefix))
            if self._keeps_reserve and not self._reserved:
                self._reserve()
        return True

    def _reserve(self) -> None:
        """Keep some room for small objects, without which nothing could be released."""
        with suppress(OSError):
            flags = os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC
            fd = os.open(_RESERVE, flags, 0o644, dir_fd=self._stage)
            try:
                os.posix_fallocate(fd, 0, _RESERVE_BYTES)
                self._reserved = True
            finally:
                os.close(fd)

    def _spend_reserve(self) -> bool:
        """Give the kept room back to the file system; return whether there was some."""
        had, self._reserved = self._reserved, False
        with suppress(OSError):
            os.unlink(_RESERVE, dir_fd=self._stage)
        return had

    def sweep(self) -> int:
        """Remove what writers and deletes of an earlier process left; return how many pieces.

        Only for the one process that writes. From then on some room is kept for small objects, so
        that Segments can be released on a full disk.
        """
        with mapped(f"{self.root}/{STAGING}"):
            left = os.listdir(self.root / STAGING)
            for name in left:
                self._discard(name)
            self._prune_all()
        self._keeps_reserve = True
        self._reserve()
        return len(left)

    def _prune_all(self) -> None:
        """Remove folders that a delete emptied and did not come to remove."""
        root = str(self.root)
        empty = []
        for folder, names, files in os.walk(root):
            if not names and not files:
                empty.append(folder[len(root) + 1 :])
            if folder.count("/") - root.count("/") >= _PRUNED_DEPTH:
                names.clear()
        for name in empty:
            self._prune(name)

    def _discard(self, name: str) -> None:
        path = self.root / STAGING / name
        while path.is_dir():
            with suppress(FileNotFoundError):  # another delete was at a part of it when it moved
                shutil.rmtree(path)
        path.unlink(missing_ok=True)

    def _prune(self, parent: str) -> None:
        while "/" in parent:
            try:
                os.rmdir(parent, dir_fd=self._root)
            except OSError:
                return  # not empty
            parent = os.path.dirname(parent)

    def cool(self, prefixes: Iterable[str]) -> None:
        """Do nothing: there is nowhere else to go."""

    def settle(self, prefix: str) -> None:
        """Do nothing: what was published lies where it belongs."""

    def sync(self) -> None:
        """Write back everything dirty on the backend's file system."""
        with mapped(str(self.root)):
            self._group_sync.wait()

    def close(self) -> None:
        """Stop the staging thread and close descriptors; idempotent."""
        if not self._fds:
            return
        if not self._read_only:
            self._spend_reserve()
            self._staging.close()
        while self._fds:
            os.close(self._fds.pop())
        self._root = self._stage = -1  # the numbers will be somebody else's

    def _keep(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def _check_writable(self) -> None:
        if self._read_only:
            raise ReadOnlyStore("is open for reading only", subject=str(self.root))

    def _name(self, key: str) -> str:
        return f"{self.root}/{key}"


def _by_name(entry: os.DirEntry[str]) -> str:
    return entry.name


def _stamp(found: os.stat_result) -> str:
    """Return what changes when a file is written, replaced, renamed or restored from a copy."""
    return f"{found.st_size}-{found.st_mtime_ns:x}-{found.st_ctime_ns:x}-{found.st_ino:x}"


def _reopen(root: str, durability: str, ahead: int, read_only: bool) -> LocalBackend:
    return LocalBackend(root, durability=durability, ahead=ahead, read_only=read_only)
