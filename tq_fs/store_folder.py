"""A store's folder: who may write to it, and whose it is."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from tq_fs import manifests
from tq_fs.backends import STAGING, LocalBackend, mapped
from tq_fs.errors import ObjectMissing, StoreBusy, WrongStore
from tq_fs.manifests import STORE_SCHEMA, StoreDocument

STORE_FILE = "store.json"
LOCK_FILE = ".lock"
_TRIES = 5
_PAUSE_S = 0.01


def lock_folder(root: Path) -> int:
    """Take a store's folder for writing, for as long as the descriptor returned is open.

    A forked child lets go of it, so that the folder does not stay taken for the child's life.

    Raises
    ------
    WrongStore
        The folder holds something that is no store.
    StoreBusy
        Another process, or another store of this one, has it.
    """
    with mapped(str(root)):
        root.mkdir(parents=True, exist_ok=True)
        _check_own(root)
        fd = os.open(root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(fd, root)
    except BaseException:
        os.close(fd)
        raise
    if not _held:
        os.register_at_fork(after_in_child=_let_go)
    _held.add(fd)
    return fd


def unlock_folder(fd: int) -> None:
    """Let go of a folder."""
    _held.discard(fd)
    os.close(fd)


_held: set[int] = set()


def _let_go() -> None:
    while _held:
        os.close(_held.pop())


def _check_own(root: Path) -> None:
    """Refuse a folder that holds anything but a store; nothing in it may be swept."""
    names = set(os.listdir(root))
    strange = names - {LOCK_FILE, STAGING}
    if strange and STORE_FILE not in names:
        raise WrongStore(
            f"holds {sorted(strange)[:3]} and no {STORE_FILE}: it is no store",
            subject=str(root),
            remedy="use an empty folder",
        )


def _lock(fd: int, root: Path) -> None:
    try:
        _lock_soon(fd)
    except BlockingIOError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
        raise StoreBusy(
            f"process {holder or 'unknown'} has it open for writing",
            subject=str(root),
            remedy="close it there, open it here with read_only, or use another store_id",
        ) from error
    with suppress(OSError):  # a full disk: the name is for messages only
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)


def _lock_soon(fd: int) -> None:
    """Take the lock; who only asks whether it is taken (tq-fs ls) holds it for a moment."""
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_PAUSE_S)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def claim_folder(
    backend: LocalBackend, store_id: str, *, read_only: bool, before: str = "", unit: str = ""
) -> StoreDocument:
    """Check that a folder is this store's, or make it so.

    Parameters
    ----------
    before
        URL of the store that the folder is the front of; empty where it is the store itself.
    unit
        Name of the StorageUnit whose folder it becomes where it is new; empty for a folder that is
        no unit's. A unit's folder keeps the name it was given first.

    Returns
    -------
    StoreDocument
        What the folder says of itself; for writing, with the next epoch, which is still to be
        written (:func:`write_claim`) where the store was there already.

    Raises
    ------
    WrongStore
        The folder is another store's.
    """
    subject = f"{backend.root}/{STORE_FILE}"
    try:
        found = manifests.decode(backend.get(STORE_FILE), StoreDocument, subject)
    except ObjectMissing:
        if read_only:
            raise
        found = StoreDocument(
            schema=STORE_SCHEMA, store_id=store_id, epoch=0, before=before, unit=unit
        )
        write_claim(backend, found)
    if found.store_id != store_id:
        raise WrongStore(f"is store {found.store_id!r}, not {store_id!r}", subject=subject)
    if found.before != before:
        raise WrongStore(
            f"is {_role(found.before)}, not {_role(before)}",
            subject=subject,
            remedy="give each store a folder of its own",
        )
    if bool(found.unit) != bool(unit):
        raise WrongStore(
            f"is {_owner(found.unit)}, not {_owner(unit)}",
            subject=subject,
            remedy="open a cluster's store with tq_fs.cluster, and give each unit a folder",
        )
    if unit:
        return found  # its epoch is the Controller's
    return found if read_only else msgspec.structs.replace(found, epoch=found.epoch + 1)


def _owner(unit: str) -> str:
    return "the folder of a cluster's StorageUnit" if unit else "a store of one process"


def _role(before: str) -> str:
    return f"the front of {before}" if before else "a store of its own"


def write_claim(backend: LocalBackend, claim: StoreDocument) -> None:
    """Write down whose a folder is and which epoch has begun."""
    backend.put(STORE_FILE, manifests.encode(claim), urgent=True)
