"""Opening a run's values: in the keeper's process, and in all others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

from tq_fs.backends import LocalBackend, Retry
from tq_fs.cache import ChunkCache
from tq_fs.channel import ChannelBackend, ChannelServer, Identity, Limits, private_socket
from tq_fs.cluster import StoreCluster, attach
from tq_fs.config import StoreConfig, folder_of
from tq_fs.embedded import encode_options, reader_pool, reader_threads, writer_threads
from tq_fs.errors import InvalidConfig
from tq_fs.keeper._settings import Connection, ValueConfig
from tq_fs.keys import component
from tq_fs.manifests import Resolved
from tq_fs.places import open_objects, open_places
from tq_fs.reader import SegmentReader
from tq_fs.values import (
    ROOT,
    Keeper,
    KeeperPlaces,
    OnePlace,
    UnitPlaces,
    ValueClient,
    ValueIndex,
    ValuePlaces,
    ValueStore,
    serve,
    serve_notes,
)

UNIT = "keeper"
_GRACE_S = 600.0  # for a put of many groups, and for clocks that differ
_LANES = 1024  # of all threads of all processes
_INDEXES = ".values"


class Spot(NamedTuple):
    """Where a process runs.

    Attributes
    ----------
    node, node_name, address
        Id and name of the node, and the address that other nodes reach it at.
    """

    node: str
    node_name: str
    address: str


def open_keeper(
    config: ValueConfig, run: str, spot: Spot, *, again: bool, opened: ExitStack
) -> Connection:
    """Take a store for a run, and serve its index until the stack closes.

    Parameters
    ----------
    again
        The run goes on: other processes of it may be writing.

    Raises
    ------
    StoreBusy, WrongStore, InvalidConfig
        It cannot be taken.
    TqFsError
        Where it lies cannot be used.
    """
    taken = _take(config, spot, again=again, opened=opened)
    path = _index_file(taken.indexes, run)
    index = ValueIndex(path, config.store.store_id)
    opened.callback(index.close)
    identity = taken.identity
    if config.kind == "objects":
        identity = _identity(path.with_name(f"{path.name}-identity"), config.store.store_id)
    keeper = Keeper(
        index,
        taken.places,
        config.store.store_id,
        run,
        checkpoints=config.checkpoints,
        sweep_s=config.sweep_s,
        check=taken.check,
        grace_s=_GRACE_S + 2 * config.store.retry_deadline_s,
    )
    opened.callback(keeper.close)
    port = index.meta("port") or "0"  # the one that other processes know
    is_folder = config.kind == "folder"  # which the keeper writes to for all
    server = ChannelServer(
        taken.places.backend("") if is_folder else LocalBackend(taken.indexes, read_only=True),
        store_id=config.store.store_id,
        unit=UNIT,
        local=[f"unix:{private_socket(f'{UNIT}/{config.store.store_id}/{run}')}"],
        remote=[f"tcp:{_host(spot.address)}:{port}"] if taken.is_shared else [],
        identity=identity,
        roots=frozenset({ROOT}) if is_folder else frozenset(),
        limits=Limits(
            budget_bytes=config.store.inflight_bytes,
            deadline_s=config.store.inflight_deadline_s,
            lanes=_LANES,
        ),
        calls=serve(keeper),
        noted=serve_notes(keeper.put_group) if is_folder else None,
    )
    opened.callback(server.close)
    local, *remote = server.endpoints
    for endpoint in remote:
        index.note("port", endpoint.rpartition(":")[2])
    return Connection(
        config=config,
        run=run,
        node=spot.node,
        local=local,
        remote="".join(remote),
        identity=identity,
    )


class _Taken(NamedTuple):
    """A store that was taken for a run."""

    places: ValuePlaces
    indexes: Path
    check: Callable[[], None]
    identity: Identity | None
    is_shared: bool  # by several nodes


def _take(config: ValueConfig, spot: Spot, *, again: bool, opened: ExitStack) -> _Taken:
    store = config.store
    if config.kind == "cluster":
        cluster = attach(store.store_id)
        folders = cluster_folders(store, spot)
        beside = Path(folders[0]) / component(store.store_id) if folders else None
        return _Taken(
            places=_unit_places(cluster, opened),
            indexes=_indexes(config, beside),
            check=lambda: None,  # of two runs one has the keeper's name
            identity=cluster.identity,
            is_shared=True,
        )
    assert store.url is not None
    found = open_places(store.url, store, read_only=False, opened=opened, alone=not again)
    found.confirm()
    is_folder = config.kind == "folder"
    return _Taken(
        places=OnePlace(found.steps),
        indexes=_indexes(config, found.folder),
        check=found.fence,
        identity=None,
        is_shared=not is_folder,
    )


def cluster_folders(store: StoreConfig, spot: Spot) -> tuple[str, ...]:
    """Return the folders of a cluster's units on a node."""
    assert store.cluster is not None
    return store.cluster.folders(spot.node_name, spot.node, spot.address)


def _indexes(config: ValueConfig, beside: Path | None) -> Path:
    """Return the folder for indexes of a store's runs, which no other store has."""
    if config.index_folder is None and beside is not None:
        return beside / _INDEXES
    folder = config.index_folder or private_socket(UNIT).parent / "indexes"
    store = config.store
    place = hashlib.sha256((store.url or "").encode()).hexdigest()[:16]
    return Path(folder) / component(store.store_id) / place


def _identity(path: Path, store_id: str) -> Identity:
    """Return the run's identity: a keeper that is started anew is the one that others know."""
    if not path.exists():
        half = path.with_name(f"{path.name}-half")
        half.unlink(missing_ok=True)
        Identity.new(store_id).save(half)
        half.rename(path)
    return Identity.load(path)


def _index_file(folder: Path, run: str) -> Path:
    """Return a run's index file; those of earlier runs are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    mine = f"{component(run)}.sqlite"
    for path in folder.iterdir():
        if not path.name.startswith(mine):
            path.unlink()
    return folder / mine


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


# ---------------------------------------------------------------- all processes


def open_values(connection: Connection, node: str, *, opened: ExitStack) -> ValueStore:
    """Open a run's values in this process, until the stack closes.

    Parameters
    ----------
    node
        Id of the node that this process runs on.

    Raises
    ------
    InvalidConfig
        The store is a folder of another node.
    StorageUnreachable
        The keeper does not answer.
    """
    config = connection.config
    store = config.store
    channel = _channel(connection, node, opened)
    remote = config.kind == "objects"
    places = _places(config, channel, opened)
    threads = reader_threads(store, remote=remote)
    reader = SegmentReader(
        _no_references,
        places.readers,
        pool=reader_pool(threads, opened),
        threads=threads,
        cache=ChunkCache(store.cache_bytes),
    )
    writers = ThreadPoolExecutor(writer_threads(store, remote=remote), "tq-fs-values")
    return ValueStore(
        store.store_id,
        connection.run,
        calls=ValueClient(channel),
        places=places,
        reader=reader,
        pool=opened.enter_context(writers),
        options=encode_options(store, remote=True),  # as few files as possible, also on a disk
        allow_pickle=config.allow_pickle,
    )


def _channel(connection: Connection, node: str, opened: ExitStack) -> ChannelBackend:
    store = connection.config.store
    is_here = node == connection.node
    if not is_here and not connection.remote:
        raise InvalidConfig(
            f"{store.url} is a folder of node {connection.node[:12]}, this process is on another",
            subject=f"store {store.store_id!r}",
            remedy="give cluster.paths (units on every node), or an s3:// url",
        )
    channel = ChannelBackend(
        connection.local if is_here else connection.remote,
        store_id=store.store_id,
        unit=UNIT,
        identity=None if is_here else connection.identity,
        retry=Retry(deadline_s=store.retry_deadline_s, most_s=1.0),
        timeout_s=store.request_timeout_s,
        named=True,
    )
    opened.callback(channel.close)
    return channel


def _places(config: ValueConfig, channel: ChannelBackend, opened: ExitStack) -> ValuePlaces:
    if config.kind == "cluster":
        return _unit_places(attach(config.store.store_id), opened)
    if config.kind == "folder":
        assert config.store.url is not None
        root = folder_of(config.store.url) / component(config.store.store_id)
        return KeeperPlaces(
            channel, opened.enter_context(closing(LocalBackend(root, read_only=True)))
        )
    backend = open_objects(config.store, opened=opened, read_only=True)
    assert backend is not None
    return OnePlace(backend)


def _unit_places(cluster: StoreCluster, opened: ExitStack) -> UnitPlaces:
    units, readers = cluster.reach(opened)
    assert cluster.config.cluster is not None
    full_s = cluster.config.cluster.full_deadline_s
    return UnitPlaces(units, readers, full_deadline_s=full_s)


def _no_references(refs: Iterable[str]) -> list[Resolved]:
    raise InvalidConfig(
        "values have names, not references", subject=str([*refs][:1]), remedy="use read_range"
    )
