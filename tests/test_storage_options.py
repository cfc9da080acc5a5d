"""How a driver is chosen and told what it needs, and that no secret gets out of it."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import tq_fs
from tests._fault_proxy import Message, Schedule, Verdict, error_answer
from tests._ways import (
    DRIVERS,
    OPERATIONS,
    QUICK,
    Way,
    finalized,
    is_whole,
    open_small,
    record,
)
from tests.test_s3_inputs import REFUSALS
from tq_fs.backends import FsspecBackend, ObjectBackend, ObstoreBackend, Retry, open_object_backend
from tq_fs.backends._fsspec import S3fsClient
from tq_fs.backends._obstore import ObstoreClient
from tq_fs.config import StoreConfig
from tq_fs.errors import InvalidConfig, StorageThrottled, TqFsError
from tq_fs.storage_options import StorageOptions

SECRETS = ("secret", "token", "key", "SECRET", "aws_secret_access_key", "password", "passphrase",
           "sas_token", "account_key", "connection_string", "client_secret", "private_key",
           "credential")  # fmt: skip
PUBLIC = ("endpoint_url", "region", "addressing_style", "profile", "anon", "key_file", "username")

# ---------------------------------------------------------------- options


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_neither_shown_nor_sent(name: str) -> None:
    options = StorageOptions({name: "hunter2", "region": "here"})
    assert "hunter2" not in f"{options} {options!r} {options!s}"
    assert "here" in repr(options)
    with pytest.raises(InvalidConfig, match=r"env:NAME or file:/path") as raised:
        pickle.dumps(options)
    assert "hunter2" not in everything(raised.value)
    nested = StorageOptions({"client_kwargs": {name: "hunter2"}})
    assert "hunter2" not in repr(nested)
    with pytest.raises(InvalidConfig):
        pickle.dumps(nested)


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("reference", ["env:NAME", "file:/path/to/it"])
def test_a_reference_is_shown_and_sent(name: str, reference: str) -> None:
    options = StorageOptions({name: reference})
    assert reference in repr(options)
    assert pickle.loads(pickle.dumps(options)) == options


def test_what_is_no_secret_is_shown_and_sent() -> None:
    options = StorageOptions(dict.fromkeys(PUBLIC, "plain"))
    assert repr(options).count("'plain'") == len(PUBLIC)
    copied = pickle.loads(pickle.dumps(options))
    assert copied == options
    assert hash(copied) == hash(options)
    assert dict(copied) == dict.fromkeys(PUBLIC, "plain")


def test_references_are_looked_up_when_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    options = StorageOptions(
        {"secret": "env:SOME_SECRET", "nested": {"token": f"file:{file}"}, "port": 5}
    )
    monkeypatch.setenv("SOME_SECRET", "one")
    file.write_text(" first \nsecond line\n")
    assert options.all_resolved() == {"secret": "one", "nested": {"token": "first"}, "port": 5}
    assert options.text("port") == "5"
    assert options.text("none") is None
    monkeypatch.setenv("SOME_SECRET", "two")
    assert options.text("secret") == "two"
    assert options["secret"] == "env:SOME_SECRET"


@pytest.mark.parametrize("reference", ["env:NO_SUCH_NAME", "file:/no/such/file", "file:/"])
def test_a_reference_to_nothing_is_refused_by_name(reference: str) -> None:
    with pytest.raises(InvalidConfig, match=f"'secret': refers to {reference}, which is not there"):
        StorageOptions({"secret": reference}).text("secret")


# ---------------------------------------------------------------- what makes no sense


def texts(error: BaseException | None) -> Iterator[str]:
    """Yield all that an error and those before it say, as far as a traceback shows it."""
    while error is not None:
        yield from (str(error), repr(error), *getattr(error, "__notes__", ()))
        yield from map(str, error.args)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def everything(error: BaseException) -> str:
    return "\n".join([*texts(error), *traceback.format_exception(error)])


def refused(url: str, **settings: Any) -> InvalidConfig:
    with pytest.raises(InvalidConfig) as raised:
        tq_fs.open_store(url, fields=[tq_fs.logprobs()], retry_deadline_s=0, **settings)
    return raised.value


@pytest.mark.parametrize(
    "url",
    [
        "s3://somebody:hunter2@bucket/prefix",
        "s3://somebody:hun/hunter2@bucket/prefix",  # as half of Amazon's secrets do
        "s3://hunter2@bucket",
        "s3a://somebody:hunter2@bucket",
        "s3://bucket/prefix?token=hunter2",
        "s3://bucket/prefix#hunter2",
        "s3://somebody:hunter2@bucket/prefix?x=hunter2@other#y",
        "ftp://somebody:hunter2@host/folder",
        "ftp://somebody:hun/hunter2@host/folder",
        "sftp://somebody:hunter2@host/folder",
        "https://somebody:hunter2@host/folder",
        "somebody:hunter2@host/folder",
    ],
)
def test_a_url_with_a_secret_is_refused_without_repeating_it(url: str) -> None:
    error = refused(url)
    assert "hunter2" not in everything(error)
    assert str(error)


@pytest.mark.parametrize("url", ["s3://", "s3:///prefix", "s3:bucket/prefix", "bucket/prefix", ""])
def test_a_url_without_a_bucket_is_refused_with_how_to_write_it(url: str) -> None:
    assert "s3://bucket/prefix" in str(refused(url))


@pytest.mark.parametrize("source", ["option", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize(
    "endpoint",
    [
        *("host:9000", "ftp://hunter1", "http://", "http:///path", "//host"),
        *("http://somebody:hunter2@host:9000", "http://somebody:hun/hunter2@host"),
        *("somebody:hunter2@host", "https://host/?token=hunter2", "https://host#hunter2"),
    ],
)
def test_an_endpoint_that_is_none_is_refused_without_repeating_secrets(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, source: str
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    options = {"endpoint_url": endpoint} if source == "option" else {}
    if not options:
        monkeypatch.setenv(source, endpoint)
    for driver in DRIVERS:
        error = refused("s3://bucket/prefix", driver=driver, storage_options=options)
        assert str(error).startswith("endpoint_url: ")
        assert "hunter2" not in everything(error)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"acess_key": "hunter2"}, r"unknown options \['acess_key'\].*known are .*'key', 'secret'"),
        ({"unsigned_payload": "maybe"}, r"unsigned_payload: 'maybe'; true or false"),
        ({"addressing_style": "dns"}, r"addressing_style: 'dns'; auto, path or virtual"),
        ({"key": "hunter2"}, r"only \['key'\] given; give key and secret"),
        ({"secret": "hunter2"}, r"only \['secret'\] given"),
        ({"token": "hunter2"}, r"only \['token'\] given"),
        ({"key": "hunter2", "token": "hunter2"}, r"only \['key', 'token'\] given"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    driver: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidConfig, match=words) as raised:
        DRIVERS[driver]("s3://bucket/prefix", StorageOptions(options))
    assert "hunter2" not in everything(raised.value)


# ---------------------------------------------------------------- which driver


def chosen(url: str, driver: str = "auto") -> type[ObjectBackend]:
    made = open_object_backend(
        url, driver=driver, options=StorageOptions(), retry=Retry(), timeout_s=1
    )
    with closing(made):
        return type(made)


def test_the_fast_driver_is_taken_where_it_serves_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen("s3://bucket/prefix") is ObstoreBackend
    assert chosen("S3://bucket/prefix") is ObstoreBackend
    assert chosen("s3a://bucket") is ObstoreBackend
    assert chosen("s3://bucket", "obstore") is ObstoreBackend
    assert chosen("s3://bucket", "s3fs") is FsspecBackend
    assert chosen("memory://somewhere") is FsspecBackend
    with pytest.raises(InvalidConfig, match="serves s3:// only, not memory://; use auto"):
        chosen("memory://somewhere", "obstore")
    monkeypatch.setitem(sys.modules, "obstore", None)  # as if it were not installed
    assert chosen("s3://bucket") is FsspecBackend


LIBRARIES = """
import sys

import tq_fs
from tq_fs.backends import FsspecBackend

def attempt(missing, call):
    for name in missing:
        sys.modules[name] = None
    try:
        call()
    except tq_fs.errors.TqFsError as error:
        print(isinstance(error, ImportError), type(error).__name__, error)
    for name in missing:
        del sys.modules[name]

def store(url, driver="auto", **options):
    return lambda: tq_fs.open_store(
        url, fields=[tq_fs.logprobs()], driver=driver, storage_options=options, retry_deadline_s=0
    )

attempt(["s3fs", "aiobotocore", "botocore"], store("s3://bucket"))
attempt(["s3fs"], store("s3://bucket", "obstore"))
attempt(["s3fs"], store("s3://bucket", "s3fs"))
attempt(["obstore"], store("s3://bucket", "obstore"))
attempt(["fsspec", "s3fs"], store("memory://somewhere"))
attempt(["botocore"], lambda: FsspecBackend("s3://bucket"))
attempt(["s3fs"], lambda: FsspecBackend("s3://bucket").get("key"))
attempt(["gcsfs"], store("gs://bucket"))
attempt(["obstore"], store("s3://bucket", endpoint_url="http://127.0.0.1:1", key="k", secret="s"))
"""


def test_a_missing_library_is_named_with_how_to_get_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIBRARIES], capture_output=True, text=True, check=True, timeout=120
    )
    *said, no_driver, by_s3fs = done.stdout.splitlines()
    store, library = "True DependencyMissing an s3:// store:", "True DependencyMissing"
    assert said == [
        *[f"{store} s3fs is not installed; pip install 'tq-fs[s3]'"] * 3,
        f"{library} driver obstore: obstore is not installed; pip install 'tq-fs[fast-s3]'",
        f"{library} memory://somewhere/default: fsspec is not installed; pip install 'tq-fs[s3]'",
        f"{library} an object store: botocore is not installed; pip install 'tq-fs[s3]'",
        f"{library} an object store: s3fs is not installed; pip install 'tq-fs[s3]'",
    ]
    assert re.fullmatch(
        rf"{library} gs://bucket/default: .*gcsfs.*; install what it names", no_driver
    )
    assert by_s3fs.startswith("False StorageUnreachable")


# ---------------------------------------------------------------- on a server


@pytest.mark.s3
def test_a_store_speaks_by_the_driver_that_it_was_told(way: Way) -> None:
    with open_small(f"{way.url}/spoken", way.driver):
        pass
    spoken = {"s3fs": "aiobotocore", "obstore": "object_store"}[way.driver]
    assert all(spoken in request.get("User-Agent") for request in way.gate.asked)


@pytest.mark.s3
@pytest.mark.usefixtures("s3_server")
def test_credentials_get_nowhere(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    """Not into objects, logs, errors or what is shown, whatever the server says."""
    key, secret, token = (f"{n}-{uuid.uuid4().hex}" for n in ("key", "hunter2", "token"))
    options = {"key": key, "secret": secret, "token": token}
    if way.server.kind == "minio":  # it looks at them
        key, secret = way.server.key, way.server.secret
        options = {"key": key, "secret": secret}
    shown: list[str] = []
    caplog.set_level(logging.DEBUG, logger="tq_fs")
    url = f"{way.url}/discreet"
    with open_small(url, way.driver, storage_options=options, retry_deadline_s=0.3) as store:
        segments = record(store, "s")
        assert is_whole(store, "s", segments)
        shown += [repr(store), repr(store.config), str(store.config.storage_options)]
        way.gate.schedule(Schedule(lambda operation, n: Verdict("throttle-503")))
        with pytest.raises(StorageThrottled) as throttled:
            record(store, "t")
        shown.append(everything(throttled.value))
        shown.append(pickle.dumps(throttled.value).decode("latin-1"))
    way.gate.schedule(Schedule())

    def echo(request: Message) -> Message:
        said = error_answer(request, "403 Forbidden", "SignatureDoesNotMatch", "No match.")
        more = f"<AWSAccessKeyId>{key}</AWSAccessKeyId><StringToSign>AWS4</StringToSign></Error>"
        body = said.body.replace(b"</Error>", more.encode()) if said.body else b""
        fields = [f for f in said.fields if f[0] != b"Content-Length"]
        length = (b"Content-Length", b"%d" % len(body))
        return Message(said.first, (*fields, length), body)

    made = DRIVERS[way.driver](f"{url}/default", StorageOptions(options), retry=QUICK, timeout_s=30)
    with closing(made) as backend:
        shown += [repr(backend), repr(backend._client), repr(vars(backend))]
        for answer in (echo, *(each.answer for each in REFUSALS.values())):
            way.gate.answer = answer
            for name, operation in OPERATIONS.items():
                if name == "head":
                    continue
                with pytest.raises(TqFsError) as raised:
                    operation(backend)
                shown.append(everything(raised.value))
        for value in (backend, store.config):
            with pytest.raises(InvalidConfig, match="is not sent to another process") as unsent:
                pickle.dumps(value)
            shown.append(everything(unsent.value))
    ours = [r for r in caplog.records if r.name.partition(".")[0] == "tq_fs"]
    assert len(ours) > 1
    shown += [f"{r.getMessage()} {r.__dict__}" for r in ours]
    for word in (key, secret, token):
        assert not [text for text in shown if word in text]
    way.gate.reset()
    stored = way.objects("discreet/")
    assert len(stored) > 8
    for word in (key, secret, token):
        assert not [k for k, data in stored.items() if word in k or word.encode() in data]


ELSEWHERE = """
import pickle, sys
from tq_fs.errors import TqFsError

backend = pickle.loads(sys.stdin.buffer.read())
try:
    backend.put("from-elsewhere", backend.get("to-elsewhere"))
except TqFsError as error:
    print(type(error).__name__, error)
"""


def elsewhere(data: bytes, env: Mapping[str, str]) -> str:
    """Use a pickled backend in a process that shares nothing with this one."""
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        input=data, env={**os.environ, **env}, capture_output=True, check=True, timeout=120,
    )  # fmt: skip
    return done.stdout.decode()


@pytest.mark.s3
def test_another_process_looks_references_up_itself(way: Way, tmp_path: Path) -> None:
    secret = f"hunter2-{uuid.uuid4().hex}" if way.server.kind == "moto" else way.server.secret
    file = tmp_path / "secret"
    options = {"key": "env:ONLY_THERE", "secret": f"file:{file}", "endpoint_url": way.gate.endpoint}
    config = StoreConfig.of({"storage_options": options})
    assert pickle.loads(pickle.dumps(config)) == config
    backend = DRIVERS[way.driver](f"{way.url}/shared", StorageOptions(options), retry=QUICK)
    data = pickle.dumps(backend)
    assert len(data) < 2000
    way.backend.put("to-elsewhere", b"value")
    there = {"ONLY_THERE": way.server.key}
    said = elsewhere(data, there)
    assert said.startswith("InvalidConfig")
    assert f"storage option 'secret': refers to file:{file}, which is not there" in said
    file.write_text(f"{secret}\n")
    said = elsewhere(data, {})
    assert "storage option 'key': refers to env:ONLY_THERE, which is not there" in said
    way.gate.reset()
    assert elsewhere(data, there) == ""
    assert way.backend.get("from-elsewhere") == b"value"
    signed = f"Credential={way.server.key}/"
    assert any(signed in request.get("Authorization") for request in way.gate.asked)
    assert secret.encode() not in pickle.dumps(backend)
    with pytest.raises(InvalidConfig, match="env:ONLY_THERE"):  # here it is still not there
        backend.get("to-elsewhere")


# ---------------------------------------------------------------- connections


@pytest.fixture
def connects(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give a list that gets longer with each connection."""
    made: list[str] = []

    def counting(kind: Any) -> None:
        connect = kind._connect

        def connected(self: Any, *args: Any, **settings: Any) -> Any:
            made.append(kind.__name__)
            return connect(self, *args, **settings)

        monkeypatch.setattr(kind, "_connect", connected)

    counting(S3fsClient)
    counting(ObstoreClient)
    return made


@pytest.mark.s3
def test_nothing_connects_before_it_is_used_and_then_once(way: Way, connects: list[str]) -> None:
    first = DRIVERS[way.driver](f"{way.url}/shared", retry=QUICK)
    backend = pickle.loads(pickle.dumps(first))
    backend.open("nothing")
    assert connects == []
    assert way.gate.counted() == 0
    for i in range(3):
        backend.put(f"k{i}", b"value")
        assert backend.get(f"k{i}") == b"value"
    assert len(connects) == 1
    backend.close()
    backend.close()
    assert backend.get("k0") == b"value"  # closing only lets go of connections
    backend.close()


@pytest.mark.s3
def test_many_threads_may_begin_at_once(way: Way, connects: list[str]) -> None:
    start = threading.Barrier(8)

    def work(i: int) -> bytes:
        start.wait()
        backend.put(f"t{i}", b"%d" % i)
        return bytes(backend.get(f"t{i}"))

    with (
        closing(DRIVERS[way.driver](f"{way.url}/shared", retry=QUICK)) as backend,
        ThreadPoolExecutor(8) as pool,
    ):
        assert list(pool.map(work, range(8))) == [b"%d" % i for i in range(8)]
        before = len(connects)
        assert list(pool.map(work, range(8))) == [b"%d" % i for i in range(8)]
    assert len(connects) == before <= 8


@pytest.mark.s3
def test_it_works_inside_of_a_running_event_loop(way: Way) -> None:
    async def main() -> list[bytes]:
        way.backend.put("loop", b"value")
        assert list(way.backend.list("loop")) == []
        assert [key for key, _ in way.backend.walk("")].count("loop") == 1
        others = (asyncio.to_thread(way.backend.get, "loop") for _ in range(4))
        return [way.backend.get("loop"), *await asyncio.gather(*others)]

    assert asyncio.run(main()) == [b"value"] * 5
    with closing(DRIVERS[way.driver](f"{way.url}/shared", retry=QUICK)) as backend:

        async def first() -> bytes:
            return bytes(backend.get("loop"))  # also the first use of all

        assert asyncio.run(first()) == b"value"


@pytest.mark.s3
def test_what_another_client_does_is_seen_at_once(way: Way) -> None:
    assert list(way.backend.list("others")) == []
    for i in range(3):
        way.put_object(f"shared/others/{i}", b"%d" % i)
        assert list(way.backend.list("others")) == [str(n) for n in range(i + 1)]
        assert len(list(way.backend.walk("others"))) == i + 1
        assert way.backend.get(f"others/{i}") == b"%d" % i
    way.put_object("shared/others/0", b"other")
    assert way.backend.get("others/0") == b"other"
    assert way.delete_objects("shared/others/1") == 1
    assert list(way.backend.list("others")) == ["0", "2"]
    assert not way.backend._is_object("others/1")


def in_fork(work: Callable[[], object]) -> str:
    """Do work in a fork of this process; return what went wrong there, empty for nothing."""
    here, there = os.pipe()
    faulthandler.cancel_dump_traceback_later()  # its thread would be missing in the fork
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: that is the point
        child = os.fork()
    if child == 0:
        said = "never came to an end"
        faulthandler.dump_traceback_later(25, file=there)  # where it hangs
        try:
            work()
            said = ""
        except BaseException:
            said = traceback.format_exc()
        finally:
            os.write(there, said.encode()[-4000:] + b"\0")
            os._exit(0)
    os.close(there)
    answer = b""
    with os.fdopen(here, "rb", buffering=0) as file:
        while select.select([file], [], [], 1 if answer else 30)[0] and (more := file.read(4096)):
            answer += more
    os.kill(child, signal.SIGKILL)  # at its end already, unless it hangs
    os.waitpid(child, 0)
    return answer.removesuffix(b"\0").decode() if answer else "died, or hung for 30 s"


def use(backend: ObjectBackend, name: str) -> None:
    """Read, write, list and delete."""
    assert backend.get("before") == b"parent"
    place = backend.publish(f"groups/{name}", {"a": [name.encode()], "zarr.json": [b"{}"]})
    part = bytearray(len(name))
    backend.open(f"{place}/a").readinto([part], 0)
    assert part == name.encode()
    assert name in list(backend.list("groups"))
    assert backend.publish(f"groups/{name}", {"a": [name.encode()], "zarr.json": [b"{}"]}) == place
    backend.put(f"{name}.json", b"{}")
    assert backend.delete(f"{name}.json")


@pytest.mark.s3
def test_a_fork_reads_and_writes_and_so_does_its_parent(way: Way) -> None:
    way.backend.put("before", b"parent")
    use(way.backend, "parent")

    def work() -> None:
        use(way.backend, "child")
        assert in_fork(lambda: use(way.backend, "grandchild")) == ""
        use(way.backend, "child-again")
        with closing(DRIVERS[way.driver](f"{way.url}/shared", retry=QUICK)) as fresh:
            use(fresh, "child-fresh")

    assert in_fork(work) == ""
    use(way.backend, "parent-again")
    assert list(way.backend.list("groups")) == [
        *("child", "child-again", "child-fresh", "grandchild", "parent", "parent-again")
    ]


@pytest.mark.s3
def test_a_fork_works_while_threads_of_its_parent_do(way: Way) -> None:
    way.backend.put("before", b"parent")
    over = threading.Event()

    def busy(i: int) -> int:
        n = 0
        while not over.is_set():
            way.backend.put(f"busy/{i}", b"x" * 1000)
            assert way.backend.get("before") == b"parent"
            n += 1
        return n

    with ThreadPoolExecutor(4) as pool:
        working = [pool.submit(busy, i) for i in range(4)]
        try:
            for i in range(3):
                assert in_fork(lambda i=i: use(way.backend, f"amid-{i}")) == ""  # type: ignore[misc]
        finally:
            over.set()
        assert all(each.result() > 0 for each in working)


@pytest.mark.s3
def test_a_fork_does_not_wait_for_what_its_parent_was_about_to_do(way: Way) -> None:
    way.backend.put("before", b"parent")
    with way.backend._lock("groups/in-hand"):  # as a thread that publishes has it
        assert in_fork(lambda: use(way.backend, "in-hand")) == ""


@pytest.mark.s3
def test_a_fork_never_ends_connections_that_its_parent_dropped(way: Way) -> None:
    """The end of an s3fs waits a second for a loop that nobody runs there."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            dropped = DRIVERS[way.driver](f"{way.url}/dropped")
            dropped.put("a", b"b")
            dropped.me = dropped  # for the collector
        del dropped

        def work() -> None:
            began = time.monotonic()
            gc.collect()
            assert time.monotonic() - began < 3

        assert in_fork(work) == ""
    finally:
        gc.enable()


@pytest.mark.s3
def test_a_fork_opens_a_store_for_reading_beside_its_parent(way: Way) -> None:
    url = f"{way.url}/forked"
    with open_small(url, way.driver) as store:
        segments = record(store, "s")
        ref = finalized(store)["s"]

        def work() -> None:
            with open_small(url, way.driver, read_only=True) as reader:
                assert is_whole(reader, "s", [ref])

        assert in_fork(work) == ""
        assert is_whole(store, "s", segments)
        assert is_whole(store, "t", record(store, "t"))
