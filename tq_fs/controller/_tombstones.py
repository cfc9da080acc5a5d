"""What is being deleted on several units: written down first, so that a crash does not stop it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator

from tq_fs.backends import Backend
from tq_fs.errors import CorruptError, MissingError
from tq_fs.keys import Incarnation
from tq_fs.manifests import TOMBSTONE_SCHEMA, TombstoneDocument, decode, encode

_log = logging.getLogger(__name__)

_ROOT = "tombstones"


class Tombstones:
    """Deletions that have begun and have not ended. Safe to call from many threads.

    Parameters
    ----------
    backend
        Where they are written; stays the caller's.
    epoch
        Stands in each.
    """

    def __init__(self, backend: Backend, *, epoch: int) -> None:
        self._backend = backend
        self._epoch = epoch

    def put(self, incarnation: Incarnation, units: Collection[str]) -> None:
        """Write down that a session is over, before anything of it is removed."""
        document = TombstoneDocument(
            schema=TOMBSTONE_SCHEMA,
            epoch=self._epoch,
            partition=incarnation.partition,
            session_id=incarnation.session_id,
            incarnation_id=incarnation.incarnation_id,
            units=tuple(sorted(units)),
        )
        self._backend.put(f"{_ROOT}/{incarnation.path}", encode(document), urgent=True)

    def remove(self, incarnation: Incarnation) -> None:
        """Forget a session of which nothing is left; idempotent."""
        self._backend.delete(f"{_ROOT}/{incarnation.path}")

    def all(self) -> Iterator[TombstoneDocument]:
        """Yield the deletions that have not ended; what cannot be read is left alone."""
        for key, _ in self._backend.walk(_ROOT):
            try:
                yield decode(self._backend.get(key), TombstoneDocument, key)
            except MissingError:
                continue  # ended meanwhile
            except CorruptError:
                _log.exception("%s is left alone; a sweep of Steps does its work", key)
