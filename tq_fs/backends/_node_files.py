"""Files that processes of a node lock, make and remove while others do."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PART = ".part"
_RACES = 16
_LOCKING = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC

_held: set[int] = set()  # a fork must not keep the locks of its parent


def _let_go() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)


def lock(fd: int, wait_s: float) -> bool:
    """Lock an open file; False where somebody else keeps it for longer than `wait_s`.

    Asks again and again: a wait in the kernel knows no deadline, and its holder may be stopped.
    """
    until = time.monotonic() + wait_s
    pause = 0.001
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        else:
            return True


def unlock(fd: int) -> None:
    """Unlock and close a file."""
    _held.discard(fd)
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def open_to_lock(path: Path) -> int:
    """Open a file that :func:`unlock` closes; makes it and its folders, which others may remove."""
    for _ in range(_RACES):
        with suppress(FileNotFoundError, FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, _LOCKING, 0o644)
            _held.add(fd)
            return fd
    raise FileNotFoundError(errno.ENOENT, "its folder is removed again and again", str(path))


def is_at(fd: int, path: Path) -> bool:
    """Tell whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def all_files(top: Path) -> Iterator[Path]:
    """Yield the files below a folder, or the file itself."""
    if not top.is_dir():
        yield top
    for folder, _, names in os.walk(top):
        for name in names:
            yield Path(folder, name)


def part_of(path: Path) -> Path:
    """Return the path of the part file that becomes an object."""
    return path.with_name(f".{path.name}{_PART}")


def whole_of(path: Path) -> Path:
    """Return the path of the object that a part file becomes; an object's own for itself."""
    if path.name.startswith(".") and path.name.endswith(_PART):
        return path.with_name(path.name[1 : -len(_PART)])
    return path


def sweep_part(part: Path) -> int | None:
    """Remove a part that nobody works on; return the bytes that stay, None if it is no more."""
    try:
        fd = os.open(part, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_at(fd, part):
            return None
        part.unlink()
        return 0
    except BlockingIOError:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def remove_file(path: Path, top: Path) -> None:
    """Remove a file, and the folders that this leaves empty."""
    path.unlink(missing_ok=True)
    for folder in path.parents:
        if folder == top:
            return
        try:
            folder.rmdir()
        except OSError:
            return  # not empty
