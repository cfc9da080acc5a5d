"""The ways to write and to read a load: http.client, s3fs as it comes, and our two drivers."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit

from tq_fs.backends import Buffer, ObjectBackend, ObstoreBackend
from tq_fs.bench._s3_load import Destination, Group, Load
from tq_fs.bench._s3_place import Place
from tq_fs.errors import FatalError, StorageFailed
from tq_fs.storage_options import StorageOptions

CONCURRENCY = 8
HTTP, S3FS, OURS, UNSIGNED, OURS_S3FS = (
    "http.client",
    "s3fs",
    "tq-fs",
    "tq-fs unsigned",
    "tq-fs by s3fs",
)
WAYS = (HTTP, S3FS, OURS, UNSIGNED, OURS_S3FS)
_SIGNED_S = 24 * 3600


class WrongBytes(FatalError):
    """What was read is not what was written."""

    code: ClassVar[str] = "wrong_bytes"


class Way(Protocol):
    """Writes and reads a load, :data:`CONCURRENCY` requests at once."""

    def put(self, groups: Sequence[Group]) -> None:
        """Write all objects."""

    def get(self, groups: Sequence[Group]) -> None:
        """Read what is wanted of all groups."""

    def check(self, destination: Destination) -> None:
        """Compare what the last :meth:`get` brought, and let go of it.

        Raises
        ------
        WrongBytes
        """


@contextmanager
def ways(place: Place, load: Load, destination: Destination) -> Iterator[dict[str, Way]]:
    """Give all ways by name, each with a folder of its own: see :func:`folder_of`."""
    with ExitStack() as opened:
        pool = opened.enter_context(ThreadPoolExecutor(CONCURRENCY, "tq-fs-bench"))

        def ours(backend: ObjectBackend) -> Way:
            opened.callback(backend.close)
            return OurWay(backend, pool, destination)

        plain_http = HttpWay(place, load, pool, destination)
        opened.callback(plain_http.close)
        out: dict[str, Way] = {
            HTTP: plain_http,
            S3FS: S3fsWay(place, load),
            OURS: ours(place.backend("obstore", folder_of(load, OURS))),
        }
        if plain_http.insecure:  # over TLS the driver signs no payload as it comes
            url = f"{place.url}/{folder_of(load, UNSIGNED)}"
            out[UNSIGNED] = ours(
                ObstoreBackend(url, StorageOptions({**place.options, "unsigned_payload": True}))
            )
        out[OURS_S3FS] = ours(place.backend("s3fs", folder_of(load, OURS_S3FS)))
        yield out


def folder_of(load: Load, way: str) -> str:
    """Return where a way puts a load, below the place."""
    return f"{load.key}{way.replace(' ', '-')}"


class OurWay:
    """A backend of this package, called from threads as a store calls it."""

    def __init__(
        self, backend: ObjectBackend, pool: ThreadPoolExecutor, destination: Destination
    ) -> None:
        self._backend = backend
        self._pool = pool
        self._destination = destination
        self._places: dict[str, str] = {}

    def put(self, groups: Sequence[Group]) -> None:
        """Publish all groups."""
        _all(self._pool, self._put, groups)

    def _put(self, group: Group) -> None:
        place = self._backend.publish(group.name, group.members, fresh=True)
        self._places[group.name] = place

    def get(self, groups: Sequence[Group]) -> None:
        """Read into the destination."""
        _all(self._pool, self._get, groups)

    def _get(self, group: Group) -> None:
        for name in group.wanted:
            with self._backend.open(f"{self._places[group.name]}/{name}") as file:
                file.readinto([self._destination.of(group, name)], 0)

    def check(self, destination: Destination) -> None:
        """Compare the destination."""
        _check_destination(destination, self._backend.url)


class HttpWay:
    """Python's http.client: one connection a thread, URLs that were signed before."""

    def __init__(
        self, place: Place, load: Load, pool: ThreadPoolExecutor, destination: Destination
    ) -> None:
        self._pool = pool
        self._destination = destination
        self._mine = threading.local()
        self._connections: list[http.client.HTTPConnection] = []
        sign, close = _signer(place)
        folder = f"{place.prefix}/{folder_of(load, HTTP)}"
        keys = [(g.name, n) for g in load.groups for n in g.members]
        signed = {
            (verb, *key): sign(verb, f"{folder}/{'/'.join(key)}")
            for verb in ("put", "get")
            for key in keys
        }
        close()
        scheme, self._host, *_ = urlsplit(next(iter(signed.values())))
        self.insecure = scheme == "http"
        self._targets = {key: url.partition(self._host)[2] for key, url in signed.items()}
        self._sizes = {(g.name, n): len(g.content(n)) for g in load.groups for n in g.members}

    def put(self, groups: Sequence[Group]) -> None:
        """Write all objects, those of a group one behind the other."""
        _all(self._pool, self._put, groups)

    def _put(self, group: Group) -> None:
        connection = self._connection()
        for name, buffers in group.members.items():
            headers = {"Content-Length": str(self._sizes[group.name, name])}
            target = self._targets["put", group.name, name]
            connection.request("PUT", target, body=_body(buffers), headers=headers)
            response = connection.getresponse()
            response.read()
            _check_status(response, target)

    def get(self, groups: Sequence[Group]) -> None:
        """Read into the destination."""
        _all(self._pool, self._get, groups)

    def _get(self, group: Group) -> None:
        connection = self._connection()
        for name in group.wanted:
            target = self._targets["get", group.name, name]
            connection.request("GET", target)
            response = connection.getresponse()
            _check_status(response, target)
            _read_all(response, self._destination.of(group, name))

    def check(self, destination: Destination) -> None:
        """Compare the destination."""
        _check_destination(destination, HTTP)

    def close(self) -> None:
        """Let go of the connections."""
        for connection in self._connections:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        found: http.client.HTTPConnection | None = getattr(self._mine, "connection", None)
        if found is None:
            kind = http.client.HTTPConnection if self.insecure else http.client.HTTPSConnection
            found = self._mine.connection = kind(self._host)
            self._connections.append(found)
        return found


class S3fsWay:
    """s3fs as it comes: its own calls for many objects, in its own loop."""

    def __init__(self, place: Place, load: Load) -> None:
        import s3fs  # noqa: PLC0415  # optional

        given = {name: place.options.text(name) for name in ("key", "secret", "endpoint_url")}
        given = {name: value for name, value in given.items() if value is not None}
        more = {"client_kwargs": {"region_name": place.region}} if place.region else {}
        self._fs = s3fs.S3FileSystem(**given, **more, skip_instance_cache=True)
        folder = f"{place.bucket}/{place.prefix}/{folder_of(load, S3FS)}"
        self._paths = {
            (g.name, n): f"{folder}/{g.name}/{n}" for g in load.groups for n in g.members
        }
        self._content = {
            self._paths[g.name, n]: g.content(n) for g in load.groups for n in g.members
        }
        self._got: dict[str, bytes] = {}

    def put(self, groups: Sequence[Group]) -> None:
        """Write all objects by one call, from bytes that were made before."""
        del groups
        self._fs.pipe(self._content, batch_size=CONCURRENCY)

    def get(self, groups: Sequence[Group]) -> None:
        """Read all objects by one call, into bytes."""
        wanted = [self._paths[group.name, name] for group in groups for name in group.wanted]
        self._got = self._fs.cat(wanted, batch_size=CONCURRENCY)

    def check(self, destination: Destination) -> None:
        """Compare the bytes."""
        del destination
        got, self._got = self._got, {}
        for path, data in got.items():
            if data != self._content[path]:
                raise WrongBytes("is not what was written", subject=path)


def _all(pool: ThreadPoolExecutor, do: Callable[[Group], None], groups: Sequence[Group]) -> None:
    for _ in pool.map(do, groups):
        pass


def _check_destination(destination: Destination, subject: str) -> None:
    wrong = destination.wrong()
    destination.clear()
    if wrong is not None:
        raise WrongBytes("is not what was written", subject=f"{subject}: {wrong}")


def _signer(place: Place) -> tuple[Callable[[str, str], str], Callable[[], None]]:
    """Return what signs the URL of a request (put or get, key), and what ends it."""
    from botocore.config import Config  # noqa: PLC0415  # optional
    from botocore.session import Session  # noqa: PLC0415

    client: Any = Session().create_client(
        "s3",
        region_name=place.region,
        endpoint_url=place.options.text("endpoint_url"),
        aws_access_key_id=place.options.text("key"),
        aws_secret_access_key=place.options.text("secret"),
        config=Config(s3={"addressing_style": "path"}, signature_version="s3v4"),
    )

    def sign(verb: str, key: str) -> str:
        what = {"Bucket": place.bucket, "Key": key}
        url: str = client.generate_presigned_url(f"{verb}_object", what, ExpiresIn=_SIGNED_S)
        return url

    return sign, client.close


def _body(buffers: Sequence[Buffer]) -> Iterator[memoryview]:
    return (memoryview(buffer).cast("B") for buffer in buffers)


def _read_all(response: http.client.HTTPResponse, target: Buffer) -> None:
    view = memoryview(target)
    at = 0
    while read := response.readinto(view[at:]):
        at += read
    if at != len(view):
        raise StorageFailed(f"{at} bytes came, {len(view)} are wanted", subject=HTTP)
    response.read()


def _check_status(response: http.client.HTTPResponse, target: str) -> None:
    if response.status != 200:
        raise StorageFailed(
            f"answered {response.status}", subject=f"{HTTP}: {target.partition('?')[0]}"
        )
