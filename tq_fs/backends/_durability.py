"""When a write counts as done: policies of the local backend."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from typing import Literal, get_args

from tq_fs.errors import InvalidConfig

Durability = Literal["none", "batch", "step"]

_libc = ctypes.CDLL(None, use_errno=True)


def check_durability(text: str) -> Durability:
    """Return `text` as a policy.

    Raises
    ------
    InvalidConfig
    """
    for known in get_args(Durability):
        if text == known:
            return known  # type: ignore[no-any-return]
    raise InvalidConfig(
        f"{text!r} is none of {', '.join(get_args(Durability))}", subject="durability"
    )


def sync_file_system(fd: int) -> None:
    """Write back everything dirty on the file system that holds `fd`.

    Raises
    ------
    OSError
        The device failed; also for data written by others.
    """
    if _libc.syncfs(fd) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class _Round:
    """One sync, begun or not; those who wait for it hold on to it."""

    def __init__(self) -> None:
        self.ended = False


class GroupSync:
    """One ``syncfs`` for all writers that wait at the same time.

    The first to come leads and syncs; those that come while it does wait for the next round,
    because their writes may have missed this one. One of them leads that.

    A failure is final. The kernel reports a failed write-back once and then forgets the pages, so
    a later sync succeeds without them: nobody knows any more whose data is on the device.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._turn = threading.Condition()
        self._running = False
        self._next = _Round()
        self._failure: OSError | None = None

    def wait(self) -> None:
        """Return once a sync that began after this call has ended.

        Raises
        ------
        OSError
            That sync, or an earlier one, failed; nothing may be acknowledged any more.
        """
        with self._turn:
            mine = self._next
            while self._running and not mine.ended:
                self._turn.wait()
            leads = not mine.ended and self._failure is None
            if leads:
                self._running = True
                self._next = _Round()
        if leads:
            self._lead(mine)
        if self._failure is not None:
            raise OSError(self._failure.errno, f"{self._failure.strerror}{_REMEDY}")

    def _lead(self, mine: _Round) -> None:
        failure: OSError | None = OSError(errno.EINTR, "the sync was interrupted")
        try:
            sync_file_system(self._fd)
            failure = None
        except OSError as error:
            failure = error
        finally:
            with self._turn:
                self._failure = self._failure or failure
                self._running = False
                mine.ended = True
                self._turn.notify_all()


_REMEDY = " in this sync or an earlier one: close the store, check the device, open it again"
