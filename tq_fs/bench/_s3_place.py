"""Where it is measured: a server of our own, or below a URL of a bucket that is there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from tq_fs.backends import ObjectBackend, Retry, open_object_backend
from tq_fs.bench.servers import s3_server
from tq_fs.errors import InvalidConfig
from tq_fs.storage_options import StorageOptions

_BUCKET = "tq-fs-bench"

ServerKind = Literal["auto", "moto", "minio"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A prefix of a bucket that nobody else uses.

    Attributes
    ----------
    url
        ``s3://bucket/prefix``.
    kind
        What answers there, in words.
    options
        Storage options of the drivers; empty where the environment says everything.
    environment
        Variables that lead another process to the server.
    """

    url: str
    kind: str
    options: StorageOptions
    environment: Mapping[str, str]

    def backend(self, driver: str, below: str = "") -> ObjectBackend:
        """Return a backend of this package on the place, or below it."""
        return open_object_backend(
            f"{self.url}/{below}" if below else self.url,
            driver=driver,
            options=self.options,
            retry=Retry(),
            timeout_s=30.0,
        )

    @property
    def bucket(self) -> str:
        """The bucket's name."""
        return self.url.split("/")[2]

    @property
    def prefix(self) -> str:
        """What all keys begin with."""
        return self.url.split("/", 3)[3]

    @property
    def region(self) -> str | None:
        """The bucket's region, where it is told in a way that botocore does not know."""
        return self.options.text("region") or os.environ.get("AWS_REGION")


@contextmanager
def measuring_bucket(url: str | None, server: ServerKind) -> Iterator[Place]:
    """Give a place that answers, and remove everything below it afterwards.

    Parameters
    ----------
    url
        ``s3://bucket/prefix``, reached by the environment's settings; None: a server of our own.
    server
        Which one, if it is our own.

    Raises
    ------
    InvalidConfig, DependencyMissing
        The URL makes no sense, or there is nothing to start a server with.
    BucketMissing, StorageDenied, StorageFailed
        The place cannot be used.
    """
    own = f"bench-{os.urandom(6).hex()}"
    if url is not None:
        if not url.startswith("s3://"):
            raise InvalidConfig("is no s3:// URL", subject=repr(url), remedy="s3://bucket/prefix")
        place = Place(
            url=f"{url.rstrip('/')}/{own}", kind=url, options=StorageOptions(), environment={}
        )
        with _cleared(place):
            yield place
        return
    with s3_server(server) as running:
        running.make_bucket(_BUCKET)
        place = Place(
            url=f"s3://{_BUCKET}/{own}",
            kind=f"a {running.kind} server on this machine",
            options=StorageOptions(
                {
                    "endpoint_url": running.endpoint,
                    "key": running.key,
                    "secret": running.secret,
                    "region": running.region,
                }
            ),
            environment=running.environment(),
        )
        with _cleared(place):
            yield place


@contextmanager
def _cleared(place: Place) -> Iterator[None]:
    backend = place.backend("auto")
    try:
        backend.put("probe", b"")  # fails by a typed error where the others would not
        yield
    finally:
        try:
            for name in list(backend.list("")):
                backend.delete(name)
        finally:
            backend.close()
