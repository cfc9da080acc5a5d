"""The driver for whatever fsspec serves; for S3 it is s3fs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tq_fs.backends._base import Buffer
from tq_fs.backends._client import ObjectClient, Page, nanoseconds
from tq_fs.backends._errors import translate
from tq_fs.backends._files import parts
from tq_fs.backends._forks import PerProcess, leave_to_parent
from tq_fs.backends._objects import ObjectBackend
from tq_fs.backends._retry import Retry
from tq_fs.backends._s3 import (
    S3Settings,
    missing,
    no_credentials,
    s3_error,
    settings_of,
    unreachable,
)
from tq_fs.errors import (
    DependencyMissing,
    InvalidConfig,
    StorageDenied,
    StorageFailed,
    StorageRefused,
    TqFsError,
)
from tq_fs.storage_options import StorageOptions, without_secrets

T = TypeVar("T")
_PAGE = 1000
_CONNECTIONS = 64
_RACES = 16
_RENAMING = {"file", "local", "sftp", "ssh", "smb", "ftp", "hdfs", "webhdfs", "arrow_hdfs"}


class S3fsClient:
    """One bucket by s3fs; an :class:`~tq_fs.backends._client.ObjectClient`."""

    def __init__(self, settings: S3Settings, options: StorageOptions) -> None:
        self._settings = settings
        self._options = options
        self._fs = PerProcess(self._connect)
        self._bulk = True

    # ------------------------------------------------------------ requests

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        """Write an object by one request."""
        body = b"".join(parts(buffers))
        patience_s = self._settings.timeout_s + self._settings.upload_s(len(body))

        async def send(s3: Any) -> None:
            try:
                async with asyncio.timeout(patience_s):  # aiohttp sets none while it sends
                    await s3.put_object(Bucket=self._name, Key=key, Body=body)
            except TimeoutError as error:
                raise ConnectionError(f"no end in {patience_s:.0f} s") from error

        self._request(key, send)

    def read(self, key: str, offset: int, nbytes: int) -> Buffer:
        """Return bytes of an object; fewer where it ends before that."""
        wanted = f"bytes={offset}-{offset + nbytes - 1}"

        async def fetch(s3: Any) -> bytes:
            import botocore.exceptions  # noqa: PLC0415  # optional

            try:
                found = await s3.get_object(Bucket=self._name, Key=key, Range=wanted)
            except botocore.exceptions.ClientError as error:
                if _status(error) == 416:
                    return b""
                raise
            return await _body(found)

        return self._request(key, fetch)

    def get(self, key: str) -> Buffer:
        """Return a whole object."""

        async def fetch(s3: Any) -> bytes:
            return await _body(await s3.get_object(Bucket=self._name, Key=key))

        return self._request(key, fetch)

    def size(self, key: str) -> int:
        """Return an object's size in bytes."""
        try:
            found = self._request(key, lambda s3: s3.head_object(Bucket=self._name, Key=key))
        except (StorageDenied, StorageRefused):
            self.read(key, 0, 1)  # the answer to a HEAD cannot say why; this one does
            raise
        size: int = found["ContentLength"]
        return size

    def modified_ns(self, key: str) -> int:
        """Return when an object was written."""
        found = self._request(key, lambda s3: s3.head_object(Bucket=self._name, Key=key))
        return nanoseconds(found["LastModified"])

    def pages(self, prefix: str, *, deep: bool, after: str) -> Iterator[Page]:
        """Yield the keys below `prefix`, as the server gives them."""
        asked: dict[str, Any] = {"Bucket": self._name, "Prefix": prefix, "MaxKeys": _PAGE}
        if not deep:
            asked["Delimiter"] = "/"
        if after:
            asked["StartAfter"] = after
        while True:
            found = self._request(prefix, lambda s3: s3.list_objects_v2(**asked))
            yield Page(
                [(o["Key"], o["Size"]) for o in found.get("Contents", ())],
                [p["Prefix"] for p in found.get("CommonPrefixes", ())],
            )
            if not found.get("IsTruncated"):
                return
            asked["ContinuationToken"] = found["NextContinuationToken"]

    def delete(self, keys: list[str]) -> None:
        """Remove objects by one request, or each by its own where the server cannot."""
        if self._bulk and len(keys) > 1:
            keys[:] = self._delete_in_bulk(keys)
        while keys:
            self._request(keys[-1], self._deletion(keys[-1]))
            del keys[-1]

    def _deletion(self, key: str) -> Callable[[Any], Awaitable[Any]]:
        return lambda s3: s3.delete_object(Bucket=self._name, Key=key)

    def _delete_in_bulk(self, keys: list[str]) -> list[str]:
        """Remove objects together; return those that have to be tried one by one."""
        what = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        try:
            found = self._request(
                keys[0], lambda s3: s3.delete_objects(Bucket=self._name, Delete=what)
            )
        except StorageRefused:
            self._bulk = False
            return keys
        return [e["Key"] for e in found.get("Errors", ()) if e.get("Key")]

    # ------------------------------------------------------------ connection

    def renew(self) -> None:
        """Forget credentials and connections."""
        self._fs.forget()

    def close(self) -> None:
        """Let go of connections."""
        self._fs.forget()

    @property
    def _name(self) -> str:
        return self._settings.bucket

    def _connect(self) -> Any:
        try:
            import s3fs  # noqa: PLC0415  # optional
            from aiobotocore.session import AioSession  # noqa: PLC0415
            from botocore.handlers import add_expect_header  # noqa: PLC0415
        except ImportError as error:
            raise missing("s3fs", "s3") from error
        mine = self._settings
        options = {n: self._options.resolved(n) for n in ("key", "secret", "token", "anon")}
        session = AioSession(profile=mine.profile)
        session.unregister("before-call.s3", add_expect_header)  # aiohttp waits for it for ever
        # fmt: off
        fs = s3fs.S3FileSystem(
            **{name: value for name, value in options.items() if value is not None},
            endpoint_url=mine.endpoint_url,
            session=session,
            client_kwargs={"region_name": mine.region},
            config_kwargs={
                "s3": {"addressing_style": "path" if mine.path_style else "virtual"},
                "connect_timeout": mine.timeout_s,
                "read_timeout": mine.timeout_s,
                "retries": {"total_max_attempts": 1},  # trying again is done once, further up
                "max_pool_connections": _CONNECTIONS,
                "request_checksum_calculation": "when_required",  # the signature has one
                "response_checksum_validation": "when_required",
            },
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        # fmt: on
        fs.retries = 1
        leave_to_parent(fs)
        return fs

    def _request(self, key: str, request: Callable[[Any], Awaitable[T]]) -> T:
        import fsspec.asyn  # noqa: PLC0415

        with _mapped_s3(f"s3://{self._name}/{key}"):
            fs = self._fs.get()

            async def run() -> T:
                await fs.set_session()
                s3 = await fs.get_s3(self._name)
                try:
                    return await request(s3)
                except ValueError as error:  # dates and numbers are parsed without a check
                    raise StorageFailed(
                        f"an answer cannot be read: {error}", subject=f"s3://{self._name}/{key}"
                    ) from error

            result: T = fsspec.asyn.sync(fs.loop, run)
            return result


async def _body(found: Any) -> bytes:
    async with found["Body"] as body:
        data: bytes = await body.read()
        return data


def _status(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


@contextmanager
def _mapped_s3(subject: str) -> Iterator[None]:
    """Raise our errors in the place of botocore's and aiohttp's."""
    import aiohttp  # noqa: PLC0415
    import botocore.exceptions as boto  # noqa: PLC0415

    try:
        yield
    except boto.ClientError as error:
        said = error.response.get("Error", {})
        code = str(said.get("Code", ""))
        text = str(said.get("Message", ""))
        raise s3_error("" if code.isdigit() else code, _status(error), text, subject) from error
    except (
        boto.NoCredentialsError,
        boto.PartialCredentialsError,
        boto.CredentialRetrievalError,
    ) as error:
        raise no_credentials(str(error), subject) from error
    except (
        boto.HTTPClientError,
        boto.ConnectionError,
        aiohttp.ClientError,
        TimeoutError,
        ConnectionError,
    ) as error:
        raise unreachable(str(error) or type(error).__name__, subject) from error
    except boto.BotoCoreError as error:
        raise StorageFailed(str(error), subject=subject) from error
    except RecursionError:  # botocore asks for the bucket's region, and is redirected again
        raise s3_error("", 301, "redirected again and again", subject) from None


class FsspecClient:
    """Any of fsspec's file systems; an :class:`~tq_fs.backends._client.ObjectClient`."""

    def __init__(self, url: str, options: StorageOptions) -> None:
        self._url = url
        self._options = options
        self._fs = PerProcess(self._connect)

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        """Write an object whole: by one call, or beside its place and renamed."""
        body = b"".join(parts(buffers))
        with self._mapped(key) as (fs, path):
            if fs.protocol not in _RENAMING and not _RENAMING & set(fs.protocol):
                fs.pipe_file(path, body)
                return
            for left in reversed(range(_RACES)):
                try:
                    _write_beside(fs, path, body)
                except FileNotFoundError:  # a delete has just removed its empty folder
                    if not left:
                        raise
                else:
                    return

    def read(self, key: str, offset: int, nbytes: int) -> Buffer:
        """Return bytes of an object; fewer where it ends before that."""
        with self._mapped(key) as (fs, path):
            return fs.cat_file(path, start=offset, end=offset + nbytes)

    def get(self, key: str) -> Buffer:
        """Return a whole object."""
        with self._mapped(key) as (fs, path):
            return fs.cat_file(path)

    def size(self, key: str) -> int:
        """Return an object's size in bytes."""
        with self._mapped(key) as (fs, path):
            found = fs.info(path)
            if found["type"] != "file":
                raise FileNotFoundError(path)
            size: int = found["size"]
            return size

    def modified_ns(self, key: str) -> int:
        """Return when an object was written; 0 where the file system does not say."""
        with self._mapped(key) as (fs, path):
            try:
                return nanoseconds(fs.modified(path))
            except NotImplementedError:
                return 0

    def pages(self, prefix: str, *, deep: bool, after: str) -> Iterator[Page]:
        """Yield the keys below `prefix`, all as one page."""
        with self._mapped(prefix) as (fs, path):
            start = len(path) - len(prefix)
            folder = path.rstrip("/")
            try:
                found = fs.find(folder, detail=True) if deep else fs.ls(folder, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return
            entries = list(found.values()) if deep else found
            keys = [(e["name"].rstrip("/")[start:], e["size"], e["type"]) for e in entries]
            below = sorted(k for k in keys if k[0].startswith(prefix) and k[0] > after)
            yield Page(
                [(key, size) for key, size, kind in below if kind == "file"],
                [f"{key}/" for key, _, kind in below if kind == "directory"],
            )

    def delete(self, keys: list[str]) -> None:
        """Remove objects one by one, and folders that this leaves empty."""
        for key in keys:
            with self._mapped(key) as (fs, path), suppress(FileNotFoundError):
                fs.rm_file(path)
        with self._mapped("") as (fs, root):
            for folder in sorted({k.rpartition("/")[0] for k in keys}, reverse=True):
                _prune(fs, root, folder)

    def renew(self) -> None:
        """Forget credentials and connections."""
        self._fs.forget()

    def close(self) -> None:
        """Let go of connections."""
        self._fs.forget()

    def _connect(self) -> tuple[Any, str]:
        import fsspec.core  # noqa: PLC0415  # optional

        try:
            fs, path = fsspec.core.url_to_fs(
                self._url,
                use_listings_cache=False,
                skip_instance_cache=True,
                **self._options.all_resolved(),
            )
        except ImportError as error:
            raise DependencyMissing(
                str(error), subject=self._url, remedy="install what it names"
            ) from error
        except ValueError as error:
            raise InvalidConfig(str(error), subject=repr(self._url)) from error
        leave_to_parent(fs)
        return fs, path.rstrip("/")

    @contextmanager
    def _mapped(self, key: str) -> Iterator[tuple[Any, str]]:
        """Give the file system and a key's path in it; raise our errors in the place of its own."""
        subject = f"{self._url}/{key}"
        try:
            fs, root = self._fs.get()
            yield fs, f"{root}/{key}"
        except TqFsError:
            raise
        except PermissionError as error:
            raise StorageDenied(str(error), subject=subject, remedy="check credentials") from error
        except (TimeoutError, ConnectionError) as error:
            raise unreachable(str(error) or type(error).__name__, subject) from error
        except FileNotFoundError as error:
            raise translate(FileNotFoundError(2, str(error)), subject) from error
        except OSError as error:
            raise translate(error, subject) from error
        except Exception as error:
            status = getattr(error, "code", None) or getattr(error, "status", None)
            if not isinstance(status, int):
                raise
            raise s3_error("", status, str(error), subject) from error


def _write_beside(fs: Any, path: str, body: bytes) -> None:
    """Write a file beside its place and rename it, where writing is not all or nothing."""
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    beside = f"{path}.{os.urandom(4).hex()}.part"
    try:
        fs.pipe_file(beside, body)
        fs.mv(beside, path)
    except BaseException:
        with suppress(OSError):
            fs.rm_file(beside)
        raise


def _prune(fs: Any, root: str, folder: str) -> None:
    while folder:
        try:
            if fs.ls(root + folder, detail=False):
                return
            fs.rmdir(root + folder)
        except (OSError, NotImplementedError):
            return
        folder = folder.rpartition("/")[0]


def split(url: str) -> tuple[str, str]:
    """Return bucket and prefix of an ``s3://`` URL.

    Raises
    ------
    InvalidConfig
        It has none, or parts that an address of a bucket does not have.
    """
    found = urlsplit(url)
    if not found.netloc or set("@:") & set(found.netloc) or found.query or found.fragment:
        raise InvalidConfig(
            "is no address of a bucket",
            subject=repr(without_secrets(url)),
            remedy="write s3://bucket/prefix; credentials belong into storage_options",
        )
    return found.netloc, found.path.strip("/")


def _holds_password(url: str) -> bool:
    found = urlsplit(url)
    try:
        return found.password is not None or found.port == -1
    except ValueError:  # no port, but the beginning of a password that holds a "/"
        return True


def _check_url(url: str) -> None:
    if _holds_password(url):
        raise InvalidConfig(
            "holds a password",
            subject=repr(without_secrets(url)),
            remedy="credentials belong into storage_options, such as username and password",
        )


class FsspecBackend(ObjectBackend):
    """A :class:`~tq_fs.backends.Backend` over fsspec. Pickles as its configuration.

    Parameters
    ----------
    url
        ``s3://bucket/prefix``, or of any other file system that fsspec knows.
    options
        Storage options; secrets among them have to be references if it is to be pickled.
    retry
        When to try requests again.
    timeout_s
        Seconds to wait for a connection, and for further bytes; for S3.
    """

    def __init__(
        self,
        url: str,
        options: StorageOptions | None = None,
        *,
        retry: Retry | None = None,
        timeout_s: float = 30.0,
        at: Callable[[str], None] | None = None,
    ) -> None:
        options, retry = options or StorageOptions(), retry or Retry()
        self._made_of = (url, options, retry, timeout_s)
        client: ObjectClient
        root = ""
        if urlsplit(url).scheme in ("s3", "s3a"):
            bucket, root = split(url)
            client = S3fsClient(settings_of(bucket, options, timeout_s), options)
        else:
            _check_url(url)
            client = FsspecClient(url.rstrip("/"), options)
        super().__init__(url, root, client, retry=retry, **({"at": at} if at else {}))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as configuration; the copy makes its own connections."""
        return _fsspec_again, self._made_of


def _fsspec_again(
    url: str, options: StorageOptions, retry: Retry, timeout_s: float
) -> FsspecBackend:
    return FsspecBackend(url, options, retry=retry, timeout_s=timeout_s)
