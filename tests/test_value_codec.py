"""A value comes back exactly as it was put: types, shapes, bits and order; or is refused."""

from __future__ import annotations

import base64
import collections
import contextlib
import enum
import math
import pickle
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tq_fs.errors import (
    DependencyMissing,
    FormatTooNew,
    ManifestCorrupt,
    TqFsError,
    ValueUnsupported,
)
from tq_fs.values.codec import (
    ARRAY_BYTES,
    ArrayForm,
    ArrayLeaf,
    EncodedValue,
    RoutedChunk,
    chunks_of,
    decode,
    encode,
    outline,
    restore,
    sole_array,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors:UserWarning",
    "ignore:ComplexHalf support:UserWarning",
)


def bits(number: float) -> bytes:
    return struct.pack("<d", number)


def same_array(a: Any, b: Any) -> bool:
    if (a.shape, a.dtype, a.dtype.char) != (b.shape, b.dtype, b.dtype.char):
        return False
    if a.dtype.byteorder != b.dtype.byteorder or a.dtype.isalignedstruct != b.dtype.isalignedstruct:
        return False
    if a.dtype == object:
        return all(map(same, a.flat, b.flat))
    return bool(a.tobytes() == b.tobytes())


def raw_bytes(tensor: Any) -> Any:
    plain = tensor.detach().resolve_conj().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8)


def same_tensor(a: Any, b: Any) -> bool:
    if (a.dtype, a.layout, a.is_nested) != (b.dtype, b.layout, b.is_nested):
        return False
    if a.is_nested:
        if a.layout is torch.jagged and a._ragged_idx != b._ragged_idx:
            return False
        return same(a.detach().unbind(), b.unbind())
    return bool(a.shape == b.shape and torch.equal(raw_bytes(a), raw_bytes(b)))


def same_set(a: Any, b: Any) -> bool:
    rest = list(b)
    for item in a:
        found = next((i for i, other in enumerate(rest) if same(item, other)), None)
        if found is None:
            return False
        del rest[found]
    return not rest


def same_items(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(same, a, b))


SAME: dict[type, Callable[[Any, Any], bool]] = {
    float: lambda a, b: bits(a) == bits(b),
    complex: lambda a, b: bits(a.real) + bits(a.imag) == bits(b.real) + bits(b.imag),
    list: same_items,
    tuple: same_items,
    torch.Size: same_items,
    set: same_set,
    frozenset: same_set,
    dict: lambda a, b: same_items(a.items(), b.items()),
    np.ndarray: same_array,
}


def same(a: Any, b: Any) -> bool:
    """Whether two values are of the same types, bits and order all the way down."""
    if type(a) is not type(b):
        return False
    if type(a) in SAME:
        return SAME[type(a)](a, b)
    if isinstance(a, torch.Tensor):
        return same_tensor(a, b)
    if isinstance(a, np.generic):
        return same_array(np.asarray(a), np.asarray(b))
    return bool(a == b)


def stored(encoded: EncodedValue) -> tuple[bytes, list[Any]]:
    """What a store gives back: arrays of their own, in the shapes and types of the forms."""
    for form, array in zip(encoded.forms, encoded.arrays, strict=True):
        assert (array.shape, array.dtype.name) == (form.shape, form.dtype)
        assert array.flags.c_contiguous
        assert array.nbytes == form.nbytes >= ARRAY_BYTES
    return encoded.head, [array.copy() for array in encoded.arrays]


def there_and_back(value: Any, **options: Any) -> Any:
    head, arrays = stored(encode(value, **options))
    return decode(memoryview(head), arrays, **options)


def check(value: Any) -> EncodedValue:
    back = there_and_back(value)
    assert same(value, back), (value, back)
    return encode(value)


# ---------------------------------------------------------------- any value

NAN_PAYLOAD = struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf8\x7f")[0]
SIGNALLING = struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf0\x7f")[0]
NEGATIVE_NAN = struct.unpack("<d", b"\x00\x00\x00\x00\x00\x00\xf8\xff")[0]

floats = st.floats() | st.floats(width=32) | st.sampled_from([NAN_PAYLOAD, SIGNALLING, -0.0])
texts = st.text(st.characters(exclude_categories=())) | st.text()  # lone surrogates in the first
atoms = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**63) - 2, 2**64) | floats
    | st.complex_numbers() | texts | st.binary()
)  # fmt: skip
keys = st.recursive(
    atoms, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4
)
dtypes = (
    hnp.scalar_dtypes() | hnp.byte_string_dtypes() | hnp.unicode_string_dtypes()
    | hnp.array_dtypes(allow_subarrays=True)
)  # fmt: skip
arrays = hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
tensors = hnp.arrays(
    st.sampled_from(["bool", "i1", "i8", "u2", "f2", "f4", "c8"]),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
).map(torch.from_numpy)
leaves = (
    atoms | arrays | tensors | st.binary().map(bytearray) | st.sets(keys, max_size=4)
    | st.frozensets(keys, max_size=4) | st.lists(floats, min_size=14, max_size=20)
    | st.lists(st.integers(-(2**63), 2**63), min_size=14, max_size=20)
    | st.lists(st.integers(-200, 300), min_size=14, max_size=20)
)  # fmt: skip


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
    )  # fmt: skip


values = st.recursive(leaves, containers, max_leaves=12)


@settings(max_examples=300, deadline=None)
@given(values)
def test_any_value_comes_back_as_it_was(value: Any) -> None:
    assert same(value, there_and_back(value))


@settings(max_examples=100, deadline=None)
@given(st.lists(values, max_size=3))
def test_any_value_comes_back_from_arrays_of_their_own(value: Any) -> None:
    """The same with arrays, texts and bytes so large that they lie outside of the head."""
    large = [np.arange(ARRAY_BYTES // 8), value, "ä" * ARRAY_BYTES, [0.1] * 9000]
    assert len(check(large).arrays) == 3


def test_the_comparison_of_these_tests_is_strict() -> None:
    different = [
        (1, True), (1, 1.0), (0.0, -0.0), (math.nan, NAN_PAYLOAD), ((1,), [1]),
        ({1}, frozenset({1})),
        (np.float32(1), np.float64(1)), (np.arange(3), np.arange(3.0)), ([1], [1, 2]),
        (np.zeros(2, ">i4"), np.zeros(2, "<i4")), ({1: 2, 3: 4}, {3: 4, 1: 2}), ({1: 0}, {True: 0}),
        (np.zeros((1, 2)), np.zeros((2, 1))), (torch.zeros(2), np.zeros(2, "f4")),
        (np.float64(1), 1.0), (b"a", bytearray(b"a")), (torch.zeros(2), torch.zeros(2) * -1),
    ]  # fmt: skip
    assert [pair for pair in different if same(*pair)] == []


# ---------------------------------------------------------------- plain Python

PLAIN: dict[str, Any] = {
    "none": None, "true": True, "one": 1, "one point": 1.0, "int64": [2**63 - 1, -(2**63)],
    "beyond": [2**63, -(2**63) - 1, 2**64, 10**400, -(10**400)],
    "nans": [math.nan, NAN_PAYLOAD, SIGNALLING, NEGATIVE_NAN, -0.0, math.inf, -math.inf, 5e-324],
    "complex": [1j, complex(-0.0, math.nan), complex(math.inf, -0.0)],
    "text": ["", "ä€😀", "\x00", "\ud800", "a\udcffb", "\ud83d\ude00"],
    "bytes": [b"", b"\x00\xff", bytearray(), bytearray(b"ab")],
    "empty": [[], (), {}, set(), frozenset(), [[]], ((),)],
    "tuples": ((1, (2, [3, (4,)])), [(), [()]]),
    "sets": [{1, "a", (2, 3), frozenset({4})}, frozenset({None, 1.5}), {True}, {1}, {2**70}],
    "keys": {1: "a", (1, 2): "b", None: "c", 2.5: "d", "é": "e", b"f": 1, frozenset({1}): 2},
    "true and text": {True: 1, "True": 2}, "tuple in tuple": {((1, (2,)), "x"): [1]},
    "surrogate key": {"\ud800": 1, "b": 2}, "order": {"b": 1, "a": 2, "c": {"z": 1, "y": 2}},
    "range": [range(3), range(5, 2, -1), range(2**70)], "slice": [slice(None), slice(1, (2,), "x")],
    "tuple keys of arrays": {("x", 1): np.arange(3), ("y", 2): [torch.ones(2), (torch.zeros(1),)]},
    "numpy dtypes": [np.dtype("f4"), np.dtype(">i8"), np.dtype([("a", "U3"), ("b", "f8", (2,))])],
    "torch dtypes": [torch.bfloat16, torch.Size([2, 3]), torch.Size([]), (torch.Size([1]),)],
    "numpy scalar keys": {np.int64(1): 1, np.float32(1.5): 2, np.str_("a"): 3},
}  # fmt: skip


@pytest.mark.parametrize("value", PLAIN.values(), ids=PLAIN)
def test_python_values_come_back(value: Any) -> None:
    assert check(value).arrays == ()


def test_large_bytes_and_text_lie_outside() -> None:
    data = bytes(range(256)) * 300
    for value in (data, bytearray(data), "é" * ARRAY_BYTES, "\ud800" * ARRAY_BYTES):
        assert len(check(value).arrays) == 1
        assert len(check([value]).head) < 200


def test_values_may_be_as_deep_as_is_said_and_no_deeper() -> None:
    value: Any = 1
    for level in range(100):
        value = ([value], {"a": value}, (value,), {1: value})[level % 4]
    check(value)
    for deeper in ([value], {"a": value}, {1: value}, (value,)):
        with pytest.raises(ValueUnsupported, match="nests deeper than 100 levels; flatten"):
            encode(deeper, allow_pickle=True)
    cycle: list[Any] = []
    cycle.append(cycle)
    round_about: dict[Any, Any] = {}
    round_about["a"] = round_about
    for endless in (cycle, round_about):
        with pytest.raises(ValueUnsupported, match="deeper"):
            encode(endless)
    key: Any = ()
    for _ in range(101):
        key = (key,)
    with pytest.raises(ValueUnsupported, match="deeper"):
        encode({key: 1})


# ---------------------------------------------------------------- numpy

STRUCT = np.dtype([("a", "<i4"), ("b", ">f8", (2,)), ("c", "S3"), ("d", [("e", "U2")])])
ALIGNED = np.dtype([("a", "i1"), ("b", "f8")], align=True)
OVERLAP = np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2], "itemsize": 9})
TITLED = np.dtype([(("title", "a"), "i4")])
NUMPY: dict[str, Any] = {
    **{n: np.arange(6).reshape(2, 3).astype(n) for n in [
        "bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16",
        "longdouble", "clongdouble", "longlong", "ulonglong", ">i2", ">u8", ">f4", ">c16", "S3",
        "U3", ">U3", "V3", "M8[s]", "m8[25ns]", ">M8[D]", "M8", "m8",
    ]},
    "struct": np.zeros(3, STRUCT), "aligned": np.zeros((2, 2), ALIGNED),
    "no fields": np.zeros(2, []),
    "overlap": np.zeros(3, OVERLAP), "titled": np.zeros(3, TITLED),
    "0-d struct": np.zeros((), STRUCT),
    "longlong field": np.zeros(2, [("a", "q"), ("b", "l")]), "S0": np.empty(3, "S0"),
    "V0": np.empty((2, 0), "V0"), "not a time": np.array(["NaT", "2020"], "M8[s]"),
    "0-d": np.array(1.5), "0-d big": np.array(1, ">i8"), "0-d bytes": np.array(b"ab"),
    "empty": np.empty((0, 3), "f4"), "empty big": np.empty((2, 0), ">f4"),
    "transposed": np.arange(6).reshape(2, 3).T, "strided": np.arange(20, dtype=">i4")[::-3],
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "broadcast": np.broadcast_to(1, (3, 2)),
    "objects": np.array([[1, "a", None], [np.arange(2), [1, (2,)], np.array(5)]], object),
    "0-d object": np.array({"a": 1}, object), "no objects": np.empty((0, 2), object),
    "objects of lists": np.array([[1, 2], None], object),
    "nan bits": np.array([NAN_PAYLOAD, SIGNALLING]),
}  # fmt: skip


@pytest.mark.parametrize("value", NUMPY.values(), ids=NUMPY)
def test_numpy_arrays_come_back(value: Any) -> None:
    check(value)
    check({"a": [value, (value,)]})


@pytest.mark.parametrize(
    "value", [v for v in NUMPY.values() if v.dtype != object and v.itemsize and v.size]
)
def test_large_numpy_arrays_come_back(value: Any) -> None:
    large = np.zeros((1, -(-ARRAY_BYTES // value.itemsize)), value.dtype)
    large[...] = value.reshape(-1)[-1]
    encoded = check(large)
    assert len(encoded.arrays) == 1
    assert sole_array(encoded.head) == encoded.forms[0]


SCALARS: list[Any] = [
    np.float32(1.5), np.float64(-0.0), np.float16(math.nan), np.longdouble(1) / 3, np.int8(-1),
    np.longlong(5), np.int64(5), np.uint64(2**64 - 1), np.bool(True), np.complex64(1j),
    np.datetime64("NaT"), np.array("2020-01-01T00:00", "M8[25s]")[()], np.timedelta64(3, "ns"),
    np.str_("ab\x00"), np.str_("\ud800"), np.bytes_(b"ab\x00"), np.void(b"abc"), np.void(b""),
    np.zeros(1, STRUCT)[0], np.frombuffer(b"\x01\x00\x80\x7f", "f4")[0],
]  # fmt: skip


@pytest.mark.parametrize("value", SCALARS, ids=lambda v: f"{type(v).__name__} {v!r}")
def test_numpy_scalars_come_back(value: Any) -> None:
    back = there_and_back([value])[0]
    assert type(back) is type(value)
    assert back.dtype == value.dtype
    assert back.tobytes() == value.tobytes()


def test_text_of_numpy_keeps_its_trailing_zeros() -> None:
    assert len(there_and_back(np.str_("a\x00"))) == 2
    assert len(there_and_back(np.bytes_(b"a\x00"))) == 2


# ---------------------------------------------------------------- torch

PLAIN_TENSORS = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
    "float32", "float64", "bfloat16", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "complex32",
]  # fmt: skip
TENSOR_DTYPES = [getattr(torch, n) for n in PLAIN_TENSORS if hasattr(torch, n)]


@pytest.mark.parametrize("dtype", TENSOR_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (0,), (3, 0, 2), (), (300, 300)], ids=str)
def test_tensors_come_back(dtype: Any, shape: tuple[int, ...]) -> None:
    count = math.prod(shape) * dtype.itemsize
    raw = torch.arange(count, dtype=torch.int64).remainder(2 if dtype is torch.bool else 251)
    value = raw.to(torch.uint8).view(dtype).reshape(shape)
    encoded = check(value)
    check([value, {"a": (value,)}])
    form = sole_array(encoded.head)
    assert form is not None
    assert form.memory == str(dtype).replace("torch.", "torch:")


def test_tensors_come_back_from_other_layouts_and_graphs() -> None:
    plain = torch.arange(12.0).reshape(3, 4)
    check(plain.T)
    check(plain[::2, 1:3])
    check(plain.to(torch.bfloat16).T)
    check(torch.tensor(1.0).expand(3, 2))
    imaginary = torch.tensor([1 + 2j, 3 - 1j])
    check(imaginary.conj())
    assert torch.equal(there_and_back(imaginary.conj().imag), imaginary.conj().imag)
    graph = torch.ones(3, requires_grad=True)
    assert not there_and_back(graph).requires_grad
    assert torch.equal(there_and_back(graph * 2), torch.full((3,), 2.0))


def nested(layout: Any, *shapes: tuple[int, ...], dtype: Any = torch.float32) -> Any:
    parts = [torch.arange(math.prod(s), dtype=torch.float32).to(dtype).reshape(s) for s in shapes]
    return torch.nested.nested_tensor(parts, layout=layout, dtype=dtype)


NESTED_SHAPES: list[list[tuple[int, ...]]] = [
    [(3,), (0,), (2,)], [(0,), (0,)], [(2, 3), (0, 3), (5, 3)], [(4, 2, 2)], [(1,), (20000,)],
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("shapes", NESTED_SHAPES, ids=str)
def test_nested_tensors_come_back(shapes: Any, layout: Any, dtype: Any) -> None:
    value = nested(layout, *shapes, dtype=dtype)
    check(value)
    check({"a": [value]})
    assert sole_array(encode(value).head) is None


def test_nested_tensors_of_every_kind_come_back() -> None:
    ragged = nested(torch.strided, (2, 3), (0, 5), (4, 1))
    check(ragged)
    assert same(there_and_back(ragged).to_padded_tensor(0.0), ragged.to_padded_tensor(0.0))
    check(torch.nested.nested_tensor([]))
    check(torch.nested.nested_tensor([], dtype=torch.bfloat16))
    check(nested(torch.strided, (), ()))
    check(nested(torch.strided, (2, 3), (4, 3)).transpose(1, 2))
    jagged = nested(torch.jagged, (2, 3), (4, 3))
    check(jagged.transpose(1, 2))
    holes = torch.nested.nested_tensor_from_jagged(
        torch.arange(10.0), offsets=torch.tensor([0, 4, 7, 10]), lengths=torch.tensor([2, 0, 3])
    )
    check(holes)
    assert not there_and_back(jagged.clone().requires_grad_()).requires_grad
    again = there_and_back(jagged)
    assert torch.equal((again * 2).values(), jagged.values() * 2)


def test_nested_tensors_are_one_array() -> None:
    for layout in (torch.jagged, torch.strided):
        encoded = encode(nested(layout, (30, 700), (0, 700), (20, 700)))
        assert [form.shape for form in encoded.forms] == [(50, 700)]


# ---------------------------------------------------------------- lists of numbers


def memory_of(value: Any) -> tuple[str, str]:
    form = sole_array(encode(value).head)
    assert form is not None
    return form.dtype, form.memory


@pytest.mark.parametrize(
    ("item", "dtype"),
    [(0.5, "float32"), (-0.0, "float32"), (0.1, "float64"),
     (math.nan, "float32"), (1e300, "float64"),
     (NAN_PAYLOAD, "float64"), (SIGNALLING, "float64"), (NEGATIVE_NAN, "float32"),
     (-math.inf, "float32"), (5e-324, "float64"), (2.0**-149, "float32"), (3.5e38, "float64")],
)  # fmt: skip
@pytest.mark.parametrize("count", [16, 20000])
def test_floats_are_narrowed_where_all_bits_come_back(item: float, dtype: str, count: int) -> None:
    numbers = [1.0] * (count - 1) + [item]
    check(numbers)
    assert memory_of(numbers) == (dtype, "list:float")


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [(0, 255, "uint8"), (-1, 127, "int8"), (0, 256, "int16"), (0, 65535, "uint16"),
     (-1, 65535, "int32"), (0, 2**32 - 1, "uint32"), (-1, 2**32 - 1, "int64"),
     (-(2**63), 2**63 - 1, "int64")],
)  # fmt: skip
def test_ints_are_narrowed_as_far_as_they_go(low: int, high: int, dtype: str) -> None:
    for count in (16, 70000):
        numbers = [low, high] * (count // 2)
        check(numbers)
        assert memory_of(numbers) == (dtype, "list:int")


def test_lists_that_are_short_or_mixed_stay_lists() -> None:
    mixed: list[Any] = [
        [0.5] * 15, [1] * 15, [1.0] * 16 + [1], [1] * 16 + [True], [1] * 16 + [2**63], [True] * 20,
        [1.0] * 16 + [np.float64(1)],
    ]  # fmt: skip
    for numbers in mixed:
        check(numbers)
        assert sole_array(encode(numbers).head) is None


# ---------------------------------------------------------------- routed experts


def chunk(data: Any, prefix: int = 3, output: int = 5, *, first: bool = True) -> dict[str, Any]:
    return {
        "data": data, "prefix_token_count": prefix, "output_token_count": output,
        "is_first_chunk": first, "note": "kept",
    }  # fmt: skip


IDS = np.arange(7 * 4 * 2, dtype="<i4").reshape(7, 4, 2)


def in_base64(ids: Any) -> str:
    return base64.b64encode(ids.astype("<i4").tobytes()).decode()


FORMS: dict[str, tuple[Callable[[Any], Any], str, tuple[int, ...]]] = {
    "base64": (in_base64, "base64:int32", (7, 8)),
    "bytes": (lambda ids: ids.tobytes(), "bytes:int32", (7, 8)),
    "int32": (lambda ids: ids, "numpy:int32", (7, 4, 2)),
    "int64": (lambda ids: ids.astype("i8"), "numpy:int64", (7, 4, 2)),
    "uint8": (lambda ids: (ids % 256).astype("u1"), "numpy:uint8", (7, 4, 2)),
    "big": (lambda ids: ids.astype(">i4"), "numpy:>i4", (7, 4, 2)),
    "longlong": (lambda ids: ids.astype("q"), "numpy:<q", (7, 4, 2)),
    "strided": (lambda ids: np.repeat(ids, 2, 2)[..., ::2], "numpy:int32", (7, 4, 2)),
    "flat": (lambda ids: ids.reshape(-1), "numpy:int32", (7, 8)),
    "tensor": (torch.from_numpy, "torch:int32", (7, 4, 2)),
    "tensor int64": (lambda ids: torch.from_numpy(ids).long(), "torch:int64", (7, 4, 2)),
    "flat tensor": (lambda ids: torch.from_numpy(ids).short().reshape(-1), "torch:int16", (7, 8)),
    "lists": (lambda ids: ids.tolist(), "list:int", (7, 4, 2)),
    "flat list": (lambda ids: ids.reshape(-1).tolist(), "list:int", (7, 8)),
}


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize(
    ("offset", "dtype"), [(0, "uint8"), (500, "uint16"), (70000, "int32"), (-1, "int32")]
)
def test_chunks_of_routed_experts_become_rows(kind: str, offset: int, dtype: str) -> None:
    put, memory, shape = FORMS[kind]
    if kind == "flat tensor" and offset == 70000:
        pytest.skip("does not fit int16")
    ids = IDS + np.int32(offset)
    value = chunk(put(ids), first=False)
    check(value)
    encoded = encode({"meta_info": [1, {"routed_experts": [value, chunk("no")]}]})
    (found,) = chunks_of(encoded.head)
    assert isinstance(found.where, np.ndarray)
    assert found.where.dtype == ("uint8" if kind == "uint8" else dtype)
    assert (found.form.shape, found.form.memory) == (shape, memory)
    assert (found.prefix, found.output, found.is_first) == (3, 5, False)
    assert found.form.chunk == RoutedChunk(3, 5, False)
    assert found.form.chunk.rows == 7
    expected = ids % 256 if kind == "uint8" else ids
    assert np.array_equal(found.where.reshape(7, 4, 2), expected)


@pytest.mark.parametrize("kind", FORMS)
def test_large_chunks_lie_outside_and_are_read_by_rows(kind: str) -> None:
    put, memory, _ = FORMS[kind]
    ids = np.random.default_rng(1).integers(0, 256, (4000, 8, 4)).astype("<i4")
    value = chunk(put(ids), prefix=1, output=4000)
    encoded = check([{"x": value}, value])
    assert [found.where for found in chunks_of(encoded.head)] == [0, 1]
    assert [form.dtype for form in encoded.forms] == ["uint8", "uint8"]
    assert len(encoded.head) < 1000
    form, array = encoded.forms[0], encoded.arrays[0]
    whole = restore(form, array.copy())
    assert same(whole, value["data"] if kind != "strided" else value["data"].copy())
    part = restore(form, array[10:20].copy())
    if memory.startswith(("numpy", "torch")):
        assert np.array_equal(np.asarray(part).reshape(10, -1), ids[10:20].reshape(10, -1))


def test_what_is_no_chunk_stays_as_it_is() -> None:
    good = in_base64(IDS)
    odd: list[Any] = [
        chunk(good, prefix=6), chunk(good[:-1]), chunk(good + "\n"), chunk(good[:-4]), chunk(""),
        chunk("!" + good[1:]), chunk("é" + good[1:]), chunk(b""), chunk(b"abc"), chunk(IDS[:6]),
        chunk(IDS.astype("f4")), chunk(IDS > 3), chunk(np.array(3)), chunk(torch.tensor(3)),
        chunk(IDS.astype("i8") + 2**40), chunk(torch.zeros(7, 8, dtype=torch.bfloat16)),
        chunk([[1, 2], [3]] * 7), chunk([[[]]] * 7), chunk([]), chunk([1, "a"] * 7),
        chunk([[1], 2] * 7),
        chunk([2**70] * 7), chunk(None),
        chunk(good, prefix=-1, output=9), chunk(good, 0, 0), chunk(good, 1, 0),
        chunk([True] * 7), chunk(good, prefix=True), chunk(good, prefix=2**80),
        {**chunk(good), "prefix_token_count": 3.0},
        {**chunk(good), "is_first_chunk": 1}, {**chunk(good), "prefix_token_count": np.int64(3)},
        {k: v for k, v in chunk(good).items() if k != "is_first_chunk"},
        chunk(nested(torch.jagged, (7,))),
    ]  # fmt: skip
    for value in odd:
        check(value)
        assert chunks_of(encode(value).head) == []


def test_base64_with_stray_bits_comes_back_with_them() -> None:
    """Two texts decode to the same bytes; only one is what encoding them gives."""
    text = base64.b64encode(bytes(4)).decode()
    assert text == "AAAAAA=="
    value = chunk("AAAAAB==", prefix=1, output=1)
    assert base64.b64decode(value["data"], validate=True) == bytes(4)
    check(value)
    assert chunks_of(encode(value).head) == []
    assert len(chunks_of(encode(chunk(text, prefix=1, output=1)).head)) == 1


def cut_chunk(data: Any, dtype: Any = "int32", rows: Any = 7) -> dict[str, Any]:
    return {"note": "kept", "data": data, "row_count": rows, "dtype": dtype}


def raw(ids: Any, dtype: str) -> bytes:
    data: bytes = ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    return data


def cut_leaf(value: Any) -> ArrayLeaf | None:
    """Return the rows of a cut chunk, if it became one."""
    leaf = outline(encode(value).head)["data"]
    return leaf if isinstance(leaf, ArrayLeaf) and leaf.form.cut else None


CUT: dict[str, tuple[Callable[[Any, str], Any], str, tuple[int, ...]]] = {
    "base64": (lambda ids, t: base64.b64encode(raw(ids, t)).decode(), "base64", (7, 8)),
    "bytes": (raw, "bytes", (7, 8)),
    "array": (lambda ids, t: ids.astype(t), "numpy", (7, 4, 2)),
    "flat array": (lambda ids, t: ids.astype(t).reshape(-1), "numpy", (7, 8)),
    "tensor": (lambda ids, t: torch.from_numpy(ids.astype(t)), "torch", (7, 4, 2)),
    "lists": (lambda ids, _: ids.tolist(), "list", (7, 4, 2)),
}


@pytest.mark.parametrize("kind", CUT)
@pytest.mark.parametrize(
    ("dtype", "offset", "stored_as"),
    [
        ("int32", -1, "int32"), ("int32", 70_000, "int32"), ("int32", 500, "uint16"),
        ("int32", 200, "uint8"), ("uint16", 2**16 - 56, "uint16"), ("uint16", 0, "uint8"),
        ("uint8", 200, "uint8"),
    ],
)  # fmt: skip
def test_chunks_that_are_cut_already_become_rows(
    kind: str, dtype: str, offset: int, stored_as: str
) -> None:
    put, memory, shape = CUT[kind]
    ids = IDS + np.int32(offset)
    value = cut_chunk(put(ids, dtype), dtype)
    check(value)
    leaf = cut_leaf(value)
    assert leaf is not None
    assert isinstance(leaf.where, np.ndarray)
    assert leaf.form.chunk is None
    assert (leaf.form.shape, leaf.form.dtype) == (shape, stored_as)
    assert leaf.form.memory == ("list:int" if kind == "lists" else f"{memory}:{dtype}")
    assert np.array_equal(leaf.where.reshape(7, 4, 2), ids)
    assert chunks_of(encode(value).head) == []


@pytest.mark.parametrize("kind", CUT)
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_large_chunks_that_are_cut_lie_outside(kind: str, dtype: str) -> None:
    put, _, shape = CUT[kind]
    ids = np.random.default_rng(1).integers(0, 256, (4000, 8, 4)).astype("<i4")
    value = cut_chunk(put(ids, dtype), dtype, 4000)
    encoded = check([value, {"x": value}])
    assert [form.dtype for form in encoded.forms] == ["uint8", "uint8"]
    assert encoded.arrays[0].shape == ((4000, 8, 4) if len(shape) == 3 else (4000, 32))
    assert len(encoded.head) < 1000


def test_what_is_no_cut_chunk_stays_as_it_is() -> None:
    good = base64.b64encode(raw(IDS, "uint16")).decode()
    assert cut_leaf(cut_chunk(good, "uint16")) is not None
    odd: list[Any] = [
        cut_chunk(good, "uint16", 5), cut_chunk(good, "uint16", 0), cut_chunk(good, "uint16", -7),
        cut_chunk(good, "uint16", 7.0), cut_chunk(good, "uint16", True),
        cut_chunk(good, "uint16", np.int64(7)), cut_chunk(good, "uint16", 2**80),
        cut_chunk(good, "uint16", "7"), cut_chunk(good, "uint16", None),
        cut_chunk(good, "int16"), cut_chunk(good, "float32"), cut_chunk(good, "<u2"),
        cut_chunk(good, np.dtype("u2")), cut_chunk(good, None), cut_chunk(good, ["uint16"]),
        cut_chunk(good, torch.uint16),
        cut_chunk(good[:-4], "uint16"), cut_chunk(good + "\n", "uint16"), cut_chunk("", "uint16"),
        cut_chunk("é" + good[1:], "uint16"), cut_chunk(bytes(7), "uint16"), cut_chunk(b"", "uint8"),
        cut_chunk(bytes(7 * 4 - 1)), cut_chunk(bytearray(28)),
        cut_chunk(IDS[:6]), cut_chunk(IDS.astype("f4")), cut_chunk(IDS + 250, "uint8"),
        cut_chunk((IDS - 1).tolist(), "uint16"), cut_chunk(IDS > 3), cut_chunk(np.array(3)),
        cut_chunk(np.frombuffer(raw(IDS, "uint16"), "u1"), "uint16"),
        cut_chunk([[1], [2, 3]] * 7), cut_chunk([True] * 7), cut_chunk([]), cut_chunk(None),
        {"data": good, "row_count": 7},
        {"data": good, "dtype": "uint16"},
        {**cut_chunk(good, "uint16"), **chunk("no")},
    ]  # fmt: skip
    for value in odd:
        check(value)
        assert cut_leaf(value) is None


def test_base64_of_a_cut_chunk_with_stray_bits_comes_back_with_them() -> None:
    for text in ("AB==", "AAB="):
        rows = len(base64.b64decode(text))
        value = cut_chunk(text, "uint8", rows)
        check(value)
        assert cut_leaf(value) is None
    assert cut_leaf(cut_chunk("AA==", "uint8", 1)) is not None


def test_a_chunk_that_says_which_tokens_it_is_of_is_not_read_as_cut() -> None:
    value = {**chunk(in_base64(IDS)), "row_count": 14, "dtype": "uint16"}
    check(value)
    (found,) = chunks_of(encode(value).head)
    assert found.form.shape == (7, 8)
    assert cut_leaf(value) is None


def test_a_cyclic_list_is_no_chunk() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ValueUnsupported, match="deeper"):
        encode(chunk(cycle, prefix=1, output=1))


# ---------------------------------------------------------------- refusals


class Colour(enum.IntEnum):
    RED = 1


class Mine:
    def __eq__(self, other: object) -> bool:
        return type(other) is Mine

    __hash__ = None  # type: ignore[assignment]


class Text(str):
    __slots__ = ()


Pair = collections.namedtuple("Pair", "a b")  # the kind programs have

REFUSED: dict[str, tuple[Any, str]] = {
    "object": (Mine(), r"value is a \S*Mine, which"),
    "in a list": ({"a": [1, 2, (3, Mine())]}, r"value\['a'\]\[2\]\[1\] is a \S*Mine"),
    "in a set": ([{Colour.RED}], r"value\[0\]\{0\} is a \S*Colour"),
    "as a key": ({"a": {7: 2, Colour.RED: 3}}, r"value\['a'\]\.keys\(\)\[1\] is a \S*Colour"),
    "under a tuple": ({(1, 2): Mine()}, r"value\[key 0\] is a \S*Mine"),
    "in objects": ([np.array([1, Mine()], object)], r"value\[0\]\.flat\[1\] is a \S*Mine"),
    "enum": (Colour.RED, "Colour"), "text subclass": (Text("a"), "Text"),
    "ordered": (collections.OrderedDict(a=1), "collections.OrderedDict"),
    "defaultdict": (collections.defaultdict(int), "collections.defaultdict"),
    "namedtuple": (Pair(1, 2), "Pair"), "type": (int, "a type"),
    "memoryview": (memoryview(b""), "memoryview"),
    "matrix": (np.zeros((1, 1)).view(np.matrix), "matrix"),
    "masked": (np.ma.masked_array([1, 2], [False, True]), "MaskedArray"),
    "recarray": (np.zeros(2, STRUCT).view(np.recarray), "recarray"),
    "strings": (np.array(["a"], np.dtypes.StringDType()), "numpy array of dtype StringDType"),
    "objects in fields": (np.zeros(1, [("a", object)]), "numpy array of dtype"),
    "records": (np.zeros(1, np.dtype((np.record, [("a", "i4")]))), "numpy array of dtype"),
    "metadata": (np.zeros(1, np.dtype("i4", metadata={"a": 1})), "numpy array of dtype int32"),
    "parameter": (torch.nn.Parameter(torch.ones(1)), "Parameter"),
    "sparse": (torch.eye(2).to_sparse(), "Tensor of torch.float32 and torch.sparse_coo"),
    "quantized": (None, "Tensor of torch.quint8"),
    "meta": (torch.empty(2, device="meta"), "Tensor of"),
    "device": (torch.device("cpu"), "torch.device"), "function": (math.sin, "builtin_function"),
}  # fmt: skip


@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::PendingDeprecationWarning"
)
@pytest.mark.parametrize("name", REFUSED)
def test_other_types_are_refused_with_type_place_and_remedy(name: str) -> None:
    value, message = REFUSED[name]
    if name == "quantized":
        value = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    with pytest.raises(ValueUnsupported, match=message) as refused:
        encode(value, subject="part 7")
    assert str(refused.value).startswith("part 7: value")
    assert str(refused.value).endswith("or set allow_pickle: true")


def test_long_paths_are_shortened() -> None:
    value: Any = Mine()
    for _ in range(90):
        value = {"a long name": value}
    with pytest.raises(ValueUnsupported, match="…") as refused:
        encode(value)
    assert len(str(refused.value)) < 300


def test_parts_are_pickled_where_that_is_allowed() -> None:
    value = {"a": [1, Mine(), Colour.RED, Pair(1, (2,))], "b": np.array([Mine()], object)}
    back = there_and_back(value, allow_pickle=True)
    assert back["a"] == value["a"]
    assert [type(item) for item in back["a"]] == [int, Mine, Colour, Pair]
    large = [collections.OrderedDict(a=bytes(ARRAY_BYTES))]
    encoded = encode(large, allow_pickle=True)
    assert [form.memory for form in encoded.forms] == ["pickle"]
    assert there_and_back(large, allow_pickle=True) == large
    containers = [collections.OrderedDict(a=[1]), collections.deque([{}])]
    assert there_and_back(containers, allow_pickle=True) == containers


def test_plain_values_hold_no_pickle_where_it_is_allowed() -> None:
    value = [1, "a", np.arange(3), torch.ones(2), {(1,): {2}}]
    assert encode(value, allow_pickle=True).head == encode(value).head
    assert pickle.PROTO not in encode(value[:2], allow_pickle=True).head


def test_what_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(ValueUnsupported, match=r"value\[0\] is a .*lambda|pickling it fails"):
        encode([lambda: 1], allow_pickle=True)


def test_pickled_parts_are_not_loaded_unasked() -> None:
    for value in ([Mine()], [collections.OrderedDict(a=bytes(ARRAY_BYTES))]):
        head, outside = stored(encode(value, allow_pickle=True))
        with pytest.raises(ValueUnsupported, match=r"part 7: .* pickle; set allow_pickle"):
            decode(head, outside, subject="part 7")


def test_a_pickle_of_an_unknown_class_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    head = encode(Mine(), allow_pickle=True).head
    monkeypatch.delattr(sys.modules[__name__], "Mine")
    with pytest.raises(DependencyMissing, match=r"part 7: .*Mine"):
        decode(head, (), allow_pickle=True, subject="part 7")


# ---------------------------------------------------------------- memory


def test_large_arrays_are_not_copied() -> None:
    array, tensor = np.zeros(ARRAY_BYTES, "f4"), torch.zeros(ARRAY_BYTES, dtype=torch.bfloat16)
    encoded = encode([array, tensor, array.view(">f4"), array.view("M8[s]")])
    assert np.shares_memory(encoded.arrays[0], array)
    assert encoded.arrays[1].ctypes.data == tensor.data_ptr()
    assert np.shares_memory(encoded.arrays[2], array)
    assert np.shares_memory(encoded.arrays[3], array)
    head, given_ = stored(encoded)
    back = decode(head, given_)
    for mine, theirs in zip(given_, back, strict=True):
        address = theirs.data_ptr() if isinstance(theirs, torch.Tensor) else theirs.ctypes.data
        assert mine.ctypes.data == address
    flat = nested(torch.strided, (300, 100), (200, 100))
    head, given_ = stored(encode(flat))
    assert decode(head, given_).unbind()[0].data_ptr() == given_[0].ctypes.data


@pytest.mark.parametrize("count", [10, 100_000])
def test_what_comes_back_can_be_written_and_is_of_its_own(count: int) -> None:
    """Neither the value that was put, nor its head, nor another result changes with it."""
    frozen = np.arange(count)
    frozen.flags.writeable = False
    value = [frozen, torch.arange(count), np.zeros(count, ">i4"), bytearray(count), [0.5] * count]
    encoded = encode(value)
    head = bytearray(encoded.head)
    first = decode(memoryview(head), [a.copy() for a in encoded.arrays])
    second = decode(memoryview(head), [a.copy() for a in encoded.arrays])
    for item in first:
        item[0] = 1
        item[1] = 7
    assert same(second, value)
    assert bytes(head) == encoded.head
    head[:] = bytes(len(head))
    assert same(second, value)
    assert [item[1] for item in first] == [7] * 5


def test_a_head_of_small_arrays_does_not_change_with_the_value() -> None:
    value = [np.arange(10), torch.zeros(10), bytearray(b"abc")]
    encoded = encode(value)
    before = bytes(encoded.head)
    for item in value:
        item[0] = 9  # type: ignore[index]
    assert encoded.head == before
    assert same(decode(encoded.head, ()), [np.arange(10), torch.zeros(10), bytearray(b"abc")])


def test_heads_of_equal_shapes_are_not_mixed_up() -> None:
    """Heads of single arrays are kept by form: types that numpy calls equal differ there too."""
    count = ARRAY_BYTES // 8
    for _ in range(2):
        for dtype in ("l", "q", "L", "f8", ">i8", "M8[s]", "m8[s]"):
            check(np.zeros(count, dtype))
        for kind in (torch.int64, torch.float64):
            check(torch.zeros(count, dtype=kind))
        check(np.zeros((count, 1), "l"))


# ---------------------------------------------------------------- heads


def test_the_form_of_a_single_array_is_known_from_its_head() -> None:
    assert sole_array(encode(torch.zeros(3, 2)).head) == ArrayForm(
        (3, 2), "float32", "torch:float32"
    )
    large = encode(torch.zeros(300, 200, dtype=torch.bfloat16))
    assert (
        sole_array(large.head)
        == ArrayForm((300, 200), "uint16", "torch:bfloat16")
        == large.forms[0]
    )
    for other in (
        [torch.zeros(3)],
        {"a": 1},
        3,
        None,
        "a",
        (1,),
        2**70,
        np.float32(1),
        [1, 2],
        np.dtype("i4"),
    ):
        assert sole_array(encode(other).head) is None


def test_rows_of_a_single_array_can_be_restored() -> None:
    tensor = torch.arange(40000).to(torch.bfloat16).reshape(200, 200)
    big = np.arange(40000).astype(">i4").reshape(200, 200)
    numbers = [i / 2 for i in range(20000)]
    values: list[Any] = [tensor, big, numbers]
    for value in values:
        encoded = encode(value)
        part = restore(encoded.forms[0], encoded.arrays[0][3:7].copy())
        assert same(part, value[3:7])


HEADS: dict[str, Any] = {
    "plain": {"a": [1, 2.5, "text"], "b": None},
    "tuples": {(1, 2): {3}, "x": (2**70, 1j, "\ud800")},
    "array": np.arange(6).reshape(2, 3),
    "big": np.zeros(2, STRUCT),
    "tensor": torch.ones(2, 3, dtype=torch.bfloat16),
    "numbers": [0.5] * 16,
    "chunk": chunk(in_base64(IDS)),
    "cut chunk": cut_chunk(in_base64(IDS)),
    "objects": np.array([1, "a"], object),
    "scalars": [np.float32(1), np.dtype("i4"), torch.bfloat16, torch.Size([1]), np.str_("a")],
    "jagged": nested(torch.jagged, (3,), (2,)),
    "strided": None,  # made in the test: torch warns of the first
    "outside": [np.zeros(ARRAY_BYTES, "u1"), "x" * ARRAY_BYTES],
    "blobs": [bytearray(b"ab"), range(3), slice(1)],
}


def value_of(name: str) -> Any:
    return nested(torch.strided, (3, 2), (2, 2)) if name == "strided" else HEADS[name]


def damaged(head: bytes) -> list[bytes]:
    flips = [
        head[:i] + bytes([head[i] ^ change]) + head[i + 1 :]
        for i in range(len(head))
        for change in (1, 0x80, 0xFF)
    ]
    return [head[:i] for i in range(len(head))] + flips + [head + b"\x00"]


@pytest.mark.parametrize("name", HEADS)
def test_a_damaged_head_is_noticed(name: str) -> None:
    encoded = encode(value_of(name))
    _, given_ = stored(encoded)
    for head in damaged(encoded.head):
        with pytest.raises(ManifestCorrupt, match=r"part 7: "):
            decode(head, given_, subject="part 7")
        for look in (sole_array, chunks_of):
            with pytest.raises(ManifestCorrupt, match=r"part 7: "):
                look(head, subject="part 7")


def resealed(body: bytes) -> bytes:
    return body + b"\xce" + crc32c(body).to_bytes(4, "big")


@pytest.mark.parametrize("name", HEADS)
def test_a_malformed_head_raises_nothing_but_typed_errors(name: str) -> None:
    """As damaged, but with the checksum of it: what another program may write."""
    encoded = encode(value_of(name))
    _, given_ = stored(encoded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for body in damaged(encoded.head[:-5]):
            for look in (lambda h: decode(h, given_), sole_array, chunks_of):
                with contextlib.suppress(TqFsError):
                    look(resealed(body))


def test_a_head_nested_without_end_is_refused() -> None:
    head = resealed(b"\x93\x01\x90" + b"\x91" * 5000 + b"\x01")
    with pytest.raises(ManifestCorrupt):
        decode(head, ())


def test_a_later_format_is_named() -> None:
    head = resealed(msgspec.msgpack.encode((2, "other", {}, "more")))
    for look in (
        lambda h: decode(h, (), subject="part 7"),
        lambda h: sole_array(h, subject="part 7"),
    ):
        with pytest.raises(FormatTooNew, match=r"part 7: has format tq-fs/value/2.*upgrade"):
            look(head)


def test_arrays_that_do_not_belong_to_the_head_are_refused() -> None:
    head, given_ = stored(encode([np.zeros(ARRAY_BYTES), np.zeros(ARRAY_BYTES, "i4")]))
    wrong: list[list[Any]] = [
        [], given_[:1], [*given_, given_[0]], given_[::-1], [given_[0][:-1], given_[1]],
        [given_[0].view(">f8"), given_[1]],
    ]  # fmt: skip
    for others in wrong:
        with pytest.raises(ManifestCorrupt, match=r"part 7: .*array"):
            decode(head, others, subject="part 7")


def test_an_array_is_not_used_twice_or_left_over() -> None:
    form = ArrayForm((2,), "uint8", "numpy:uint8")
    leaf = msgspec.msgpack.Ext(1, bytes(4))
    for root in ([leaf, leaf], []):
        head = resealed(msgspec.msgpack.encode((1, (form,), root)))
        with pytest.raises(ManifestCorrupt):
            decode(head, [np.zeros(2, "u1")])


def test_values_without_tensors_need_no_torch() -> None:
    code = (
        "import sys, numpy as np\nfrom tq_fs.values.codec import encode, decode, chunks_of\n"
        "value = {'a': [np.arange(3), (1, {2})], 'b': [0.5] * 20}\n"
        "assert decode(encode(value).head, ())['b'] == value['b']\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- tensordict


def test_tensordicts_come_back() -> None:
    tensordict = pytest.importorskip("tensordict")
    inner = tensordict.TensorDict({"c": torch.ones(2, 1)}, batch_size=[2])
    value = tensordict.TensorDict(
        {"a": torch.arange(6).reshape(2, 3), "b": inner},
        batch_size=[2],
        names=["row"],
        device="cpu",
    )
    value["s"] = "hello"
    back = there_and_back([value])[0]
    assert type(back) is tensordict.TensorDict
    assert (back.batch_size, back.names, back.device) == (value.batch_size, ["row"], value.device)
    assert list(back.keys()) == list(value.keys())
    assert same(back["a"], value["a"])
    assert type(back["b"]) is tensordict.TensorDict
    assert same(back["b", "c"], inner["c"])
    assert back["s"] == "hello"
    assert type(back.get("s")) is tensordict.NonTensorData
    with pytest.raises(ValueUnsupported, match=r"value\['n'\] is a .*NonTensorStack"):
        encode(tensordict.TensorDict({"n": tensordict.NonTensorStack("x", "y")}, batch_size=[2]))
