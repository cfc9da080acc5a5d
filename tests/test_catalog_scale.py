"""A catalog of many sessions: packed in memory, and in pages that spare a start from opening it."""

from __future__ import annotations

import gc
import itertools
import shutil
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests._rollouts import FIELDS, open_store, record, tree
from tq_fs.backends import LocalBackend, Stamping
from tq_fs.controller import Controller
from tq_fs.errors import ObjectMissing, SegmentMissing, StorageFull
from tq_fs.fields import logprobs, routed_experts
from tq_fs.keys import SegmentRef, StepKey
from tq_fs.manifests import (
    Catalog,
    Pages,
    SessionManifest,
    View,
    decode,
    decode_page,
    encode,
    encode_page,
    note,
    noted,
    seal,
    unseal,
)
from tq_fs.recovery import Recovery
from tq_fs.steps import EncodeOptions, FieldArray
from tq_fs.storage_unit import StorageUnit
from tq_fs.trajectory import ClosedSession, StepRecord

STORE = "run"
SPECS = [logprobs(), routed_experts(layers=2, topk=2, experts=8)]
FULL, LEAST = 4, 2
CONSUMERS = ("train", "eval")


class Counting(LocalBackend):
    """Counts the manifests that are opened."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.manifests = 0

    def get(self, key: str) -> bytes:
        self.manifests += key.endswith("/manifest.json")
        return super().get(key)


class Unaware(Pages):
    """What a version does that knows no pages."""

    def read(self) -> dict[str, tuple[str, bytes]]:
        return {}

    def _write(self, epoch: int) -> bool:
        return False

    def _remove(self, names: Any) -> None:
        pass


@dataclass
class World:
    """A store's folder, and the Controller that has it."""

    folder: Path
    epoch: int = 0
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.backend = Counting(self.folder, ahead=0)
        self.unit = StorageUnit(self.backend, STORE, options=EncodeOptions())
        self.recovery = self.start()

    def start(self, kind: type[Pages] = Pages) -> Recovery:
        """Begin a life; the one before is forgotten as it is: killed."""
        self.epoch += 1
        self.controller = self.make(kind, self.unit)
        self.recovery = self.controller.recover()
        return self.recovery

    def make(self, kind: type[Pages] = Pages, unit: StorageUnit | None = None) -> Controller:
        pages = kind(self.backend, STORE, full=FULL, least=LEAST)
        catalog = Catalog(self.backend, STORE, cache_bytes=0, pages=pages)
        return Controller(catalog, unit, epoch=self.epoch, now_ns=lambda: next(self.numbers))

    def finalize(self, seed: int = 1, count: int = 1) -> list[str]:
        """Record sessions of a kind for real; return their references."""
        rng = np.random.default_rng(seed)
        refs = []
        for _ in range(count):
            where = self.controller.open_session("train", f"s {next(self.numbers)}")
            chains = rng.integers(0, 2, 3)
            views: tuple[View, ...] = ("lineage", "timeline") if seed % 2 else ("lineage",)
            closed = ClosedSession(
                incarnation=where,
                mode="tito",
                views=views,
                consumers=CONSUMERS[: 1 + seed % 3 % 2],
                records=self._records(where, chains.tolist()),
                stored=SPECS,
                resident=(),
                extra={},
            )
            manifest = self.controller.finalize(closed)
            refs += [str(manifest.ref(segment)) for segment in manifest.segments]
        return refs

    def _records(self, where: Any, chains: Sequence[int]) -> list[StepRecord]:
        records: list[StepRecord] = []
        for index, opens in enumerate(chains):
            parent = None if opens or not records else records[-1]
            rows = {"tokens": 5, "transitions": 5 if parent else 4}
            arrays = [
                FieldArray(s, np.zeros((rows[s.rows], *(s.inner or ())), s.dtype)) for s in SPECS
            ]
            records.append(
                StepRecord(
                    index=index,
                    kind="append" if parent else "create",
                    parent=parent.index if parent else None,
                    prefix=parent.total if parent else 0,
                    tokens=np.zeros(5, np.int32),
                    response=2,
                    versions=(("1", 5),),
                    arrays={},
                    stored=self.unit.put(StepKey(where, index), 5, arrays),
                )
            )
        return records

    def pages(self) -> list[Path]:
        return sorted(self.folder.glob("pages/*"))

    def manifests(self) -> list[Path]:
        return sorted(self.folder.glob("manifests/*/*/*/manifest.json"))

    def opened(self, act: Callable[[], object]) -> int:
        """Return how many manifests something opens."""
        before = self.backend.manifests
        act()
        return self.backend.manifests - before


def session_of(ref: str) -> str:
    return SegmentRef.parse(ref).incarnation.session_id


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.backend.close()


def tells(controller: Controller) -> tuple[Recovery, dict[str, list[str]], list[Any]]:
    """Return all that a Controller says once it has read what is there."""
    found = controller.load()
    refs = sorted(controller.unreleased())
    by = {c: sorted(controller.unreleased(c)) for c in CONSUMERS}
    resolved = [(r.ref, r.segment, r.steps, r.shared) for r in controller.resolve(refs)]
    return found, by, resolved


def check_same(world: World) -> None:
    """Compare what a start learns from pages, holding or not, with what the manifests say."""
    want = tells(world.make(Unaware))
    assert tells(world.make(unit=world.unit)) == want
    assert tells(world.make()) == want
    found, by, _ = want
    assert {c: sorted(world.controller.unreleased(c)) for c in CONSUMERS} == by
    again = world.make(Unaware, world.unit).survey()
    assert (again.sessions, again.segments, again.steps) == (
        found.sessions,
        found.segments,
        found.steps,
    )
    assert again.incomplete == ()


# ---------------------------------------------------------------- whatever happens


def another(path: Path) -> None:
    """Write a manifest again, as long as it was, with something else in it."""
    document = decode(path.read_bytes(), SessionManifest, "it")
    segments = [
        msgspec.structs.replace(s, response_tokens=s.response_tokens ^ 1) for s in document.segments
    ]
    path.write_bytes(encode(msgspec.structs.replace(document, segments=tuple(segments))))


def harm(world: World, what: str, pick: int) -> None:
    pages = world.pages()
    if what == "rewrite":
        if found := world.manifests():
            another(found[pick % len(found)])
    elif pages:
        path = pages[pick % len(pages)]
        data = path.read_bytes()
        if what == "lose":
            path.unlink()
        elif what == "cut":
            path.write_bytes(data[: pick % len(data)])
        elif what == "flip":
            at = pick % len(data)
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << pick % 8]) + data[at + 1 :])
        else:  # a page of yesterday comes back
            world.folder.joinpath("pages/00000000-000001.msgpack").write_bytes(data)


ACTS = ["finalize"] * 4 + ["release"] * 3 + ["kill", "close", "unaware"]
HARMS = ["lose", "cut", "flip", "rewrite", "old"]


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    acts=st.lists(
        st.tuples(st.sampled_from(ACTS + HARMS), st.integers(0, 2**31)), min_size=4, max_size=14
    )
)
def test_a_start_from_pages_equals_a_start_from_manifests(acts: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for act, pick in acts:
            if act == "finalize":
                world.finalize(pick, count=1 + pick % 3)
            elif act == "release":
                consumer = CONSUMERS[pick % 2]
                refs = sorted(world.controller.unreleased(consumer))
                chosen = refs[pick % 5 :: 1 + pick % 3]
                world.controller.release(chosen, consumer)
            elif act in HARMS:
                harm(world, act, pick)
            else:
                if act == "close":
                    world.controller.close()
                world.start(Unaware if act == "unaware" else Pages)
            check_same(world)
        world.backend.close()


# ---------------------------------------------------------------- a start


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_a_start_opens_no_manifest_that_a_page_tells_of(world: World, end: str) -> None:
    refs = world.finalize(2, count=2 * FULL + 3)
    if end == "closed":
        world.controller.close()
    assert world.opened(world.start) == (0 if end == "closed" else 3)
    assert world.recovery.sessions == 2 * FULL + 3
    assert sorted(world.controller.unreleased()) == sorted(refs)
    if end == "killed":
        assert world.opened(world.start) == 0  # the three are in a page since
    assert world.opened(lambda: world.controller.resolve(refs)) == 0


def damaged(data: bytes) -> bytes:
    return data[:40] + bytes([data[40] ^ 1]) + data[41:]


def later(data: bytes) -> bytes:
    page = msgspec.msgpack.decode(unseal(data, "page"))
    return seal(msgspec.msgpack.encode({**page, "schema": "tq-fs/page/2", "surprise": 1}))


def foreign(data: bytes) -> bytes:
    return encode_page("another", 1, decode_page(data, STORE, "page"))


def nonsense(data: bytes) -> bytes:
    return encode_page(STORE, 1, [b"\x01"])


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def empty(data: bytes) -> bytes:
    return b""


DAMAGE = [damaged, later, foreign, nonsense, cut, empty]


@pytest.mark.parametrize("how", DAMAGE, ids=lambda how: how.__name__)
def test_a_page_that_cannot_be_used_is_told_and_the_manifests_are_read(
    world: World, caplog: pytest.LogCaptureFixture, how: Callable[[bytes], bytes]
) -> None:
    refs = world.finalize(2, count=2 * FULL)
    first, second = world.pages()
    first.write_bytes(how(first.read_bytes()))
    assert world.opened(world.start) == FULL
    assert f"pages/{first.name} is not used" in caplog.text
    assert sorted(world.controller.unreleased()) == sorted(refs)
    assert len(world.pages()) == 2  # one written anew, and the bad one is gone
    assert second in world.pages()
    assert world.opened(world.start) == 0


def test_pages_that_are_missing_are_written_by_the_next_start(world: World) -> None:
    refs = world.finalize(2, count=3 * FULL)
    shutil.rmtree(world.folder / "pages")
    assert world.opened(world.start) == 3 * FULL
    assert world.opened(world.start) == 0
    assert sorted(world.controller.unreleased()) == sorted(refs)


def test_a_manifest_that_was_written_again_is_read_again(world: World) -> None:
    world.finalize(2, count=FULL)
    path = world.manifests()[1]
    before = path.stat().st_size
    another(path)
    assert path.stat().st_size == before
    assert world.opened(world.start) == 1
    check_same(world)


def test_a_manifest_that_was_damaged_is_not_made_good_by_a_page(world: World) -> None:
    refs = world.finalize(2, count=FULL)
    path = world.manifests()[1]
    path.write_bytes(damaged(path.read_bytes()))
    assert world.start().unreadable == (str(path.parent.relative_to(world.folder / "manifests")),)
    assert world.recovery.sessions == FULL - 1
    assert len(list(world.controller.unreleased())) == len(refs) * (FULL - 1) // FULL


def test_what_was_released_after_its_page_stays_released(world: World) -> None:
    whole = world.finalize(4, count=FULL)  # for both consumers
    gone = [
        r
        for r in whole
        if SegmentRef.parse(r).incarnation == SegmentRef.parse(whole[0]).incarnation
    ]
    for consumer in CONSUMERS:
        world.controller.release(gone, consumer)
    world.controller.release([whole[-1]], "eval")
    world.start()
    left = sorted(set(whole) - set(gone))
    assert sorted(world.controller.unreleased("train")) == left
    assert sorted(world.controller.unreleased("eval")) == sorted(set(left) - {whole[-1]})
    with pytest.raises(SegmentMissing):
        world.controller.resolve(gone[:1])


def test_a_version_that_knows_no_pages_may_have_it_in_between(world: World) -> None:
    first = world.finalize(2, count=FULL + LEAST)
    world.controller.close()
    world.start(Unaware)
    world.controller.release(first[:2], "train")
    second = world.finalize(2, count=2)
    assert world.opened(world.start) == 2
    assert sorted(world.controller.unreleased()) == sorted([*first[2:], *second])


class Rotten(Counting):
    """A device that gives other bytes under the same stamps."""

    def stamp(self, key: str) -> str:
        return "always" if key.endswith(".json") else super().stamp(key)

    def stamps(self, prefix: str) -> Iterator[tuple[str, str]]:
        return ((key, self.stamp(key)) for key, _ in self.walk(prefix))


@pytest.mark.parametrize("look", ["survey", "rebuild"])
def test_recovery_after_a_loss_believes_no_page(world: World, look: str) -> None:
    world.backend = Rotten(world.folder, ahead=0)
    world.unit = StorageUnit(world.backend, STORE, options=EncodeOptions())
    world.start()
    world.finalize(2, count=FULL)
    path = world.manifests()[1]
    path.write_bytes(damaged(path.read_bytes()))
    assert world.start().unreadable == ()  # nothing tells, and what is in memory is right
    controller = world.make(unit=world.unit)
    found = controller.survey() if look == "survey" else controller.recover(rebuild=True)
    assert len(found.unreadable) == 1


def test_a_store_opened_read_only_uses_pages_and_writes_none(tmp_path: Path) -> None:
    world = World(tmp_path)
    refs = world.finalize(2, count=FULL + 3)
    world.epoch += 1
    controller = world.make()
    assert world.opened(controller.load) == 3
    controller.close()
    assert len(world.pages()) == 1
    assert sorted(controller.unreleased()) == sorted(refs)


def test_a_store_that_is_opened_again_uses_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(backend: Any, store_id: str) -> Pages:
        return Pages(backend, store_id, full=FULL, least=LEAST)

    monkeypatch.setattr("tq_fs.manifests._catalog.Pages", small)
    with open_store(tmp_path, FIELDS) as store:
        for number in range(FULL + 2):
            record(store, f"s{number}", number)
        refs = sorted(store.unreleased())
    assert len(list(tmp_path.glob("default/pages/*"))) == 2
    monkeypatch.setattr("tq_fs.places.LocalBackend", Counting)
    with open_store(tmp_path, FIELDS) as store:
        backend: Any = store._controller._catalog._backend  # type: ignore[union-attr]
        assert backend.manifests == 0
        assert (store.recovery.sessions, store.recovery.incomplete) == (FULL + 2, ())
        assert sorted(store.unreleased()) == refs
        store.release(refs)
    assert tree(tmp_path) == {"default/store.json"}


# ---------------------------------------------------------------- pages


def test_a_page_goes_with_the_last_of_its_sessions(world: World) -> None:
    sessions = [world.finalize(0) for _ in range(2 * FULL)]
    first, second = world.pages()
    world.controller.release(itertools.chain(*sessions[: FULL - 1]), "train")
    assert world.pages() == [first, second]
    world.controller.release(sessions[FULL - 1], "train")
    assert world.pages() == [second]
    world.controller.release(itertools.chain(*sessions), "train")
    assert tree(world.folder) == set()
    world.controller.close()
    assert tree(world.folder) == set()


def test_sessions_that_outlive_their_pages_do_not_keep_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of each eight stays for good, alone in its page at first."""
    monkeypatch.setattr("tests.test_catalog_scale.FULL", 8)
    world = World(tmp_path)
    kept = []
    for _ in range(40):
        sessions = [world.finalize(0) for _ in range(8)]
        kept += sessions[0]
        world.controller.release(itertools.chain(*sessions[1:]), "train")
    assert len(world.pages()) <= 40 / 2 + 1  # a quarter of a full page lives in each, but the last
    assert sorted(world.controller.unreleased()) == sorted(kept)
    assert world.opened(world.start) == 0
    check_same(world)
    world.backend.close()


def test_a_page_that_cannot_be_written_fails_no_finalize(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def full(self: Any, key: str, data: bytes, *, urgent: bool = False) -> None:
        if key.startswith("pages/"):
            tries.append(key)
            raise StorageFull("no room", subject=key)
        put(self, key, data, urgent=urgent)

    put = LocalBackend.put
    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "put", full)
        refs = world.finalize(2, count=2 * FULL - 1)
        assert len(tries) == 1  # not with each session from then on
        world.controller.close()
    assert "could not be written" in caplog.text
    assert world.pages() == []
    refs += world.finalize(2, count=FULL)
    assert world.pages() != []
    assert sorted(world.controller.unreleased()) == sorted(refs)
    check_same(world)


def test_what_is_released_while_its_page_is_written_is_gone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(self: Any, key: str, data: bytes, *, urgent: bool = False) -> None:
        real(self, key, data, urgent=urgent)
        if key.startswith("pages/"):
            world.controller.release(sessions[0], "train")

    real = LocalBackend.put
    sessions = [world.finalize(0) for _ in range(FULL - 1)]
    monkeypatch.setattr(LocalBackend, "put", put)
    sessions.append(world.finalize(0))
    with pytest.raises(SegmentMissing):
        world.controller.resolve(sessions[0])
    assert len(world.pages()) == 1
    world.controller.release(itertools.chain(*sessions[1:]), "train")
    assert tree(world.folder) == set()


def test_many_threads_finalize_and_release_while_pages_are_written(world: World) -> None:
    errors: list[BaseException] = []
    left: list[str] = []

    def work(seed: int) -> None:
        try:
            for turn in range(15):
                refs = world.finalize(2 * seed, count=2)
                for consumer in CONSUMERS[: 1 + 2 * seed % 3 % 2]:
                    world.controller.release(refs if turn % 3 else refs[1:], consumer)
                left.extend([] if turn % 3 else refs[:1])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(world.controller.unreleased()) == sorted(left)
    check_same(world)
    world.controller.close()
    assert world.opened(world.start) < LEAST
    check_same(world)


# ---------------------------------------------------------------- memory


def test_a_session_in_memory_is_a_few_hundred_bytes_a_step(world: World) -> None:
    """Of three Steps: a decoded manifest would be three times as much."""
    world.finalize(2, count=50)
    gc.collect()
    tracemalloc.start()
    try:
        world.finalize(2, count=200)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert grown / 200 <= 2000


# ---------------------------------------------------------------- stamps


def test_a_stamp_changes_whenever_a_file_is_written_again(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path, ahead=0)
    assert isinstance(backend, Stamping)
    backend.put("a/b", b"1")
    backend.put("a/c", b"1")
    stamps = dict(backend.stamps("a"))
    assert stamps == {key: backend.stamp(key) for key in ("a/b", "a/c")}
    assert len(set(stamps.values())) == 2
    seen = {stamps["a/b"]}
    for change in (
        lambda: backend.put("a/b", b"1"),
        lambda: (tmp_path / "a/b").write_bytes(b"2"),
        lambda: (
            shutil.copy2(tmp_path / "a/b", tmp_path / "d"),
            (tmp_path / "d").replace(tmp_path / "a/b"),
        ),
    ):
        change()
        assert backend.stamp("a/b") not in seen
        seen.add(backend.stamp("a/b"))
    assert backend.stamp("a/c") == stamps["a/c"]
    with pytest.raises(ObjectMissing):
        backend.stamp("a/x")
    backend.close()


# ---------------------------------------------------------------- the format

GOLDEN = Path(__file__).parent / "golden"


def test_the_golden_page_is_read_and_what_it_holds_is_the_golden_manifest() -> None:
    """Deflated bytes differ from one zlib to the next; what is inflated does not."""
    (entry,) = decode_page((GOLDEN / "page-1.msgpack").read_bytes(), "golden", "page")
    data = (GOLDEN / "manifest-1.json").read_bytes()
    manifest = decode(data, SessionManifest, "manifest")
    found = noted(entry)
    assert found.json() == data
    assert found.manifest() == manifest
    assert found.incarnation == manifest.incarnation
    assert msgspec.structs.replace(found, packed=b"") == msgspec.structs.replace(
        noted(note(manifest, data, "12-3-4-5")), packed=b""
    )
    assert (found.consumers, found.segments) == (manifest.consumers, len(manifest.segments))
    assert found.nbytes == sum(step.nbytes for step in manifest.steps)
