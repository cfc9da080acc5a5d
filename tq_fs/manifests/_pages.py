"""What a Controller remembers of all manifests: packed in memory, and in pages for the next one.

The manifests are the truth; a page saves a start from opening them. It is written when so many
manifests are in none yet, never changed, and believed only for a manifest whose file has the stamp
that was noted: what was released, written again, damaged by an editor or put there by a version
that knows no pages is seen in the listing of the manifests, which therefore is the journal. Any
page may be missing.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from tq_fs.backends import Backend
from tq_fs.errors import ObjectMissing, TqFsError
from tq_fs.keys import Incarnation
from tq_fs.manifests._models import SessionManifest
from tq_fs.manifests._page import decode_page, encode_page, note, noted

PAGES = "pages"
PAGE_SESSIONS = 1024  # in a page
LEAST_SESSIONS = 256  # fewer are not worth a page at the end
_SPARSE = 4  # a page with less than this part of a full one alive is written anew
_MOST_SPARSE = 4  # at once
_NAME = re.compile(r"([0-9]{8,})-([0-9]{6,})\.msgpack")

_log = logging.getLogger(__name__)


class Pages:
    """The manifests of a store's live sessions, packed. Safe to call from many threads.

    Memory: about 1.4 KB for a session of ten Steps.

    Parameters
    ----------
    backend
        Where pages lie; stays the caller's.
    store_id
        Pages of other stores are not believed.
    full
        Manifests in a page.
    least
        Manifests that :meth:`flush` writes a page for.
    """

    def __init__(
        self,
        backend: Backend,
        store_id: str,
        *,
        full: int = PAGE_SESSIONS,
        least: int = LEAST_SESSIONS,
    ) -> None:
        self._backend = backend
        self._store_id = store_id
        self._full = full
        self._least = least
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._held: dict[Incarnation, bytes] = {}
        self._waiting: dict[Incarnation, None] = {}  # held, with a stamp, and in no page
        self._page_of: dict[Incarnation, str] = {}
        self._alive: Counter[str] = Counter()
        self._number = 0
        self._due = full  # waiting, before a page is written

    # ------------------------------------------------------------ memory

    def hold(self, manifest: SessionManifest, data: bytes | None = None, stamp: str = "") -> None:
        """Keep a manifest; `data` is its file's content and `stamp` that file's, where known."""
        entry = note(manifest, data, stamp)
        incarnation = manifest.incarnation
        with self._lock:
            self._held[incarnation] = entry
            if stamp:
                self._waiting[incarnation] = None

    def get(self, incarnation: Incarnation) -> bytes | None:
        """Return a manifest that is held, as its file holds it.

        Raises
        ------
        ManifestCorrupt
        """
        entry = self._held.get(incarnation)
        return noted(entry).json() if entry is not None else None

    def drop(self, incarnation: Incarnation) -> None:
        """Forget a manifest that is gone; idempotent."""
        with self._lock:
            gone = self._forget(incarnation)
        self._remove(gone)

    def _forget(self, incarnation: Incarnation) -> list[str]:
        """Take an incarnation out; return the page that nobody needs any more, if that leaves one."""
        self._held.pop(incarnation, None)
        self._waiting.pop(incarnation, None)
        page = self._page_of.pop(incarnation, None)
        if page is None:
            return []
        self._alive[page] -= 1
        if self._alive[page]:
            return []
        del self._alive[page]
        return [page]

    # ------------------------------------------------------------ start

    def read(self) -> dict[str, tuple[str, bytes]]:
        """Return what the pages say: for each incarnation's path the page's name, and the entry.

        What cannot be used is left out: the manifests themselves are there.
        """
        found: dict[str, tuple[str, bytes]] = {}
        for name in sorted(filter(_NAME.fullmatch, self._backend.list(PAGES)), key=_order):
            self._number = max(self._number, _order(name)[1])
            for entry in self._entries(name):
                found[noted(entry).incarnation.path] = (name, entry)
            self._alive[name] += 0
        return found

    def _entries(self, name: str) -> list[bytes]:
        key = f"{PAGES}/{name}"
        try:
            return decode_page(self._backend.get(key), self._store_id, key)
        except ObjectMissing:
            return []  # written anew elsewhere
        except TqFsError:
            _log.warning("%s is not used: the manifests are read instead", key, exc_info=True)
            return []

    def keep(self, incarnation: Incarnation, page: str, entry: bytes) -> None:
        """Hold an entry of a page, once it is known to be true."""
        with self._lock:
            self._held[incarnation] = entry
            self._page_of[incarnation] = page
            self._alive[page] += 1

    # ------------------------------------------------------------ write

    def turn(self, epoch: int) -> None:
        """Write pages if so many manifests are in none that they fill one."""
        while len(self._waiting) >= self._due and self._write(epoch):
            pass

    def flush(self, epoch: int) -> None:
        """Write what is in no page yet, and remove pages that nobody needs."""
        self.turn(epoch)
        if len(self._waiting) >= self._least:
            self._write(epoch)
        with self._lock:
            empty = [name for name, alive in self._alive.items() if not alive]
            for name in empty:
                del self._alive[name]
        self._remove(empty)

    def _write(self, epoch: int) -> bool:
        """Write one page; False where that did not work, or another thread is at it."""
        if not self._writing.acquire(blocking=False):
            return False
        try:
            batch = self._next()
            self._number += 1
            name = f"{epoch:08d}-{self._number:06d}.msgpack"
            page = encode_page(self._store_id, epoch, list(batch.values()))
            self._backend.put(f"{PAGES}/{name}", page)
        except TqFsError:
            _log.warning("a page of the catalog could not be written", exc_info=True)
            self._due = len(self._waiting) + self._full
            return False
        else:
            self._due = self._full
            self._remove(self._settle(name, batch))
            return True
        finally:
            self._writing.release()

    def _next(self) -> dict[Incarnation, bytes]:
        """Return what the next page is to hold: what waits, and what is left of sparse pages."""
        with self._lock:
            few = self._full / _SPARSE
            sparse = [name for name, alive in self._alive.items() if alive < few][:_MOST_SPARSE]
            chosen = [*self._waiting][: self._full]
            chosen += [i for i, page in self._page_of.items() if page in sparse] if sparse else []
            return {incarnation: self._held[incarnation] for incarnation in chosen}

    def _settle(self, name: str, batch: dict[Incarnation, bytes]) -> list[str]:
        """Note where entries lie that are still true; return pages that nobody needs any more."""
        gone: list[str] = []
        with self._lock:
            self._alive[name] = 0
            for incarnation, entry in batch.items():
                if self._held.get(incarnation) is entry:
                    gone += self._forget(incarnation)
                    self._held[incarnation] = entry
                    self._page_of[incarnation] = name
                    self._alive[name] += 1
            if not self._alive[name]:
                del self._alive[name]
                gone.append(name)
        return gone

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(TqFsError):  # it says nothing that is believed; the next start tries again
                self._backend.delete(f"{PAGES}/{name}")


def _order(name: str) -> tuple[int, int]:
    """Return epoch and number of a page."""
    found = _NAME.fullmatch(name)
    assert found is not None
    return int(found[1]), int(found[2])
