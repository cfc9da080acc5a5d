"""The embedded store: open, continue, refuse, release, sweep; and the formats it promises."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

import tq_fs
from tests._rollouts import (
    VIEWS,
    Op,
    Rollout,
    assert_batch,
    assert_bits,
    empty_folders,
    open_store,
    routes,
    run_child,
    sealed,
    short_rollout,
    small_chunks,
    specs,
    standard_fields,
    tree,
    turning_rollout,
    visible_steps,
)
from tq_fs import StoreConfig, manifests
from tq_fs.backends import LocalBackend
from tq_fs.config import folder_of
from tq_fs.errors import (
    FormatTooNew,
    InvalidConfig,
    InvalidKey,
    InvalidSegment,
    ManifestCorrupt,
    ObjectMissing,
    ReadOnlyStore,
    SegmentMissing,
    SessionClosed,
    StaleReference,
    StepMissing,
    StorageFailed,
    StorageFull,
    StoreBusy,
    TqFsError,
    WrongStore,
)
from tq_fs.keys import Incarnation, SegmentRef, StepKey
from tq_fs.manifests import Mode, SessionManifest, SessionState, StoreDocument
from tq_fs.steps import EncodeOptions, FieldArray, Scratch, encode_step, read_attributes

FIELDS = standard_fields()
GOLDEN = Path(__file__).parent / "golden"
SCHEMAS = Path(manifests.__file__).parent / "schemas"


def record(
    store: tq_fs.Store, session_id: str, seed: int = 0, partition: str = "train", **finalize: Any
) -> tuple[list[tq_fs.Segment], list[dict[str, Any]]]:
    """Record and finalize a session; return its lineage Segments and what they must hydrate to."""
    rollout = short_rollout(FIELDS, seed)
    session = store.session(session_id, partition=partition)
    rollout.record(session)
    want = [e.slime(specs(FIELDS)) for e in rollout.expected("lineage")]
    return session.finalize(**finalize), want


def refs_of(segments: list[tq_fs.Segment]) -> list[str]:
    return [s.ref for s in segments if s.ref is not None]


# ---------------------------------------------------------------- open, close, continue


def test_a_store_that_is_opened_again_continues(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        first, want_first = record(store, "a", 1)
    with open_store(tmp_path, FIELDS) as store:
        assert list(store.unreleased()) == refs_of(first)
        assert store.swept == type(store.swept)(0, 0)
        assert_batch(store.hydrate(first), want_first)
        second, want_second = record(store, "b", 2)
        assert_batch(store.hydrate([*second, *first]), want_second + want_first)
    with open_store(tmp_path, FIELDS) as store:
        assert sorted(store.unreleased()) == sorted(refs_of(first + second))
        assert store.release(first) == 3
        assert list(store.unreleased()) == refs_of(second)
        assert_batch(store.hydrate(second), want_second)


READ_IT = """
import sys
import numpy as np
from _rollouts import standard_fields, specs
import tq_fs
with tq_fs.open_store(sys.argv[1], fields=specs(standard_fields()), read_only=True) as store:
    (ref,) = list(store.unreleased())
    batch = store.hydrate([ref])
    np.savez(sys.argv[2], **{name: tensors[0].numpy() for name, tensors in batch.items()})
    print(ref)
"""


@pytest.mark.parametrize("writer_is_open", [True, False])
def test_another_process_hydrates_by_reference(tmp_path: Path, writer_is_open: bool) -> None:
    store = open_store(tmp_path / "store", FIELDS)
    with store:
        segments, (want,) = record(store, "a", 1)
        if not writer_is_open:
            store.close()
        out = tmp_path / "out.npz"
        done = run_child(READ_IT, (tmp_path / "store").as_uri(), out)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == refs_of(segments)
        with np.load(out) as have:
            for name, array in want.items():
                assert_bits(have[name], array)


def test_hydrating_by_reference_alone_gives_the_whole_segment(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        segments, want = record(store, "a", 1)
        assert_batch(store.hydrate(refs_of(segments)), want)
        assert len(refs_of(segments)[0]) < 120
        with pytest.raises(InvalidKey):
            store.hydrate(["tqfs1:nonsense"])


def test_a_second_writer_is_refused_and_told_who_writes(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS):
        with pytest.raises(StoreBusy, match=f"process {os.getpid()} has it open"):
            open_store(tmp_path, FIELDS)
        done = run_child(
            "import sys, tq_fs\n"
            "try: tq_fs.open_store(sys.argv[1], fields=[tq_fs.logprobs()])\n"
            "except tq_fs.errors.StoreBusy as error: print(error)\n",
            tmp_path.as_uri(),
        )
        assert f"process {os.getpid()} has it open" in done.stdout, done.stderr
        open_store(tmp_path, FIELDS, store_id="another run").close()
    open_store(tmp_path, FIELDS).close()


def test_reading_beside_the_writer_sees_what_is_finalized_later(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as writer:
        record(writer, "a", 1)
        before = tree(tmp_path)
        with open_store(tmp_path, FIELDS, read_only=True) as reader:
            later, want = record(writer, "b", 2)
            assert_batch(reader.hydrate(later), want)
            with pytest.raises(ReadOnlyStore):
                reader.session("c")
            with pytest.raises(ReadOnlyStore):
                reader.release(later)
            writer.release(later)
            with pytest.raises((StepMissing, SegmentMissing)):
                reader.hydrate(later)
        assert tree(tmp_path) == before  # nothing of the reader's


def test_reading_a_store_that_is_not_there_is_an_error_and_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ObjectMissing):
        open_store(tmp_path / "none", FIELDS, read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_stays_locked_until_the_last_step_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, go = threading.Event(), threading.Event()

    def at(point: str) -> None:
        if point == "members written" and not written.is_set():
            written.set()
            assert go.wait(20)

    monkeypatch.setattr("tq_fs.store.LocalBackend", partial(LocalBackend, at=at))
    store = open_store(tmp_path, FIELDS)
    rollout = short_rollout(FIELDS, 1)
    future = store.session("s").submit(rollout.step(rollout.turns[0]))
    assert written.wait(20)
    closing = threading.Thread(target=store.close)
    closing.start()
    try:
        closing.join(0.2)
        assert closing.is_alive()
        with pytest.raises(StoreBusy):
            open_store(tmp_path, FIELDS).close()
    finally:
        go.set()
        closing.join()
    assert future.result().stored is not None


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = open_store(tmp_path, FIELDS)
    segments, _ = record(store, "a", 1)
    session = store.session("b")
    rollout = short_rollout(FIELDS, 2)
    session.record(rollout.step(rollout.turns[0]))
    store.close()
    store.close()
    before = contents(tmp_path)
    uses: list[Callable[[], Any]] = [
        lambda: session.record(rollout.step(rollout.turns[1])),
        session.finalize,
        session.discard,
        lambda: store.hydrate(segments),
        lambda: store.release(segments),
        lambda: store.session("c"),
        store.unreleased,
        lambda: store.micro_batches(segments, size=1),
    ]
    for use in uses:
        with pytest.raises(SessionClosed, match="closed"):
            use()
    assert contents(tmp_path) == before
    assert len(visible_steps(tmp_path)) == 4


FORKED = """
import asyncio, os, signal, sys
from pathlib import Path
from tq_fs.errors import WrongProcess
from _rollouts import open_store, short_rollout, standard_fields

fields = standard_fields()
store = open_store(Path(sys.argv[1]), fields, prepared_groups=4)
rollout = short_rollout(fields, 1)
done = store.session("done")
rollout.record(done)
segments = done.finalize()
session = store.session("open")
session.record(rollout.step(rollout.turns[0]))
step = rollout.step(rollout.turns[1])
store.hydrate(segments)
batches = store.micro_batches(segments, size=1)
list(batches)
uses = {
    "record": lambda: session.record(step),
    "submit": lambda: session.submit(step),
    "arecord": lambda: asyncio.run(session.arecord(step)),
    "finalize": session.finalize,
    "discard": session.discard,
    "session": lambda: store.session("s"),
    "hydrate": lambda: store.hydrate(segments),
    "release": lambda: store.release(segments),
    "unreleased": lambda: list(store.unreleased()),
    "micro_batches": lambda: store.micro_batches(segments, size=1),
    "iterate": lambda: list(batches),
}
told, tell = os.pipe()
end, ended = os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(10)
    os.close(ended)
    for name, use in uses.items():
        try:
            use()
            said = "nothing"
        except BaseException as error:
            said = type(error).__name__
        os.write(tell, f"{name}: {said}\\n".encode())
    store.close()
    os.write(tell, b"close: done\\n")
    os.close(tell)
    os.read(end, 1)  # lives until the parent is through
    os._exit(0)
os.close(tell)
while data := os.read(told, 4096):
    print(data.decode(), end="")
session.record(step)
store.hydrate(session.finalize())
store.close()
with open_store(Path(sys.argv[1]), fields) as again:
    print(len(list(again.unreleased())), "unreleased")
os.close(ended)
print("exit", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_is_told_and_does_not_hold_the_folder(tmp_path: Path) -> None:
    done = run_child(FORKED, tmp_path)
    assert done.returncode == 0, done.stderr
    *said, close, unreleased, ended = done.stdout.splitlines()
    assert len(said) == 11
    assert {line.split(": ")[1] for line in said} == {"WrongProcess"}, said
    assert (close, unreleased, ended) == ("close: done", "2 unreleased", "exit 0")


def test_tensors_without_torch_are_an_error_that_says_so(tmp_path: Path) -> None:
    done = run_child(
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from _rollouts import open_store, short_rollout, standard_fields\n"
        "with open_store(Path(sys.argv[1]), standard_fields()) as store:\n"
        "    session = store.session('s')\n"
        "    short_rollout(standard_fields(), 1).record(session)\n"
        "    segments = session.finalize()\n"
        "    try: store.hydrate(segments)\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
        "    print(store.release(segments))\n",
        tmp_path,
    )
    assert done.stdout.startswith("DependencyMissing "), done.stderr
    assert "torch" in done.stdout
    assert done.stdout.endswith("\n3\n")


def test_closing_a_store_lets_a_micro_batch_that_is_being_hydrated_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go = threading.Event(), threading.Event()

    class Slow(LocalBackend):
        def open(self, key: str) -> Any:
            if "/000001/" in key:
                reading.set()
                assert go.wait(20)
            return super().open(key)

    monkeypatch.setattr("tq_fs.store.LocalBackend", Slow)
    store = open_store(tmp_path, FIELDS, reader_threads=1)
    segments, want = record(store, "a", 1)
    batches = store.micro_batches(segments, size=1)
    batches.prefetch()
    assert reading.wait(20)
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(0.1)
    go.set()
    closing.join(20)
    assert not closing.is_alive()
    (batch,) = batches
    assert_batch(dict(batch.tensors), want)


# ---------------------------------------------------------------- references


def test_references_of_another_store_are_refused(tmp_path: Path) -> None:
    with (
        open_store(tmp_path, FIELDS, store_id="one") as one,
        open_store(tmp_path, FIELDS, store_id="two") as two,
    ):
        segments, _ = record(one, "a", 1)
        record(two, "a", 1)
        with pytest.raises(WrongStore, match="is of store 'one', this is 'two'"):
            two.hydrate(segments)
        with pytest.raises(WrongStore):
            two.release(segments)
        assert len(list(one.unreleased())) == 1


def test_a_folder_of_another_store_is_refused(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS, store_id="one") as store:
        record(store, "a", 1)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with pytest.raises(WrongStore, match="is store 'one', not 'two'"):
        open_store(tmp_path, FIELDS, store_id="two")
    with pytest.raises(WrongStore):
        open_store(tmp_path, FIELDS, store_id="two", read_only=True)
    (tmp_path / "one/store.json").write_text('{"schema": "something else"}')
    with pytest.raises(ManifestCorrupt, match=r"one/store\.json"):
        open_store(tmp_path, FIELDS, store_id="one")


def test_a_manifest_of_another_store_is_left_alone(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS, store_id="one") as store:
        segments, _ = record(store, "a", 1)
    open_store(tmp_path, FIELDS, store_id="two").close()
    shutil.copytree(tmp_path / "one/manifests", tmp_path / "two/manifests")
    shutil.copytree(tmp_path / "one/steps", tmp_path / "two/steps")
    known = SegmentRef.parse(refs_of(segments)[0])
    ref = str(SegmentRef("two", known.incarnation, known.view, known.index))
    before = tree(tmp_path)
    with open_store(tmp_path, FIELDS, store_id="two") as store:
        assert store.swept == type(store.swept)(0, 0, (known.incarnation.path,))
        for use in (store.hydrate, store.release):
            with pytest.raises(WrongStore, match="'one' in store 'two'"):
                use([ref])
        mine, want = record(store, "a", 2)
        assert_batch(store.hydrate(mine), want)
        store.release(mine)
    assert tree(tmp_path) == before


STRANGERS = {
    "a checkpoint": "steps/1000/rank0/shard0/0",
    "a file": "notes.txt",
    "a hidden file": ".notes",
    "an empty folder": "manifests/train/",
    "documents of its own": "manifests/train/a/0/manifest.json",
}


@pytest.mark.parametrize("what", STRANGERS)
def test_a_folder_that_holds_something_else_is_refused_and_not_touched(
    tmp_path: Path, what: str
) -> None:
    root = tmp_path / "default"
    path = root / STRANGERS[what]
    if STRANGERS[what].endswith("/"):
        path.mkdir(parents=True)
    else:
        path.parent.mkdir(parents=True)
        path.write_text("mine")
    (root / ".staging").mkdir()
    (root / ".staging/mine").write_text("mine")
    before = sorted(root.rglob("*"))
    with pytest.raises(WrongStore, match=f"{path.relative_to(root).parts[0]}.*no store.json"):
        open_store(tmp_path, FIELDS)
    assert sorted(root.rglob("*")) == before
    assert path.is_dir() or path.read_text() == "mine"


def test_a_folder_that_a_killed_first_start_left_is_taken(tmp_path: Path) -> None:
    (tmp_path / "default/.staging/left").mkdir(parents=True)
    (tmp_path / "default/.lock").touch()
    with open_store(tmp_path, FIELDS) as store:
        assert tree(tmp_path) == {"default/store.json"}
        segments, want = record(store, "a", 1)
        assert_batch(store.hydrate(segments), want)


@pytest.mark.parametrize("depth", range(4))
def test_a_stray_file_among_the_steps_does_not_stop_a_start(tmp_path: Path, depth: int) -> None:
    with open_store(tmp_path, FIELDS) as store:
        segments, want = record(store, "a", 1)
    (step,) = tmp_path.glob("default/steps/train/a/*/000000")
    stray = step.parents[3 - depth] / "notes.txt"
    stray.write_text("mine")
    with open_store(tmp_path, FIELDS) as store:
        assert_batch(store.hydrate(segments), want)
        assert depth == 2 or stray.read_text() == "mine"  # at 2 it stands where an orphan would


def test_an_older_incarnation_is_stale_once_it_is_gone(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        old, want_old = record(store, "a", 1)
        new, want_new = record(store, "a", 2)
        assert_batch(store.hydrate([*new, *old]), want_new + want_old)  # both live
        store.release(old)
        with pytest.raises(StaleReference, match="session 'a' has been used again"):
            store.hydrate(old)
        assert store.release(old) == 0  # late, and hits nothing newer
        assert_batch(store.hydrate(new), want_new)
    with open_store(tmp_path, FIELDS) as store:
        with pytest.raises(StaleReference):
            store.hydrate(old)
        assert_batch(store.hydrate(new), want_new)
        store.release(new)
        with pytest.raises(SegmentMissing):
            store.hydrate(new)


def test_a_segment_that_is_not_there_is_missing(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        (segment,), _ = record(store, "a", 1)
        assert segment.ref is not None
        known = SegmentRef.parse(segment.ref)
        for ref in [
            SegmentRef(known.store_id, known.incarnation, "lineage", 1),
            SegmentRef(known.store_id, known.incarnation, "timeline", 0),
            SegmentRef(known.store_id, Incarnation("train", "b", "0"), "lineage", 0),
            SegmentRef(known.store_id, Incarnation("eval", "a", "0"), "lineage", 0),
        ]:
            with pytest.raises(SegmentMissing, match="never finalized"):
                store.hydrate([str(ref)])
        session = store.session("open")
        rollout = short_rollout(FIELDS, 2)
        rollout.record(session)
        still_open = Incarnation("train", "open", session.incarnation_id)
        with pytest.raises(SegmentMissing):
            store.hydrate([str(SegmentRef("default", still_open, "lineage", 0))])
        session.discard()
        with pytest.raises(SegmentMissing):
            store.hydrate([str(SegmentRef("default", still_open, "lineage", 0))])


# ---------------------------------------------------------------- release


@pytest.mark.parametrize("order", [range(6), [5, 4, 3, 2, 1, 0], [2, 0, 4, 1, 5, 3]])
def test_release_deletes_exactly_what_no_other_segment_needs(
    tmp_path: Path, order: list[int]
) -> None:
    rollout = turning_rollout()
    with open_store(tmp_path, FIELDS) as store:
        session = store.session("s")
        rollout.record(session)
        segments = session.finalize(views=VIEWS)
        want = [e.slime(specs(FIELDS)) for view in VIEWS for e in rollout.expected(view)]
        assert [s.steps for s in segments] == [
            (0, 2, 4),
            (1, 3),
            (0,),
            (1,),
            (0, 2),
            (1, 3),
            (0, 2, 4),
        ]
        empty = 4  # holds no rows, so no Segment refers to it
        live = set(range(7))
        deleted = 0
        for i in [*order, 6]:
            deleted += store.release([segments[i]])
            live.discard(i)
            needed = {n for j in live for n in segments[j].steps} - {empty}
            on_disk = {int(p.rsplit("/", 1)[1]) for p in visible_steps(tmp_path)}
            assert on_disk == needed
            chosen = sorted(live)
            assert_batch(
                store.hydrate([segments[j] for j in chosen]), [want[j] for j in chosen], live
            ) if live else None
        assert deleted == 4
    assert tree(tmp_path) == {"default/store.json"}
    assert empty_folders(tmp_path) == set()


def test_every_consumer_has_to_release(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        segments, want = record(store, "a", 1, consumers=["train", "eval", "again"])
        assert store.release(segments, "train") == 0
        assert store.release(segments, "train") == 0  # idempotent
        assert store.release(segments, "again") == 0
        assert list(store.unreleased("train")) == []
        assert list(store.unreleased("eval")) == refs_of(segments)
        with pytest.raises(
            InvalidConfig, match=r"'tests' is not among \['again', 'eval', 'train'\]"
        ):
            store.release(segments, "tests")
        assert_batch(store.hydrate(segments), want)
    with open_store(tmp_path, FIELDS) as store:
        assert list(store.unreleased("train")) == []
        assert list(store.unreleased()) == refs_of(segments)
        assert_batch(store.hydrate(segments), want)
        assert store.release(segments, "eval") == 3
        for consumer in ("train", "eval", "anybody"):
            assert store.release(segments, consumer) == 0
        assert list(store.unreleased()) == []
    assert tree(tmp_path) == {"default/store.json"}


def test_unreleased_are_told_by_consumer_and_partition(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        a, _ = record(store, "a", 1, consumers=["train", "eval"])
        b, _ = record(store, "b", 2, partition="eval")
        assert set(store.unreleased()) == set(refs_of(a + b))
        assert list(store.unreleased(partition="eval")) == refs_of(b)
        assert list(store.unreleased("eval", partition="train")) == refs_of(a)
        assert list(store.unreleased("eval", partition="eval")) == []
        store.release(a, "train")
        assert list(store.unreleased("train")) == refs_of(b)
        assert set(store.unreleased()) == set(refs_of(a + b))


def test_consumers_are_named_once_each(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        session = store.session("s")
        rollout = short_rollout(FIELDS, 1)
        rollout.record(session)
        for consumers in ([], ["train", "train"]):
            with pytest.raises(InvalidConfig):
                session.finalize(consumers=consumers)
        session.finalize(consumers=["train"])


def test_many_threads_release_everything_once(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        rollouts = [turning_rollout() for _ in range(12)]
        segments = []
        for i, rollout in enumerate(rollouts):
            session = store.session(f"s{i}")
            rollout.record(session)
            segments += session.finalize(views=VIEWS, consumers=["a", "b"])
        errors: list[BaseException] = []

        def work(consumer: str, seed: int) -> None:
            order = np.random.default_rng(seed).permutation(len(segments))
            try:
                for i in order:
                    store.release([segments[i]], consumer)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(c, s)) for c in "ab" for s in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert errors == []
        assert list(store.unreleased()) == []
    assert tree(tmp_path) == {"default/store.json"}


def test_a_release_that_is_repeated_while_the_first_deletes_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes while the first has the Steps in the trash, and writes its note late."""
    late = threading.Event()
    started = threading.Event()
    second: list[threading.Thread] = []
    errors: list[BaseException] = []
    deletes: list[str] = []

    def again() -> None:
        try:
            store.release(segments)
        except BaseException as error:
            errors.append(error)

    def at(point: str) -> None:
        if not armed:
            return
        if point == "value written" and second and threading.current_thread() is second[0]:
            started.set()
            late.wait(1)
        if point == "delete renamed" and threading.current_thread() not in second:
            deletes.append(point)
            if not second:
                second.append(threading.Thread(target=again))
                second[0].start()
                started.wait(1)
            elif len(deletes) == 4:  # three Steps, and now the manifest
                threading.Timer(0.2, late.set).start()

    armed = False
    monkeypatch.setattr("tq_fs.store.LocalBackend", partial(LocalBackend, at=at))
    store = open_store(tmp_path, FIELDS)
    with store:
        segments, _ = record(store, "a", 1)
        armed = True
        assert store.release(segments) == 3
        second[0].join()
        armed = False
        assert errors == []
    assert tree(tmp_path) == {"default/store.json"}


class Stuck(LocalBackend):
    """A backend whose deletes below a prefix fail some times."""

    prefix, times = "", 0

    def delete(self, prefix: str) -> bool:
        if Stuck.times and prefix.startswith(Stuck.prefix):
            Stuck.times -= 1
            raise StorageFailed("the device said no", subject=prefix)
        return super().delete(prefix)


@pytest.mark.parametrize("then", ["a release", "a start"])
def test_steps_that_cannot_be_deleted_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, then: str
) -> None:
    monkeypatch.setattr("tq_fs.store.LocalBackend", Stuck)
    monkeypatch.setattr(Stuck, "prefix", "steps/")
    with open_store(tmp_path, FIELDS) as store:
        first, _ = record(store, "a", 1)
        second, want = record(store, "b", 2)
        monkeypatch.setattr(Stuck, "times", 2)
        store.release(first)
        assert Stuck.times == 0
        assert caplog.text.count("could not be deleted yet") == 2
        assert list(store.unreleased()) == refs_of(second)
        assert len(visible_steps(tmp_path)) == 2 + 3
        with pytest.raises(SegmentMissing):
            store.hydrate(first)
        if then == "a release":
            assert store.release(first) == 0
            assert len(visible_steps(tmp_path)) == 3
    with open_store(tmp_path, FIELDS) as store:
        assert store.swept.steps == (2 if then == "a start" else 0)
        assert_batch(store.hydrate(second), want)
        store.release(second)
    assert tree(tmp_path) == {"default/store.json"}


def test_an_orphan_that_cannot_be_deleted_does_not_stop_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_fs.store.LocalBackend", Stuck)
    monkeypatch.setattr(Stuck, "prefix", "steps/")
    with open_store(tmp_path, FIELDS) as store:
        segments, want = record(store, "a", 1)
        short_rollout(FIELDS, 2).record(store.session("left open"))
    monkeypatch.setattr(Stuck, "times", 1)
    with open_store(tmp_path, FIELDS) as store:
        assert Stuck.times == 0
        assert_batch(store.hydrate(segments), want)
    with open_store(tmp_path, FIELDS) as store:
        assert store.swept.sessions == 1
        store.release(segments)
    assert tree(tmp_path) == {"default/store.json"}


def test_a_release_whose_manifest_cannot_be_dropped_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_fs.store.LocalBackend", Stuck)
    monkeypatch.setattr(Stuck, "prefix", "manifests/")
    with open_store(tmp_path, FIELDS) as store:
        segments, want = record(store, "a", 1)
        before = contents(tmp_path)
        monkeypatch.setattr(Stuck, "times", 1)
        with pytest.raises(StorageFailed):
            store.release(segments)
        assert contents(tmp_path) == before
        assert list(store.unreleased()) == refs_of(segments)
        assert_batch(store.hydrate(segments), want)
        assert store.release(segments) == 3
    assert tree(tmp_path) == {"default/store.json"}


@pytest.mark.parametrize("backwards", [False, True])
def test_a_release_is_checked_as_a_whole_before_anything_is_done(
    tmp_path: Path, backwards: bool
) -> None:
    with open_store(tmp_path, FIELDS) as store:
        a, _ = record(store, "a", 1, consumers=["eval"])
        b, _ = record(store, "b", 2, consumers=["train"])
        before = contents(tmp_path)
        unknown = refs_of(b)[0].rsplit("/", 1)[0] + "/7"
        for refs, consumer, error in [
            (refs_of([*a, *b]), "eval", InvalidConfig),
            (refs_of([*b, *a]), "train", InvalidConfig),
            ([*refs_of(a), unknown], "eval", SegmentMissing),
            ([*refs_of(a), "tqfs1:other/train/b/0/lineage/0"], "eval", WrongStore),
            ([*refs_of(a), "nonsense"], "eval", InvalidKey),
        ]:
            with pytest.raises(error):
                store.release(refs[::-1] if backwards else refs, consumer)
            assert contents(tmp_path) == before
            assert list(store.unreleased()) == refs_of([*a, *b])
        assert store.release(a, "eval") + store.release(b) == 6


def test_one_reference_is_released_as_it_is(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        segments, _ = record(store, "a", 1)
        assert store.release(refs_of(segments)[0]) == 3
        assert list(store.unreleased()) == []


def test_references_that_are_no_longer_there_count_as_released(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        segments, _ = record(store, "a", 1)
        store.release(segments)
        assert store.release([*segments, *refs_of(segments)]) == 0
        assert store.release([segments[0].sample()]) == 0
        assert store.release([]) == 0


# ---------------------------------------------------------------- end of a session


def test_discard_deletes_what_was_written(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        kept, want = record(store, "a", 1)
        before = tree(tmp_path)
        session = store.session("b")
        short_rollout(FIELDS, 2).record(session)
        assert tree(tmp_path) != before
        session.discard()
        assert tree(tmp_path) == before
        assert empty_folders(tmp_path) == set()
        assert_batch(store.hydrate(kept), want)
        store.session("never used").discard()


def test_a_session_without_steps_has_no_segments(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        assert store.session("s").finalize() == []
        assert list(store.unreleased()) == []
    assert tree(tmp_path) == {"default/store.json"}


def test_steps_without_rows_of_their_own_are_deleted_at_finalize(tmp_path: Path) -> None:
    rollout = turning_rollout()
    with open_store(tmp_path, FIELDS) as store:
        session = store.session("s")
        rollout.record(session)
        assert len(visible_steps(tmp_path)) == 5
        session.finalize(views=VIEWS)
        assert len(visible_steps(tmp_path)) == 4


@pytest.mark.parametrize("code", [28, 5])  # ENOSPC, EIO
@pytest.mark.parametrize("point", ["staged", "members written", "renamed"])
def test_a_finalize_that_fails_leaves_the_session_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, code: int
) -> None:
    armed = False

    def at(passed: str) -> None:
        nonlocal armed
        if armed and passed == point:
            armed = False
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr("tq_fs.store.LocalBackend", partial(LocalBackend, at=at))
    rollout = turning_rollout()
    with open_store(tmp_path, FIELDS) as store:
        session = store.session("s")
        for turn in rollout.turns:
            session.record(rollout.step(turn))
        steps = visible_steps(tmp_path)
        armed = True
        with pytest.raises(StorageFull if code == 28 else StorageFailed):
            session.finalize(views=VIEWS)
        assert not armed
        assert list(store.unreleased()) == []
        assert not list(tmp_path.glob("default/manifests/*/*/*/manifest.json"))
        assert visible_steps(tmp_path) == steps
        rollout.play([Op("create", 0, 1, 3)], np.random.default_rng(1))
        session.record(rollout.step(rollout.turns[-1]))
        segments = session.finalize(views=VIEWS)
        want = [e.slime(specs(FIELDS)) for view in VIEWS for e in rollout.expected(view)]
        assert_batch(store.hydrate(segments), want)
        store.release(segments)
    assert tree(tmp_path) == {"default/store.json"}


def test_a_step_that_cannot_be_deleted_does_not_leave_a_session_half_finalized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finalized, with the Step left to the next sweep, or open again: but one of the two."""
    armed = False

    def at(passed: str) -> None:
        nonlocal armed
        if armed and passed == "delete renamed":
            armed = False
            raise OSError(5, os.strerror(5))

    monkeypatch.setattr("tq_fs.store.LocalBackend", partial(LocalBackend, at=at))
    rollout = turning_rollout()
    want = [e.slime(specs(FIELDS)) for view in VIEWS for e in rollout.expected(view)]
    with open_store(tmp_path, FIELDS) as store:
        session = store.session("s")
        rollout.record(session)
        armed = True
        try:
            segments = session.finalize(views=VIEWS)
        except TqFsError:
            assert list(store.unreleased()) == []
            segments = session.finalize(views=VIEWS)
        assert not armed
        assert list(store.unreleased()) == refs_of(segments)
        assert_batch(store.hydrate(segments), want)
    with open_store(tmp_path, FIELDS) as store:
        assert_batch(store.hydrate(segments), want)
        store.release(segments)
    assert tree(tmp_path) == {"default/store.json"}


def test_sessions_left_open_are_swept_when_the_store_is_opened_again(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        kept, want = record(store, "kept", 1)
        before = tree(tmp_path)
        for i in range(3):
            rollout = short_rollout(FIELDS, i, turns=2)
            rollout.record(store.session("left", partition=f"p{i}"))
        record(store, "gone", 5)
        store.release(list(store.unreleased()))
        kept, want = record(store, "kept", 1)
        assert len(visible_steps(tmp_path)) == 3 + 6
        before = tree(tmp_path)
    with open_store(tmp_path, FIELDS) as store:
        assert (store.swept.sessions, store.swept.steps) == (3, 6)
        assert tree(tmp_path) == {p for p in before if "/p" not in p}
        assert empty_folders(tmp_path) == set()
        assert_batch(store.hydrate(kept), want)
    with open_store(tmp_path, FIELDS) as store:
        assert (store.swept.sessions, store.swept.steps) == (0, 0)


# ---------------------------------------------------------------- ids

WEIRD = {
    "slash": "a/b",
    "two dots": "..",
    "a dot": ".",
    "hidden": ".hidden",
    "percent": "100%2F",
    "colon": "tqfs1:x",
    "bracket": "[a]*?",
    "under score": "_",
    "escape look-alike": "_2f__h",
    "empty": "",
    "blank": "  \t\n",
    "null": "a\0b",
    "accent": "é",
    "decomposed accent": "e\u0301",
    "emoji": "🧵",
    "upper": "ID",
    "lower": "id",
    "300 bytes": "x" * 300,
    "300 bytes of accents": "é" * 150,
    "300 bytes that end otherwise": "x" * 299 + "y",
    "1000 bytes": "/" * 1000,
}


def test_every_id_round_trips_as_session_and_as_partition(tmp_path: Path) -> None:
    want = {}
    with open_store(tmp_path, FIELDS, store_id="weird/../id %") as store:
        for i, text in enumerate(WEIRD.values()):
            for partition, session in [(text, "s"), ("p", text), (text, text)]:
                segments, (arrays,) = record(store, session, i, partition)
                want[refs_of(segments)[0]] = (partition, session, arrays)
        assert len(want) == 3 * len(WEIRD)
    (root,) = tmp_path.iterdir()
    assert root.name == "weird_2f.._2fid_20_25"
    for tree_of in ("steps", "manifests"):
        assert len(list((root / tree_of / "p").iterdir())) == len(WEIRD)  # a folder for each
    with open_store(tmp_path, FIELDS, store_id="weird/../id %") as store:
        assert store.swept.steps == 0
        assert set(store.unreleased()) == set(want)
        for text in WEIRD.values():
            mine = {ref for ref, (p, _, _) in want.items() if p == text}
            assert set(store.unreleased(partition=text)) == mine
        for ref, (partition, session, arrays) in want.items():
            where = SegmentRef.parse(ref).incarnation
            assert (where.partition, where.session_id) == (partition, session)
            assert_batch(store.hydrate([ref]), [arrays])
        assert store.release(want) == 3 * len(want)
    assert tree(tmp_path) == {"weird_2f.._2fid_20_25/store.json"}


@pytest.mark.parametrize("bad", ["x" * 1001, "x" * 2000, "é" * 501, "\ud800"])
def test_ids_that_are_too_long_or_no_text_are_refused(tmp_path: Path, bad: str) -> None:
    with open_store(tmp_path, FIELDS) as store:
        for partition, session in [("train", bad), (bad, "s")]:
            with pytest.raises(InvalidKey):
                store.session(session, partition=partition)
    with pytest.raises(InvalidKey):
        open_store(tmp_path, FIELDS, store_id=bad)
    assert tree(tmp_path) == {"default/store.json"}


# ---------------------------------------------------------------- configuration


def test_unknown_keys_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidConfig, match=r"unknown keys \['cache_byte'\].*cache_bytes"):
        StoreConfig.of({"cache_byte": 1})
    with pytest.raises(InvalidConfig, match="unknown keys"):
        tq_fs.open_store(None, fields=specs(FIELDS), cash_bytes=1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_groups", 0),
        ("writer_threads", 0),
        ("reader_threads", -1),
        ("inflight_bytes", 0),
        ("inflight_bytes", 1.5),
        ("prepared_groups", -1),
        ("cache_bytes", "1 GiB"),
        ("manifest_cache_bytes", True),
        ("inflight_deadline_s", -1),
        ("inflight_deadline_s", "soon"),
        ("inflight_deadline_s", float("nan")),
        ("checksum", "yes"),
        ("durability", "sometimes"),
        ("transfer", ["logprobs", "nonsense"]),
        ("transfer", "logprobs"),
        ("store_id", 7),
    ],
)
def test_values_that_make_no_sense_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(tq_fs.errors.InputError):
        open_store(tmp_path, FIELDS, **{key: value})
    assert tree(tmp_path) == set()


def test_the_largest_step_fits_the_default_budget() -> None:
    assert StoreConfig().inflight_bytes >= 256 * 1024 * 75 * 8 * 4  # tokens, layers, top-k, int32


def test_a_configuration_is_read_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "store.yaml"
    path.write_text("store_id: run-7\ntransfer: [routed_experts]\nlayer_groups: 4\n")
    config = StoreConfig.from_yaml(path)
    assert config == StoreConfig(store_id="run-7", transfer=("routed_experts",), layer_groups=4)
    with open_store(tmp_path, FIELDS, config=config, cache_bytes=0) as store:
        assert store.config.store_id == "run-7"
        assert (store.config.cache_bytes, store.config.layer_groups) == (0, 4)
    for text in ["- a list", "a: [1", "", "store_ids: x"]:
        path.write_text(text)
        with pytest.raises(InvalidConfig):
            StoreConfig.from_yaml(path)
    with pytest.raises(InvalidConfig, match="cannot be read"):
        StoreConfig.from_yaml(tmp_path / "none.yaml")


def test_an_unknown_kind_of_store_is_refused_with_the_known_ones() -> None:
    for url in [
        "s3://bucket/run",
        "/no/scheme",
        "relative",
        "file://host/folder",
        "http://x/y",
        "",
    ]:
        with pytest.raises(InvalidConfig, match="known: file:///absolute/folder"):
            tq_fs.open_store(url, fields=specs(FIELDS))
    for url in ["file:///a?b=c", "file:///a#b", "file:relative"]:
        with pytest.raises(InvalidConfig, match="absolute"):
            tq_fs.open_store(url, fields=specs(FIELDS))


def test_a_url_may_hold_spaces_and_percent_escapes(tmp_path: Path) -> None:
    for name in ["with space", "ünï", "100%", "a#b?c"]:
        folder = tmp_path / name
        assert folder_of(folder.as_uri()) == folder
        with open_store(folder, FIELDS) as store:
            segments, want = record(store, "a", 1)
            assert_batch(store.hydrate(segments), want)
        assert (folder / "default/store.json").is_file()
    unescaped = f"file://{tmp_path}/with space"
    with tq_fs.open_store(unescaped, fields=specs(FIELDS)) as store:
        refs = list(store.unreleased())
        assert len(refs) == 1
        assert_batch(store.hydrate(refs), want)


def test_a_field_is_declared_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="declared twice"):
        tq_fs.open_store(tmp_path.as_uri(), fields=[tq_fs.logprobs(), tq_fs.logprobs()])


# ---------------------------------------------------------------- the second promise


class Blind(LocalBackend):
    """A backend that can be told to read nothing."""

    blind = False

    def open(self, key: str) -> Any:
        assert not Blind.blind, f"{key} was opened for reading"
        return super().open(key)

    def get(self, key: str) -> bytes:
        assert not Blind.blind, f"{key} was read"
        return super().get(key)

    def list(self, prefix: str) -> Iterator[str]:
        assert not Blind.blind, f"{prefix} was listed"
        return super().list(prefix)


@pytest.mark.parametrize("mode", ["tito", "snapshot"])
@pytest.mark.parametrize("durability", ["none", "batch", "step"])
def test_nothing_is_read_while_recording_branching_and_finalizing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode, durability: str
) -> None:
    monkeypatch.setattr("tq_fs.store.LocalBackend", Blind)
    ops = [
        Op("create"), Op("append", 0), Op("branch", 1), Op("append", 0, 0, 0), Op("boundary", 2),
        Op("append", 1), Op("create", 0, 1, 0),
    ]  # fmt: skip
    rollout = Rollout(FIELDS, mode).play(ops, np.random.default_rng(1))
    with open_store(tmp_path, FIELDS, durability=durability) as store:
        monkeypatch.setattr(Blind, "blind", True)
        finalized = []
        for view in [("lineage",), ("timeline",), VIEWS]:
            session = store.session("s", mode=mode)
            rollout.record(session)
            with pytest.raises(TqFsError):
                session.append(99, [1], [2])
            assert [r.version for r in session.records] == [t.version for t in rollout.turns]
            finalized.append(session.finalize(views=view))
        gone = store.session("s", mode=mode)
        rollout.record(gone)
        gone.discard()
        with pytest.raises(AssertionError, match="was opened"):
            store.hydrate(finalized[0])  # the backend was blind indeed
        monkeypatch.setattr(Blind, "blind", False)
        want = [e.slime(specs(FIELDS)) for view in VIEWS for e in rollout.expected(view)]
        assert_batch(store.hydrate(finalized[2]), want)


# ---------------------------------------------------------------- the seventh promise


@pytest.mark.parametrize("how", ["no url", "no field"])
def test_switched_off_it_touches_no_disk_and_gives_the_same_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a backend was made")

    rollout = turning_rollout()
    declared = specs(FIELDS)
    with monkeypatch.context() as patched:
        patched.setattr("tq_fs.store.LocalBackend", never)
        if how == "no url":
            off = tq_fs.open_store(None, fields=declared)
        else:
            off = tq_fs.open_store((tmp_path / "off").as_uri(), fields=declared, transfer=())
    with off, open_store(tmp_path / "on", FIELDS) as on:
        batches = []
        for store in (off, on):
            session = store.session("s")
            rollout.record(session)
            segments = session.finalize(views=VIEWS)
            batches.append(store.hydrate(segments))
            if store is off:
                assert {s.ref for s in segments} == {None}
                assert list(store.unreleased()) == []
                assert store.release(segments) == 0
                with pytest.raises(InvalidConfig):
                    store.hydrate(["tqfs1:a/b/c/d/lineage/0"])
        want = [e.slime(declared) for view in VIEWS for e in rollout.expected(view)]
        for batch in batches:
            assert_batch(batch, want)
    assert not (tmp_path / "off").exists()


def test_only_selected_fields_leave_memory(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS, transfer=("routed_experts",)) as store:
        session = store.session("s")
        rollout = short_rollout(FIELDS, 1)
        records = rollout.record(session)
        for r in records:
            assert set(r.arrays) == {"logprobs"}
            assert r.stored is not None
            assert set(r.stored.fields) == {"routed_experts"}
        segments = session.finalize()
        assert set(segments[0].arrays) == {"logprobs"}
        assert_batch(
            store.hydrate(segments), [e.slime(specs(FIELDS)) for e in rollout.expected("lineage")]
        )
        with pytest.raises(tq_fs.errors.FieldMissing, match="logprobs"):
            store.hydrate(refs_of(segments))
        store.hydrate(refs_of(segments), fields=["routed_experts"])
    assert not [p for p in tree(tmp_path) if "logprobs" in p]


# ---------------------------------------------------------------- formats


def golden_arrays() -> dict[str, Any]:
    """Return the values that the golden Steps hold."""
    whole = np.arange(2 * 3 * 2, dtype=np.int32).reshape(2, 3, 2) * 20
    whole[1] = -1
    parts = (np.arange(11 * 3 * 2, dtype=np.int32).reshape(11, 3, 2) * 7) % 300
    parts[4, 1, 0] = parts[10, 2, 1] = -1
    bits = np.array([0, 0x80000000, 0xBF000000], np.uint32)
    return {
        "logprobs": [bits.view(np.float32), (np.arange(11) / -8).astype(np.float32)],
        "routed_experts": [whole, parts],
    }


GOLDEN_INCARNATION = Incarnation("train", "a/b é", "0017c0ffee")
GOLDEN_FIELDS = [tq_fs.logprobs(), tq_fs.routed_experts(layers=3, topk=2, experts=300)]


def golden_step(index: int) -> tuple[StepKey, dict[str, bytes]]:
    """Return a golden Step as today's code encodes it: one plain, one sharded and compressed."""
    stored = tq_fs.routed_experts(layers=3, topk=2, experts=256) if index == 0 else GOLDEN_FIELDS[1]
    values = {name: arrays[index] for name, arrays in golden_arrays().items()}
    arrays = [
        FieldArray(GOLDEN_FIELDS[0], values["logprobs"]),
        FieldArray(stored, values["routed_experts"]),
    ]
    key = StepKey(GOLDEN_INCARNATION, index)
    options = EncodeOptions(layer_groups=1 + index)
    tokens = len(values["logprobs"])
    with small_chunks(8, 4):
        encoded = encode_step("golden", key, tokens, arrays, options, Scratch())
        members = {
            name: b"".join(bytes(np.asarray(b)) for b in buffers)
            for name, buffers in encoded.members.items()
        }
    return key, members


@pytest.mark.parametrize("index", [0, 1])
def test_the_golden_steps_are_encoded_to_the_same_bytes(index: int) -> None:
    _, members = golden_step(index)
    folder = GOLDEN / f"step-1/{index:06d}"
    assert tree(folder) == set(members)
    for name, data in members.items():
        assert (folder / name).read_bytes() == data, name


@pytest.fixture
def golden_store(tmp_path: Path) -> Path:
    """Lay the golden files out as the store they were taken from."""
    root = tmp_path / "golden"
    where = GOLDEN_INCARNATION.path
    shutil.copytree(GOLDEN / "step-1", root / "steps" / where)
    (root / "manifests" / where).mkdir(parents=True)
    shutil.copy(GOLDEN / "manifest-1.json", root / "manifests" / where / "manifest.json")
    shutil.copy(GOLDEN / "state-1.json", root / "manifests" / where / "state.json")
    shutil.copy(GOLDEN / "store-1.json", root / "store.json")
    return tmp_path


@pytest.mark.parametrize("read_only", [True, False])
def test_the_golden_store_is_read_by_todays_code(golden_store: Path, read_only: bool) -> None:
    arrays = golden_arrays()
    with tq_fs.open_store(
        golden_store.as_uri(), fields=GOLDEN_FIELDS, store_id="golden", read_only=read_only,
        prepared_groups=0,
    ) as store:  # fmt: skip
        refs = list(store.unreleased())
        assert refs == ["tqfs1:golden/train/a_2fb_20_c3_a9/0017c0ffee/lineage/0"]
        assert list(store.unreleased("eval")) == []
        batch = store.hydrate(refs)
        assert_bits(batch["rollout_log_probs"][0], np.concatenate(arrays["logprobs"])[2:])
        assert_bits(batch["rollout_routed_experts"][0], np.concatenate(arrays["routed_experts"]))
        if not read_only:
            assert store.swept == type(store.swept)(0, 0)
            assert store.release(refs, "train") == 2


def test_zarr_reads_the_golden_steps() -> None:
    zarr = pytest.importorskip("zarr")
    arrays = golden_arrays()
    for index in (0, 1):
        group = zarr.open_group(str(GOLDEN / f"step-1/{index:06d}"), mode="r")
        have = np.asarray(group["routed_experts"][:])
        want = arrays["routed_experts"][index]
        assert_bits(have.astype(np.int32), np.where(want == -1, 0, want))
        assert_bits(np.asarray(group["logprobs"][:]), arrays["logprobs"][index])


GOLDEN_DOCUMENTS: dict[str, type[SessionManifest | SessionState | StoreDocument]] = {
    "manifest-1": SessionManifest,
    "state-1": SessionState,
    "store-1": StoreDocument,
}


@pytest.mark.parametrize("name", GOLDEN_DOCUMENTS)
def test_golden_documents_decode_encode_and_validate(name: str) -> None:
    data = (GOLDEN / f"{name}.json").read_bytes()
    kind: Any = GOLDEN_DOCUMENTS[name]
    document = manifests.decode(data, kind, name)
    assert manifests.encode(document) == data
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(data), schema)
    broken = {**json.loads(data), "epoch": "nine"}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, schema)


@pytest.mark.parametrize("name", GOLDEN_DOCUMENTS)
def test_the_schemas_in_the_package_are_those_of_the_models(name: str) -> None:
    kind, _, version = name.rpartition("-")
    schema = manifests.json_schema(f"tq-fs/{kind}/{version}")
    written = (SCHEMAS / f"{name}.json").read_text()
    assert written == json.dumps(schema, indent=2) + "\n"
    assert {f"tq-fs/{n.replace('-', '/')}" for n in GOLDEN_DOCUMENTS} == set(manifests.SCHEMAS)


def test_what_a_store_writes_validates(tmp_path: Path) -> None:
    def valid(path: Path, name: str) -> None:
        schema = json.loads((SCHEMAS / f"{name}.json").read_text())
        jsonschema.validate(json.loads(path.read_bytes()), schema)

    with open_store(tmp_path, FIELDS) as store:
        session = store.session("s")
        turning_rollout().record(session)
        segments = session.finalize(views=VIEWS)
        store.release(segments[:2])
    valid(tmp_path / "default/store.json", "store-1")
    (manifest,) = tmp_path.glob("default/manifests/*/*/*/manifest.json")
    valid(manifest, "manifest-1")
    valid(manifest.parent / "state.json", "state-1")


# ---------------------------------------------------------------- documents that went wrong

Change = Callable[[dict[str, Any]], None]


def edited(folder: Path, name: str, change: Change | bytes) -> Path:
    """Change a document: the store's own, or one of session a's."""
    where = "default" if name == "store.json" else "default/manifests/train/a/*"
    (path,) = folder.glob(f"{where}/{name}")
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        document = json.loads(path.read_bytes())
        change(document)
        path.write_bytes(sealed(document))
    return path


@pytest.fixture
def finalized(tmp_path: Path) -> tuple[Path, str]:
    """Give a store with a session a that is half released, and a session b beside it."""
    with open_store(tmp_path, FIELDS) as store:
        segments, _ = record(store, "a", 1, consumers=["train", "eval"])
        store.release(segments, "eval")
        record(store, "b", 2)
    return tmp_path, refs_of(segments)[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {p: (folder / p).read_bytes() for p in tree(folder)}


def assert_left_alone(
    folder: Path, ref: str, name: str, error: type[TqFsError], match: str
) -> None:
    """Open a store in which session a cannot be used: it is named and kept, all else works."""
    where = SegmentRef.parse(ref).incarnation.path
    before = {p: data for p, data in contents(folder).items() if "/train/a/" in p}
    assert len([p for p in before if p.endswith("zarr.json")]) == 3 * 3
    for read_only in (True, False):
        with open_store(folder, FIELDS, read_only=read_only) as store:
            assert store.swept == type(store.swept)(0, 0, (where,))
            (other,) = store.unreleased()
            (want,) = short_rollout(FIELDS, 2).expected("lineage")
            assert_batch(store.hydrate([other]), [want.slime(specs(FIELDS))])
            if name == "manifest":  # the state says nothing that reading needs
                with pytest.raises(error, match=match):
                    store.hydrate([ref])
            if not read_only:
                with pytest.raises(error, match=match):
                    store.release([ref])
                with pytest.raises(error, match=match):
                    store.release([other, ref])
                assert list(store.unreleased()) == [other]
                assert store.release([other]) == 3
                record(store, "c", 3)
    after = contents(folder)
    assert {p: data for p, data in after.items() if "/train/a/" in p} == before
    assert not [p for p in after if "/train/b/" in p]


@pytest.mark.parametrize("name", ["manifest", "state"])
def test_a_session_of_a_later_version_is_left_alone(finalized: tuple[Path, str], name: str) -> None:
    folder, ref = finalized
    later = f"tq-fs/{name}/2"
    edited(folder, f"{name}.json", lambda d: d.update(schema=later, surprise=1, epoch="x"))
    assert_left_alone(folder, ref, name, FormatTooNew, f"{name}.json.*{later}.*upgrade")


def test_a_store_of_a_later_version_is_refused(finalized: tuple[Path, str]) -> None:
    folder, _ = finalized
    edited(folder, "store.json", lambda d: d.update(schema="tq-fs/store/2", epoch="x"))
    before = contents(folder)
    for read_only in (True, False):
        with pytest.raises(FormatTooNew, match=r"store.json.*tq-fs/store/2.*upgrade"):
            open_store(folder, FIELDS, read_only=read_only)
    assert contents(folder) == before


def test_a_step_of_a_later_version_is_refused(finalized: tuple[Path, str]) -> None:
    folder, _ = finalized
    path = sorted(folder.glob("default/steps/*/*/*/*/zarr.json"))[0]
    document = json.loads(path.read_bytes())
    good = read_attributes(path.read_bytes(), "x")
    assert good.key.step_index == 0
    document["attributes"]["tq_fs"]["schema"] = "tq-fs/step/2"
    with pytest.raises(FormatTooNew, match="upgrade"):
        read_attributes(json.dumps(document).encode(), "x")


GARBAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "zeros": lambda whole: bytes(len(whole)),
    "a brace": lambda _: b"{",
    "a list": lambda _: sealed({})[:-1] + b"[]",
    "a number for a schema": lambda _: sealed({"schema": 1}),
    "another schema": lambda _: sealed({"schema": "tq-fs/other/1"}),
    "no schema": lambda _: sealed({"epoch": 1}),
    "no checksum": lambda whole: b"{" + whole[len('{"crc32c":"xxxxxxxx",') :],
    "edited by hand": lambda whole: whole.replace(b'"epoch":1', b'"epoch":2'),
    "cut": lambda whole: whole[: len(whole) // 2],
    "longer": lambda whole: whole + b" ",
}


@pytest.mark.parametrize("name", ["manifest", "state"])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_session_whose_documents_are_garbage_is_left_alone(
    finalized: tuple[Path, str], name: str, garbage: str
) -> None:
    folder, ref = finalized
    (path,) = folder.glob(f"default/manifests/train/a/*/{name}.json")
    whole = path.read_bytes()
    path.write_bytes(GARBAGE[garbage](whole))
    assert path.read_bytes() != whole
    assert_left_alone(folder, ref, name, ManifestCorrupt, f"{name}.json")


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_store_whose_document_is_garbage_is_refused(
    finalized: tuple[Path, str], garbage: str
) -> None:
    folder, _ = finalized
    path = folder / "default/store.json"
    path.write_bytes(GARBAGE[garbage](path.read_bytes()))
    before = contents(folder)
    for read_only in (True, False):
        with pytest.raises(ManifestCorrupt, match=r"store\.json"):
            open_store(folder, FIELDS, read_only=read_only)
    assert contents(folder) == before


@pytest.mark.parametrize("name", GOLDEN_DOCUMENTS)
def test_a_flipped_bit_of_a_document_is_never_read_as_something_else(
    finalized: tuple[Path, str], name: str
) -> None:
    folder, _ = finalized
    kind: Any = GOLDEN_DOCUMENTS[name]
    file = name.replace("-1", ".json")
    (path,) = [p for p in folder.glob(f"default/**/{file}") if "/train/b/" not in str(p)]
    whole = path.read_bytes()
    manifests.decode(whole, kind, "x")
    for bit in range(0, 8 * len(whole), 7):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises((ManifestCorrupt, FormatTooNew)):
            manifests.decode(bytes(flipped), kind, "x")


def test_a_session_that_is_repaired_is_there_again_at_the_next_start(
    finalized: tuple[Path, str],
) -> None:
    folder, ref = finalized
    (path,) = folder.glob("default/manifests/train/a/*/manifest.json")
    whole = path.read_bytes()
    path.write_bytes(b"")
    open_store(folder, FIELDS).close()
    path.write_bytes(whole)
    with open_store(folder, FIELDS) as store:
        (want,) = short_rollout(FIELDS, 1).expected("lineage")
        assert_batch(store.hydrate([ref]), [want.slime(specs(FIELDS))])
        assert store.release([ref]) == 3


def test_a_manifest_that_went_bad_under_an_open_reader_is_named(tmp_path: Path) -> None:
    with (
        open_store(tmp_path, FIELDS) as writer,
        open_store(tmp_path, FIELDS, read_only=True) as reader,
    ):
        (ref,) = refs_of(record(writer, "a", 1)[0])
        edited(tmp_path, "manifest.json", b"{")
        with pytest.raises(ManifestCorrupt, match="manifests/train/a/"):
            reader.hydrate([ref])


def first_fragments(document: dict[str, Any]) -> Any:
    return document["segments"][0]["fields"]["routed_experts"]


def overlap(d: dict[str, Any]) -> None:
    f = first_fragments(d)[1]
    f["target"][0] -= 1
    f["source"][0] = 0
    f["source"][1] = f["target"][1] - f["target"][0]


def gap(d: dict[str, Any]) -> None:
    del first_fragments(d)[1]


def late(d: dict[str, Any]) -> None:
    del first_fragments(d)[0]


def early(d: dict[str, Any]) -> None:
    del first_fragments(d)[-1]


def none(d: dict[str, Any]) -> None:
    first_fragments(d).clear()


def unequal(d: dict[str, Any]) -> None:
    first_fragments(d)[0]["source"][1] -= 1


def outside(d: dict[str, Any]) -> None:
    f = first_fragments(d)[-1]
    f["source"] = [n + 1 for n in f["source"]]


def below(d: dict[str, Any]) -> None:
    f = first_fragments(d)[-1]
    f["source"] = [n - 1 for n in f["source"]]


def unknown_step(d: dict[str, Any]) -> None:
    first_fragments(d)[0]["step"] = 77


def no_such_field(d: dict[str, Any]) -> None:
    d["segments"][0]["fields"]["entropy"] = first_fragments(d)


def wrong_chunks(d: dict[str, Any]) -> None:
    first_fragments(d)[0]["chunks"] = [0, 2]


def longer(d: dict[str, Any]) -> None:
    d["segments"][0]["tokens"] += 2


@pytest.mark.parametrize(
    "change",
    [overlap, gap, late, early, none, unequal, outside, below, unknown_step, no_such_field,
     wrong_chunks, longer],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_a_session_whose_fragments_do_not_make_up_their_segment_is_left_alone(
    finalized: tuple[Path, str], change: Change
) -> None:
    folder, ref = finalized
    edited(folder, "manifest.json", change)
    assert_left_alone(
        folder, ref, "manifest", InvalidSegment, r"tqfs1:default/train/a/.*/lineage/0"
    )


def test_a_manifest_larger_than_the_cache_is_read_again(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS, manifest_cache_bytes=0) as store:
        done = [record(store, f"s{i}", i) for i in range(3)]
        for _ in range(2):
            for segments, want in done:
                assert_batch(store.hydrate(segments), want)


def test_each_opening_raises_the_epoch_that_is_written(tmp_path: Path) -> None:
    epochs = []
    for i in range(3):
        with open_store(tmp_path, FIELDS) as store:
            segments, _ = record(store, f"s{i}", i, consumers=["train", "eval"])
            store.release(segments, "eval")
            (manifest,) = tmp_path.glob(f"default/manifests/train/s{i}/*/manifest.json")
            state = msgspec.json.decode((manifest.parent / "state.json").read_bytes())
            epochs.append((msgspec.json.decode(manifest.read_bytes())["epoch"], state["epoch"]))
    assert epochs == [(1, 1), (2, 2), (3, 3)]
    with open_store(tmp_path, FIELDS, read_only=True):
        document = msgspec.json.decode((tmp_path / "default/store.json").read_bytes())
    assert document["epoch"] == 3


def test_a_router_of_an_unknown_count_keeps_its_widest_ids(tmp_path: Path) -> None:
    """Ids of 65,536 and more do not fit what the narrowest guess of another Step was."""
    spec = tq_fs.routed_experts(layers=1, topk=1)
    with tq_fs.open_store(tmp_path.as_uri(), fields=[spec], prepared_groups=0) as store:
        session = store.session("s")
        ids = routes(np.random.default_rng(0), 4, 1, 1, 2**31 - 1)
        session.create([1, 2], [3, 4, 5], routed_experts=ids)
        (have,) = store.hydrate(session.finalize())["rollout_routed_experts"]
        assert_bits(have, ids)
