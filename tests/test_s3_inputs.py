"""What users and servers get wrong: an error that says so, and nothing lost or half-written."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from dataclasses import replace as changed
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import numpy as np
import pytest

from tests._fault_proxy import (
    Message,
    Operation,
    Schedule,
    Verdict,
    error_answer,
)
from tests._ways import (
    DRIVERS,
    ONCE,
    OPERATIONS,
    QUICK,
    Gate,
    Way,
    client_of,
    finalized,
    is_whole,
    keys_below,
    logprobs_of,
    open_small,
    record,
    ref_of,
)
from tq_fs import manifests
from tq_fs.bench.servers import S3Server, juicefs_binary, minio_server
from tq_fs.errors import (
    BucketMissing,
    ClockSkewed,
    CredentialsExpired,
    CredentialsMissing,
    InvalidConfig,
    ManifestCorrupt,
    ObjectMissing,
    SegmentMissing,
    StepMissing,
    StorageDenied,
    StorageFailed,
    StorageRefused,
    StorageUnreachable,
    TqFsError,
    WrongRegion,
    WrongStore,
)
from tq_fs.manifests import STORE_SCHEMA, StoreDocument
from tq_fs.storage_options import StorageOptions

pytestmark = pytest.mark.s3


# ---------------------------------------------------------------- refused for good


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a server answers, and what has to come of it."""

    status: str
    code: str
    text: str
    error: type[TqFsError]
    remedy: str
    fields: tuple[tuple[bytes, bytes], ...] = ()

    def answer(self, request: Message) -> Message:
        said = error_answer(request, self.status, self.code, self.text)
        return changed(said, fields=said.fields + self.fields)


REFUSALS = {
    "an unknown access key": Refusal(
        "403 Forbidden", "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist "
        "in our records.", StorageDenied, "check the credentials",
    ),
    "a wrong secret": Refusal(
        "403 Forbidden", "SignatureDoesNotMatch", "The request signature we calculated does not "
        "match the signature you provided. Check your key and signing method.", StorageDenied,
        "check the credentials",
    ),
    "no permission": Refusal(
        "403 Forbidden", "AccessDenied", "Access Denied", StorageDenied, "s3:GetObject, PutObject",
    ),
    "a clock that is off": Refusal(
        "403 Forbidden", "RequestTimeTooSkewed", "The difference between the request time and the "
        "current time is too large.", ClockSkewed, "set this machine's clock",
    ),
    "another region": Refusal(
        "400 Bad Request", "AuthorizationHeaderMalformed", "The authorization header is malformed; "
        "the region 'us-east-1' is wrong; expecting 'eu-west-1'", WrongRegion, "set region",
    ),
    "another region's endpoint": Refusal(
        "301 Moved Permanently", "PermanentRedirect", "The bucket you are attempting to access "
        "must be addressed using the specified endpoint.", WrongRegion, "set region",
        ((b"x-amz-bucket-region", b"eu-west-1"),),
    ),
    "a redirect without a place": Refusal(
        "301 Moved Permanently", "Moved", "Moved", WrongRegion, "set region",
    ),
    "a missing bucket": Refusal(
        "404 Not Found", "NoSuchBucket", "The specified bucket does not exist", BucketMissing,
        "create the bucket",
    ),
    "a token that is none": Refusal(
        "400 Bad Request", "InvalidToken", "The provided token is malformed or otherwise invalid.",
        StorageDenied, "check the credentials",
    ),
    "what the server cannot do": Refusal(
        "501 Not Implemented", "NotImplemented", "A header you provided implies functionality that "
        "is not implemented", StorageRefused, "use another one",
    ),
    "what the server does not like": Refusal(
        "400 Bad Request", "InvalidArgument", "Invalid Argument", StorageRefused,
        "check endpoint_url and addressing_style",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_will_not_pass_fails_at_once_and_says_what_to_do(way: Way, kind: str) -> None:
    refusal = REFUSALS[kind]
    way.gate.answer = refusal.answer
    for name, operation in OPERATIONS.items():
        if (kind, name) == ("a missing bucket", "head"):
            continue  # has no body that could say so
        before = way.gate.counted()
        with pytest.raises(refusal.error, match=re.escape(refusal.remedy)) as raised:
            operation(way.backend)
        assert type(raised.value) is refusal.error, name
        assert raised.value.subject.startswith(f"s3://{way.bucket}/shared/"), name
        requests = way.gate.counted() - before
        assert requests <= most_requests(way.driver, kind, name), name


def most_requests(driver: str, kind: str, operation: str) -> int:
    """Return how many requests a refusal may take until it is understood."""
    if driver == "s3fs" and kind == "a redirect without a place":
        return 200  # botocore asks where the bucket is, and is redirected, and asks …
    if driver == "s3fs" and kind == "another region's endpoint":
        return 2  # botocore tries the region that it was told
    return 3 if operation == "head" else 1  # a GET asks for the reason


def test_a_store_is_not_opened_where_the_server_refuses(way: Way) -> None:
    for kind in ("a wrong secret", "a clock that is off", "another region"):
        way.gate.answer = REFUSALS[kind].answer
        before = way.gate.counted()
        with pytest.raises(REFUSALS[kind].error, match=REFUSALS[kind].remedy):
            open_small(way.url, way.driver)
        assert way.gate.counted() == before + 1


def test_a_missing_bucket_is_named(way: Way) -> None:
    for read_only in (False, True):
        with pytest.raises(BucketMissing, match=r"create the bucket.*correct the store's URL"):
            open_small("s3://no-such-bucket/runs", way.driver, read_only=read_only)
    with closing(DRIVERS[way.driver]("s3://no-such-bucket/runs", retry=QUICK)) as backend:
        for name in ("put", "get", "range", "list", "names", "delete"):
            way.gate.reset()
            with pytest.raises(BucketMissing, match="no-such-bucket"):
                OPERATIONS[name](backend)
            assert way.gate.counted() == 1, name


@pytest.fixture(scope="module")
def minio() -> Iterator[S3Server]:
    with minio_server() as server:
        server.make_bucket("minio-bucket")
        yield server


@pytest.mark.minio
@pytest.mark.skipif(juicefs_binary() is None, reason="juicefs not installed")
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("wrong", ["key", "secret", "anon"])
def test_wrong_credentials_are_refused_once(minio: S3Server, driver: str, wrong: str) -> None:
    options: dict[str, Any] = {"key": minio.key, "secret": minio.secret}
    options = {"anon": True} if wrong == "anon" else {**options, wrong: "so-wrong-a-thing"}
    with Gate(minio.endpoint) as gate:
        options = {"endpoint_url": gate.endpoint, **options}
        url = "s3://minio-bucket/store"
        with closing(DRIVERS[driver](url, StorageOptions(options), retry=QUICK)) as backend:
            for name in ("put", "get", "list"):
                before = gate.counted()
                with pytest.raises(StorageDenied, match="check the credentials") as raised:
                    OPERATIONS[name](backend)
                assert type(raised.value) is StorageDenied
                assert "so-wrong-a-thing" not in str(raised.value)
                assert gate.counted() == before + 1
        with pytest.raises(StorageDenied):
            open_small(url, driver, storage_options=options)
    with client_of(minio) as client:
        assert keys_below(client, "minio-bucket") == []


def test_missing_credentials_are_named_without_asking_the_server(
    way: Way, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(CredentialsMissing, match="set AWS_ACCESS_KEY_ID and"):
        open_small(way.url, way.driver)
    assert way.gate.counted() == 0


# ---------------------------------------------------------------- credentials that expire


def expired(request: Message, valid: Callable[[], str], status: str) -> Message | None:
    """Answer as S3 does to a token other than the valid one."""
    if request.get("x-amz-security-token") == valid():
        return None
    return error_answer(request, status, "ExpiredToken", "The provided token has expired.")


@pytest.fixture
def lenient(way: Way) -> Iterator[Way]:
    """Give a way to a server that does not look into tokens; only the gate does."""
    if way.server.kind == "minio":
        pytest.skip("MinIO refuses tokens that it has not made")
    yield way
    way.backend._client.renew()


def test_expired_credentials_are_fetched_anew(
    lenient: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = lenient
    way.backend.put("k", b"value")
    token = ["first"]
    way.gate.answer = lambda request: expired(request, lambda: token[0], "400 Bad Request")
    for i, name in enumerate(OPERATIONS):
        token[0] = f"token-{i}"
        monkeypatch.setenv("AWS_SESSION_TOKEN", token[0])
        before = len(way.gate.asked)
        OPERATIONS[name](way.backend)
        used = [r.get("x-amz-security-token") == token[0] for r in way.gate.asked[before:]]
        assert used[-1], name
        assert used.count(False) == 1 or name in ("head", "delete"), name
        assert len(used) <= 4, name


def test_what_stays_expired_is_said_so(lenient: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    way = lenient
    monkeypatch.setenv("AWS_SESSION_TOKEN", "old")
    way.backend._client.renew()
    way.gate.answer = lambda request: expired(request, lambda: "new", "400 Bad Request")
    for name in ("put", "list", "head"):
        before = way.gate.counted()
        with pytest.raises(CredentialsExpired, match="renew the token"):
            OPERATIONS[name](way.backend)
        if name != "head":
            assert way.gate.counted() == before + 2, name  # once more, with fresh ones
    way.gate.reset()
    way.backend.put("k", b"after")
    assert way.backend.get("k") == b"after"


def test_threads_that_find_credentials_expired_all_go_on(
    lenient: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = lenient
    monkeypatch.setenv("AWS_SESSION_TOKEN", "new")
    way.gate.answer = lambda request: expired(request, lambda: "new", "403 Forbidden")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: way.backend.put(f"many/{i}", b"%d" % i), range(24)))
        found = list(pool.map(lambda i: way.backend.get(f"many/{i}"), range(24)))
    assert found == [b"%d" % i for i in range(24)]


def test_a_run_outlives_its_credentials(lenient: Way, tmp_path: Path) -> None:
    """The token lies in a file, which somebody else replaces in time."""
    way = lenient
    file = tmp_path / "token"
    file.write_text("hour 0\n")
    options = {"key": "env:AWS_ACCESS_KEY_ID", "secret": "env:AWS_SECRET_ACCESS_KEY"}
    options["token"] = f"file:{file}"
    hour = [0]
    way.gate.answer = lambda request: expired(request, lambda: f"hour {hour[0]}", "400 Bad Request")
    url = f"{way.url}/expiring"
    with open_small(url, way.driver, storage_options=options) as store:
        segments = []
        for hour[0] in range(3):
            file.write_text(f"hour {hour[0]}\n")
            segments.append(record(store, f"s{hour[0]}"))
        assert all(is_whole(store, f"s{i}", each) for i, each in enumerate(segments))

        hour[0] = 9  # and nobody replaces it
        with pytest.raises(CredentialsExpired, match="renew the token"):
            record(store, "late")
        file.write_text("hour 9\n")
        again = record(store, "again")
        assert is_whole(store, "again", again)
    with open_small(url, way.driver, storage_options=options) as store:
        left = finalized(store)
        assert sorted(left) == ["again", "s0", "s1", "s2"]
        assert all(is_whole(store, name, [ref]) for name, ref in left.items())


# ---------------------------------------------------------------- where the server is


def test_dots_in_a_bucket_and_slashes_behind_addresses_change_nothing(way: Way) -> None:
    bucket = f"runs.{uuid.uuid4().hex[:8]}.example.org"
    way.server.make_bucket(bucket)
    url = f"s3://{bucket}/a.b/c"
    one, two = ({"endpoint_url": way.gate.endpoint + end} for end in ("/", "///"))
    with open_small(f"{url}/", way.driver, storage_options=one) as store:
        assert is_whole(store, "s", record(store, "s"))
    with open_small(url, way.driver, storage_options=two, read_only=True) as store:
        assert is_whole(store, "s", [finalized(store)["s"]])
    keys = keys_below(way.client, bucket)
    assert {key.partition("/default/")[0] for key in keys} == {"a.b/c"}
    assert not any("//" in key for key in keys)


def test_the_option_for_the_endpoint_wins_over_the_environment(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    options = StorageOptions({"endpoint_url": way.gate.endpoint, "region": "eu-central-7"})
    with closing(DRIVERS[way.driver](way.url, options, retry=ONCE)) as backend:
        backend.put("k", b"value")
        assert backend.get("k") == b"value"
    assert way.gate.counted() == 2
    assert "/eu-central-7/s3/" in way.gate.asked[0].get("Authorization")


def test_the_environment_does_not_take_the_signature_away(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    with closing(DRIVERS[way.driver](way.url, retry=ONCE)) as backend:
        backend.put("k", b"value")
    assert "Signature=" in way.gate.asked[0].get("Authorization")


def test_a_profile_says_who_and_where(
    way: Way, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in way.server.environment():
        monkeypatch.delenv(name)
    config = tmp_path / "config"
    config.write_text(
        "[profile training]\n"
        f"endpoint_url = {way.gate.endpoint}/\n"
        "region = eu-west-3\n"
        "aws_access_key_id = key-of-training\n"
        "aws_secret_access_key = secret-of-training\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    options = StorageOptions({"profile": "training"})
    with closing(DRIVERS[way.driver](way.url, options, retry=ONCE)) as backend:
        way.gate.answer = REFUSALS["no permission"].answer  # moto and MinIO know no such key
        with pytest.raises(StorageDenied):
            backend.put("k", b"value")
    signed = way.gate.asked[0].get("Authorization")
    assert "Credential=key-of-training/" in signed
    assert "/eu-west-3/s3/" in signed
    with pytest.raises(InvalidConfig, match="nobody"):
        DRIVERS[way.driver](way.url, StorageOptions({"profile": "nobody"}))


class Recorder:
    """An HTTP proxy that says yes to everything, and notes where it should have gone."""

    def __init__(self) -> None:
        asked = self.asked = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_PUT(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                asked.append(self.path)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.send_header("ETag", '"0"')
                self.end_headers()

            def log_message(self, *message: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    asked: list[str]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    ("style", "wanted"),
    [
        ("auto", "http://s3.example.test:9000/bucket/store/k"),
        ("path", "http://s3.example.test:9000/bucket/store/k"),
        ("virtual", "http://bucket.s3.example.test:9000/store/k"),
    ],
    ids=["auto", "path", "virtual"],
)
def test_the_bucket_stands_where_the_addressing_style_says(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, driver: str, style: str, wanted: str
) -> None:
    with closing(Recorder()) as proxy:
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        options = {"endpoint_url": "http://s3.example.test:9000", "addressing_style": style}
        url = "s3://bucket/store"
        with closing(DRIVERS[driver](url, StorageOptions(options), retry=ONCE)) as backend:
            backend.put("k", b"value")
        assert proxy.asked == [wanted]


# ---------------------------------------------------------------- a server that is down


def test_an_endpoint_that_is_down_at_the_start_is_waited_for(way: Way) -> None:
    url = f"{way.url}/late"
    way.gate.stop()
    try:
        with pytest.raises(StorageUnreachable, match=r"tried \d+ times.*check endpoint_url"):
            open_small(url, way.driver, retry_deadline_s=0.2)
    finally:
        later = Timer(0.3, way.gate.start)
        later.start()
    with open_small(url, way.driver) as store:
        assert is_whole(store, "s", record(store, "s"))
    later.join()


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_host_that_does_not_exist_is_unreachable(s3_server: S3Server, driver: str) -> None:
    options = {"endpoint_url": "http://no-such-host.invalid:9000"}
    with pytest.raises(StorageUnreachable, match="check endpoint_url"):
        open_small("s3://bucket/store", driver, storage_options=options, retry_deadline_s=0)


def test_an_outage_in_mid_run_is_waited_for(way: Way) -> None:
    with open_small(f"{way.url}/outage", way.driver) as store:
        first = record(store, "before")
        way.gate.stop()
        later = Timer(0.5, way.gate.start)
        later.start()
        second = record(store, "during")
        later.join()
        assert is_whole(store, "before", first)
        assert is_whole(store, "during", second)


def test_an_outage_that_lasts_loses_only_what_was_not_acknowledged(way: Way) -> None:
    url = f"{way.url}/long-outage"
    with open_small(url, way.driver, retry_deadline_s=0.3) as store:
        record(store, "before")
        open_session = store.session("half")
        open_session.create(
            context=[1], response=[2], logprobs=logprobs_of("half", 1),
            routed_experts=np.zeros((1, 2, 2), np.int32),
        )  # fmt: skip
        way.gate.stop()
        try:
            with pytest.raises(StorageUnreachable, match="check endpoint_url"):
                record(store, "during")
            with pytest.raises(StorageUnreachable):
                store.hydrate(list(finalized(store).values()))
        finally:
            way.gate.start()
        assert is_whole(store, "after", record(store, "after"))
    with open_small(url, way.driver) as store:
        left = finalized(store)
        assert sorted(left) == ["after", "before"]
        assert all(is_whole(store, name, [ref]) for name, ref in left.items())
    keys = way.keys("long-outage/")
    assert [key for key in keys if "/half/" in key or "/during/" in key] == []


# ---------------------------------------------------------------- lost acknowledgements


def test_what_was_done_without_being_acknowledged_is_done_once(way: Way) -> None:
    """Some requests of each kind are done by the server, which then is not heard."""

    def decide(operation: Operation, n: int) -> Verdict:
        every = 5 if operation == "delete" else 3  # four of them go out side by side
        return Verdict("lost-ack" if n % every == 1 else None)

    way.gate.schedule(Schedule(decide))
    url = f"{way.url}/lost"
    with open_small(url, way.driver) as store:
        segments = {name: record(store, name) for name in ("one", "two", "three")}
        assert all(is_whole(store, name, each) for name, each in segments.items())
        assert store.release(segments["two"]) == 2
        assert store.release(segments["two"]) == 0
    assert any(seen.fault for seen in way.gate.seen())
    way.gate.reset()
    with open_small(url, way.driver) as store:
        left = finalized(store)
        assert sorted(left) == ["one", "three"]
        assert all(is_whole(store, name, [ref]) for name, ref in left.items())
        assert store.recovery.swept_steps == 0
    keys = way.keys("lost/")
    assert sum(key.endswith("/zarr.json") for key in keys) == 4  # one for each Step
    assert sum(key.endswith("/manifest.json") for key in keys) == 2
    assert not any("/two/" in key for key in keys)


@pytest.mark.parametrize("operation", ["put", "commit", "document"])
def test_what_could_not_be_written_is_not_there(way: Way, operation: Operation) -> None:
    url = f"{way.url}/unwritten-{operation}"
    with open_small(url, way.driver, retry_deadline_s=0.2) as store:
        record(store, "before")
        way.gate.schedule(
            Schedule(lambda asked, n: Verdict("error-500" if asked == operation else None))
        )
        with pytest.raises(StorageFailed, match="InternalError"):
            record(store, "failed")
        way.gate.reset()
    with open_small(url, way.driver) as store:
        left = finalized(store)
        assert list(left) == ["before"]
        assert is_whole(store, "before", [left["before"]])
    keys = way.keys(f"unwritten-{operation}/")
    assert [key for key in keys if "/failed/" in key] == []


# ---------------------------------------------------------------- others in the bucket


def test_an_object_deleted_behind_our_back_is_missed_by_name(way: Way) -> None:
    url, root = f"{way.url}/deleted", "deleted/default"
    with open_small(url, way.driver) as store:
        segments = {name: record(store, name) for name in ("one", "two", "three")}
        with open_small(url, way.driver, read_only=True) as reader:
            assert way.delete_objects(f"{root}/steps/train/one/") == 6
            for each in (store, reader):
                ref = ref_of(segments["one"])
                with pytest.raises(StepMissing, match=r"session 'one'.*c\.0.* is gone"):
                    each.hydrate([ref])
            assert is_whole(store, "two", segments["two"])
        assert store.release(segments["one"]) == 2  # what is gone already counts as deleted
    assert way.delete_objects(f"{root}/manifests/train/two/") == 2
    with open_small(url, way.driver) as store:
        assert list(finalized(store)) == ["three"]
        with pytest.raises(SegmentMissing):
            store.hydrate([ref_of(segments["two"])])
        assert is_whole(store, "three", segments["three"])
    with pytest.raises(ObjectMissing, match="nothing"):
        way.backend.get("nothing")
    with pytest.raises(ObjectMissing, match="nothing"):
        way.backend.open("nothing").readinto([bytearray(3)], 0)


def test_stores_share_a_bucket_and_a_prefix(way: Way) -> None:
    url = f"{way.url}/together"
    foreign = f"together/{uuid.uuid4().hex}.txt"
    way.put_object(foreign, b"foreign")
    with (
        open_small(url, way.driver, store_id="run/1") as one,
        open_small(url, way.driver, store_id="run") as two,
    ):
        first, second = record(one, "s"), record(two, "s")
        with pytest.raises(WrongStore):
            two.hydrate([ref_of(first)])
        assert one.release(first) == 2
        assert is_whole(two, "s", second)
    with open_small(url, way.driver, store_id="run") as two:
        assert two.recovery.swept_steps == 0
        assert is_whole(two, "s", second)
    assert way.objects(foreign) == {foreign: b"foreign"}


OTHER = manifests.encode(StoreDocument(schema=STORE_SCHEMA, store_id="other", epoch=0))


@pytest.mark.parametrize(
    ("name", "data", "error", "words"),
    [
        ("checkpoint/weights.bin", b"\x00" * 64, WrongStore, "no store.json: it is no store"),
        ("store.json", OTHER, WrongStore,
         "is store 'other', not 'default'"),
        ("store.json", b"\x00\x01", ManifestCorrupt, "store.json"),
        ("store.json", b"", ManifestCorrupt, "store.json"),
    ],
    ids=["data", "another store's", "no document", "empty"],
)  # fmt: skip
def test_a_prefix_that_holds_something_else_is_left_alone(
    way: Way, name: str, data: bytes, error: type[TqFsError], words: str
) -> None:
    prefix = f"taken-{uuid.uuid4().hex[:8]}"
    way.put_object(f"{prefix}/default/{name}", data)
    way.put_object(f"{prefix}/default/steps/train/s/i/000000/c", b"dear")
    before = way.objects(f"{prefix}/")
    with pytest.raises(error, match=words):
        open_small(f"{way.url}/{prefix}", way.driver)
    if name != "store.json":
        with pytest.raises((error, ObjectMissing), match=r"store\.json"):
            open_small(f"{way.url}/{prefix}", way.driver, read_only=True)
    assert way.objects(f"{prefix}/") == before
    assert not way.gate.counted("put", "commit", "document", "delete", "bulk-delete")
