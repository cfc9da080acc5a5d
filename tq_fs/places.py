"""Where a store lies: a local folder, an object store, or one behind the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from tq_fs import manifests
from tq_fs.backends import (
    Backend,
    LocalBackend,
    NodeCache,
    ObjectBackend,
    Retry,
    TieredBackend,
    mapped,
    open_object_backend,
)
from tq_fs.claim import take_claim
from tq_fs.config import StoreConfig, TierConfig, folder_of
from tq_fs.errors import InvalidConfig, ObjectMissing, WrongStore
from tq_fs.keys import component
from tq_fs.manifests import STORE_SCHEMA, StoreDocument
from tq_fs.served import SCHEME, open_served
from tq_fs.steps import measure_group
from tq_fs.store_folder import (
    STORE_FILE,
    claim_folder,
    lock_folder,
    unlock_folder,
    write_claim,
)

CACHES = ".cache"  # no store's folder begins with a dot
_PARTS_OF_A_STORE = ("claims", "manifests", "pages", "steps", "values")


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a store lies, open. The pieces belong to the ExitStack they were opened in.

    Attributes
    ----------
    steps, documents
        Where Steps go, and where manifests go.
    url
        Of the store itself, its id included.
    folder
        The same as a local folder; None in an object store.
    remote
        Whether Steps lie in an object store, in the end.
    epoch
        Of this process, where it writes.
    fence
        Raises where another process has taken the store since.
    confirm
        Writes down that the epoch has begun; called when the store is swept, so that there is
        room for it.
    """

    steps: Backend
    documents: Backend
    url: str
    folder: Path | None
    remote: bool
    epoch: int
    fence: Callable[[], None]
    confirm: Callable[[], None]


def open_places(
    url: str,
    config: StoreConfig,
    *,
    read_only: bool,
    opened: ExitStack,
    create: bool = True,
    alone: bool = True,
) -> Places:
    """Open where a store lies, and take it for writing unless `read_only`.

    Parameters
    ----------
    create
        Make it where there is none.
    alone
        Nobody else writes to its folder at this moment: what is half written there is left over.

    Raises
    ------
    InvalidConfig
        The URL or a setting makes no sense.
    StoreBusy, WrongStore
        Another process has it, or it is something else.
    BucketMissing, StorageDenied, StorageFailed
        The object store cannot be used.
    """
    scheme = urlsplit(url).scheme
    if scheme == SCHEME:
        return _open_served(url, config, read_only=read_only, opened=opened)
    if scheme == "file":
        if not create:
            _check_there(folder_of(url) / component(config.store_id))
        return _open_folder(url, config, read_only=read_only, opened=opened, alone=alone)
    return _open_object_store(url, config, read_only=read_only, opened=opened, create=create)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlace:
    """The folder of a cluster's StorageUnit, taken. It belongs to the ExitStack.

    Attributes
    ----------
    steps
        What the unit serves: its folder, or that in front of the object store.
    front
        Its folder.
    claim
        What the folder says of itself.
    """

    steps: Backend
    front: LocalBackend
    claim: StoreDocument


def open_unit_place(folder: str, config: StoreConfig, name: str, *, opened: ExitStack) -> UnitPlace:
    """Take a folder for a StorageUnit, and make it where there is none.

    Parameters
    ----------
    folder
        Absolute; the store's own is made in it.
    config
        With a URL of an object store the folder becomes a tier in front of it.
    name
        For a unit that is new.

    Raises
    ------
    StoreBusy, WrongStore, InvalidConfig
        Another process has it, or it is something else.
    BucketMissing, StorageDenied, StorageFailed
        The object store cannot be used.
    """
    root = Path(folder) / component(config.store_id)
    objects = open_objects(config, opened=opened, read_only=False)
    before = objects.url if objects is not None else ""
    front = _open_local(root, config, read_only=False, opened=opened)
    claim = claim_folder(front, config.store_id, read_only=False, before=before, unit=name)
    if objects is None:
        return UnitPlace(steps=front, front=front, claim=claim)
    tier = config.tier or TierConfig(folder=folder)
    steps = _tiered(front, objects, config, replace(tier, folder=folder), opened=opened)
    steps.recover()
    return UnitPlace(steps=steps, front=front, claim=claim)


def open_unit_files(root: str, config: StoreConfig, *, opened: ExitStack) -> Backend:
    """Open a unit's folder for reading, beside the unit that writes there.

    Raises
    ------
    ObjectMissing, StorageDenied
        This process cannot see it.
    """
    front = _open_local(Path(root), config, read_only=True, opened=opened)
    objects = open_objects(config, opened=opened, read_only=True)
    if objects is None:
        return front
    folder = str(Path(root).parent)
    tier = replace(config.tier or TierConfig(folder=folder), folder=folder)
    return _tiered(front, objects, config, tier, opened=opened)


def open_objects(
    config: StoreConfig, *, opened: ExitStack, read_only: bool
) -> ObjectBackend | None:
    """Open the object store that a cluster's store ends in; None where its units keep all."""
    if config.url is None:
        return None
    backend = _open_objects(config.url, config, opened=opened)
    _identify(backend, config.store_id, create=True, read_only=read_only)
    return backend


def _check_there(root: Path) -> None:
    with mapped(str(root)):  # it may be there, where nobody else can look
        if (root / STORE_FILE).is_file():
            return
        names = sorted(entry.name for entry in root.iterdir()) if root.is_dir() else []
    raise _no_store(str(root), names)


def _no_store(where: str, names: Sequence[str] = ()) -> WrongStore:
    parts = [name for name in names if name in _PARTS_OF_A_STORE]
    if parts:
        return WrongStore(
            f"holds {parts} and no {STORE_FILE}: half of a store",
            subject=where,
            remedy=f"restore its {STORE_FILE}; nothing was changed",
        )
    return WrongStore(
        f"holds no {STORE_FILE}: there is no store",
        subject=where,
        remedy="check URL and store_id",
    )


def _nothing() -> None:
    """Do nothing."""


def _open_folder(
    url: str, config: StoreConfig, *, read_only: bool, opened: ExitStack, alone: bool
) -> Places:
    _check_no_remote(config)
    root = folder_of(url) / component(config.store_id)
    backend = _open_local(root, config, read_only=read_only, opened=opened, alone=alone)
    found = claim_folder(backend, config.store_id, read_only=read_only)
    return Places(
        steps=backend,
        documents=backend,
        url=root.as_uri(),
        folder=root,
        remote=False,
        epoch=found.epoch,
        fence=_nothing,  # the lock is one
        confirm=_nothing if read_only else lambda: write_claim(backend, found),
    )


def _check_no_remote(config: StoreConfig) -> None:
    """Refuse settings that a local folder would ignore."""
    given = {
        "tier": config.tier is not None,
        "storage_options": bool(config.storage_options),
        "driver": config.driver != "auto",
    }
    for name, is_given in given.items():
        if is_given:
            raise InvalidConfig(
                "is for object stores", subject=name, remedy="leave it out, or use an s3:// URL"
            )


def _open_local(
    root: Path, config: StoreConfig, *, read_only: bool, opened: ExitStack, alone: bool = True
) -> LocalBackend:
    if not read_only:
        opened.callback(unlock_folder, lock_folder(root))  # first, so that it is let go of last
    backend = LocalBackend(
        root,
        durability=config.durability,
        ahead=config.prepared_groups,
        read_only=read_only,
    )
    opened.callback(backend.close)
    if not read_only and alone:
        backend.sweep()  # first of all: it makes room where the disk is full
    return backend


def _open_object_store(
    url: str, config: StoreConfig, *, read_only: bool, opened: ExitStack, create: bool
) -> Places:
    backend = _open_objects(url, config, opened=opened)
    _identify(backend, config.store_id, create=create, read_only=read_only)
    steps: Backend = backend
    if config.tier is not None:
        steps = _open_tier(backend, config, config.tier, read_only=read_only, opened=opened)
    claim = None if read_only else take_claim(backend)
    return Places(
        steps=steps,
        documents=backend,
        url=backend.url,
        folder=None,
        remote=True,
        epoch=claim.epoch if claim is not None else 0,
        fence=claim.check if claim is not None else _nothing,
        confirm=_nothing,
    )


def _open_objects(url: str, config: StoreConfig, *, opened: ExitStack) -> ObjectBackend:
    backend = open_object_backend(
        f"{url.rstrip('/')}/{component(config.store_id)}",
        driver=config.driver,
        options=config.storage_options,
        retry=Retry(deadline_s=config.retry_deadline_s),
        timeout_s=config.request_timeout_s,
    )
    opened.callback(backend.close)
    return backend


def _open_served(url: str, config: StoreConfig, *, read_only: bool, opened: ExitStack) -> Places:
    if config.tier is not None or config.driver != "auto":
        raise InvalidConfig("is for object stores", subject="tier or driver", remedy="leave it out")
    backend = open_served(
        url,
        store_id=config.store_id,
        options=config.storage_options,
        retry=Retry(deadline_s=config.retry_deadline_s),
        timeout_s=config.request_timeout_s,
    )
    opened.callback(backend.close)
    claim = None if read_only else take_claim(backend)
    return Places(
        steps=backend,
        documents=backend,
        url=f"{url.rstrip('/')}/{component(config.store_id)}",
        folder=None,
        remote=True,
        epoch=claim.epoch if claim is not None else 0,
        fence=claim.check if claim is not None else _nothing,
        confirm=_nothing,
    )


def _identify(backend: ObjectBackend, store_id: str, *, create: bool, read_only: bool) -> None:
    """Check that a prefix is this store's, or make it so.

    Raises
    ------
    WrongStore
        It holds something else.
    """
    subject = f"{backend.url}/{STORE_FILE}"
    try:
        found, _ = manifests.fetch(
            backend, STORE_FILE, lambda data: manifests.decode(data, StoreDocument, subject)
        )
    except ObjectMissing:
        if not create:
            raise _no_store(backend.url, list(backend.list(""))) from None
        if read_only:
            raise
        strange = list(backend.list(""))
        if strange:
            raise WrongStore(
                f"holds {strange[:3]} and no {STORE_FILE}: it is no store",
                subject=backend.url,
                remedy="use an empty prefix",
            ) from None
        found = StoreDocument(schema=STORE_SCHEMA, store_id=store_id, epoch=0)
        backend.put(STORE_FILE, manifests.encode(found))
    if found.store_id != store_id:
        raise WrongStore(f"is store {found.store_id!r}, not {store_id!r}", subject=subject)


def _open_tier(
    back: ObjectBackend,
    config: StoreConfig,
    tier: TierConfig,
    *,
    read_only: bool,
    opened: ExitStack,
) -> TieredBackend:
    root = Path(tier.folder) / component(config.store_id)
    front: LocalBackend | None = None
    if not read_only or root.is_dir():
        front = _open_local(root, config, read_only=read_only, opened=opened)
        found = claim_folder(front, config.store_id, read_only=read_only, before=back.url)
        if not read_only:
            write_claim(front, found)
    backend = _tiered(front, back, config, tier, opened=opened)
    if not read_only:
        backend.recover()
    return backend


def _tiered(
    front: LocalBackend | None,
    back: ObjectBackend,
    config: StoreConfig,
    tier: TierConfig,
    *,
    opened: ExitStack,
) -> TieredBackend:
    cache = None
    if tier.cache_bytes:
        name = component(config.store_id)
        cache = NodeCache(Path(tier.folder) / CACHES / name, tier.cache_bytes)
    backend = TieredBackend(
        front,
        back,
        policy=tier.policy,
        capacity_bytes=tier.capacity_bytes,
        high_water=tier.high_water,
        low_water=tier.low_water,
        upload_threads=tier.upload_threads,
        queue_bytes=tier.upload_queue_bytes,
        upload_memory_bytes=tier.upload_memory_bytes,
        deadline_s=config.inflight_deadline_s,
        cache=cache,
        measure=measure_group,
    )
    opened.callback(backend.close)
    return backend
