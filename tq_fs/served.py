"""A local folder's store, for processes of other nodes: ``tqfs://host:port``.

One process holds the folder and serves its bytes over the channel; it knows nothing of sessions.
Whoever opens the URL is a store like any other: one process writes at a time, which claims settle
as in an object store, and any number read.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from urllib.parse import urlsplit

from tq_fs.backends import LocalBackend, Retry
from tq_fs.channel import ChannelBackend, ChannelServer, Identity, Limits
from tq_fs.config import folder_of
from tq_fs.errors import InvalidConfig
from tq_fs.keys import component
from tq_fs.storage_options import StorageOptions
from tq_fs.store_folder import STORE_FILE, claim_folder, lock_folder, unlock_folder, write_claim

SCHEME = "tqfs"
_OPTIONS = ("identity",)
_ROOTS = frozenset({"steps", "manifests", "pages", "claims", "quarantine", STORE_FILE})


class ServedStore:
    """A store's folder, taken and served until it is closed. A context manager.

    Parameters
    ----------
    url
        ``file:///absolute/folder``.
    store_id
        The run; its folder is made where there is none.
    local
        Endpoints for this host: ``unix:/folder/socket``.
    remote
        Endpoints for others: ``tcp:host:port``.
    identity
        What clients beyond this host have to have; None lets in whoever reaches the port.
    durability
        As in :class:`tq_fs.StoreConfig`.
    limits
        How much is taken at a time.

    Attributes
    ----------
    urls
        To open the store by, local ones first.

    Raises
    ------
    StoreBusy, WrongStore
        Another process has the folder, or it is something else.
    InvalidConfig
        An endpoint cannot be listened at.
    """

    def __init__(
        self,
        url: str,
        *,
        store_id: str = "default",
        local: Sequence[str] = (),
        remote: Sequence[str] = (),
        identity: Identity | None = None,
        durability: str = "none",
        limits: Limits | None = None,
    ) -> None:
        root = folder_of(url) / component(store_id)
        with ExitStack() as opened:
            opened.callback(unlock_folder, lock_folder(root))
            backend = LocalBackend(root, durability=durability)
            opened.callback(backend.close)
            backend.sweep()
            write_claim(backend, claim_folder(backend, store_id, read_only=False))
            self.server = ChannelServer(
                backend,
                store_id=store_id,
                unit=str(root),
                local=local,
                remote=remote,
                identity=identity,
                roots=_ROOTS,
                limits=limits,
            )
            opened.callback(self.server.close)
            self._opened = opened.pop_all()
        self.urls = tuple(map(url_of, self.server.endpoints))

    def close(self) -> None:
        """End what is under way, and let go of the folder; idempotent."""
        self._opened.close()

    def __enter__(self) -> ServedStore:
        """Return it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()


def url_of(endpoint: str) -> str:
    """Return the URL of a store that is served at an endpoint."""
    return f"{SCHEME}://{endpoint.partition(':')[2]}"


def open_served(
    url: str, *, store_id: str, options: StorageOptions, retry: Retry, timeout_s: float
) -> ChannelBackend:
    """Return the backend of a served store; nothing is connected yet.

    Parameters
    ----------
    url
        ``tqfs://host:port``, or ``tqfs:///absolute/socket`` on its own host.
    options
        ``identity``: the file that ``tq-fs serve`` wrote.

    Raises
    ------
    InvalidConfig
    """
    unknown = set(options) - set(_OPTIONS)
    if unknown:
        raise InvalidConfig(
            f"unknown options {sorted(unknown)}",
            subject=f"storage_options of a {SCHEME}:// store",
            remedy=f"known are {list(_OPTIONS)}",
        )
    parts = urlsplit(url)
    if parts.query or parts.fragment or (parts.netloc and parts.path.strip("/")):
        raise InvalidConfig(
            "says more than where the store is served",
            subject=repr(url),
            remedy=f"{SCHEME}://host:port, or {SCHEME}:///absolute/socket",
        )
    path = options.text("identity")
    return ChannelBackend(
        f"tcp:{parts.netloc}" if parts.netloc else f"unix:{parts.path}",
        store_id=store_id,
        unit=parts.netloc or parts.path,
        identity=Identity.load(path) if path else None,
        retry=retry,
        timeout_s=timeout_s,
    )
