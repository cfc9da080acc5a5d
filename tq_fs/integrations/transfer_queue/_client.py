"""TransferQueue's key-value client, for programs that use such clients by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from transfer_queue.storage.clients.base import StorageClientFactory, StorageKVClient

from tq_fs.errors import InvalidKey
from tq_fs.integrations.transfer_queue._bootstrap import connection_of
from tq_fs.keeper import here, open_values

_PARTITION = ""


@StorageClientFactory.register("TqFsStorageClient")
class TqFsStorageClient(StorageKVClient):  # type: ignore[misc]  # TransferQueue has no types
    """Puts, gets and clears under keys ``<index>@<field>``. Safe to call from many threads.

    Such keys know no partition: they are apart from what
    :class:`~tq_fs.integrations.transfer_queue.TqFsStorageManager` stores.

    Parameters
    ----------
    config
        ``backend.TqFs`` as the bootstrap has left it.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        with ExitStack() as opened:
            self._values = open_values(connection_of(config), here().node, opened=opened)
            self._opened = opened.pop_all()

    def put(self, keys: Sequence[str], values: Sequence[Any]) -> list[int]:
        """Store values; return the generation of each."""
        generations = []
        for field, named in _by_field(keys).items():
            indexes = [index for _, index in named]
            column = [values[at] for at, _ in named]
            generation = self._values.put(_PARTITION, indexes, {field: column})
            generations += [(at, generation) for at, _ in named]
        return [generation for _, generation in sorted(generations)]

    def get(
        self,
        keys: Sequence[str],
        shapes: object = None,  # noqa: ARG002  # what is stored knows its own
        dtypes: object = None,  # noqa: ARG002
        custom_backend_meta: object = None,  # noqa: ARG002
    ) -> list[Any]:
        """Return values in the order of their keys.

        Raises
        ------
        ValueMissing
        """
        found: dict[int, Any] = {}
        for field, named in _by_field(keys).items():
            samples = [(_PARTITION, index) for _, index in named]
            column = self._values.get(samples, [field])[field]
            assert isinstance(column, list)
            found.update(zip([at for at, _ in named], column, strict=True))
        return [found[at] for at in range(len(keys))]

    def clear(self, keys: Sequence[str], custom_backend_meta: object = None) -> None:  # noqa: ARG002
        """Delete the samples of keys, with all their fields; idempotent."""
        indexes = {index for named in _by_field(keys).values() for _, index in named}
        self._values.clear([(_PARTITION, index, None) for index in sorted(indexes)])

    def close(self) -> None:
        """Release all threads and descriptors; idempotent."""
        self._opened.close()


def _by_field(keys: Sequence[str]) -> Mapping[str, list[tuple[int, int]]]:
    """Return for each field the positions of its keys, and their indexes."""
    found: dict[str, list[tuple[int, int]]] = {}
    for at, key in enumerate(keys):
        index, mark, field = key.partition("@")
        if not mark or not index.isdecimal():
            raise InvalidKey("is no key of the form <index>@<field>", subject=repr(key)[:200])
        found.setdefault(field, []).append((at, int(index)))
    return found
