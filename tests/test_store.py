"""The embedded store: open, continue, refuse; what is read and where, and what is not."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tq_fs
from tests._rollouts import (
    FIELDS,
    VIEWS,
    Op,
    Rollout,
    assert_batch,
    assert_bits,
    contents,
    open_store,
    record,
    refs_of,
    run_child,
    short_rollout,
    specs,
    tree,
    turning_rollout,
    visible_steps,
)
from tq_fs.backends import LocalBackend
from tq_fs.errors import (
    InvalidConfig,
    InvalidKey,
    ManifestCorrupt,
    ObjectMissing,
    ReadOnlyStore,
    SegmentMissing,
    SessionClosed,
    StaleReference,
    StepMissing,
    StoreBusy,
    TqFsError,
    WrongStore,
)
from tq_fs.keys import Incarnation, SegmentRef
from tq_fs.manifests import Mode
from tq_fs.recovery import Recovery

# ---------------------------------------------------------------- open, close, continue


def test_a_store_that_is_opened_again_continues(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        first, want_first = record(store, "a", 1)
    with open_store(tmp_path, FIELDS) as store:
        assert list(store.unreleased()) == refs_of(first)
        assert (store.recovery.swept_sessions, store.recovery.swept_steps) == (0, 0)
        assert (store.recovery.incomplete, store.recovery.unreadable) == ((), ())
        assert (store.recovery.sessions, store.recovery.steps) == (1, 3)
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

    monkeypatch.setattr("tq_fs.places.LocalBackend", partial(LocalBackend, at=at))
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

    monkeypatch.setattr("tq_fs.places.LocalBackend", Slow)
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
        assert store.recovery == Recovery(unreadable=(known.incarnation.path,))
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
        assert stray.read_text() == "mine"
        assert store.recovery.swept_steps == 0


@pytest.mark.parametrize(
    "where",
    [
        "notes.txt",
        "manifest.json",
        "train/notes.txt",
        "train/manifest.json",
        "train/a/manifest.json",
        "train/a/*/notes.txt",
        "train/a/*/state-00000001.json.bak",
        "train/a/*/old/manifest.json",
        "train/b/0/notes.txt",
        "train/b/0/old/manifest.json",
    ],
)
def test_a_stray_file_among_the_manifests_costs_none_of_them(tmp_path: Path, where: str) -> None:
    """Nor what was released, nor a Step."""
    with open_store(tmp_path, FIELDS) as store:
        segments, want = record(store, "a", 1, consumers=["train", "eval"])
        store.release(segments, "eval")
        record(store, "c", 2)
    (mine,) = tmp_path.glob("default/manifests/train/a/*/")
    stray = tmp_path / "default/manifests" / where.replace("*", mine.name)
    stray.parent.mkdir(parents=True, exist_ok=True)
    stray.write_text("mine")
    before = contents(tmp_path)
    for read_only in (True, False):
        with open_store(tmp_path, FIELDS, read_only=read_only) as store:
            assert store.recovery.unreadable == ()
            assert (store.recovery.sessions, store.recovery.unreleased) == (2, 2)
            assert list(store.unreleased("eval")) == []
            assert len(list(store.unreleased("train"))) == 2
            assert_batch(store.hydrate(segments), want)
    after = contents(tmp_path)
    assert before.pop("default/store.json") != after.pop("default/store.json")  # the epoch
    assert after == before


def test_a_stray_file_among_an_incarnations_steps_is_left_alone(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        segments, want = record(store, "a", 1)
    (step,) = tmp_path.glob("default/steps/train/a/*/000000")
    strays = [step / "notes.txt", step.parent / "notes/notes.txt"]
    strays[1].parent.mkdir()
    for stray in strays:
        stray.write_text("mine")
    with open_store(tmp_path, FIELDS) as store:
        assert store.recovery.swept_steps == 0
        assert_batch(store.hydrate(segments), want)
    assert [stray.read_text() for stray in strays] == ["mine", "mine"]


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

    def walk(self, prefix: str) -> Iterator[tuple[str, int]]:
        assert not Blind.blind, f"{prefix} was walked"
        return super().walk(prefix)


@pytest.mark.parametrize("mode", ["tito", "snapshot"])
@pytest.mark.parametrize("durability", ["none", "batch", "step"])
def test_nothing_is_read_while_recording_branching_and_finalizing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode, durability: str
) -> None:
    monkeypatch.setattr("tq_fs.places.LocalBackend", Blind)
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
        patched.setattr("tq_fs.places.LocalBackend", never)
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
