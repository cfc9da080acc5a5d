"""The embedded store: StorageUnit and Controller in this process, behind one small API."""

from __future__ import annotations

import itertools
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from tq_fs import fields as f
from tq_fs.budget import ByteBudget
from tq_fs.cache import ChunkCache
from tq_fs.config import StoreConfig
from tq_fs.controller import Controller
from tq_fs.embedded import UNIT, Parts, open_embedded, reader_pool, reader_threads, writer_threads
from tq_fs.errors import (
    InvalidConfig,
    InvalidSelection,
    ReadOnlyStore,
    SessionClosed,
    WrongProcess,
)
from tq_fs.fields import FieldSpec
from tq_fs.hydrate import Allocate, Hydrator, Selection, TokensOf
from tq_fs.keys import Incarnation
from tq_fs.logs import log_context
from tq_fs.manifests import Catalog, Mode
from tq_fs.memory import mapped_empty
from tq_fs.metrics import Metrics
from tq_fs.micro_batches import MicroBatches, by_budget, by_count
from tq_fs.places import open_places
from tq_fs.plan import Range
from tq_fs.recovery import Recovery
from tq_fs.session import Session
from tq_fs.steps import EncodeOptions
from tq_fs.storage_unit import StorageUnit
from tq_fs.trajectory import ANY_VERSIONS, Sample, Segment, Trajectory, VersionRule
from tq_fs.units import Passed
from tq_fs.writer import StepWriter

if TYPE_CHECKING:
    import torch

Open = Callable[[ChunkCache, ExitStack], Parts]


def open_store(
    url: str | None,
    *,
    fields: Sequence[FieldSpec],
    config: StoreConfig | None = None,
    read_only: bool = False,
    now_ns: Callable[[], int] = time.time_ns,
    metrics: Metrics | None = None,
    **settings: Any,
) -> Store:
    """Open a store, or make it where there is none.

    Parameters
    ----------
    url
        ``file:///absolute/folder``, ``s3://bucket/prefix``, ``tqfs://host:port`` of a store that
        another node serves, or of another file system that fsspec serves. None switches the
        store off: everything stays in memory, on the same code path.
    fields
        Declared per-token fields; see :func:`tq_fs.logprobs`, :func:`tq_fs.routed_experts`.
    config
        Settings; defaults where left out.
    read_only
        Only hydrate: any number of processes may, beside the one that writes.
    now_ns
        The Controller's clock.
    metrics
        Counts what passes; stays the caller's, who publishes it (:class:`tq_fs.metrics.Metrics`).
    settings
        Single settings that replace those of `config`, such as ``store_id="run-7"``.

    Returns
    -------
    Store
        A context manager; close it.

    Raises
    ------
    InvalidConfig
        The URL or a setting makes no sense.
    StoreBusy
        Another process has it open for writing; in an object store the later one takes it.
    WrongStore
        The folder or prefix holds something else.
    BucketMissing, StorageDenied, StorageFailed
        The object store cannot be used.
    """
    merged = StoreConfig.of(
        {**({n: getattr(config, n) for n in StoreConfig.__slots__} if config else {}), **settings}
    )
    selected = f.select(fields, merged.transfer)
    if url is None or not selected:
        return Store(merged, fields, frozenset(), None, metrics=metrics)

    def parts(cache: ChunkCache, opened: ExitStack) -> Parts:
        return open_embedded(
            url,
            merged,
            read_only=read_only,
            now_ns=now_ns,
            metrics=metrics,
            cache=cache,
            opened=opened,
        )

    remote = not url.startswith("file:")
    return Store(merged, fields, selected, parts, remote=remote, metrics=metrics)


def recover_store(
    url: str, config: StoreConfig | None = None, *, dry_run: bool = False
) -> Recovery:
    """Rebuild a store's catalog from what lies in it, when every process and node is gone.

    Reads all manifests, holds them against the Steps that are there, makes manifests that cannot
    be used anew from trajectory and Steps where both are whole, and removes Steps of sessions that
    were never finalized or were released. What a manifest refers to is never deleted. Takes the
    store for writing: a process that still has it open can write no more.

    Parameters
    ----------
    url, config
        As for :func:`open_store`; without fields, which recovery does not need.
    dry_run
        Change nothing, and tell what would be removed.

    Raises
    ------
    WrongStore, StoreBusy, BucketMissing, StorageDenied, StorageFailed
    """
    config = config or StoreConfig()
    with ExitStack() as opened:
        places = open_places(url, config, read_only=dry_run, opened=opened, create=False)
        pool = reader_pool(reader_threads(config, remote=True), opened)
        controller = Controller(
            Catalog(places.documents, config.store_id, cache_bytes=config.manifest_cache_bytes),
            StorageUnit(places.steps, config.store_id, name=UNIT, options=EncodeOptions()),
            epoch=places.epoch,
            now_ns=time.time_ns,
            fence=places.fence,
            pool=pool if places.remote else None,
        )
        if dry_run:
            return controller.survey()
        found = controller.recover(rebuild=True)
        places.confirm()
        return found


class Store:
    """A store that is open. Safe to call from many threads; made by :func:`open_store`.

    Attributes
    ----------
    config
        Its settings.
    url
        Of the store itself, its id included; None where the store is off.
    location
        The same as a local folder; None where there is none.
    cache
        Decoded chunks that Segments share.
    reader
        Reads references; None where the store is off.
    recovery
        What opening it found, and what it removed: Steps of sessions that were never finalized,
        and of Segments whose deletion was begun.
    """

    def __init__(
        self,
        config: StoreConfig,
        fields: Sequence[FieldSpec],
        selected: frozenset[str],
        parts: Open | None,
        *,
        remote: bool = False,
        metrics: Metrics | None = None,
    ) -> None:
        self.config = config
        self._specs = tuple(fields)
        self._numbers = itertools.count(1)
        self._closed = False
        self._pid = os.getpid()
        self._closing = ExitStack()
        with ExitStack() as opened:
            self._budget = ByteBudget(
                config.inflight_bytes,
                deadline_s=config.inflight_deadline_s,
                clock=time.monotonic,
                subject=f"Steps on their way to store {config.store_id!r}",
            )
            self.cache = ChunkCache(config.cache_bytes)
            made = parts(self.cache, opened) if parts is not None else None
            threads = writer_threads(config, remote=remote)
            writers = opened.enter_context(ThreadPoolExecutor(threads, "tq-fs-writer"))
            self._ahead = opened.enter_context(ThreadPoolExecutor(1, "tq-fs-prefetch"))
            units = made.units if made else None
            self.url = made.url if made else None
            self.location = made.location if made else None
            self.recovery = made.recovery if made else Recovery()
            self.reader = made.reader if made else None
            self._controller = made.controller if made else None
            self._passed = made.passed if made else Passed
            self._read_only = made is not None and units is None
            self._writer = StepWriter(
                units, selected, pool=writers, budget=self._budget, metrics=metrics
            )
            if metrics is not None:
                opened.callback(metrics.watch(self._writer.samples))
                opened.callback(metrics.watch(self.cache.samples))
            self._hydrator = Hydrator(self._specs, self.reader)
            self._closing = opened.pop_all()

    @property
    def fields(self) -> tuple[FieldSpec, ...]:
        """The declared fields."""
        return self._specs

    # ------------------------------------------------------------ record

    def session(
        self,
        session_id: str,
        *,
        partition: str = "train",
        mode: Mode = "tito",
        versions: VersionRule = ANY_VERSIONS,
    ) -> Session:
        """Begin to record a rollout session.

        Parameters
        ----------
        session_id
            Any text of up to 1,000 bytes. Used again, it gives a new incarnation.
        partition
            Namespace, such as ``train`` or ``eval``.
        mode
            ``tito``: an append Step holds its own tokens. ``snapshot``: every Step holds the whole
            sequence.
        versions
            Which weight versions its Steps may hold together; any, where left out.
        """
        self._check_open()
        if self._read_only:
            raise ReadOnlyStore(
                "is open for reading only", subject=f"store {self.config.store_id!r}"
            )
        if self._controller is not None:
            incarnation = self._controller.open_session(partition, session_id)
        else:
            incarnation = Incarnation(partition, session_id, f"{next(self._numbers):016x}")
        trajectory = Trajectory(
            incarnation, self._specs, mode, versions=versions, compact=self.config.compact
        )
        return Session(
            trajectory,
            self._writer,
            self._controller,
            self.config.store_id,
            check_open=self._check_open,
        )

    def unreleased(
        self, consumer: str | None = None, *, partition: str | None = None, held: bool = False
    ) -> Iterator[str]:
        """Yield the references of finalized Segments that are still to be released.

        Parameters
        ----------
        consumer
            By this consumer; None for any.
        partition
            Only of this partition.
        held
            Also those whose release waits for :meth:`checkpoint_saved`: what a run that resumes
            from an earlier checkpoint has to train on again.
        """
        self._check_open()
        if self._controller is None:
            return iter(())
        return self._controller.unreleased(consumer, partition, held=held)

    def release(
        self,
        refs: Iterable[str | Segment | Sample],
        consumer: str = "train",
        *,
        rollout_id: int | None = None,
    ) -> int:
        """Note that a consumer needs Segments no more; returns how many Steps that deleted.

        Idempotent. Comes after the barrier of all ranks that read them.

        Parameters
        ----------
        rollout_id
            Hold the release back until :meth:`checkpoint_saved` names this rollout or a later one:
            a run that resumes from an earlier checkpoint finds the Segments still there.
        """
        self._check_open()
        if self._controller is None:
            return 0
        given = _refs([refs] if isinstance(refs, str) else refs)
        with log_context(store=self.config.store_id):
            return self._controller.release(given, consumer, rollout_id)

    def checkpoint_saved(self, rollout_id: int) -> int:
        """Release what is held for a rollout, or for an earlier one; returns how many Steps go.

        Idempotent. Comes once the model checkpoint that used them is on disk.
        """
        self._check_open()
        return 0 if self._controller is None else self._controller.checkpoint_saved(rollout_id)

    def segments(self, refs: Iterable[str]) -> Iterator[Segment]:
        """Yield finalized Segments with their resident fields: what a resumed run trains on.

        Parameters
        ----------
        refs
            References, such as :meth:`unreleased` gives. Those of a session should follow each
            other: its trajectory is then read once.

        Raises
        ------
        TrajectoryMissing
            The session was finalized without ``persist_trajectories``.
        SegmentMissing, StaleReference, WrongStore, ManifestCorrupt
        """
        self._check_open()
        if self._controller is None:
            raise InvalidConfig("a reference needs a store that is on", subject="segments")
        for _, mine in itertools.groupby(
            (found.ref for found in self._controller.resolve(refs)), key=lambda r: r.incarnation
        ):
            wanted = list(mine)
            closed = self._controller.trajectory(wanted[0])
            built = {s.ref: s for s in closed.segments(self.config.store_id)}
            yield from (built[str(ref)] for ref in wanted)

    # ------------------------------------------------------------ hydrate

    def hydrate(
        self,
        samples: Sequence[Sample | Segment | str],
        *,
        fields: Sequence[str] | None = None,
        layers: Range | None = None,
        tokens: Sequence[Range] | Range | TokensOf | None = None,
    ) -> dict[str, list[torch.Tensor]]:
        """Return Slime's fields of a batch of samples.

        Parameters
        ----------
        samples
            Samples, Segments, or references (of whole Segments).
        fields
            Names; None for all.
        layers
            Half-open layer range, for a pipeline rank.
        tokens
            Half-open token range, or several, for a context rank; or a function that gives them
            for a sample's length and a field, see :class:`tq_fs.hydrate.Selection`.

        Returns
        -------
        dict
            ``rollout_log_probs``: float32 ``[response_length]`` for each sample;
            ``rollout_routed_experts``: int32 ``[T-1, layers, topk]`` for each sample.

        Raises
        ------
        StaleReference, SegmentMissing, StepMissing, ChunkCorrupt, ObjectShort, InvalidSelection
        """
        self._check_open()
        select = _selection(fields, layers, tokens)
        with log_context(store=self.config.store_id):
            return self._hydrator.tensors(self._samples(samples), select)

    def micro_batches(
        self,
        samples: Sequence[Sample | Segment | str],
        *,
        size: int | None = None,
        budget_bytes: int | None = None,
        fields: Sequence[str] | None = None,
        layers: Range | None = None,
        tokens: Sequence[Range] | Range | TokensOf | None = None,
        reuse: bool = False,
        allocate: Allocate = mapped_empty,
    ) -> MicroBatches:
        """Hydrate a shard lazily, one micro-batch ahead of its user.

        At most two micro-batches are in memory, beside those whose tensors are still held.

        Parameters
        ----------
        size
            Samples in a micro-batch, or
        budget_bytes
            bytes of its tensors.
        reuse
            Hydrate into two blocks in turn, whose pages are touched only once: faster, but the
            tensors of a micro-batch are overwritten as soon as the next one is taken.
        allocate
            Gives memory: a uint8 array of so many bytes (pinned, say).
        """
        self._check_open()
        select = _selection(fields, layers, tokens)
        chosen = self._samples(samples)
        if (size is None) == (budget_bytes is None):
            raise InvalidConfig("give either size or budget_bytes", subject="micro_batches")
        sizes = self._hydrator.sizes(chosen, select)
        if size is not None:
            runs = by_count(len(chosen), size)
        else:
            assert budget_bytes is not None
            runs = by_budget(sizes, budget_bytes)
        return MicroBatches(
            self._hydrator,
            chosen,
            select,
            runs,
            sizes,
            pool=self._ahead,
            check_open=self._check_open,
            allocate=allocate,
            reuse=reuse,
        )

    def _samples(self, samples: Sequence[Sample | Segment | str]) -> list[Sample]:
        return [self._sample(s) for s in samples]

    def _sample(self, item: Sample | Segment | str) -> Sample:
        if isinstance(item, Sample):
            return item
        if isinstance(item, Segment):
            return item.sample()
        if self.reader is None:
            raise InvalidConfig("a reference needs a store that is on", subject=item)
        (resolved,) = self.reader.resolve((item,))
        entry = resolved.segment
        return Sample(ref=item, tokens=entry.tokens, response_length=entry.response_tokens)

    def passed(self) -> Passed:
        """Return what has passed between this process and a cluster's units; zeros elsewhere."""
        return self._passed()

    # ------------------------------------------------------------ open and close

    def close(self) -> None:
        """Wait for Steps that are on their way, then let go of everything; idempotent.

        Sessions that were not finalized are swept when the store is opened again.
        """
        if os.getpid() != self._pid:
            return  # everything belongs to the process that opened it
        self._closed = True
        self._closing.close()

    def _check_open(self) -> None:
        name = f"store {self.config.store_id!r}"
        if self._closed:
            raise SessionClosed("was closed", subject=name)
        if os.getpid() != self._pid:
            raise WrongProcess(
                f"was opened in process {self._pid}, its threads do not live in this fork of it",
                subject=name,
                remedy="open the store (read_only, beside the writer) in the process that uses it",
            )

    def __enter__(self) -> Store:
        """Return the store."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the store."""
        self.close()


def _refs(items: Iterable[str | Segment | Sample]) -> Iterator[str]:
    for item in items:
        ref = item if isinstance(item, str) else item.ref
        if ref is not None:
            yield ref


def _selection(
    fields: Sequence[str] | None,
    layers: Range | None,
    tokens: Sequence[Range] | Range | TokensOf | None,
) -> Selection:
    ranges: tuple[Range, ...] | TokensOf | None = None
    if callable(tokens):
        ranges = tokens
    elif tokens is not None:
        given: list[Any] = list(tokens) if np.iterable(tokens) else [tokens]
        ranges = tuple(map(_range, [given] if given and np.ndim(given[0]) == 0 else given))
    return Selection(
        fields=None if fields is None else tuple(fields),
        layers=None if layers is None else _range(layers),
        tokens=ranges,
    )


def _range(value: Any) -> Range:
    """Return a half-open range given as a pair of whole numbers of any kind."""
    try:
        start, stop = map(operator.index, value)
    except (TypeError, ValueError) as error:
        raise InvalidSelection("is no pair of whole numbers", subject=repr(value)) from error
    return start, stop
