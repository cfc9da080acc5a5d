"""The fast driver for S3: obstore, which is the Rust crate object_store."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from tq_fs.backends._base import Buffer
from tq_fs.backends._client import Page, nanoseconds
from tq_fs.backends._files import nbytes
from tq_fs.backends._forks import leave_to_parent
from tq_fs.backends._fsspec import S3fsClient, split
from tq_fs.backends._objects import ObjectBackend
from tq_fs.backends._retry import Retry
from tq_fs.backends._s3 import S3Settings, no_credentials, s3_error, settings_of, unreachable
from tq_fs.errors import (
    RetryError,
    StorageDenied,
    StorageFailed,
    StorageRefused,
    StorageThrottled,
    StorageUnreachable,
    TqFsError,
)
from tq_fs.storage_options import StorageOptions

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_JOINED_BYTES = 64 * 1024  # buffers that are cheaper to join than to hand over one by one
_PAGE = 1000
_WORTH_BULK = 100  # fewer go as fast one by one, ten at a time, and every server can do that
_AT_ONCE = 10  # requests that the driver sends side by side
_RENEWED = timedelta(minutes=10)  # how long the driver keeps what botocore gave it
_ONCE: Any = {
    "backoff": {"init_backoff": timedelta(0), "max_backoff": timedelta(0), "base": 2.0},
    "max_retries": 0,
    "retry_timeout": timedelta(0),
}

_forked = False


def _note_fork() -> None:
    global _forked  # noqa: PLW0603  # what a fork did to this process
    _forked = _forked or "obstore" in sys.modules


os.register_at_fork(after_in_child=_note_fork)


class ObstoreClient:
    """One bucket by obstore; an :class:`~tq_fs.backends._client.ObjectClient`.

    obstore's threads do not live in a fork of the process that started them, and its calls hang
    there. In such a child requests go through s3fs.
    """

    def __init__(self, settings: S3Settings, options: StorageOptions) -> None:
        self._settings = settings
        self._options = options
        self._stores: dict[tuple[bool, int], Any] = {}
        self._bulk = True
        self._at_once = _AT_ONCE
        self._in_fork: S3fsClient | None = None
        leave_to_parent(self)

    # ------------------------------------------------------------ requests

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        """Write an object by one request."""
        if (other := self._other()) is not None:
            other.put(key, buffers)
            return
        import obstore  # noqa: PLC0415  # optional

        with self._mapped(key):
            bucket = self._bucket(nbytes=sum(map(nbytes, buffers)))
            obstore.put(bucket, key, _payload(buffers), use_multipart=False)

    def read(self, key: str, offset: int, nbytes: int) -> Buffer:
        """Return bytes of an object; fewer where it ends before that."""
        if (other := self._other()) is not None:
            return other.read(key, offset, nbytes)
        import obstore  # noqa: PLC0415

        with self._mapped(key):
            try:
                return obstore.get_range(self._bucket(), key, start=offset, length=nbytes)
            except Exception as error:
                if _status(error) == 416:
                    return b""
                raise

    def get(self, key: str) -> Buffer:
        """Return a whole object."""
        if (other := self._other()) is not None:
            return other.get(key)
        import obstore  # noqa: PLC0415

        with self._mapped(key):
            return obstore.get(self._bucket(), key).bytes()

    def size(self, key: str) -> int:
        """Return an object's size in bytes."""
        if (other := self._other()) is not None:
            return other.size(key)
        import obstore  # noqa: PLC0415

        try:
            with self._mapped(key):
                return obstore.head(self._bucket(), key)["size"]
        except (StorageDenied, StorageRefused):
            self.read(key, 0, 1)  # the answer to a HEAD cannot say why; this one does
            raise

    def modified_ns(self, key: str) -> int:
        """Return when an object was written."""
        if (other := self._other()) is not None:
            return other.modified_ns(key)
        import obstore  # noqa: PLC0415

        with self._mapped(key):
            return nanoseconds(obstore.head(self._bucket(), key)["last_modified"])

    def pages(self, prefix: str, *, deep: bool, after: str) -> Iterator[Page]:
        """Yield the keys below `prefix`."""
        if (other := self._other()) is not None:
            yield from other.pages(prefix, deep=deep, after=after)
            return
        import obstore  # noqa: PLC0415

        with self._mapped(prefix):
            below = prefix or None
            if not deep:
                found = obstore.list_with_delimiter(self._bucket(), below)
                objects = [(m["path"], m["size"]) for m in found["objects"]]
                yield Page(objects, [f"{p}/" for p in found["common_prefixes"]])
                return
            pages = obstore.list(self._bucket(), below, offset=after or None, chunk_size=_PAGE)
        while True:
            with self._mapped(prefix):
                page = next(pages, None)
            if page is None:
                return
            yield Page([(m["path"], m["size"]) for m in page])

    def delete(self, keys: list[str]) -> None:
        """Remove objects by one request, or each by its own where the server cannot."""
        if (other := self._other()) is not None:
            other.delete(keys)
        elif self._bulk and len(keys) >= _WORTH_BULK:
            try:
                self._delete(keys, bulk=True)
            except (StorageThrottled, StorageUnreachable):
                raise  # this says nothing about bulk requests
            except (StorageRefused, StorageFailed):
                self._delete_singly(keys)
                self._bulk = False  # it went well one by one: what failed was the bulk request
        else:
            self._delete_singly(keys)

    def _delete_singly(self, keys: list[str]) -> None:
        while keys:
            some = keys[-self._at_once :]
            try:
                self._delete(some, bulk=False)
            except RetryError:  # of which of them, the driver does not say
                self._at_once = 1
                raise
            self._at_once = min(2 * self._at_once, _AT_ONCE)
            del keys[-len(some) :]

    def _delete(self, keys: Sequence[str], *, bulk: bool) -> None:
        import obstore  # noqa: PLC0415

        with self._mapped(keys[0]):
            try:
                obstore.delete(self._bucket(bulk=bulk), list(keys))
            except FileNotFoundError as error:
                if _code(error) == "NoSuchBucket":
                    raise

    # ------------------------------------------------------------ connection

    def renew(self) -> None:
        """Forget credentials and connections."""
        if (other := self._other()) is not None:
            other.renew()
        else:
            self._stores = {}

    def close(self) -> None:
        """Let go of connections; in a fork, of its own."""
        if (other := self._other()) is not None:
            other.close()
        else:
            self._stores = {}

    def _other(self) -> S3fsClient | None:
        if not _forked:
            return None
        if self._in_fork is None:
            self._in_fork = S3fsClient(self._settings, self._options)
        return self._in_fork

    def _bucket(self, *, bulk: bool = True, nbytes: int = 0) -> Any:
        """Return a connected store that is patient enough for an upload of so many bytes."""
        answer_s, doublings = self._settings.timeout_s, 0
        while 0 < answer_s < self._settings.upload_s(nbytes):
            answer_s, doublings = answer_s * 2, doublings + 1
        stores, kind = self._stores, (bulk, doublings)
        if kind not in stores:
            stores[kind] = self._connect(bulk=bulk, answer_s=answer_s)
        return stores[kind]

    def _connect(self, *, bulk: bool, answer_s: float) -> Any:
        from obstore.exceptions import UnknownConfigurationKeyError  # noqa: PLC0415
        from obstore.store import S3Store  # noqa: PLC0415

        mine = self._settings
        config: dict[str, Any] = {
            "region": mine.region,
            "virtual_hosted_style_request": not mine.path_style,
            "unsigned_payload": mine.unsigned_payload,
            "disable_bulk_delete": not bulk,
            "disable_tagging": True,
        }
        anonymous = bool(self._options.resolved("anon"))
        config["skip_signature"] = anonymous  # else by the environment
        if not anonymous:
            config["credential_provider"] = self._credentials()
        make = partial(
            S3Store,
            mine.bucket,
            client_options={
                "allow_http": True,
                "connect_timeout": timedelta(seconds=mine.timeout_s),
                "read_timeout": timedelta(seconds=answer_s),  # sending is part of it
                "timeout": timedelta(days=1),  # of a whole request, however large
            },
            retry_config=_ONCE,
            **config,
        )
        if mine.endpoint_url is None:
            return make()
        try:  # AWS_ENDPOINT_URL_S3 in the environment would win over `endpoint`
            return make(aws_endpoint_url_s3=_endpoint(mine))
        except UnknownConfigurationKeyError:  # an older obstore, which does not know that either
            return make(endpoint=_endpoint(mine))

    def _credentials(self) -> Callable[[], dict[str, Any]]:
        """Return what gives credentials: those of the options, or by botocore's usual ways."""
        key, secret, token = (self._options.text(n) for n in ("key", "secret", "token"))
        if key is not None and secret is not None:
            return lambda: _known(key, secret, token, None)
        import botocore.session  # noqa: PLC0415

        session = botocore.session.Session(profile=self._settings.profile)
        found = session.get_credentials()
        if found is None:
            raise no_credentials("no credentials were found", f"s3://{self._settings.bucket}")

        def ask() -> dict[str, Any]:
            now = found.get_frozen_credentials()  # renews by itself what can be renewed
            until = datetime.now(UTC) + _RENEWED if now.token else None
            return _known(now.access_key, now.secret_key, now.token, until)

        return ask

    @contextmanager
    def _mapped(self, key: str) -> Iterator[None]:
        """Raise our errors in the place of obstore's."""
        try:
            yield
        except TqFsError:
            raise
        except Exception as error:
            if not isinstance(error, OSError | ValueError) and not _is_obstores(error):
                raise
            raise _translate(error, f"s3://{self._settings.bucket}/{key}") from None


def _is_obstores(error: Exception) -> bool:
    return type(error).__module__.partition(".")[0] == "obstore"


def _known(key: str, secret: str, token: str | None, until: datetime | None) -> dict[str, Any]:
    return {
        "access_key_id": key,
        "secret_access_key": secret,
        "token": token,
        "expires_at": until,
    }


def _payload(buffers: Sequence[Buffer]) -> Any:
    views = [memoryview(b).cast("B") for b in buffers if nbytes(b)]
    if len(views) == 1:
        return views[0]
    if sum(map(len, views)) <= _JOINED_BYTES:
        return b"".join(views)
    return iter(views)


def _endpoint(settings: S3Settings) -> str:
    assert settings.endpoint_url is not None
    if settings.path_style:
        return settings.endpoint_url
    scheme, host, *_ = urlsplit(settings.endpoint_url)
    return f"{scheme}://{settings.bucket}.{host}"


def _status(error: BaseException) -> int:
    found = _STATUS.search(str(error))
    return int(found[1]) if found else 0


def _code(error: BaseException) -> str:
    found = _CODE.search(str(error))
    return found[1] if found else ""


def _translate(error: Exception, subject: str) -> TqFsError:
    """Return our error; obstore tells status and body of an answer in the text of its own."""
    text = str(error)
    status = _status(error) or (404 if isinstance(error, FileNotFoundError) else 0)
    message = _MESSAGE.search(text)
    if status:
        return s3_error(_code(error), status, message[1] if message else "", subject)
    first = text.splitlines()[0] if text else type(error).__name__
    if "redirect" in first:  # 301 of another region's server, which names no place to go to
        return s3_error("", 301, "redirected", subject)
    if "invalid path" in first:
        return StorageRefused(
            first[:300], subject=subject, remedy="remove that object, or use driver s3fs"
        )
    if "HTTP error" in first or "body" in first or "timed out" in text:
        return unreachable(first[:300], subject)
    return StorageFailed(first[:300], subject=subject)


class ObstoreBackend(ObjectBackend):
    """A :class:`~tq_fs.backends.Backend` over S3 by obstore. Pickles as its configuration.

    Parameters
    ----------
    url
        ``s3://bucket/prefix``.
    options
        Storage options; secrets among them have to be references if it is to be pickled.
    retry
        When to try requests again.
    timeout_s
        Seconds to wait for a connection, and for further bytes.
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
        bucket, root = split(url)
        settings = settings_of(bucket, options, timeout_s)
        client = ObstoreClient(settings, options)
        super().__init__(url, root, client, retry=retry, **({"at": at} if at else {}))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as configuration; the copy makes its own connections."""
        return _obstore_again, self._made_of


def _obstore_again(
    url: str, options: StorageOptions, retry: Retry, timeout_s: float
) -> ObstoreBackend:
    return ObstoreBackend(url, options, retry=retry, timeout_s=timeout_s)
