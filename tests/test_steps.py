"""A Step is a Zarr v3 group: zarr-python and tensorstore read what we write, and so do we."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorstore
import zarr
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tq_fs.backends import LocalBackend
from tq_fs.errors import (
    ChunkCorrupt,
    CorruptError,
    FormatTooNew,
    ManifestCorrupt,
    ObjectExists,
    ObjectMissing,
    ObjectShort,
)
from tq_fs.fields import FieldSpec, logprobs, routed_experts
from tq_fs.keys import Incarnation, StepKey
from tq_fs.steps import (
    GROUP,
    STEP_SCHEMA,
    ArrayEntry,
    EncodedStep,
    EncodeOptions,
    FieldArray,
    Scratch,
    decode,
    encode_step,
    layout_for,
    measure_group,
    read_attributes,
)

Array = npt.NDArray[Any]

KEY = StepKey(Incarnation("train", "sess/ion é", "0001"), 7)
FIELD = "routed_experts"
DTYPES = ("uint8", "uint16", "int32", "float32", "float16", "bool")
CODECS = ("none", "lz4", "zstd")
ROWS = (0, 1, 2, 2047, 2048, 2049, 2050, 5000)
GROUPS = (1, 2, 3, 4)
INNER = (5, 2)  # five layers: two, three and four groups all pad the last one


def field(dtype: str, codec: str, rows: int, inner: tuple[int, ...] = INNER) -> FieldArray:
    """Random values of all bit patterns a stored type has; -1 stays out of it."""
    random = np.random.default_rng(rows + len(dtype))
    shape = (rows, *inner)
    if dtype in ("uint8", "uint16", "int32"):
        spec = FieldSpec(name=FIELD, dtype="int32", inner=inner, stored=dtype, codec=codec)
        top = int(np.iinfo(dtype).max)
        return FieldArray(spec, random.integers(0, top, shape, np.int32, endpoint=True))
    spec = FieldSpec(name=FIELD, dtype=dtype, inner=inner, codec=codec)
    if dtype == "bool":
        return FieldArray(spec, random.integers(0, 2, shape).astype(bool))
    itemsize = np.dtype(dtype).itemsize
    bits = random.integers(0, 256, (rows, *inner, itemsize), np.uint8)
    return FieldArray(spec, bits.view(dtype).reshape(shape))  # NaN payloads included


def ids(values: Array, *, stored: str = "uint8", codec: str = "none") -> FieldArray:
    values = np.ascontiguousarray(values, np.int32)
    layers, topk = values.shape[1:]
    return FieldArray(routed_experts(layers=layers, topk=topk, stored=stored, codec=codec), values)


def encode(*arrays: FieldArray, scratch: Scratch | None = None, **options: Any) -> EncodedStep:
    tokens = len(arrays[0].values) + 1
    return encode_step("store", KEY, tokens, arrays, EncodeOptions(**options), scratch or Scratch())


def object_bytes(step: EncodedStep, name: str) -> bytes:
    return b"".join(b if isinstance(b, bytes) else b.tobytes() for b in step.members[name])


def same(left: Array, right: Array) -> bool:
    """Equal to the bit, whatever is a NaN."""
    return left.shape == right.shape and left.tobytes() == right.tobytes()


def stored_chunks(entry: ArrayEntry, stored: bytes) -> list[npt.NDArray[np.uint8]]:
    """The chunks of an object, checksums included, at the places the layout names."""
    layout = entry.layout
    spans = [
        (start, start + layout.stored_nbytes(position, entry.sizes))
        for position, start in enumerate(layout.offsets(entry.sizes)[:-1])
    ]
    return [np.frombuffer(stored[start:stop], np.uint8) for start, stop in spans]


def allocate(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.empty(nbytes, np.uint8)


def read_part(
    entry: ArrayEntry, stored: bytes, rows: tuple[int, int], layers: tuple[int, int]
) -> Array:
    """Read a selection as the reader does: the chunks that the layout names, cut and joined."""
    layout = entry.layout
    chunks = stored_chunks(entry, stored)
    inner = (layers[1] - layers[0], *layout.shape[2:]) if layout.shape[1:] else ()
    out = np.full((rows[1] - rows[0], *inner), 77).astype(layout.dtype)
    for part in layout.parts(rows, layers):
        data = decode(chunks[part.position], layout, allocate)
        chunk = data.view(layout.dtype).reshape(layout.chunk)
        (top, left), (first, last), (low, high) = part.origin, part.rows, part.layers
        target, source = out[first - rows[0] : last - rows[0]], chunk[first - top : last - top]
        if inner:
            target = target[:, low - layers[0] : high - layers[0]]
            source = source[:, low - left : high - left]
        target[:] = source
    return out


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[LocalBackend]:
    backend = LocalBackend(tmp_path, ahead=0)
    yield backend
    backend.close()


def publish(backend: LocalBackend, step: EncodedStep) -> Path:
    backend.publish(KEY.path, step.members)
    return backend.root / KEY.path


def zarr_array(group: zarr.Group, name: str) -> Array:
    array = group[name]
    assert isinstance(array, zarr.Array)
    return np.asarray(array[:])


def tensorstore_array(path: Path) -> Array:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    return np.asarray(tensorstore.open(spec, open=True, read=True).result().read().result())


# ---------------------------------------------------------------- the judges


@pytest.mark.parametrize(
    ("dtype", "codec", "rows", "groups", "checksum"),
    [
        # every (dtype, codec, rows), and with each of them every group count and checksum
        (dtype, codec, rows, GROUPS[(i + j + k) % 4], (i + j + k // 4) % 2 == 0)
        for (i, dtype), (j, codec), (k, rows) in itertools.product(
            enumerate(DTYPES), enumerate(CODECS), enumerate(ROWS)
        )
    ],
)
def test_other_libraries_read_what_we_write(
    backend: LocalBackend, dtype: str, codec: str, rows: int, groups: int, checksum: bool
) -> None:
    mine = field(dtype, codec, rows)
    step = encode(mine, layer_groups=groups, checksum=checksum)
    folder = publish(backend, step)
    want = mine.values.astype(dtype)

    group = zarr.open_group(folder, mode="r")
    assert group.metadata.consolidated_metadata is not None
    assert same(zarr_array(group, FIELD), want)
    assert same(np.asarray(zarr.open_array(folder / FIELD, mode="r")[:]), want)
    assert same(tensorstore_array(folder / FIELD), want)

    entry = step.entry.fields[FIELD]
    assert (entry.shape, entry.dtype, entry.codec) == (want.shape, dtype, codec)
    assert entry.checksum is checksum
    if rows:
        stored = backend.get(f"{KEY.path}/{FIELD}/{entry.layout.object_name}")
        assert len(stored) == entry.nbytes
        assert same(read_part(entry, stored, (0, rows), (0, INNER[0])), want)
    else:
        assert list(backend.list(f"{KEY.path}/{FIELD}")) == [GROUP]


def test_the_selection_covers_all_pairs() -> None:
    """The list above is thinned; no pair of settings may be lost."""
    (mark,) = [
        m
        for m in test_other_libraries_read_what_we_write.pytestmark  # type: ignore[attr-defined]
        if m.name == "parametrize"
    ]
    axes = (DTYPES, CODECS, ROWS, GROUPS, (True, False))
    for a, b in itertools.combinations(range(len(axes)), 2):
        assert {(c[a], c[b]) for c in mark.args[1]} == set(itertools.product(axes[a], axes[b]))


@pytest.mark.parametrize("rows", [3, 3000])
def test_a_whole_step_opens_by_its_consolidated_metadata_alone(
    backend: LocalBackend, rows: int
) -> None:
    random = np.random.default_rng(rows)
    values = random.integers(0, 200, (rows - 1, 4, 2), np.int32)
    values[1, 2, 1] = -1
    probs = random.random(rows, np.float32)
    step = encode(FieldArray(logprobs(), probs), ids(values), layer_groups=2)
    folder = publish(backend, step)
    consolidated = json.loads(object_bytes(step, GROUP))["consolidated_metadata"]
    assert consolidated["kind"] == "inline"
    assert consolidated["must_understand"] is False
    names = {"logprobs", "routed_experts", "routed_experts_unknown"}
    for name in names:
        (folder / name / GROUP).unlink()
    group = zarr.open_group(folder, mode="r")
    assert set(group.array_keys()) == names
    assert same(zarr_array(group, "logprobs"), probs)
    assert same(zarr_array(group, "routed_experts").astype(np.int32), values.clip(0))
    assert same(zarr_array(group, "routed_experts_unknown").astype(bool), values == -1)


@pytest.mark.parametrize("stored", ["uint8", "uint16", "int32"])
@pytest.mark.parametrize(("rows", "groups"), [(700, 1), (1800, 1), (2500, 3)])
def test_arrays_as_wide_as_models_are_read_too(
    backend: LocalBackend, stored: str, rows: int, groups: int
) -> None:
    """Chunks of more than one block, and of more than 4 MiB, which then are a shard."""
    values = np.random.default_rng(rows).integers(0, 256, (rows, 92, 8), np.int32)
    values[rows // 2, 90, 7] = -1
    step = encode(ids(values, stored=stored), layer_groups=groups)
    folder = publish(backend, step)
    entry = step.entry.fields[FIELD]
    want = values if stored == "int32" else values.clip(0)
    assert same(zarr_array(zarr.open_group(folder, mode="r"), FIELD), want.astype(stored))
    assert same(known_ids(entry, step, values), values)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_the_metadata_says_how_chunks_are_compressed(dtype: str) -> None:
    """A reader finds the shuffle in the chunk; one that rewrites it believes the metadata."""
    step = encode(field(dtype, "lz4", 100))
    (metadata,) = step.members[f"{FIELD}/{GROUP}"]
    (blosc,) = [c for c in json.loads(bytes(metadata))["codecs"] if c["name"] == "blosc"]
    entry = step.entry.fields[FIELD]
    _, _, flags, typesize = object_bytes(step, f"{FIELD}/{entry.layout.object_name}")[:4]
    assert blosc["configuration"]["shuffle"] == "bitshuffle"
    assert flags & 0b101 == 0b100, "bit-shuffled, not byte-shuffled"
    assert blosc["configuration"]["cname"] == "lz4"
    assert flags >> 5 == 1
    assert blosc["configuration"]["typesize"] == typesize == np.dtype(dtype).itemsize


def test_attributes_hold_the_ids_as_they_were_given(backend: LocalBackend) -> None:
    """Also where the path holds only a hash of them."""
    key = StepKey(Incarnation("train", "s/é" * 150, ".."), 12)
    arrays = [FieldArray(logprobs(), np.zeros(3, np.float32))]
    step = encode_step("run:1", key, 3, arrays, EncodeOptions(), Scratch())
    backend.publish(key.path, step.members)
    group = zarr.open_group(backend.root / key.path, mode="r")
    mine = group.attrs["tq_fs"]
    assert isinstance(mine, dict)
    assert mine["schema"] == STEP_SCHEMA
    assert mine["store_id"] == "run:1"
    assert mine["session_id"] == "s/é" * 150
    read = read_attributes(backend.get(f"{key.path}/{GROUP}"), key.path)
    assert read.key == key
    assert read.store_id == "run:1"
    assert read.step == step.entry


# ---------------------------------------------------------------- our own way


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_part_read_by_layout_equals_the_numpy_slice(data: st.DataObject) -> None:
    inner = data.draw(st.sampled_from([(), (1,), (5,), (4, 2), (7, 1, 3)]), "inner")
    rows = data.draw(st.sampled_from([1, 5, 2048, 2049, 3000, 5000]), "rows")
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    mine = field(dtype, data.draw(st.sampled_from(CODECS), "codec"), rows, inner)
    step = encode(
        mine,
        layer_groups=data.draw(st.integers(1, 8), "layer groups"),
        checksum=data.draw(st.booleans(), "checksum"),
    )
    layers = inner[0] if inner else 1
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, rows)] * 2), "rows read"))
    low, high = sorted(data.draw(st.tuples(*[st.integers(0, layers)] * 2), "layers read"))
    assume(inner or (low, high) == (0, 1))

    entry = step.entry.fields[FIELD]
    layout = entry.layout
    stored = object_bytes(step, f"{FIELD}/{layout.object_name}")
    want = mine.values.astype(dtype)[start:stop]
    assert same(
        read_part(entry, stored, (start, stop), (low, high)), want[:, low:high] if inner else want
    )

    touched = {p.position % layout.grid[0] for p in layout.parts((start, stop))}
    assert touched == set(range(*layout.chunk_range((start, stop))))


def test_a_layer_group_and_a_run_of_rows_are_contiguous() -> None:
    layout = layout_for((5000, 8, 2), "uint8", "none", checksum=True, layer_groups=4)
    assert layout.grid == (5, 4)
    for group in range(4):
        parts = layout.parts((0, 5000), (2 * group, 2 * group + 2))
        assert [p.position for p in parts] == list(range(5 * group, 5 * group + 5))
    assert [p.position for p in layout.parts((1000, 1001), (3, 5))] == [6, 11] == [5 + 1, 10 + 1]


def test_every_array_of_a_step_comes_back_from_its_description() -> None:
    """The entry in ``zarr.json`` is the entry a manifest gets, masks and sizes included."""
    values = np.random.default_rng(0).integers(-1, 256, (3000, 4, 2), np.int32)
    step = encode(
        FieldArray(logprobs(), np.zeros(3000, np.float32)),
        ids(values, codec="zstd"),
        layer_groups=2,
    )
    entry = step.entry.fields[FIELD]
    assert entry.sizes is not None
    assert entry.mask is not None
    read = read_attributes(object_bytes(step, GROUP), "step")
    assert read.step == step.entry
    assert read.step.tokens == 3001
    for name, array in {**step.entry.fields, "routed_experts_unknown": entry.mask}.items():
        assert len(object_bytes(step, f"{name}/{array.layout.object_name}")) == array.nbytes
    assert step.entry.nbytes == sum(
        len(object_bytes(step, n)) for n in step.members if not n.endswith(GROUP)
    )
    assert list(step.members)[-1] == GROUP, "what makes it a group comes last"


# ---------------------------------------------------------------- size


@pytest.mark.parametrize(
    ("inner", "dtype", "bound"),
    [
        ((), "float32", 1.03),  # a chunk has a few KiB only: its place in 64 bytes shows
        ((48, 8), "uint8", 1.02),
        ((94, 8), "uint16", 1.02),
        ((92, 8), "int32", 1.02),
    ],
)
def test_next_to_nothing_is_padded_at_any_length(
    inner: tuple[int, ...], dtype: str, bound: float
) -> None:
    for rows in itertools.chain(range(1, 6000), range(6000, 200_000, 97)):
        layout = layout_for((rows, *inner), dtype, "none", checksum=True, layer_groups=1)
        assert layout.offsets(None)[-1] <= bound * rows * layout.row_nbytes + 4, rows
        assert layout.chunk_nbytes <= 4 * 2**20, rows
        whole = layout.row_nbytes * rows <= 4 * 2**20 and rows <= 2048
        assert (layout.chunks == 1) == whole, rows


@pytest.mark.parametrize("rows", [1, 2, 700, 2047, 2048, 2049, 2050, 3071, 3073, 5000])
def test_a_plain_array_takes_its_bytes_and_little_more(rows: int) -> None:
    """Checksums and index included, for as many layers as models of today have."""
    values = np.zeros((rows, 48, 8), np.int32)
    entry = encode(ids(values)).entry.fields[FIELD]
    assert rows * 48 * 8 <= entry.nbytes <= 1.02 * rows * 48 * 8


# ---------------------------------------------------------------- encoding


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("rows", [5, 2050])
def test_encoding_is_deterministic(codec: str, rows: int) -> None:
    """Equal content has equal bytes, padding included, whatever memory held before."""
    arrays = [field("uint16", codec, rows), FieldArray(logprobs(), np.ones(rows, np.float32))]
    want = encode(*arrays, layer_groups=2)
    scratch = Scratch()
    for _ in range(3):
        scratch.reset()
        scratch.take(2**20)[:] = 0xAB
        scratch.reset()
        scratch.take(2**20)[:] = 0xAB
        scratch.reset()
        again = encode(*arrays, layer_groups=2, scratch=scratch)
        assert again.entry == want.entry
        assert list(again.members) == list(want.members)
        assert all(object_bytes(again, m) == object_bytes(want, m) for m in want.members)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 2])
def test_source_arrays_are_not_changed(dtype: str, groups: int) -> None:
    mine = field(dtype, "none", 2050)
    if dtype == "uint8":
        mine.values[5:9] = -1
        mine = FieldArray(ids(mine.values).spec, mine.values)
    before = mine.values.copy()
    mine.values.flags.writeable = False
    encode(mine, layer_groups=groups)
    assert same(mine.values, before)


def test_views_are_encoded_as_the_arrays_they_show() -> None:
    whole = np.random.default_rng(0).integers(0, 256, (4, 4200, 3), np.int32)
    view = whole.transpose(1, 0, 2)[::2]
    assert not view.flags.c_contiguous
    for stored, groups in itertools.product(("uint8", "int32"), (1, 2)):
        spec = routed_experts(layers=4, topk=3, stored=stored, codec="none")
        left = encode(FieldArray(spec, view), layer_groups=groups)
        right = encode(FieldArray(spec, np.ascontiguousarray(view)), layer_groups=groups)
        assert all(object_bytes(left, m) == object_bytes(right, m) for m in right.members)


def test_two_steps_of_other_content_are_not_taken_for_equal(backend: LocalBackend) -> None:
    publish(backend, encode(field("uint8", "none", 10)))
    publish(backend, encode(field("uint8", "none", 10)))
    with pytest.raises(ObjectExists):
        publish(backend, encode(field("uint8", "none", 11)))


# ---------------------------------------------------------------- unknown routes


def known_ids(entry: ArrayEntry, step: EncodedStep, values: Array) -> Array:
    stored = object_bytes(step, f"{FIELD}/{entry.layout.object_name}")
    rows, layers = values.shape[:2]
    out = read_part(entry, stored, (0, rows), (0, layers)).astype(np.int32)
    for start, stop in entry.unknown:
        out[start:stop] = -1
    if entry.mask is not None:
        beside = object_bytes(step, f"{FIELD}_unknown/{entry.mask.layout.object_name}")
        out[read_part(entry.mask, beside, (0, rows), (0, layers)).view(bool)] = -1
    return out


@pytest.mark.parametrize("rows", [10, 5000])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_unknown_rows_are_ranges(rows: int, groups: int, codec: str) -> None:
    values = np.random.default_rng(rows).integers(0, 256, (rows, 4, 2), np.int32)
    values[0] = values[3:7] = values[-1] = -1
    step = encode(ids(values, codec=codec), layer_groups=groups)
    entry = step.entry.fields[FIELD]
    assert entry.unknown == ((0, 1), (3, 7), (rows - 1, rows))
    assert entry.mask is None
    assert not any("unknown" in m for m in step.members)
    assert same(known_ids(entry, step, values), values)


@pytest.mark.parametrize("rows", [200, 5000])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("pattern", ["single values", "many runs"])
def test_other_unknown_values_are_a_mask_that_zarr_reads(
    backend: LocalBackend, rows: int, groups: int, pattern: str
) -> None:
    random = np.random.default_rng(rows)
    values = random.integers(0, 256, (rows, 4, 2), np.int32)
    if pattern == "many runs":
        values[::2] = -1
    else:
        values[random.random(values.shape) < 0.1] = -1
    step = encode(ids(values), layer_groups=groups)
    entry = step.entry.fields[FIELD]
    assert entry.mask is not None
    assert entry.unknown == ()
    assert same(known_ids(entry, step, values), values)
    folder = publish(backend, step)
    mask = zarr_array(zarr.open_group(folder, mode="r"), f"{FIELD}_unknown")
    assert same(mask.astype(bool), values == -1)
    assert same(tensorstore_array(folder / f"{FIELD}_unknown"), mask)


def test_sixty_four_runs_are_ranges_and_sixty_five_are_a_mask() -> None:
    for runs, masked in ((64, False), (65, True)):
        values = np.zeros((200, 2, 2), np.int32)
        values[: 2 * runs : 2] = -1
        entry = encode(ids(values)).entry.fields[FIELD]
        assert (entry.mask is not None) == masked
        assert len(entry.unknown) == (0 if masked else runs)


def test_unknown_stays_in_place_where_the_type_has_room() -> None:
    values = np.full((3, 2, 2), -1, np.int32)
    step = encode(ids(values, stored="int32"))
    entry = step.entry.fields[FIELD]
    assert (entry.unknown, entry.mask) == ((), None)
    assert same(known_ids(entry, step, values), values)


# ---------------------------------------------------------------- damage


def test_a_missing_chunk_is_an_error_and_no_fill_value(backend: LocalBackend) -> None:
    """zarr-python gives zeros here, as the format says; we must not."""
    mine = field("uint8", "none", 100)
    entry = encode(mine).entry.fields[FIELD]
    folder = publish(backend, encode(mine))
    name = f"{FIELD}/{entry.layout.object_name}"
    (folder / name).rename(folder / "elsewhere")
    assert not zarr_array(zarr.open_group(folder, mode="r"), FIELD).any()
    with pytest.raises(ObjectMissing, match=entry.layout.object_name):
        backend.open(f"{KEY.path}/{name}")


def test_a_cut_object_is_short(backend: LocalBackend) -> None:
    mine = field("uint8", "none", 100)
    entry = encode(mine).entry.fields[FIELD]
    path = publish(backend, encode(mine)) / FIELD / entry.layout.object_name
    path.write_bytes(path.read_bytes()[:-1])
    with (
        backend.open(f"{KEY.path}/{FIELD}/{path.name}") as source,
        pytest.raises(ObjectShort, match=f"{entry.nbytes - 1}.*{entry.nbytes}"),
    ):
        source.readinto([bytearray(entry.nbytes)], 0)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("rows", [40, 2050])
def test_every_flipped_bit_is_found(codec: str, rows: int) -> None:
    mine = field("uint16", codec, rows)
    step = encode(mine)
    entry = step.entry.fields[FIELD]
    stored = object_bytes(step, f"{FIELD}/{entry.layout.object_name}")
    random = np.random.default_rng(0)
    for chunk in stored_chunks(entry, stored):
        decode(chunk, entry.layout, allocate)
        last = len(chunk) - 1
        for at in {0, last - 4, last - 3, last, *random.integers(0, last, 20).tolist()}:
            damaged = chunk.copy()
            damaged[at] ^= 1 << random.integers(8)
            with pytest.raises(ChunkCorrupt, match=r"checksum .* restore the Step"):
                decode(damaged, entry.layout, allocate)
        with pytest.raises(ChunkCorrupt, match="checksum"):
            decode(chunk[:-1], entry.layout, allocate)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("rows", [60, 40, 0])
def test_a_chunk_of_another_size_is_found_without_checksums(codec: str, rows: int) -> None:
    """A whole, valid chunk of other rows, or nothing at all."""
    want = encode(field("uint16", codec, 50), checksum=False).entry.fields[FIELD]
    other = encode(field("uint16", codec, max(1, rows)), checksum=False)
    name = f"{FIELD}/{want.layout.object_name}"
    stored = object_bytes(other, name) if rows else b""
    with pytest.raises(ChunkCorrupt):
        decode(np.frombuffer(stored, np.uint8), want.layout, allocate)


DAMAGE = """
import contextlib, ctypes, mmap, sys
import numpy as np
from tq_fs.errors import ChunkCorrupt
from tq_fs.steps import decode, layout_for

codec, stored = sys.argv[1], np.frombuffer(bytes.fromhex(sys.stdin.read()), np.uint8)
layout = layout_for((2000, 4, 2), "uint16", codec, checksum=False, layer_groups=1)

# behind the chunk lies a page that must not be read
size = -(-len(stored) // mmap.PAGESIZE) * mmap.PAGESIZE
memory = mmap.mmap(-1, size + mmap.PAGESIZE)
guard = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), mmap.PAGESIZE, 0) == 0  # PROT_NONE
room = np.frombuffer(memory, np.uint8, size)

def check(data):
    room[size - len(data) :] = data
    return decode(room[size - len(data) :], layout, lambda nbytes: np.empty(nbytes, np.uint8))

assert len(check(stored)) == 32000
for cut in range(0, len(stored), 101):
    try:
        check(stored[:cut])
    except ChunkCorrupt:
        continue
    raise AssertionError(f"{cut} of {len(stored)} bytes were taken for the chunk")
random = np.random.default_rng(0)
for _ in range(4000):
    damaged = stored.copy()
    damaged[random.integers(0, 40)] = random.integers(256)
    with contextlib.suppress(ChunkCorrupt):
        check(damaged)
"""


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_damage_without_checksums_does_not_kill_the_process(codec: str) -> None:
    """Decompressors are C: a header that lies must not make them read beyond the chunk."""
    values = np.random.default_rng(0).integers(0, 200, (2000, 4, 2), np.int32)
    step = encode(ids(values, stored="uint16", codec=codec), checksum=False)
    entry = step.entry.fields[FIELD]
    stored = object_bytes(step, f"{FIELD}/{entry.layout.object_name}").hex()
    command = [sys.executable, "-c", DAMAGE, codec]
    done = subprocess.run(command, input=stored, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"


# ---------------------------------------------------------------- versions


def described_as(step: EncodedStep, /, **changes: object) -> bytes:
    document = json.loads(object_bytes(step, GROUP))
    document["attributes"]["tq_fs"] |= changes
    return json.dumps(document).encode()


def test_a_later_format_says_upgrade() -> None:
    step = encode(field("uint8", "none", 3))
    with pytest.raises(FormatTooNew, match=r"a/step: has format tq-fs/step/2, .*upgrade"):
        read_attributes(described_as(step, schema="tq-fs/step/2"), "a/step")


def test_a_later_format_says_upgrade_whatever_its_shape() -> None:
    """Else the later format could never change anything that this version checks."""
    later = {"attributes": {"tq_fs": {"schema": "tq-fs/step/2", "content": [1, 2]}}}
    with pytest.raises(FormatTooNew, match="upgrade"):
        read_attributes(json.dumps(later).encode(), "a/step")
    step = encode(field("uint8", "none", 3))
    with pytest.raises(FormatTooNew, match="upgrade"):
        read_attributes(described_as(step, schema="tq-fs/step/3", step="elsewhere"), "a/step")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"null",
        b"[1]",
        b'{"attributes":{}}',
        b'{"attributes":{"tq_fs":{}}}',
        b'{"attributes":{"tq_fs":{"schema":"tq-fs/manifest/1"}}}',
        b'{"attributes":{"tq_fs":{"schema":"tq-fs/step/1"}}}',
        b"\xff\xfe",
    ],
)
def test_what_is_no_step_is_refused_by_name(text: bytes) -> None:
    with pytest.raises(ManifestCorrupt) as error:
        read_attributes(text, "a/step")
    assert error.value.subject == "a/step"


def test_a_damaged_description_is_refused() -> None:
    whole = object_bytes(encode(field("uint8", "none", 3)), GROUP)
    for size in range(0, len(whole), 37):
        with pytest.raises(ManifestCorrupt):
            read_attributes(whole[:size], "a/step")
    for at in range(len(whole)):
        with contextlib.suppress(ManifestCorrupt):  # or it lies in what only Zarr reads
            read_attributes(whole[:at] + b"\xff" + whole[at + 1 :], "a/step")


def test_arrays_that_cannot_be_are_refused() -> None:
    """Whoever asks them for their objects would divide by zero."""
    whole = object_bytes(encode(field("uint8", "none", 3)), GROUP)
    refused = 0
    for at in range(len(whole)):
        for other in (b"0", b"9", b"-1"):
            try:
                found = read_attributes(whole[:at] + other + whole[at + 1 :], "a/step")
            except CorruptError:  # of a later version, where it is that digit
                refused += 1
            else:
                found.step.objects()
    assert refused


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("is_compact", [False, True])
def test_a_group_says_what_its_members_measure(codec: str, is_compact: bool) -> None:
    step = encode(field("uint16", codec, 2050), layer_groups=2)
    members = {
        m: object_bytes(step, m)
        for m in step.members
        if m == GROUP or not (is_compact and m.endswith("/zarr.json"))
    }
    sizes = measure_group(members[GROUP], members.keys())
    assert sizes == {m: len(data) for m, data in members.items() if m != GROUP}


def test_a_damaged_group_says_sizes_or_nothing_and_raises_nothing() -> None:
    whole = object_bytes(encode(field("uint8", "none", 3)), GROUP)
    for at in range(len(whole)):
        for other in (b"0", b"9", b"\xff", b'"', b""):
            measure_group(whole[:at] + other + whole[at + 1 :], ["f/zarr.json"])
    assert measure_group(b"", []) == {}
    assert measure_group(whole[:-1], []) == {}
