"""When a write counts as done: policies of the local backend."""

from __future__ import annotations

import ctypes
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


class GroupSync:
    """One ``syncfs`` for all writers that wait at the same time.

    The first to come leads and syncs; those that come while it does wait for the next round,
    because their writes may have missed this one.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._turn = threading.Condition()
        self._running = False
        self._started = 0
        self._finished = 0
        self._failed: dict[int, OSError] = {}

    def wait(self) -> None:
        """Return once a sync that began after this call has ended.

        Raises
        ------
        OSError
            That sync failed; nothing may be acknowledged on it.
        """
        with self._turn:
            mine = self._started + 1
            while self._running and self._finished < mine:
                self._turn.wait()
            if self._finished >= mine:
                self._raise_failure(mine)
                return
            self._running = True
            self._started = mine
        self._lead(mine)

    def _lead(self, mine: int) -> None:
        try:
            sync_file_system(self._fd)
        except OSError as error:
            self._failed = {mine: error}
            raise
        finally:
            with self._turn:
                self._running = False
                self._finished = mine
                self._turn.notify_all()

    def _raise_failure(self, mine: int) -> None:
        error = self._failed.get(mine)
        if error is not None:
            raise OSError(error.errno, error.strerror) from error
