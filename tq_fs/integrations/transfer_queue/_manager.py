"""TransferQueue's storage manager: what each of its clients has in its process."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import zmq.asyncio
from tensordict import TensorDict
from transfer_queue.metadata import BatchMeta, extract_field_schema
from transfer_queue.storage.managers.base import StorageManager, StorageManagerFactory
from transfer_queue.storage.simple_storage import StorageKeyNotFoundError
from transfer_queue.utils.zmq_utils import ZMQServerInfo

from tq_fs.errors import InvalidField, ValueMissing
from tq_fs.integrations.transfer_queue._bootstrap import (
    NAME,
    abandon,
    connection_of,
    stop_own,
    take_charge,
)
from tq_fs.integrations.transfer_queue._columns import (
    Parser,
    batch_of,
    columns_of,
    nbytes_of,
    plain,
)
from tq_fs.integrations.transfer_queue._puts import Put, Puts, Schema, Waiter
from tq_fs.integrations.transfer_queue._teller import Teller
from tq_fs.keeper import ValueConfig, here, open_values
from tq_fs.values import Prepared, ValueStore

T = TypeVar("T")
_THREADS = 4  # gets and clears that are under way at a time
_WRITERS = {"folder": 2, "cluster": 2, "objects": 8}  # two keep up with a disk
_SYNCING = 8  # where a put waits for the device, others wait with it


class KeyGone(ValueMissing, StorageKeyNotFoundError):  # type: ignore[misc]
    """A value was cleared, or never put; what programs of TransferQueue expect in that case."""


@StorageManagerFactory.register(NAME)
class TqFsStorageManager(StorageManager):  # type: ignore[misc]  # TransferQueue has no types
    """Keeps samples' values in a store of tq-fs. All work is done in threads.

    Parameters
    ----------
    controller_info
        TransferQueue's controller.
    config
        ``backend.TqFs`` as :func:`~tq_fs.integrations.transfer_queue.bring_up` has left it.
    zmq_context
        The client's; TransferQueue's own part of a manager borrows it.

    Attributes
    ----------
    values
        The run's values.

    Raises
    ------
    InvalidConfig, StorageUnreachable
        This process cannot reach the store.
    """

    def __init__(
        self,
        controller_info: ZMQServerInfo,
        config: Any,
        zmq_context: zmq.asyncio.Context | None = None,
    ) -> None:
        connection = connection_of(config)
        self._run = connection.run
        with ExitStack() as opened:
            opened.push(lambda kind, *_: abandon(connection.run, kind))
            self.values: ValueStore = open_values(connection, here().node, opened=opened)
            self._threads = opened.enter_context(ThreadPoolExecutor(_THREADS, "tq-fs-transfer"))
            super().__init__(controller_info, config, zmq_context=zmq_context)
            threads = _writers(connection.config)
            teller = Teller(controller_info, self.storage_manager_id)
            self._puts = Puts(self.values, teller, threads=threads)
            opened.callback(self._puts.close)
            self._opened = opened.pop_all()
        take_charge(self._run)

    # ------------------------------------------------------------ data

    async def put_data(
        self, data: TensorDict, metadata: BatchMeta, data_parser: Parser | None = None
    ) -> None:
        """Store the fields of samples, all or none, and tell the controller that they are there.

        A put that is cancelled is carried out, and has ended when its caller hears of that: what it
        puts afterwards comes later.

        Raises
        ------
        ValueUnsupported, InvalidField
            A value cannot be stored as it is; nothing was written.
        StorageFull
            Nothing is visible.
        """
        if not metadata.size:
            return
        waiter = Waiter()
        write = functools.partial(self._write, data, metadata, data_parser)
        partition = metadata.partition_ids[0]
        self._puts.ask(Put(partition, write, metadata.global_indexes, nbytes_of(data), waiter))
        generation = await waiter.end()
        known = dict.fromkeys(map(str, data.keys()), generation)
        for noted in metadata._custom_backend_meta:  # so that a clear by it means these samples
            noted.update(known)

    def _write(
        self, data: TensorDict, metadata: BatchMeta, parser: Parser | None
    ) -> tuple[int | Prepared, Schema]:
        indexes = metadata.global_indexes
        if data.batch_size[0] != len(indexes):
            raise InvalidField(
                f"has {data.batch_size[0]} samples, its meta data {len(indexes)}", subject="data"
            )
        data = plain(data)
        schema = extract_field_schema(data)
        for meta in schema.values():
            if meta.get("per_sample_shapes") is not None:
                meta["per_sample_shapes"] = dict(
                    zip(indexes, meta["per_sample_shapes"], strict=True)
                )
        columns = columns_of(data, parser)
        return self.values.write(metadata.partition_ids[0], indexes, columns), schema

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """Return fields of samples, in their order.

        Raises
        ------
        KeyGone
            A sample was cleared, or has no such field; a ``StorageKeyNotFoundError``.
        ChunkCorrupt, ObjectShort, UnitLost
            What is stored is not what was written, or is gone.
        """
        if not metadata.size:
            return TensorDict({}, batch_size=0)
        return await self._in_thread(lambda: self._get(metadata))

    def _get(self, metadata: BatchMeta) -> TensorDict:
        samples = list(zip(metadata.partition_ids, metadata.global_indexes, strict=True))
        try:
            found = self.values.get(samples, metadata.field_names, joined=True)
        except ValueMissing as error:
            raise KeyGone(error.problem, subject=error.subject, remedy=error.remedy) from error
        return batch_of(found, len(samples))

    async def clear_data(self, metadata: BatchMeta) -> None:
        """Delete samples, whatever fields they have; idempotent.

        What was put under an index after it was given to another sample stays, if the meta data
        says which put it means: that from the controller, and that of a put, do. Other meta data
        means what is there when the clear begins.
        """
        if not metadata.size:
            return
        samples = [
            (partition, index, max(noted.values(), default=None))
            for partition, index, noted in zip(
                metadata.partition_ids,
                metadata.global_indexes,
                metadata._custom_backend_meta,
                strict=True,
            )
        ]
        await self._in_thread(lambda: self.values.clear(samples))

    # ------------------------------------------------------------ checkpoints

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write down in a folder which values there are; they stay in the store."""
        folder = Path(checkpoint_dir).absolute()
        await self._in_thread(lambda: self.values.save(folder))

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Let the store be as it was when the checkpoint in a folder was saved.

        Raises
        ------
        FileNotFoundError, CheckpointMissing, ManifestCorrupt, FormatTooNew, WrongStore
        """
        folder = Path(checkpoint_dir).absolute()
        await self._in_thread(lambda: self.values.load(folder))

    # ------------------------------------------------------------ life

    def close(self) -> None:
        """Release all that this process has, and end what it has started; idempotent."""
        opened = getattr(self, "_opened", None)
        if opened is None:
            return  # it never came to be
        self._puts.close()
        super().close()
        opened.close()
        stop_own(self._run)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _writers(config: ValueConfig) -> int:
    """Return how many threads write small puts."""
    return _WRITERS[config.kind] if config.store.durability == "none" else _SYNCING
