"""Per-token fields: what is accepted, how narrow it is stored, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tq_fs import narrow
from tq_fs.errors import (
    InvalidConfig,
    InvalidField,
    RowCountMismatch,
    ValueOutOfRange,
    WidthChanged,
)
from tq_fs.fields import (
    UNKNOWN,
    FieldSpec,
    check_rows,
    coerce,
    logprobs,
    routed_experts,
    select,
    with_inner,
)
from tq_fs.keys import Incarnation, StepKey
from tq_fs.model_config import dense_layers_of_model, routed_experts_of_model
from tq_fs.steps import (
    ArrayEntry,
    EncodedStep,
    EncodeOptions,
    FieldArray,
    Scratch,
    decode,
    encode_step,
)

Array = npt.NDArray[Any]

KEY = StepKey(Incarnation("train", "s", "1"), 3)


def experts(**settings: Any) -> FieldSpec:
    return routed_experts(layers=2, topk=3, **settings)


def ids(*special: int, rows: int = 4) -> Array:
    """Rows of two layers and three slots: zeros, and `special` in the last places."""
    values = np.zeros((rows, 2, 3), np.int32)
    if special:
        values.reshape(-1)[-len(special) :] = special
    return values


def encode(spec: FieldSpec, values: Array, layer_groups: int = 1) -> EncodedStep:
    options = EncodeOptions(layer_groups=layer_groups)
    return encode_step("s", KEY, len(values) + 1, [FieldArray(spec, values)], options, Scratch())


def stored(spec: FieldSpec, values: Array) -> str:
    return encode(spec, values).entry.fields[spec.name].dtype


def round_trip(spec: FieldSpec, values: Array) -> Array:
    """Encode a Step of one chunk, and decode it with -1 where it was unknown."""
    step = encode(spec, values)
    entry = step.entry.fields[spec.name]

    def chunk(name: str, part: ArrayEntry) -> Array:
        buffers = step.members[f"{name}/{part.layout.object_name}"]
        raw = b"".join(b if isinstance(b, bytes) else b.tobytes() for b in buffers)
        data = decode(np.frombuffer(raw, np.uint8), part.layout, lambda n: np.empty(n, np.uint8))
        return data.view(part.dtype).reshape(part.shape)

    out = chunk(spec.name, entry).astype(entry.memory)
    for start, stop in entry.unknown:
        out[start:stop] = UNKNOWN
    if entry.mask is not None:
        out[chunk(f"{spec.name}_unknown", entry.mask).astype(bool)] = UNKNOWN
    return out


# ---------------------------------------------------------------- declarations


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"experts": 257, "stored": "uint8"}, "257 experts do not fit uint8; store as uint16"),
        ({"experts": 65537, "stored": "uint16"}, "do not fit uint16; store as int32"),
        ({"stored": "int8"}, "cannot be stored as int8"),
        ({"stored": "float32"}, "cannot be stored as float32"),
        ({"codec": "gzip"}, "unknown codec 'gzip'; auto, none, lz4 or zstd"),
    ],
)
def test_what_could_not_be_stored_is_refused_at_declaration(
    settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidConfig, match="routed_experts: ") as error:
        experts(**settings)
    assert problem in str(error.value)


@pytest.mark.parametrize(("count", "stored"), [(256, "uint8"), (65536, "uint16"), (65537, "int32")])
def test_the_largest_expert_count_of_each_type_is_accepted(count: int, stored: str) -> None:
    assert experts(experts=count, stored=stored).stored == stored


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "not an identifier"},
        {"name": ""},
        {"name": "../x"},
        {"name": "x_unknown"},
        *({"name": n} for n in ("kind", "parent", "context", "response", "version", "reason")),
        {"name": "values"},
        {"dtype": "U8"},
        {"dtype": "object"},
        {"dtype": "complex64"},
        {"dtype": "no such type"},
        {"inner": (0, 2)},
        {"dtype": "float32", "stored": "float16"},
        {"dtype": "uint16", "stored": "uint8"},
    ],
)
def test_a_field_that_makes_no_sense_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        FieldSpec(**{"name": "x", "dtype": "float32", **settings})


@pytest.mark.parametrize("dtype", ["f4", "<f4", ">f4", "float", "int", "longdouble"])
def test_only_names_that_zarr_knows_reach_the_metadata(dtype: str) -> None:
    """Refused or spelled out: Zarr v3 has data types ``float32`` and ``int64``, and no ``f4``."""
    try:
        spec = FieldSpec(name="x", dtype=dtype)
    except InvalidConfig:
        return
    step = encode(spec, np.zeros(3, dtype))
    (metadata,) = step.members["x/zarr.json"]
    assert json.loads(bytes(metadata))["data_type"] in {"float32", "float64", "int64"}


def test_layers_and_topk_come_together() -> None:
    with pytest.raises(InvalidConfig, match="layers and topk together"):
        routed_experts(layers=2)
    assert routed_experts().inner is None
    assert experts().inner == (2, 3)


def test_select_names_what_is_taken_out_of_the_way() -> None:
    specs = [logprobs(), experts()]
    assert select(specs, None) == {"logprobs", "routed_experts"}
    assert select(specs, ["logprobs"]) == {"logprobs"}
    assert select(specs, ["logprobs", "logprobs"]) == {"logprobs"}
    assert select(specs, []) == frozenset()


def test_select_refuses_unknown_and_doubly_declared_fields() -> None:
    with pytest.raises(InvalidConfig, match=r"\['entropy'\].*choose from \['logprobs'\]"):
        select([logprobs()], ["logprobs", "entropy"])
    with pytest.raises(InvalidConfig, match="declared twice"):
        select([logprobs(), logprobs()], None)


def test_rows_of_transitions_follow_from_tokens() -> None:
    assert experts().row_count(5, opens_chain=True) == 4
    assert experts().row_count(5, opens_chain=False) == 5
    assert logprobs().row_count(5, opens_chain=True) == 5


# ---------------------------------------------------------------- the edge


@pytest.mark.parametrize("dtype", ["int64", "uint8", "int16", "uint32", "uint64", ">i4"])
def test_integers_of_any_width_are_ids(dtype: str) -> None:
    values = np.arange(24).reshape(4, 2, 3)
    out = coerce(experts(), values.astype(dtype))
    assert out.dtype == np.int32
    assert out.flags.c_contiguous
    np.testing.assert_array_equal(out, values)
    np.testing.assert_array_equal(coerce(experts(), values.tolist()), values)


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**63 - 1, 2**32])
def test_an_integer_beyond_the_memory_type_is_refused(value: int) -> None:
    with pytest.raises(ValueOutOfRange, match=str(value)) as error:
        coerce(experts(), np.full((1, 2, 3), value, np.int64), "Step 3")
    assert error.value.subject == "Step 3, routed_experts"


@pytest.mark.parametrize(
    "values",
    [
        [1.0],
        np.zeros(3, np.float32),
        [True, False],
        ["1"],
        [None],
        [1 + 0j],
        [b"1"],
        None,
        [[1], [2.5]],
    ],
    ids=str,
)
def test_what_is_no_integer_is_no_id(values: Any) -> None:
    with pytest.raises(InvalidField, match="Step 3, routed_experts"):
        coerce(experts(), values, "Step 3")


@pytest.mark.parametrize(
    "values",
    [
        [True, False],
        np.zeros(3, bool),
        ["0.5"],
        "0.5",
        [None, 0.5],
        None,
        [object()],
        {"a": 1},
        [1j],
        np.zeros(2, "datetime64[s]"),
    ],
    ids=str,
)
def test_what_is_no_number_is_no_logprob(values: Any) -> None:
    with pytest.raises(InvalidField, match="Step 3, logprobs"):
        coerce(logprobs(), values, "Step 3")


@pytest.mark.parametrize(
    "values", [[-0.5, -1], [-1, -2], np.array([-0.5]), np.array([-0.5], np.float16), []]
)
def test_any_number_is_a_logprob(values: Any) -> None:
    out = coerce(logprobs(), values)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, np.asarray(values, np.float32))


@pytest.mark.parametrize("spec", [logprobs(), routed_experts()], ids=lambda s: s.name)
def test_ragged_rows_are_refused(spec: FieldSpec) -> None:
    with pytest.raises(InvalidField, match=rf"{spec.name}: is no plain array \(.*inhomogeneous"):
        coerce(spec, [[1, 2], [3]])


@pytest.mark.parametrize("trouble", ["bfloat16", "requires grad"])
def test_a_tensor_that_numpy_cannot_take_is_refused(trouble: str) -> None:
    torch = pytest.importorskip("torch")
    values = torch.zeros(3)
    values = values.bfloat16() if trouble == "bfloat16" else values.requires_grad_()
    with pytest.raises(InvalidField, match=r"Step 3, logprobs: is no plain array"):
        coerce(logprobs(), values, "Step 3")


def test_a_plain_tensor_is_taken_by_value() -> None:
    torch = pytest.importorskip("torch")
    out = coerce(logprobs(), torch.tensor([-0.5, -1.0]))
    np.testing.assert_array_equal(out, np.array([-0.5, -1.0], np.float32))


def test_nan_payloads_and_signed_zeros_keep_their_bits() -> None:
    bits = np.array([0x7FC00001, 0xFFC0ABCD, 0x7F800001, 0x80000000, 0xFF800000, 1], np.uint32)
    values = bits.view(np.float32)
    for array in (values, np.repeat(values, 2)[::2]):
        out = coerce(logprobs(), array)
        assert out.tobytes() == bits.tobytes()
        assert round_trip(logprobs(), out).tobytes() == bits.tobytes()


def test_what_has_the_right_type_already_is_not_copied() -> None:
    values = ids(1, 2)
    assert coerce(experts(), values) is values


@pytest.mark.parametrize(("rows", "copied"), [(1, True), (49, True), (50, False), (100, False)])
def test_a_small_part_of_an_array_does_not_keep_it_in_memory(rows: int, copied: bool) -> None:
    whole = ids(rows=100)
    whole[:] = np.arange(600).reshape(100, 2, 3)
    part = whole[-rows:]
    out = coerce(experts(), part)
    np.testing.assert_array_equal(out, part)
    assert np.shares_memory(out, whole) != copied
    assert (out.base is None) == copied


def test_non_contiguous_arrays_are_taken_by_value() -> None:
    whole = np.arange(2 * 3 * 8, dtype=np.int32).reshape(3, 2, 8)
    view = whole.transpose(2, 1, 0)[::-2]
    out = coerce(experts(), view)
    assert out.flags.c_contiguous
    np.testing.assert_array_equal(out, view)
    np.testing.assert_array_equal(round_trip(experts(), out), view)


def test_an_empty_array_has_no_rows_of_the_right_type() -> None:
    assert coerce(experts(), np.empty((0, 2, 3))).dtype == np.int32
    assert coerce(logprobs(), []).shape == (0,)
    assert stored(experts(), ids(rows=0)) == "uint8"


@pytest.mark.parametrize("rows", [3, 5])
def test_another_number_of_rows_is_refused(rows: int) -> None:
    with pytest.raises(RowCountMismatch, match=rf"Step 3, routed_experts: {rows} rows .* for 4"):
        check_rows(experts(), ids(rows=rows), 4, "Step 3")
    with pytest.raises(RowCountMismatch, match="no rows"):
        check_rows(logprobs(), np.ones((), np.float32), 1, "Step 3")
    check_rows(experts(), ids(), 4, "Step 3")


@pytest.mark.parametrize("shape", [(4, 3, 2), (4, 6), (4,), (4, 2, 3, 1)])
def test_another_shape_of_rows_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(WidthChanged, match=r"Step 3.*\[2, 3\] is expected"):
        check_rows(experts(), np.zeros(shape, np.int32), 4, "Step 3")


def test_an_open_shape_is_fixed_by_the_first_array() -> None:
    assert with_inner(routed_experts(), ids()).inner == (2, 3)
    assert with_inner(experts(), np.zeros((4, 9, 9))).inner == (2, 3)
    check_rows(routed_experts(), ids(), 4, "Step 3")


# ---------------------------------------------------------------- narrow


@pytest.mark.parametrize(
    ("largest", "dtype"),
    [(0, "uint8"), (255, "uint8"), (256, "uint16"), (65535, "uint16"), (65536, "int32")],
)
def test_auto_is_the_narrowest_type_for_the_ids(largest: int, dtype: str) -> None:
    values = ids(largest)
    assert stored(experts(), values) == dtype
    np.testing.assert_array_equal(round_trip(experts(), values), values)


@pytest.mark.parametrize(
    ("count", "dtype"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "int32")],
)
def test_auto_is_the_narrowest_type_for_the_expert_count(count: int, dtype: str) -> None:
    """So that all Steps of a model have one type, whatever their ids."""
    assert stored(experts(experts=count), ids(0)) == dtype
    values = ids(count - 1)
    np.testing.assert_array_equal(round_trip(experts(experts=count), values), values)


@pytest.mark.parametrize(
    ("dtype", "largest"), [("uint8", 255), ("uint16", 65535), ("int32", 2**31 - 1)]
)
def test_the_largest_id_of_a_type_survives_and_the_next_is_refused(
    dtype: str, largest: int
) -> None:
    spec = experts(stored=dtype)
    for values in (ids(largest), ids(-1, largest), ids(largest, -1, -1)):
        np.testing.assert_array_equal(round_trip(spec, values), values)
    if dtype == "int32":
        return
    for values in (ids(largest + 1), ids(-1, largest + 1), ids(largest + 1, -1), ids(2**31 - 1)):
        with pytest.raises(ValueOutOfRange):
            encode(spec, values)


@pytest.mark.parametrize("stored", ["uint8", "uint16", "int32", "auto"])
@pytest.mark.parametrize("count", [None, 256])
def test_unknown_survives_beside_every_legal_id(stored: str, count: int | None) -> None:
    values = np.arange(-1, 256, dtype=np.int32).repeat(6).reshape(-1, 2, 3)
    spec = experts(stored=stored, experts=count)
    for array in (values, np.random.default_rng(0).permuted(values), np.full_like(values, -1)):
        np.testing.assert_array_equal(round_trip(spec, array), array)


@pytest.mark.parametrize("count", [1, 3, 8, 60, 100, 128, 160, 255, 256, 384, 65536])
@pytest.mark.parametrize("stored", ["auto", "int32"])
def test_the_expert_count_bounds_ids_also_where_the_type_would_hold_more(
    count: int, stored: str
) -> None:
    spec = experts(experts=count, stored=stored)
    values = ids(count - 1)
    np.testing.assert_array_equal(round_trip(spec, values), values)
    for wrong in (count, count + 1, 2**31 - 1):
        with pytest.raises(ValueOutOfRange, match=rf"id {wrong} .* not in \[0, {count}\)"):
            encode(spec, ids(wrong))


@pytest.mark.parametrize("stored", ["uint8", "uint16", "int32", "auto"])
@pytest.mark.parametrize("wrong", [-2, -256, -(2**31)])
@pytest.mark.parametrize("groups", [1, 2])
def test_other_negative_ids_are_refused_by_place_and_value(
    stored: str, wrong: int, groups: int
) -> None:
    values = ids(-1, 255, rows=3000)
    values[2345, 1, 2] = wrong
    with pytest.raises(ValueOutOfRange) as error:
        encode(experts(stored=stored), values, layer_groups=groups)
    assert f"id {wrong} at row 2345, layer 1, slot 2" in error.value.problem
    assert error.value.subject == f"{KEY}, routed_experts"


def test_the_type_is_named_where_an_id_does_not_fit_it() -> None:
    with pytest.raises(ValueOutOfRange, match=r"row 3, layer 1, slot 2.*uint8"):
        encode(experts(stored="uint8"), ids(256))


def test_minus_one_is_refused_where_a_field_knows_no_unknown() -> None:
    for dtype, limit in (("uint8", None), ("uint8", 9), ("int32", 9)):
        spec = FieldSpec(name="x", dtype="int32", inner=(2, 3), stored=dtype, limit=limit)
        with pytest.raises(ValueOutOfRange, match="id -1 at row 3, layer 1, slot 2"):
            encode(spec, ids(-1))


@pytest.mark.parametrize("stored", ["auto", "int32"])
@pytest.mark.parametrize("value", [-1, -2, -(2**31)])
def test_whole_numbers_that_are_no_ids_may_be_negative(stored: str, value: int) -> None:
    spec = FieldSpec(name="x", dtype="int32", inner=(2, 3), stored=stored)
    assert encode(spec, ids(value)).entry.fields["x"].dtype == "int32"
    np.testing.assert_array_equal(round_trip(spec, ids(value)), ids(value))


def test_every_place_of_a_large_step_is_checked() -> None:
    """Blocks, chunk borders and tails: one bad id anywhere is found."""
    spec = routed_experts(layers=40, topk=8, experts=256)
    values = np.random.default_rng(0).integers(0, 256, (5000, 40, 8), np.int32)
    encode(spec, values)
    for row in (0, 1, 999, 1000, 1023, 1024, 2047, 2048, 4999):
        for groups in (1, 3):
            values[row, 39, 7] = 256
            with pytest.raises(ValueOutOfRange, match=f"row {row}, layer 39, slot 7"):
                encode(spec, values, layer_groups=groups)
            values[row, 39, 7] = 255


def test_runs_are_half_open() -> None:
    assert narrow.runs_of(np.array([1, 1, 0, 1, 0, 0, 1], bool)) == [(0, 2), (3, 4), (6, 7)]
    assert narrow.runs_of(np.zeros(3, bool)) == []
    assert narrow.runs_of(np.ones(3, bool)) == [(0, 3)]
    assert narrow.runs_of(np.empty(0, bool)) == []


# ---------------------------------------------------------------- the model's configuration

QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
}
GLM_4_MOE = {
    "model_type": "glm4_moe",
    "num_hidden_layers": 92,
    "n_routed_experts": 160,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
}
MIXTRAL = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
DENSE = {"model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096}


@pytest.mark.parametrize(
    ("config", "layers", "topk", "count"),
    [
        (QWEN3_MOE, 48, 8, 128),
        (DEEPSEEK_V3, 58, 8, 256),
        (GLM_4_MOE, 89, 8, 160),
        (MIXTRAL, 32, 2, 8),
        ({"model_type": "qwen3_vl_moe", "text_config": QWEN3_MOE, "vision_config": {}}, 48, 8, 128),
        (QWEN3_MOE | {"mlp_only_layers": [0, 47]}, 46, 8, 128),
        (QWEN3_MOE | {"mlp_only_layers": None}, 48, 8, 128),
        # Qwen: (i + 1) % decoder_sparse_step == 0
        (QWEN3_MOE | {"decoder_sparse_step": 2}, 24, 8, 128),
        (QWEN3_MOE | {"decoder_sparse_step": 2, "num_hidden_layers": 5}, 2, 8, 128),
        (QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [1, 2]}, 23, 8, 128),
        # DeepSeek: i >= first_k_dense_replace and i % moe_layer_freq == 0
        (DEEPSEEK_V3 | {"moe_layer_freq": 2}, 29, 8, 256),
        (DEEPSEEK_V3 | {"moe_layer_freq": 2, "first_k_dense_replace": 0}, 31, 8, 256),
        # MiniMax, MiMo: one flag per layer
        (MIXTRAL | {"moe_layer_freq": [0, 0, 0, *[1] * 29]}, 29, 2, 8),
    ],
)
def test_a_model_s_configuration_gives_layers_topk_and_experts(
    tmp_path: Path, config: dict[str, Any], layers: int, topk: int, count: int
) -> None:
    want = routed_experts(layers=layers, topk=topk, experts=count)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for source in (config, tmp_path, str(tmp_path), tmp_path / "config.json"):
        assert routed_experts_of_model(source) == want


def test_dense_layers_count_where_the_engine_records_them() -> None:
    assert routed_experts_of_model(DEEPSEEK_V3, dense_layers=True).inner == (61, 8)
    assert routed_experts_of_model(DEEPSEEK_V3, stored="int32").stored == "int32"


def test_dense_layers_are_named() -> None:
    assert dense_layers_of_model(DEEPSEEK_V3) == (0, 1, 2)
    assert dense_layers_of_model({"text_config": DEEPSEEK_V3}) == (0, 1, 2)
    assert dense_layers_of_model(MIXTRAL | {"moe_layer_freq": [0, 1] * 16}) == (*range(0, 32, 2),)
    assert dense_layers_of_model(QWEN3_MOE | {"mlp_only_layers": [5]}) == (5,)
    with pytest.raises(InvalidConfig, match="in a way unknown here"):
        dense_layers_of_model(MIXTRAL | {"moe_layer_freq": [0, 1]})


@pytest.mark.parametrize(
    "config",
    [DENSE, {}, {"text_config": DENSE}, QWEN3_MOE | {"num_experts": 0}, {"text_config": None}],
    ids=["dense", "empty", "nested dense", "no experts", "nested null"],
)
def test_a_model_without_experts_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match="give layers, topk and experts yourself"):
        routed_experts_of_model(config)


@pytest.mark.parametrize(
    "config",
    [
        {**MIXTRAL, "num_experts_per_tok": None, "moe_topk": [2] * 32},
        MIXTRAL | {"moe_layer_freq": [0, 1]},
        MIXTRAL | {"num_hidden_layers": "many"},
        {"text_config": [1]},
    ],
    ids=["top-k per layer", "few flags", "words", "list"],
)
def test_a_routing_that_is_unknown_here_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match="give layers, topk and experts yourself"):
        routed_experts_of_model(config)


@pytest.mark.parametrize("text", [None, "{", "[]", "null"], ids=["absent", "cut", "list", "null"])
def test_a_configuration_that_cannot_be_read_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidConfig, match=r"config\.json"):
        routed_experts_of_model(tmp_path / "config.json")
