"""Values of tests: groups that nobody wrote for an index, and stores over any place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import tq_fs
from tests._clusters import Cluster, cluster, readers_of, units_of
from tests._rollouts import run_child, spawn_child, tree
from tests._ways import client_of
from tests.test_value_codec import same
from tq_fs import StoreConfig
from tq_fs.backends import LocalBackend
from tq_fs.bench.servers import S3Server
from tq_fs.cache import ChunkCache
from tq_fs.cluster._node_unit import NodeUnit
from tq_fs.errors import InvalidConfig
from tq_fs.places import open_objects
from tq_fs.reader import SegmentReader
from tq_fs.steps import EncodeOptions
from tq_fs.values import (
    Keeper,
    OnePlace,
    Place,
    StoredGroup,
    UnitPlaces,
    ValueCalls,
    ValueEntry,
    ValueIndex,
    ValuePlaces,
    ValueStore,
)
from tq_fs.values._entry import NamedEntry

__all__ = ["run_child", "same", "spawn_child", "tree"]

STORE = "run"
_numbers = itertools.count()


def stored_group(*names: tuple[int, str], path: str = "", unit: str = "") -> StoredGroup:
    """Return a group of values that lies nowhere."""
    number = next(_numbers)
    path = path or f"values/r/{number % 256:02x}/{number:016x}-0-{number:x}"
    values = [NamedEntry(i, f, ValueEntry(at=k, nbytes=1)) for k, (i, f) in enumerate(names)]
    return StoredGroup(unit, path, 100, tuple(values))


def place_of(group: StoredGroup) -> Place:
    return Place(group.unit, group.path)


def same_columns(have: Mapping[str, Any], want: Mapping[str, Sequence[Any]]) -> bool:
    return set(have) == set(want) and all(
        len(have[name]) == len(want[name])
        and all(same(a, b) for a, b in zip(have[name], want[name], strict=True))
        for name in want
    )


# ---------------------------------------------------------------- stores


def open_store(
    calls: ValueCalls,
    places: ValuePlaces,
    opened: ExitStack,
    *,
    run: str = "r1",
    threads: int = 2,
    allow_pickle: bool = False,
    compact: bool = True,
) -> ValueStore:
    """Open values of a run over places that are open."""
    readers = opened.enter_context(ThreadPoolExecutor(threads))
    reader = SegmentReader(
        _no_references, places.readers, pool=readers, threads=threads, cache=ChunkCache(1 << 20)
    )
    return ValueStore(
        STORE,
        run,
        calls=calls,
        places=places,
        reader=reader,
        pool=opened.enter_context(ThreadPoolExecutor(threads)),
        options=EncodeOptions(compact=compact),
        allow_pickle=allow_pickle,
    )


def _no_references(refs: Any) -> Any:
    raise InvalidConfig("values have names", subject=str(refs))


class Kept:
    """A run's values and their keeper, in this process."""

    def __init__(
        self,
        folder: Path,
        places: ValuePlaces,
        opened: ExitStack,
        run: str = "r1",
        checkpoints: int = 2,
        now_ns: Callable[[], int] | None = None,
        **named: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.places = places
        self.index = ValueIndex(folder / f"{run}.sqlite", STORE)
        opened.callback(self.index.close)
        clock: dict[str, Any] = {} if now_ns is None else {"now_ns": now_ns}
        self.keeper = Keeper(
            self.index,
            places,
            STORE,
            run,
            checkpoints=checkpoints,
            sweep_s=0,
            check=lambda: None,
            **clock,
        )
        opened.callback(self.keeper.close)
        self.values = open_store(self.keeper, places, opened, run=run, **named)


def keeper_of(opened: ExitStack) -> Keeper:
    """Return the keeper that was opened, by what the stack will close."""
    for _, callback in opened._exit_callbacks:  # type: ignore[attr-defined]
        owner = getattr(getattr(callback, "__wrapped__", None), "__self__", None)
        if isinstance(owner, Keeper):
            return owner
    raise AssertionError("no keeper")


# ---------------------------------------------------------------- where values lie


class Ground:
    """A place of values, with a way past everything: to read, damage and remove files of it."""

    def __init__(self, places: ValuePlaces, folder: Path) -> None:
        self.places = places
        self.folder = folder  # for indexes

    def objects(self, root: str = "values") -> list[tuple[str, str]]:
        """Return unit and key of every object below a root."""
        return [
            (unit, key)
            for unit in self.places.units()
            for key, _ in self.places.backend(unit).walk(root)
        ]

    def read(self, unit: str, key: str) -> bytes:
        raise NotImplementedError

    def write(self, unit: str, key: str, data: bytes) -> None:
        raise NotImplementedError

    def remove(self, unit: str, key: str) -> None:
        raise NotImplementedError

    @contextmanager
    def kept(self, run: str = "r1", **named: Any) -> Iterator[Kept]:
        with ExitStack() as opened:
            yield Kept(self.folder, self.places, opened, run, **named)


class Folders(Ground):
    """Folders of a backend, or of units."""

    def __init__(self, places: ValuePlaces, folder: Path, roots: dict[str, Path]) -> None:
        super().__init__(places, folder)
        self.roots = roots

    def read(self, unit: str, key: str) -> bytes:
        return (self.roots[unit] / key).read_bytes()

    def write(self, unit: str, key: str, data: bytes) -> None:
        (self.roots[unit] / key).write_bytes(data)

    def remove(self, unit: str, key: str) -> None:
        (self.roots[unit] / key).unlink()


class Bucket(Ground):
    """A prefix of a bucket."""

    def __init__(self, places: ValuePlaces, folder: Path, client: Any, bucket: str) -> None:
        super().__init__(places, folder)
        self._client = client
        self._bucket = bucket
        self._prefix = f"p/{STORE}/"

    def read(self, unit: str, key: str) -> bytes:
        found = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key)
        data: bytes = found["Body"].read()
        return data

    def write(self, unit: str, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=data)

    def remove(self, unit: str, key: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=self._prefix + key)


@contextmanager
def folder_ground(folder: Path, **settings: Any) -> Iterator[Folders]:
    with closing(LocalBackend(folder / "store", **{"ahead": 0, **settings})) as backend:
        yield Folders(OnePlace(backend), folder / "index", {"": folder / "store"})


@contextmanager
def unit_ground(folder: Path, node: str = "n0", **settings: Any) -> Iterator[Folders]:
    """Two units, seen from a node: the own unit's files are read, the other's come by channel."""
    with cluster(folder / "units", 2, **settings) as found:
        yield unit_view(found, folder, node)


def unit_view(found: Cluster, folder: Path, node: str) -> Folders:
    store = found.store([tq_fs.logprobs()], node=node)
    found._opened.callback(store.close)
    places = UnitPlaces(units_of(store), readers_of(store), full_deadline_s=0.2)
    units = [(node, unit) for node, unit in found.fleet.units.items() if isinstance(unit, NodeUnit)]
    roots = {unit.name: found.root / node / STORE for node, unit in units}
    return Folders(places, folder / "index", roots)


@contextmanager
def bucket_ground(folder: Path, server: S3Server, bucket: str, driver: str) -> Iterator[Bucket]:
    config = StoreConfig(store_id=STORE, url=f"s3://{bucket}/p", driver=driver)
    with ExitStack() as opened:
        backend = open_objects(config, opened=opened, read_only=False)
        assert backend is not None
        client = opened.enter_context(client_of(server))
        yield Bucket(OnePlace(backend), folder / "index", client, bucket)
