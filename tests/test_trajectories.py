"""Trajectories: what a later run can train on, when all that it has is the store."""

from __future__ import annotations

import functools
import json
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tq_fs
from tests._rollouts import (
    FIELDS,
    VIEWS,
    Op,
    Rollout,
    assert_batch,
    assert_bits,
    assert_segment,
    open_store,
    record,
    refs_of,
    run_child,
    short_rollout,
    small_chunks,
    specs,
    tree,
    turning_rollout,
    visible_steps,
)
from tests.test_identity import NAMES, Case, cases, op
from tq_fs.backends import LocalBackend
from tq_fs.errors import (
    FormatTooNew,
    InvalidConfig,
    InvalidField,
    ManifestCorrupt,
    SegmentMissing,
    StaleReference,
    TrajectoryMissing,
    WrongStore,
)
from tq_fs.trajectory import decode_trajectory

keeping = functools.partial(open_store, persist_trajectories=True)


@pytest.fixture
def memory_url() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield f"memory://{name}"
    fs = fsspec.filesystem("memory")  # one for the whole process
    if fs.exists(f"/{name}"):
        fs.rm(f"/{name}", recursive=True)


def assert_same(have: tq_fs.Segment, want: tq_fs.Segment, extra: Mapping[str, Any]) -> None:
    """Compare a Segment that was read back with one that never left memory."""
    for name in ("session_id", "view", "index", "steps", "versions", "response_length"):
        assert getattr(have, name) == getattr(want, name), name
    assert_bits(have.tokens, want.tokens)
    assert_bits(have.loss_mask, want.loss_mask)
    assert have.extra == extra
    for name, array in have.arrays.items():
        assert_bits(array, want.arrays[name], name)
        assert array.flags.writeable


# ---------------------------------------------------------------- bit for bit

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=3), inner, max_size=3
        )
    ),
    max_leaves=5,
)
extras = st.dictionaries(st.sampled_from(["messages", "tools", "label", ""]), plain, max_size=3)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(
    case=cases,
    histories=st.lists(st.lists(op, min_size=1, max_size=6), min_size=1, max_size=2),
    seed=st.integers(0, 2**32 - 1),
    transfer=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True).map(tuple),
    extra=extras,
    data=st.data(),
)
def test_every_history_comes_back_bit_for_bit_whatever_fields_are_stored(
    case: Case, histories: list[list[Op]], seed: int, transfer: Any, extra: Any, data: Any
) -> None:
    fields = case.fields()
    views = data.draw(st.sampled_from([VIEWS, VIEWS[:1], VIEWS[1:]]), label="views")
    rollouts = [
        Rollout(fields, case.mode).play(ops, np.random.default_rng([seed, i]))
        for i, ops in enumerate(histories)
    ]
    expected = [e for rollout in rollouts for view in views for e in rollout.expected(view)]
    more = {**case.settings(), "transfer": transfer, "prepared_groups": 0}

    def recorded(store: tq_fs.Store) -> list[tq_fs.Segment]:
        made = []
        for i, rollout in enumerate(rollouts):
            session = store.session(f"s{i}", mode=case.mode)
            rollout.record(session)
            made += session.finalize(views=views, extra=extra, consumers=["train", "eval"])
        return made

    with tempfile.TemporaryDirectory() as folder, small_chunks():
        with tq_fs.open_store(None, fields=specs(fields), compact=case.compact) as off:
            kept = recorded(off)
        with keeping(Path(folder), fields, **more) as store:
            first = recorded(store)
        with keeping(Path(folder), fields, read_only=True, **more) as store:
            again = list(store.segments(store.unreleased("eval")))
            assert [s.ref for s in again] == [s.ref for s in first]
            for have, memory, want in zip(again, kept, expected, strict=True):
                assert set(have.arrays) == set(specs_by_name(fields)) - set(transfer)
                assert_same(have, memory, extra)
                assert_segment(have, want)
            assert_batch(store.hydrate(again), [e.slime(specs(fields)) for e in expected])


def specs_by_name(fields: Any) -> dict[str, tq_fs.FieldSpec]:
    return {f.spec.name: f.spec for f in fields}


ANOTHER_PROCESS = """
import hashlib, json, sys
import tq_fs
from tests._rollouts import FIELDS, specs

with tq_fs.open_store(
    sys.argv[1], fields=specs(FIELDS), transfer=("routed_experts",), read_only=True
) as store:
    segments = list(store.segments(store.unreleased()))
    batch = store.hydrate(segments)
    for i, s in enumerate(segments):
        arrays = [s.tokens, s.loss_mask, *(a for _, a in sorted(s.arrays.items()))]
        arrays += [batch[name][i].numpy() for name in sorted(batch)]
        digest = hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()
        kinds = [[str(a.dtype), list(a.shape)] for a in arrays]
        print(json.dumps([s.ref, digest, kinds, s.versions, s.response_length, s.steps, s.extra]))
"""


@pytest.mark.parametrize("mode", ["tito", "snapshot"])
@pytest.mark.parametrize("kind", ["file", pytest.param("s3", marks=pytest.mark.s3)])
def test_another_process_gets_what_this_one_had(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, mode: Any
) -> None:
    import hashlib

    url = tmp_path.as_uri()
    if kind == "s3":
        url = f"s3://{request.getfixturevalue('bucket')}"
    extra = {"messages": [{"role": "user", "content": "ü €"}], "reward": 0.1, "raw": None}
    transfer = ("routed_experts",)
    rollout = turning_rollout(seed=4, mode=mode)
    with (
        tq_fs.open_store(None, fields=specs(FIELDS)) as off,
        tq_fs.open_store(
            url, fields=specs(FIELDS), transfer=transfer, persist_trajectories=True
        ) as on,
    ):
        kept, stored = (_finalized(store, rollout, mode, extra) for store in (off, on))
        batch = off.hydrate(kept)
    done = run_child(ANOTHER_PROCESS, url)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(said) == len(stored)
    for i, (memory, mine, theirs) in enumerate(zip(kept, stored, said, strict=True)):
        arrays: list[Any] = [memory.tokens, memory.loss_mask, memory.arrays["logprobs"]]
        arrays += [batch[name][i].numpy() for name in sorted(batch)]
        digest = hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()
        kinds = [[str(a.dtype), list(a.shape)] for a in arrays]
        assert theirs == [
            mine.ref, digest, kinds, [list(v) for v in memory.versions], memory.response_length,
            list(memory.steps), extra,
        ]  # fmt: skip


def _finalized(
    store: tq_fs.Store, rollout: Rollout, mode: Any, extra: Mapping[str, Any]
) -> list[tq_fs.Segment]:
    session = store.session("s", mode=mode)
    rollout.record(session)
    return session.finalize(views=VIEWS, extra=extra)


# ---------------------------------------------------------------- when they are kept


def test_a_folder_keeps_none_unless_it_is_told_to(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        segments, want = record(store, "a", 1)
        with pytest.raises(TrajectoryMissing, match=r"train/a/.*persist_trajectories"):
            next(store.segments(refs_of(segments)))
        assert_batch(store.hydrate(segments), want)
    with keeping(tmp_path, FIELDS) as store:  # both sorts in one store
        record(store, "b", 2)
        kept = [ref for ref in store.unreleased() if "/b/" in ref]
        assert len(list(store.segments(kept))) == 1
        with pytest.raises(TrajectoryMissing):
            list(store.segments(store.unreleased()))


@pytest.mark.parametrize("asked", [None, True, False])
def test_an_object_store_keeps_them_unless_it_is_told_not_to(
    memory_url: str, asked: bool | None
) -> None:
    with tq_fs.open_store(memory_url, fields=specs(FIELDS), persist_trajectories=asked) as store:
        segments, _ = record(store, "a", 1)
        if asked is False:
            with pytest.raises(TrajectoryMissing):
                list(store.segments(refs_of(segments)))
        else:
            (again,) = store.segments(refs_of(segments))
            assert_bits(again.tokens, segments[0].tokens)


def test_a_reader_that_missed_a_release_is_told_of_the_segment(tmp_path: Path) -> None:
    """It has the manifest in its memory; what is gone is more than the trajectory."""
    with keeping(tmp_path, FIELDS) as store:
        segments, _ = record(store, "a", 1)
        refs = refs_of(segments)
        with keeping(tmp_path, FIELDS, read_only=True) as reader:
            assert len(list(reader.segments(refs))) == 1
            store.release(refs)
            with pytest.raises(SegmentMissing, match="released by all its consumers"):
                list(reader.segments(refs))


def test_they_go_with_the_last_release(tmp_path: Path) -> None:
    with keeping(tmp_path, FIELDS) as store:
        first, second = _finalized(store, turning_rollout(), "tito", {})[:2]
        rest = [ref for ref in store.unreleased() if ref not in (first.ref, second.ref)]
        store.release([first, *rest])
        again = list(store.segments([str(first.ref), str(second.ref)]))  # until all are released
        assert [s.ref for s in again] == [first.ref, second.ref]
        store.release([second])
        assert list(store.segments(store.unreleased())) == []
        with pytest.raises(SegmentMissing):
            list(store.segments([str(second.ref)]))
    assert tree(tmp_path) == {"default/store.json"}


def test_each_use_of_a_session_id_has_its_own(tmp_path: Path) -> None:
    with keeping(tmp_path, FIELDS) as store:
        old, _ = record(store, "a", 1)
        new, _ = record(store, "a", 2)
        for segments in (old, new):
            (again,) = store.segments(refs_of(segments))
            assert_bits(again.tokens, segments[0].tokens)
        store.release(old)
        with pytest.raises(StaleReference):
            list(store.segments(refs_of(old)))
        (again,) = store.segments(refs_of(new))
        assert_bits(again.tokens, new[0].tokens)


def test_a_session_is_read_once_for_all_its_segments_in_the_order_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gets: list[str] = []

    class Noting(LocalBackend):
        def get(self, key: str) -> bytes:
            gets.append(key)
            return super().get(key)

    monkeypatch.setattr("tq_fs.places.LocalBackend", Noting)
    with keeping(tmp_path, FIELDS) as store:
        refs = refs_of(_finalized(store, turning_rollout(), "tito", {}))[::-1]
        other = refs_of(record(store, "b", 2)[0])
        gets.clear()
        assert [s.ref for s in store.segments([*refs, *other])] == [*refs, *other]
        assert sum(key.endswith("/trajectory.msgpack") for key in gets) == 2
        assert not any(key.startswith("steps/") for key in gets)


def test_references_of_other_stores_and_stores_that_are_off_are_refused(tmp_path: Path) -> None:
    with keeping(tmp_path, FIELDS) as store:
        refs = refs_of(record(store, "a", 1)[0])
    with keeping(tmp_path, FIELDS, store_id="other") as store, pytest.raises(WrongStore):
        list(store.segments(refs))
    with tq_fs.open_store(None, fields=specs(FIELDS)) as store, pytest.raises(InvalidConfig):
        list(store.segments(refs))


# ---------------------------------------------------------------- damage


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, list[str], Path]:
    """Give a store with a session, the session's references, and its trajectory's file."""
    with keeping(tmp_path, FIELDS) as store:
        refs = refs_of(_finalized(store, turning_rollout(), "tito", {"label": 1}))
        record(store, "other", 2)
    (path,) = tmp_path.glob("default/manifests/train/s/*/trajectory.msgpack")
    return tmp_path, refs, path


def resealed(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return an edited document under a checksum that agrees."""
    document = msgspec.msgpack.decode(msgspec.msgpack.decode(data)[1])
    change(document)
    body = msgspec.msgpack.encode(document)
    return msgspec.msgpack.encode([crc32c(body), body])


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"\x00",
    "zeros": lambda data: bytes(len(data)),
    "no seal": lambda data: bytes(msgspec.msgpack.decode(data)[1]),
    "JSON": lambda data: b"{}",
    "without steps": lambda data: resealed(data, lambda d: d.pop("steps")),
    "another schema": lambda data: resealed(data, lambda d: d.update(schema="tq-fs/other/1")),
    "another session's": lambda data: resealed(data, lambda d: d.update(session_id="x")),
    "another store's": lambda data: resealed(data, lambda d: d.update(store_id="x")),
    "an unknown type": lambda data: resealed(
        data, lambda d: d.update(mode="neither")
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_trajectory_is_corrupt_and_names_its_session(kept: Any, damage: str) -> None:
    folder, refs, path = kept
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with keeping(folder, FIELDS) as store:
        with pytest.raises(ManifestCorrupt, match=r"train/s/"):
            list(store.segments(refs))
        whole = [e.slime(specs(FIELDS)) for v in VIEWS for e in turning_rollout().expected(v)]
        assert_batch(store.hydrate(refs), whole)  # what is stored does not need it
        other = [ref for ref in store.unreleased() if ref not in refs]
        assert len(list(store.segments(other))) == 1


def test_no_flipped_bit_of_a_trajectory_is_read_as_something_else(kept: Any) -> None:
    _, _, path = kept
    whole = path.read_bytes()
    decode_trajectory(whole, "x")
    for bit in range(0, 8 * len(whole), 7):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises((ManifestCorrupt, FormatTooNew)):
            decode_trajectory(bytes(flipped), "x")


def test_a_trajectory_of_a_later_version_says_so(kept: Any) -> None:
    folder, refs, path = kept

    def later(document: dict[str, Any]) -> None:
        document.update(schema="tq-fs/trajectory/3", mode="new", steps=None, surprise=1)

    path.write_bytes(resealed(path.read_bytes(), later))
    with keeping(folder, FIELDS) as store:
        with pytest.raises(FormatTooNew, match=r"train/s/.*tq-fs/trajectory/3.*upgrade"):
            list(store.segments(refs))
        assert set(store.unreleased()) > set(refs)


# ---------------------------------------------------------------- what cannot be kept


class Unknown:
    pass


def endless() -> list[Any]:
    inside: list[Any] = []
    inside.append(inside)
    return inside


UNKEEPABLE: dict[str, Callable[[], Any]] = {
    "an object": lambda: {"label": Unknown()},
    "an array": lambda: {"reward": np.ones(3, np.float32)},
    "a numpy number": lambda: {"reward": np.float32(1)},
    "a number of 65 bits": lambda: {"seed": 2**64},
    "deep inside": lambda: {"messages": [{"content": [Unknown()]}]},
    "a key that is no text": lambda: {1: "label"},
    "a half of a character": lambda: {"messages": "\ud800"},
    "without an end": lambda: {"tree": endless()},
}


@pytest.mark.parametrize("what", UNKEEPABLE)
def test_an_extra_that_cannot_be_kept_is_refused_and_the_session_open_again(
    tmp_path: Path, what: str
) -> None:
    rollout = short_rollout(FIELDS, 1)
    with keeping(tmp_path, FIELDS) as store:
        session = store.session("s")
        rollout.record(session)
        before = tree(tmp_path)
        with pytest.raises(InvalidField, match=r"extra of .*'s'.*give text, numbers"):
            session.finalize(extra=UNKEEPABLE[what]())
        assert tree(tmp_path) == before
        assert list(store.unreleased()) == []
        rollout.play([Op("append", 0, 1, 3)], np.random.default_rng(1))
        session.record(rollout.step(rollout.turns[-1]))
        segments = session.finalize(extra={"label": "good"})
        (again,) = store.segments(refs_of(segments))
        (want,) = rollout.expected("lineage")
        assert_segment(again, want)
        assert again.extra == {"label": "good"}
        assert_batch(store.hydrate([again]), [want.slime(specs(FIELDS))])
        assert len(visible_steps(tmp_path)) == 4


def test_without_trajectories_an_extra_may_be_anything(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        session = store.session("s")
        short_rollout(FIELDS, 1).record(session)
        label = Unknown()
        (segment,) = session.finalize(extra={"label": label})
        assert segment.extra["label"] is label
