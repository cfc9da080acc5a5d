"""Which stores lie below a URL: for whoever has named one that does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlsplit

from tq_fs.backends import Backend, LocalBackend, Retry, open_object_backend
from tq_fs.config import StoreConfig, folder_of
from tq_fs.errors import InvalidKey, ObjectMissing, TqFsError, WrongStore
from tq_fs.keys import unescape
from tq_fs.served import SCHEME
from tq_fs.store_folder import STORE_FILE

_MOST = 20


@contextmanager
def naming_neighbours(url: str, config: StoreConfig) -> Iterator[None]:
    """Say in the error of a store that is not there which others are.

    Raises
    ------
    WrongStore
    """
    try:
        yield
    except WrongStore as error:
        found = stores_below(url, config)
        if config.store_id in found or not found:
            raise
        names = ", ".join(map(repr, found))
        raise WrongStore(
            error.problem, subject=error.subject, remedy=f"stores there (--store-id): {names}"
        ) from error


def stores_below(url: str, config: StoreConfig) -> list[str]:
    """Return the ids of stores below a URL, some of them; none where nobody can look."""
    with ExitStack() as opened, suppress(TqFsError):
        backend = _open(url, config, opened)
        return [] if backend is None else list(_stores(backend))
    return []


def _open(url: str, config: StoreConfig, opened: ExitStack) -> Backend | None:
    scheme = urlsplit(url).scheme
    backend: Backend
    if scheme == SCHEME:
        return None  # what is served is one store
    if scheme == "file":
        backend = LocalBackend(folder_of(url), read_only=True)
    else:
        backend = open_object_backend(
            url.rstrip("/"),
            driver=config.driver,
            options=config.storage_options,
            retry=Retry(deadline_s=config.retry_deadline_s),
            timeout_s=config.request_timeout_s,
        )
    opened.callback(backend.close)
    return backend


def _stores(backend: Backend) -> Iterator[str]:
    for name in list(backend.list(""))[:_MOST]:
        try:
            backend.get(f"{name}/{STORE_FILE}")
            yield unescape(name)
        except (ObjectMissing, InvalidKey):
            continue
