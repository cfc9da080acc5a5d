"""Bytes that changed or went, and processes that were killed: what is said, and what is left."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tq_fs
from tests._rollouts import (
    VIEWS,
    Field,
    Op,
    Rollout,
    assert_batch,
    assert_segment,
    empty_folders,
    open_store,
    routes,
    run_child,
    short_rollout,
    small_chunks,
    spawn_child,
    specs,
    standard_fields,
    tree,
    turning_rollout,
    visible_steps,
)
from tq_fs.backends import LocalBackend
from tq_fs.errors import ChunkCorrupt, CorruptError, ObjectShort, StepMissing

# ---------------------------------------------------------------- damage

LAYERS, TOPK = 4, 2


def declared(codec: str, stored: str, holes: str, experts: int | None) -> list[Field]:
    spec = tq_fs.FieldSpec(
        name="logprobs", dtype="float32", stored="float32", context_fill=0.0, codec=codec
    )
    routed = tq_fs.routed_experts(
        layers=LAYERS, topk=TOPK, experts=experts, stored=stored, codec=codec
    )
    return [
        Field(spec, lambda random, rows: random.random(rows, dtype=np.float32)),
        Field(routed, lambda random, rows: routes(random, rows, LAYERS, TOPK, 100, holes)),
    ]


# name: fields, chunks are small, the damaged array, chunks it has
CASES: dict[str, tuple[list[Field], bool, str, int]] = {
    "one chunk": (declared("none", "uint8", "none", 256), False, "routed_experts", 1),
    "one chunk of the memory type": (
        declared("none", "int32", "none", None), False, "routed_experts", 1),
    "a chunk of a shard": (declared("none", "uint8", "none", 256), True, "routed_experts", 8),
    "a chunk of a shard of the memory type": (
        declared("none", "int32", "none", None), True, "routed_experts", 8),
    "a mask": (declared("none", "uint8", "values", 256), False, "routed_experts_unknown", 1),
    "a chunk of a sharded mask": (
        declared("none", "uint8", "values", 256), True, "routed_experts_unknown", 8),
    "lz4": (declared("lz4", "uint16", "none", 300), False, "routed_experts", 1),
    "sharded lz4": (declared("lz4", "uint16", "none", 300), True, "routed_experts", 8),
    "zstd": (declared("zstd", "uint8", "none", 256), False, "routed_experts", 1),
    "logprobs": (declared("none", "uint8", "none", 256), False, "logprobs", 1),
    "sharded logprobs": (declared("none", "uint8", "none", 256), True, "logprobs", 4),
    "compressed logprobs": (declared("zstd", "uint8", "none", 256), True, "logprobs", 4),
}  # fmt: skip


def damaged(
    folder: Path, case: str, damage: Callable[[Path, tuple[int, int]], bool], **settings: Any
) -> tuple[tq_fs.Store, list[tq_fs.Segment], int]:
    """Record a session and damage an array of its Step 1; return the first chunk that suffers."""
    fields, small, array, chunks = CASES[case]
    rollout = Rollout(fields, "tito").play(
        [Op("create", 0, 3, 4), Op("append", 0, 2, 14)], np.random.default_rng(0)
    )
    with small_chunks(8 if small else 2048, 4 if small else 1024):
        store = open_store(folder, fields, layer_groups=2 if small else 1, **settings)
        session = store.session("s")
        records = rollout.record(session)
        segments = session.finalize()
        (want,) = rollout.expected("lineage")
        assert_batch(store.hydrate(segments), [want.slime(specs(fields))])
        assert records[1].stored is not None
        entry = records[1].stored.fields[array.removesuffix("_unknown")]
        if array.endswith("_unknown"):
            assert entry.mask is not None
            entry = entry.mask
        assert entry.layout.chunks == chunks
        (path,) = folder.glob(f"default/steps/train/s/*/000001/{array}/c.*")
        offsets = entry.layout.offsets(entry.sizes)
        chunk = chunks // 2
        stop = offsets[chunk] + entry.layout.stored_nbytes(chunk, entry.sizes)
        hit = damage(path, (offsets[chunk], stop))
    return store, segments, chunk if hit else 0


def remove(path: Path, _: tuple[int, int]) -> bool:
    path.unlink()
    return False


def empty(path: Path, _: tuple[int, int]) -> bool:
    path.write_bytes(b"")
    return False


def cut(path: Path, chunk: tuple[int, int]) -> bool:
    path.write_bytes(path.read_bytes()[: (chunk[0] + chunk[1]) // 2])
    return True


def cut_by_a_byte(path: Path, chunk: tuple[int, int]) -> bool:
    path.write_bytes(path.read_bytes()[: chunk[1] - 1])
    return True


def flip(path: Path, chunk: tuple[int, int]) -> bool:
    return overwrite(path, (chunk[0] + chunk[1]) // 2, b"\x10")


def flip_the_checksum(path: Path, chunk: tuple[int, int]) -> bool:
    return overwrite(path, chunk[1] - 1, b"\x01")


def overwrite(path: Path, at: int, mask: bytes) -> bool:
    """XOR some bytes of a file."""
    data = bytearray(path.read_bytes())
    for i, byte in enumerate(mask):
        data[at + i] ^= byte
    path.write_bytes(data)
    return True


def zero(path: Path, chunk: tuple[int, int]) -> bool:
    data = bytearray(path.read_bytes())
    data[chunk[0] : chunk[1]] = bytes(chunk[1] - chunk[0])
    path.write_bytes(data)
    return True


DAMAGE = {
    remove: StepMissing,
    empty: ObjectShort,
    cut: ObjectShort,
    cut_by_a_byte: ObjectShort,
    flip: ChunkCorrupt,
    flip_the_checksum: ChunkCorrupt,
    zero: ChunkCorrupt,
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda d: d.__name__)
@pytest.mark.parametrize("case", CASES)
def test_damage_is_an_error_that_names_step_field_and_chunk(
    tmp_path: Path, case: str, damage: Any, threads: int
) -> None:
    store, segments, chunk = damaged(tmp_path, case, damage, reader_threads=threads)
    _, _, array, chunks = CASES[case]
    with store:
        for _ in range(2):  # an error does not cure it
            with pytest.raises(DAMAGE[damage]) as caught:
                store.hydrate(segments)
            text = str(caught.value)
            assert "Step 1 of session 's' (train, " in text
            assert caught.value.remedy
            if damage is remove:  # the object's name says which array, and that it is all of it
                assert f", {array.removesuffix('_unknown')}" in text
                assert f"000001/{array}/c.0" in text
                continue
            which = r"\d" if damage in (cut, cut_by_a_byte) else chunk
            assert re.search(f", {array}, chunk {which} of {chunks}:", text)
        intact = ({"logprobs", "routed_experts"} - {array.removesuffix("_unknown")}).pop()
        store.hydrate(segments, fields=[intact])
        store.hydrate([s.sample(tokens=7) for s in segments], tokens=(0, 6))  # Step 0 alone


@pytest.mark.parametrize("case", ["a chunk of a shard", "sharded lz4", "sharded logprobs"])
@pytest.mark.parametrize("damage", [cut, cut_by_a_byte], ids=lambda d: d.__name__)
def test_the_chunk_named_is_the_first_that_a_cut_file_lacks(
    tmp_path: Path, case: str, damage: Any
) -> None:
    store, segments, chunk = damaged(tmp_path, case, damage)
    with store, pytest.raises(ObjectShort, match=f"chunk {chunk} of"):
        store.hydrate(segments)


@pytest.mark.parametrize("damage", [remove, empty, cut, cut_by_a_byte], ids=lambda d: d.__name__)
@pytest.mark.parametrize("case", CASES)
def test_a_short_file_is_found_without_checksums(tmp_path: Path, case: str, damage: Any) -> None:
    store, segments, _ = damaged(tmp_path, case, damage, checksum=False)
    with store:
        with pytest.raises((StepMissing, CorruptError)) as caught:
            store.hydrate(segments)
        assert type(caught.value) is DAMAGE[damage]
        assert "Step 1 of session 's'" in str(caught.value)


@pytest.mark.parametrize("case", ["lz4", "sharded lz4", "zstd", "compressed logprobs", "a mask"])
def test_a_compressed_chunk_that_does_not_decode_is_found_without_checksums(
    tmp_path: Path, case: str
) -> None:
    def spoil(path: Path, chunk: tuple[int, int]) -> bool:
        return overwrite(path, chunk[0], b"\xa5" * 8)  # the frame's own header

    store, segments, chunk = damaged(tmp_path, case, spoil, checksum=False)
    with store, pytest.raises(ChunkCorrupt, match=f"Step 1 .*chunk {chunk} of"):
        store.hydrate(segments)


def test_damage_of_a_chunk_that_is_not_asked_for_does_no_harm(tmp_path: Path) -> None:
    store, segments, chunk = damaged(tmp_path, "a chunk of a shard", flip)
    assert chunk == 4  # the first rows of the second layer group
    with store:
        rest = store.hydrate(segments, fields=["routed_experts"], layers=(0, 2))
        assert rest["rollout_routed_experts"][0].shape == (22, 2, 2)
        with pytest.raises(ChunkCorrupt):
            store.hydrate(segments, fields=["routed_experts"], layers=(1, 3))


def test_a_step_folder_that_is_gone_is_missing_never_zeros(tmp_path: Path) -> None:
    with open_store(tmp_path, standard_fields()) as store:
        session = store.session("s")
        short_rollout(standard_fields(), 0).record(session)
        segments = session.finalize()
        (step,) = tmp_path.glob("default/steps/train/s/*/000001")
        step.rename(tmp_path / "elsewhere")
        with pytest.raises(StepMissing, match="Step 1 of session 's'"):
            store.hydrate(segments)
    with open_store(tmp_path, standard_fields()) as store:
        assert store.recovery.incomplete == (step.relative_to(tmp_path / "default").as_posix(),)
        with pytest.raises(StepMissing):
            store.hydrate(segments)


# ---------------------------------------------------------------- killed

FIELDS = standard_fields()
SESSION = """
import functools, json, os, sys
from pathlib import Path
import tq_fs.places
from tq_fs.backends import LocalBackend
from _rollouts import VIEWS, open_store, standard_fields, turning_rollout

folder, durability, prepared, phase, point, nth = sys.argv[1:]
armed, passed = False, 0

def at(name):
    global passed
    if armed and name == point:
        passed += 1
        if passed == int(nth):
            os.kill(os.getpid(), 9)

tq_fs.places.LocalBackend = functools.partial(LocalBackend, at=at)
fields = standard_fields()
store = open_store(
    Path(folder), fields, durability=durability, prepared_groups=int(prepared), writer_threads=1,
    persist_trajectories=phase == "persist",
)
before, during = store.session("before"), store.session("during")
turning_rollout(fields, 1).record(before)
segments = before.finalize(views=VIEWS)
print(json.dumps([s.ref for s in segments]), flush=True)

rollout = turning_rollout(fields, 2)
for turn in rollout.turns:
    armed = phase == "record" and turn is rollout.turns[-1]
    during.record(rollout.step(turn))
if phase == "discard":
    armed = True
    during.discard()
armed = phase in ("finalize", "persist")
segments = during.finalize(views=VIEWS, consumers=["train", "eval"])
store.release(segments, "eval")
print(json.dumps([s.ref for s in segments]), flush=True)
armed = phase == "release"
store.release(segments[:2])
store.release(segments[2:4])
print(json.dumps(["half"]), flush=True)
store.release(segments[4:6])  # nobody needs Steps 1 and 3 any more
print(json.dumps(["all but one"]), flush=True)
store.release(segments)
print("never reached the point")
"""

DURABILITY = ("none", "batch", "step")
STAGES = ("staged", "members written", "renamed", "acknowledged")
VALUES = ("value written", "value renamed", "value acknowledged")
KILLS = [
    *[("none", "record", point, 1) for point in STAGES],
    *[("step", "record", point, 1) for point in (*STAGES, "members synced")],
    ("batch", "record", "acknowledged", 1),
    *[(d, "finalize", p, 1) for d in DURABILITY for p in (*VALUES, "delete renamed")],
    # the trajectory first, and then the manifest
    *[(d, "persist", p, nth) for d in DURABILITY for p in VALUES for nth in (1, 2)],
    *[(d, "persist", "delete renamed", 1) for d in DURABILITY],
    ("none", "discard", "delete renamed", 1),
    *[("none", "release", point, nth) for point in VALUES for nth in (1, 2, 3)],
    # two Steps, the last Segment's manifest, and its Steps
    *[("none", "release", "delete renamed", nth) for nth in (1, 2, 3, 4)],
]


def kill(
    folder: Path, durability: str, phase: str, point: str, nth: int, prepared: int = 0
) -> list[list[str]]:
    """Run the session in a process that is killed at a point; return what it acknowledged."""
    done = run_child(SESSION, folder, durability, prepared, phase, point, nth)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_kills_below_meet_every_point() -> None:
    assert {point for _, _, point, _ in KILLS} == set(LocalBackend.POINTS)


@pytest.mark.parametrize(("durability", "phase", "point", "nth"), KILLS)
def test_after_a_kill_what_was_acknowledged_is_there_and_the_rest_is_swept(
    tmp_path: Path, durability: str, phase: str, point: str, nth: int
) -> None:
    said = kill(tmp_path, durability, phase, point, nth, prepared=2)
    before, *rest = said
    with open_store(tmp_path, FIELDS) as store:
        live = list(store.unreleased("train"))
        during = [ref for ref in live if "/during/" in ref]
        assert [ref for ref in live if "/before/" in ref] == before
        assert_references(store, before, 1)
        assert_references(store, during, 2)
        if phase in ("record", "discard"):
            assert during == []
        elif phase in ("finalize", "persist"):
            written = nth - (point == "value written")
            last = 2 if phase == "persist" else 1  # the manifest is
            assert len(during) == (7 if written == last or point == "delete renamed" else 0)
        elif point in VALUES:  # the state written down last counts
            released = 2 * (nth - 1) if point == "value written" else 2 * nth
            assert during == rest[0][released:]
        else:
            assert during == (rest[0][6:] if nth <= 2 else [])
        if phase == "persist":
            assert_trajectories(store, before, 1)
            assert_trajectories(store, during, 2)
        assert_nothing_stray(tmp_path, live, phase)
        # and on it goes, under the same session id
        rollout = turning_rollout(FIELDS, 3)
        session = store.session("during")
        rollout.record(session)
        segments = session.finalize(views=VIEWS)
        assert_references(store, [s.ref for s in segments if s.ref], 3)
        for consumer in ("train", "eval"):
            store.release([r for r in live if consumer == "train" or r in during], consumer)
        store.release(segments)
    assert tree(tmp_path) == {"default/store.json"}


def assert_references(store: tq_fs.Store, refs: list[str], seed: int) -> None:
    """Compare what references give with the rollout that was recorded under them."""
    rollout = turning_rollout(FIELDS, seed)
    whole = {
        (view, i): expected.slime(specs(FIELDS))
        for view in VIEWS
        for i, expected in enumerate(rollout.expected(view))
    }
    places = [ref.rsplit("/", 2)[1:] for ref in refs]
    want = [whole[view, int(index)] for view, index in places]  # type: ignore[index]
    if refs:
        assert_batch(store.hydrate(refs), want)


def assert_trajectories(store: tq_fs.Store, refs: list[str], seed: int) -> None:
    """Compare what was kept of Segments with the rollout that was recorded under them."""
    rollout = turning_rollout(FIELDS, seed)
    want = [expected for view in VIEWS for expected in rollout.expected(view)]
    segments = list(store.segments(refs))
    assert [segment.ref for segment in segments] == refs
    for segment, expected in zip(segments, want if refs else [], strict=True):
        assert_segment(segment, expected)


def assert_nothing_stray(folder: Path, live: list[str], phase: str) -> None:
    """Compare the store's files with those that live sessions own."""
    sessions: dict[tuple[str, ...], set[int]] = {}
    for ref in live:
        sessions.setdefault(tuple(ref.split("/")[1:4]), set()).update(steps_of(ref))
    allowed = {"default/store.json"}
    for session, steps in sessions.items():
        where = "/".join(session)
        if phase == "persist":
            allowed.add(f"default/manifests/{where}/trajectory.msgpack")
        allowed.add(f"default/manifests/{where}/manifest.json")
        if session[1] == "during" and phase == "release":
            allowed.add(f"default/manifests/{where}/state-00000001.json")
        names = ("logprobs/c.0", "routed_experts/c.0.0.0")
        arrays = [f"{n.split('/')[0]}/zarr.json" for n in names]
        for step in steps:
            allowed |= {
                f"default/steps/{where}/{step:06d}/{name}"
                for name in ("zarr.json", *names, *arrays)
            }
    assert tree(folder) == allowed
    assert len(visible_steps(folder)) == sum(map(len, sessions.values()))


def steps_of(ref: str) -> set[int]:
    """Return the Steps that a Segment needs: the fifth holds no rows and was deleted."""
    view, index = ref.rsplit("/", 2)[1:]
    return set(turning_rollout(FIELDS).expected(view)[int(index)].steps) - {4}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("phase", "point", "nth"),
    [
        ("record", "staged", 1),
        ("discard", "delete renamed", 1),
        ("persist", "value renamed", 1),
        *[("release", "delete renamed", nth) for nth in (1, 2, 3, 4)],
    ],
)
def test_no_empty_folders_are_left_after_a_kill(
    tmp_path: Path, phase: str, point: str, nth: int
) -> None:
    kill(tmp_path, "none", phase, point, nth, prepared=2)
    open_store(tmp_path, FIELDS).close()
    assert empty_folders(tmp_path) == set()


@pytest.mark.parametrize("prepared", [0, 32])
def test_what_a_sweep_removed_is_counted_in_steps(tmp_path: Path, prepared: int) -> None:
    """Four Steps were published and a fifth was begun; folders kept ready are no Steps."""
    kill(tmp_path, "none", "record", "staged", 1, prepared)
    with open_store(tmp_path, FIELDS) as store:
        assert store.recovery.swept_sessions == 1
        assert store.recovery.swept_steps in (4, 5)


FOREVER = """
import itertools, json, sys
from pathlib import Path
from _rollouts import VIEWS, open_store, standard_fields, turning_rollout

folder, run = sys.argv[1:]
fields = standard_fields()
store = open_store(Path(folder), fields, prepared_groups=4, writer_threads=2)
print(json.dumps(["open"]), flush=True)
for i in itertools.count():
    session = store.session(f"{run}-{i}")
    turning_rollout(fields, i).record(session)
    refs = [s.ref for s in session.finalize(views=VIEWS)]
    print(json.dumps(["finalized", i, refs]), flush=True)
    if i % 3 == 2:
        print(json.dumps(["releasing", i]), flush=True)
        store.release(refs)
        print(json.dumps(["released", i]), flush=True)
"""


def test_a_process_killed_at_any_moment_loses_nothing_it_acknowledged(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    alive: dict[int, tuple[int, list[str]]] = {}
    for run in range(4):
        process = spawn_child(FOREVER, tmp_path, run)
        assert process.stdout is not None
        said: list[Any] = []
        wanted = int(random.integers(5, 40))
        while len(said) < wanted:
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            said.append(json.loads(line))
        process.kill()
        left = process.stdout.read()
        process.communicate(timeout=20)
        said += [json.loads(line) for line in left.splitlines() if line.endswith("]")]
        finalized = {m[1]: m[2] for m in said if m[0] == "finalized"}
        begun = {m[1] for m in said if m[0] == "releasing"}
        ended = {m[1] for m in said if m[0] == "released"}
        with open_store(tmp_path, FIELDS) as store:
            live = set(store.unreleased())
            for i, refs in finalized.items():
                here = live.intersection(refs)
                if i in ended:
                    assert not here
                elif i not in begun:
                    assert len(here) == 7
                assert len(here) in (0, 7)  # a release counts whole or not at all
                if here:
                    alive[1000 * run + i] = (i, refs)
            for seed, refs in alive.values():
                assert_references(store, refs, seed)
            known = {ref for _, refs in alive.values() for ref in refs}
            assert len({r.split("/")[2] for r in live - known}) <= 1  # finalized, not yet said
        sessions = {r.split("/")[2] for r in live}
        assert len(visible_steps(tmp_path)) == 4 * len(sessions)
        assert not list((tmp_path / "default/.staging").iterdir())
    assert len(alive) > 3
