"""What is promised of stored bytes: golden files, schemas, and documents that went wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

import tq_fs
from tests._rollouts import (
    FIELDS,
    VIEWS,
    assert_batch,
    assert_bits,
    contents,
    open_store,
    record,
    refs_of,
    routes,
    sealed,
    short_rollout,
    small_chunks,
    specs,
    tree,
    turning_rollout,
)
from tq_fs import manifests
from tq_fs.errors import (
    FormatTooNew,
    InvalidSegment,
    ManifestCorrupt,
    TqFsError,
)
from tq_fs.keys import Incarnation, SegmentRef, StepKey
from tq_fs.manifests import SessionManifest, SessionState, StoreDocument, TombstoneDocument
from tq_fs.steps import (
    EncodeOptions,
    FieldArray,
    Scratch,
    StepEntry,
    encode_step,
    read_attributes,
)
from tq_fs.trajectory import (
    TRAJECTORY_SCHEMA,
    ClosedSession,
    StepRecord,
    decode_trajectory,
    encode_trajectory,
    trajectory_document,
)

GOLDEN = Path(__file__).parent / "golden"
SCHEMAS = Path(manifests.__file__).parent / "schemas"


# ---------------------------------------------------------------- formats


def golden_arrays() -> dict[str, Any]:
    """Return the values that the golden Steps hold."""
    whole = np.arange(2 * 3 * 2, dtype=np.int32).reshape(2, 3, 2) * 20
    whole[1] = -1
    parts = (np.arange(11 * 3 * 2, dtype=np.int32).reshape(11, 3, 2) * 7) % 300
    parts[4, 1, 0] = parts[10, 2, 1] = -1
    alone = 299 - np.arange(4 * 3 * 2, dtype=np.int32).reshape(4, 3, 2)
    bits = np.array([0, 0x80000000, 0xBF000000], np.uint32)
    return {
        "logprobs": [
            bits.view(np.float32),
            (np.arange(11) / -8).astype(np.float32),
            (np.arange(5) / -16).astype(np.float32),
        ],
        "routed_experts": [whole, parts, alone],
    }


GOLDEN_INCARNATION = Incarnation("train", "a/b é", "0017c0ffee")
GOLDEN_FIELDS = [tq_fs.logprobs(), tq_fs.routed_experts(layers=3, topk=2, experts=300)]
# Where each golden Step's group lies, as its manifest entry says; the last as in an object store.
GOLDEN_ATTEMPTS = ("", "", "try-0123456789abcdef")
GOLDEN_STEPS = range(len(GOLDEN_ATTEMPTS))


def golden_step(index: int) -> tuple[StepKey, dict[str, bytes]]:
    """Return a golden Step as today's code encodes it.

    One plain, one sharded and compressed, and one compact.
    """
    stored = tq_fs.routed_experts(layers=3, topk=2, experts=256) if index == 0 else GOLDEN_FIELDS[1]
    values = {name: arrays[index] for name, arrays in golden_arrays().items()}
    arrays = [
        FieldArray(GOLDEN_FIELDS[0], values["logprobs"]),
        FieldArray(stored, values["routed_experts"]),
    ]
    key = StepKey(GOLDEN_INCARNATION, index)
    options = EncodeOptions(layer_groups=2 if index == 1 else 1, compact=index == 2)
    tokens = len(values["logprobs"])
    with small_chunks(8, 4):
        encoded = encode_step("golden", key, tokens, arrays, options, Scratch())
        members = {
            name: b"".join(bytes(np.asarray(b)) for b in buffers)
            for name, buffers in encoded.members.items()
        }
    return key, members


def golden_folder(index: int) -> Path:
    return GOLDEN / f"step-1/{index:06d}" / GOLDEN_ATTEMPTS[index]


@pytest.mark.parametrize("index", GOLDEN_STEPS)
def test_the_golden_steps_are_encoded_to_the_same_bytes(index: int) -> None:
    _, members = golden_step(index)
    folder = golden_folder(index)
    assert tree(folder) == set(members)
    assert tree(GOLDEN / f"step-1/{index:06d}") == {
        (folder / name).relative_to(GOLDEN / f"step-1/{index:06d}").as_posix() for name in members
    }
    assert len([name for name in members if name.endswith("zarr.json")]) == (3, 4, 1)[index]
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
    shutil.copy(GOLDEN / "state-1.json", root / "manifests" / where / "state-00000004.json")
    shutil.copy(GOLDEN / "trajectory-1.msgpack", root / "manifests" / where / "trajectory.msgpack")
    shutil.copy(GOLDEN / "store-1.json", root / "store.json")
    return tmp_path


def golden_session() -> ClosedSession:
    """Return the golden session with its resident fields: two turns, and one that stands alone."""
    rewards = np.arange(6, dtype=np.float16).reshape(3, 2)
    records = [
        StepRecord(
            index=0, kind="create", parent=None, prefix=0, tokens=np.array([7, 8, 9], np.int32),
            response=1, versions=(("v1", 3),), arrays={"rewards": rewards},
        ),
        StepRecord(
            index=1, kind="append", parent=0, prefix=3, tokens=np.arange(-5, 6, dtype=np.int32),
            response=4, versions=(("v2", 11),), reason="née",
            arrays={"rewards": np.ones((11, 2), "f2")},
        ),
        StepRecord(
            index=2, kind="boundary", parent=1, prefix=0, tokens=np.array([2**31 - 1] * 5, "i4"),
            response=2, versions=(("v2", 5),), arrays={"rewards": -np.ones((5, 2), "f2")},
        ),
    ]  # fmt: skip
    return ClosedSession(
        incarnation=GOLDEN_INCARNATION,
        mode="tito",
        views=("lineage",),
        consumers=("train", "eval"),
        records=records,
        stored=GOLDEN_FIELDS,
        resident=[tq_fs.FieldSpec(name="rewards", dtype="float16", inner=(2,))],
        extra={"messages": [{"role": "user", "content": "é"}], "label": 0.5, "tools": None},
    )


def golden_session_of_schema_2() -> ClosedSession:
    """Return the same with what schema 1 cannot say: several versions, and narrowed ids."""
    before = golden_session()
    first, second, alone = before.records
    choices = np.array([[0, 255], [7, 7], [1, 2]], np.int32)
    records = [
        replace(first, arrays={**first.arrays, "choices": choices.astype(np.uint8)}),
        replace(
            second,
            versions=(("v2", 8), ("v10", 3)),
            arrays={**second.arrays, "choices": np.full((11, 2), 65535, np.uint16)},
        ),
        replace(alone, arrays={**alone.arrays, "choices": np.full((5, 2), -1, np.int32)}),
    ]
    return replace(before, records=records, resident=[*before.resident, CHOICES])


CHOICES = tq_fs.FieldSpec(name="choices", dtype="int32", inner=(2,), unknown=True)


@pytest.mark.parametrize(
    ("schema", "session"), [(1, golden_session), (2, golden_session_of_schema_2)]
)
def test_a_golden_trajectory_is_read_as_the_session_it_was(
    schema: int, session: Callable[[], ClosedSession]
) -> None:
    data = (GOLDEN / f"trajectory-{schema}.msgpack").read_bytes()
    document = decode_trajectory(data, "golden")
    assert document == trajectory_document("golden", session())
    assert document.schema == TRAJECTORY_SCHEMA
    assert (encode_trajectory(document) == data) == (schema == 2)  # today's is written today


def test_the_golden_trajectory_of_schema_2_gives_runs_and_narrow_ids(golden_store: Path) -> None:
    where = golden_store / "golden/manifests" / GOLDEN_INCARNATION.path / "trajectory.msgpack"
    shutil.copy(GOLDEN / "trajectory-2.msgpack", where)
    with tq_fs.open_store(
        golden_store.as_uri(), fields=[*GOLDEN_FIELDS, CHOICES], store_id="golden", read_only=True
    ) as store:
        first, alone = store.segments(store.unreleased())
        (whole, rest) = store.hydrate([first, alone], fields=["choices"])["rollout_choices"]
    assert first.versions == (("v1", 3), ("v2", 8), ("v10", 3))
    assert alone.versions == (("v2", 5),)
    assert [s.arrays["choices"].dtype.name for s in (first, alone)] == ["uint16", "int32"]
    assert_bits(whole, np.array([[0, 255], [7, 7], [1, 2], *[[65535] * 2] * 11], np.int32))
    assert_bits(rest, np.full((5, 2), -1, np.int32))


def test_the_golden_trajectory_gives_the_same_segments(golden_store: Path) -> None:
    with tq_fs.open_store(
        golden_store.as_uri(), fields=GOLDEN_FIELDS, store_id="golden", read_only=True
    ) as store:
        refs = list(store.unreleased())
        first, alone = store.segments(refs)
        assert [first.ref, alone.ref] == refs
    assert first.steps == (0, 1)
    assert_bits(first.tokens, np.array([7, 8, 9, *range(-5, 6)], np.int32))
    assert_bits(first.loss_mask, np.array([0, 0, 1, *[0] * 7, *[1] * 4], np.uint8))
    assert first.versions == (("v1", 3), ("v2", 11))
    assert first.response_length == 12
    rewards = np.array([[0, 1], [2, 3], [4, 5], *[[1, 1]] * 11], np.float16)
    assert set(first.arrays) == {"rewards"}
    assert_bits(first.arrays["rewards"], rewards)
    assert alone.steps == (2,)
    assert_bits(alone.tokens, np.full(5, 2**31 - 1, np.int32))
    assert_bits(alone.loss_mask, np.array([0, 0, 0, 1, 1], np.uint8))
    assert (alone.versions, alone.response_length) == ((("v2", 5),), 2)
    assert_bits(alone.arrays["rewards"], np.full((5, 2), -1, np.float16))
    for segment in (first, alone):
        assert (segment.session_id, segment.view) == ("a/b é", "lineage")
        assert segment.extra == {
            "messages": [{"role": "user", "content": "é"}], "label": 0.5, "tools": None
        }  # fmt: skip


def test_the_golden_trajectory_gives_the_golden_manifest() -> None:
    """Which is how a manifest that was lost is made anew."""
    document = decode_trajectory((GOLDEN / "trajectory-1.msgpack").read_bytes(), "golden")
    data = (GOLDEN / "manifest-1.json").read_bytes()
    manifest = manifests.decode(data, SessionManifest, "golden")
    closed = document.closed(dict(enumerate(golden_entries())))
    assert tuple(closed.step_entries()) == manifest.steps
    assert closed.segment_entries() == manifest.segments
    assert closed.incarnation == manifest.incarnation
    assert (closed.mode, closed.consumers) == (manifest.mode, manifest.consumers)


def golden_entries() -> list[StepEntry]:
    """Return what a manifest says of the golden Steps, from what they say of themselves."""
    said = [(golden_folder(i) / "zarr.json").read_bytes() for i in GOLDEN_STEPS]
    steps = [read_attributes(data, "golden").step for data in said]
    return [
        msgspec.structs.replace(step, attempt=attempt)
        for step, attempt in zip(steps, GOLDEN_ATTEMPTS, strict=True)
    ]


@pytest.mark.parametrize("schema", [1, 2])
def test_a_flipped_bit_of_a_trajectory_is_never_read_as_something_else(schema: int) -> None:
    whole = (GOLDEN / f"trajectory-{schema}.msgpack").read_bytes()
    for bit in range(0, 8 * len(whole), 7):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises((ManifestCorrupt, FormatTooNew)):
            decode_trajectory(bytes(flipped), "golden")
    with pytest.raises(ManifestCorrupt):
        decode_trajectory(whole[:-1], "golden")


def test_a_trajectory_of_a_later_version_is_refused() -> None:
    today = trajectory_document("golden", golden_session())
    later = msgspec.structs.replace(today, schema="tq-fs/trajectory/3")
    with pytest.raises(FormatTooNew, match="upgrade"):
        decode_trajectory(encode_trajectory(later), "golden")


@pytest.mark.parametrize(
    "runs", [(), (("v1", 2),), (("v1", 2), ("v2", 2)), (("v1", 4), ("v2", -1), ("v3", 0))]
)
def test_a_trajectory_whose_versions_are_not_of_its_tokens_is_corrupt(runs: Any) -> None:
    whole = golden_session()
    wrong = replace(whole, records=[replace(whole.records[0], versions=runs)])
    data = encode_trajectory(trajectory_document("golden", wrong))
    with pytest.raises(ManifestCorrupt, match="weight versions"):
        decode_trajectory(data, "golden")


@pytest.mark.parametrize("read_only", [True, False])
def test_the_golden_store_is_read_by_todays_code(golden_store: Path, read_only: bool) -> None:
    arrays = golden_arrays()
    before = tree(golden_store)
    with tq_fs.open_store(
        golden_store.as_uri(), fields=GOLDEN_FIELDS, store_id="golden", read_only=read_only,
        prepared_groups=0,
    ) as store:  # fmt: skip
        refs = list(store.unreleased())
        session = "tqfs1:golden/train/a_2fb_20_c3_a9/0017c0ffee"
        assert refs == [f"{session}/lineage/0", f"{session}/lineage/1"]
        assert list(store.unreleased("eval")) == []
        batch = store.hydrate(refs)
        logprobs, routed = batch["rollout_log_probs"], batch["rollout_routed_experts"]
        assert_bits(logprobs[0], np.concatenate(arrays["logprobs"][:2])[2:])
        assert_bits(routed[0], np.concatenate(arrays["routed_experts"][:2]))
        assert_bits(logprobs[1], arrays["logprobs"][2][3:])
        assert_bits(routed[1], arrays["routed_experts"][2])
        if not read_only:
            assert (store.recovery.swept_sessions, store.recovery.swept_steps) == (0, 0)
            assert (store.recovery.incomplete, store.recovery.unreadable) == ((), ())
            assert store.release(refs, "train") == 3
    assert tree(golden_store) == (before if read_only else {"golden/store.json"})


def test_zarr_reads_the_golden_steps() -> None:
    zarr = pytest.importorskip("zarr")
    arrays = golden_arrays()
    for index in GOLDEN_STEPS:
        group = zarr.open_group(str(golden_folder(index)), mode="r")
        have = np.asarray(group["routed_experts"][:])
        want = arrays["routed_experts"][index]
        assert_bits(have.astype(np.int32), np.where(want == -1, 0, want))
        assert_bits(np.asarray(group["logprobs"][:]), arrays["logprobs"][index])


Documents = SessionManifest | SessionState | StoreDocument | TombstoneDocument
GOLDEN_DOCUMENTS: dict[str, type[Documents]] = {
    "manifest-1": SessionManifest,
    "state-1": SessionState,
    "store-1": StoreDocument,
    "tombstone-1": TombstoneDocument,
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
    valid(manifest.parent / "state-00000001.json", "state-1")


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


def assert_left_alone(
    folder: Path, ref: str, name: str, error: type[TqFsError], match: str
) -> None:
    """Open a store in which session a cannot be used: it is named and kept, all else works."""
    where = SegmentRef.parse(ref).incarnation.path
    before = {p: data for p, data in contents(folder).items() if "/train/a/" in p}
    assert len([p for p in before if p.endswith("zarr.json")]) == 3 * 3
    for read_only in (True, False):
        with open_store(folder, FIELDS, read_only=read_only) as store:
            found = store.recovery
            assert (found.swept_sessions, found.swept_steps, found.incomplete) == (0, 0, ())
            assert (found.unreadable, found.sessions) == ((where,), 1)
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
    edited(folder, f"{name}*.json", lambda d: d.update(schema=later, surprise=1, epoch="x"))
    assert_left_alone(folder, ref, name, FormatTooNew, f"{name}.*json.*{later}.*upgrade")


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
    (path,) = folder.glob(f"default/manifests/train/a/*/{name}*.json")
    whole = path.read_bytes()
    path.write_bytes(GARBAGE[garbage](whole))
    assert path.read_bytes() != whole
    assert_left_alone(folder, ref, name, ManifestCorrupt, rf"{name}[-0-9]*\.json")


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
    file = name.replace("-1", "*.json")
    found = [p for p in folder.glob(f"default/**/{file}") if "/train/b/" not in str(p)]
    (path,) = found or [GOLDEN / f"{name}.json"]  # tombstones are a cluster's
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
            (path,) = manifest.parent.glob("state-*.json")
            assert path.name == f"state-{i + 1:08d}.json"
            state = msgspec.json.decode(path.read_bytes())
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
