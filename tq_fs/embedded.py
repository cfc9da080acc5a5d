"""The parts of a store in this process: its Controller, its StorageUnit, and what reads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tq_fs.backends import Readable, TieredBackend
from tq_fs.cache import ChunkCache
from tq_fs.config import StoreConfig
from tq_fs.controller import Controller, ControllerCalls
from tq_fs.manifests import Catalog
from tq_fs.metrics import Metrics
from tq_fs.places import open_places
from tq_fs.reader import SegmentReader
from tq_fs.recovery import Recovery
from tq_fs.steps import EncodeOptions
from tq_fs.storage_unit import StorageUnit, Units
from tq_fs.units import Passed

UNIT = "local"
_LOCAL_THREADS = 2
_REMOTE_READERS = 16  # they wait for the network, mostly
_REMOTE_WRITERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a store is made of, open. The pieces belong to the ExitStack they were opened in.

    Attributes
    ----------
    controller
        Answers what references mean.
    units
        Take Steps; None where the store is read only.
    reader
        Reads references.
    url, location
        Of the store itself, its id included; and the same as a local folder, where it is one.
    recovery
        What opening it found.
    passed
        Tells what has passed between this process and the units of a cluster.
    """

    controller: ControllerCalls
    units: Units | None
    reader: SegmentReader
    url: str | None
    location: Path | None
    recovery: Recovery
    passed: Callable[[], Passed] = Passed


def open_embedded(
    url: str,
    config: StoreConfig,
    *,
    read_only: bool,
    now_ns: Callable[[], int],
    metrics: Metrics | None,
    cache: ChunkCache,
    opened: ExitStack,
) -> Parts:
    """Take where a store lies, read its manifests, and make the parts that work on them.

    Raises
    ------
    StoreBusy, WrongStore, InvalidConfig, BucketMissing, StorageDenied, StorageFailed
    """
    places = open_places(url, config, read_only=read_only, opened=opened)
    if metrics is not None and isinstance(places.steps, TieredBackend):
        opened.callback(metrics.watch(places.steps.samples))
    threads = reader_threads(config, remote=places.remote)
    pool = reader_pool(threads, opened)
    units = None
    if not read_only:
        options = encode_options(config, remote=places.remote)
        units = StorageUnit(places.steps, config.store_id, name=UNIT, options=options)
    persist = config.persist_trajectories
    controller = Controller(
        Catalog(places.documents, config.store_id, cache_bytes=config.manifest_cache_bytes),
        units,
        epoch=places.epoch,
        now_ns=now_ns,
        persist=places.remote if persist is None else persist,
        fence=places.fence,
        pool=pool if places.remote else None,
    )
    if units is None:
        recovery = controller.load()
    else:
        recovery = controller.recover()
        places.confirm()  # last: on a full disk the sweep has made room
        opened.callback(controller.close)
    return Parts(
        controller=controller,
        units=units,
        reader=SegmentReader(
            controller.resolve,
            OnePlace(places.steps),
            pool=pool,
            threads=threads,
            cache=cache,
            metrics=metrics,
        ),
        url=places.url,
        location=places.folder,
        recovery=recovery,
    )


class OnePlace(dict[str, Readable]):
    """Says of every unit that its Steps lie in one place.

    A store in an object store may have been recorded by the units of a cluster.
    """

    def __init__(self, place: Readable) -> None:
        super().__init__({UNIT: place})

    def __missing__(self, unit: str) -> Readable:
        """Return the place."""
        return self[UNIT]


def reader_threads(config: StoreConfig, *, remote: bool) -> int:
    """Return how many threads read, the calling one included."""
    return config.reader_threads or (_REMOTE_READERS if remote else _LOCAL_THREADS)


def writer_threads(config: StoreConfig, *, remote: bool) -> int:
    """Return how many threads encode Steps and write or send them."""
    return config.writer_threads or (_REMOTE_WRITERS if remote else _LOCAL_THREADS)


def reader_pool(threads: int, opened: ExitStack) -> ThreadPoolExecutor | None:
    """Return the threads that help the calling one; None for none."""
    if threads == 1:
        return None
    return opened.enter_context(ThreadPoolExecutor(threads - 1, "tq-fs-reader"))


def encode_options(config: StoreConfig, *, remote: bool) -> EncodeOptions:
    """Return how Steps are encoded; as few objects as possible where each costs a request."""
    compact = config.layout == "compact" or (config.layout == "auto" and remote)
    return EncodeOptions(
        checksum=config.checksum, layer_groups=config.layer_groups, compact=compact
    )
