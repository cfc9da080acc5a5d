"""The bytes beside a value's arrays: a sealed msgpack document.

A head is two msgpack objects in a row: ``[version, forms, root]``, and the crc32c of its bytes as a
``uint32``. `forms` are the arrays that are stored outside, by number. `root` is the value: what
msgpack has is itself, and an extension is a leaf of another type (an array among them), or, first
in an array and empty, says what the array's other items make up: a tuple, a set, a dict ...
"""

from __future__ import annotations

import enum
import functools
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np
from crc32c import crc32c
from msgspec.msgpack import Ext

from tq_fs.errors import FormatTooNew, ManifestCorrupt, TqFsError
from tq_fs.values.codec._forms import ARRAY_BYTES, STORED, Array, ArrayForm, Part

VERSION = 1
_SEAL = b"\xce"  # msgpack: a uint32 follows
_SEAL_BYTES = 5
_EXTENSIONS = frozenset({0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8})  # first bytes


class Leaf(enum.IntEnum):
    """Extensions that are a value."""

    ARRAY = 1  # number of an array stored outside: 4 bytes
    INLINE = 2  # [form, bytes]
    INT = 3  # beyond msgpack's 64 bits: little-endian, signed
    COMPLEX = 4  # two float64
    TEXT = 5  # with lone surrogates: UTF-8 with them passed
    BYTEARRAY = 6
    SCALAR = 7  # numpy's: [dtype, bytes]
    DTYPE = 8  # numpy's
    TORCH_DTYPE = 9


class Mark(enum.IntEnum):
    """Extensions that say what the other items of their array make up."""

    TUPLE = 32
    SET = 33
    FROZENSET = 34
    DICT = 35  # key, value, key, value ...
    OBJECTS = 36  # shape, items: numpy array of objects
    RANGE = 37  # start, stop, step
    SLICE = 38  # start, stop, step
    TORCH_SIZE = 39
    NESTED = 40  # values, sizes: nested tensor, strided
    JAGGED = 41  # values, offsets, lengths, ragged axis: nested tensor, jagged
    TENSORDICT = 42  # batch size, axis names, whether it has a device, items
    NON_TENSOR = 43  # batch size, data


class Document(msgspec.Struct, frozen=True, array_like=True):
    """What a head says, not yet read."""

    version: int
    forms: msgspec.Raw
    root: msgspec.Raw


class ChunkArray(NamedTuple):
    """A chunk of routed experts inside a value.

    Attributes
    ----------
    where
        Number of its array among those stored outside, or the array itself where it is small.
    form
        How it is stored: ``shape[0]`` is its rows.
    prefix, output
        Tokens, as the chunk says.
    is_first
        Whether it is the generation's first.
    """

    where: int | Array
    form: ArrayForm
    prefix: int
    output: int
    is_first: bool


_read_document = msgspec.msgpack.Decoder(Document).decode
_read_forms = msgspec.msgpack.Decoder(tuple[ArrayForm, ...]).decode
_read_inline = msgspec.msgpack.Decoder(tuple[ArrayForm, memoryview]).decode
_write = msgspec.msgpack.Encoder().encode


def seal(forms: tuple[ArrayForm, ...], root: Any) -> bytes:
    """Return the head of a value."""
    body = _write((VERSION, forms, root))
    return b"%b%b%b" % (body, _SEAL, crc32c(body).to_bytes(4, "big"))


@functools.lru_cache(maxsize=4096)
def sole_head(form: ArrayForm) -> bytes:
    """Return the head of a value that is one array, stored outside."""
    return seal((form,), array_leaf(0))


def array_leaf(number: int) -> Ext:
    """Return the leaf of an array that is stored outside."""
    return Ext(int(Leaf.ARRAY), number.to_bytes(4, "little"))


def inline_leaf(part: Part) -> Ext:
    """Return the leaf of a small array."""
    return Ext(int(Leaf.INLINE), _write((part.form, part.array.tobytes())))


def unseal(head: bytes | memoryview) -> tuple[tuple[ArrayForm, ...], msgspec.Raw]:
    """Return the forms of the arrays stored outside, and the value's root, not yet read.

    Raises
    ------
    FormatTooNew, ManifestCorrupt, msgspec.DecodeError
    """
    view = memoryview(head).cast("B")
    body, tail = view[:-_SEAL_BYTES], bytes(view[-_SEAL_BYTES:])
    if tail != _SEAL + crc32c(body).to_bytes(4, "big"):
        raise ManifestCorrupt(f"the head of a value ({len(view)} bytes) fails its checksum")
    document = _read_document(body)
    if document.version > VERSION:
        raise FormatTooNew(
            f"has format tq-fs/value/{document.version}, this version reads {VERSION}",
            remedy="upgrade tq-fs",
        )
    forms = _read_forms(document.forms)
    for form in forms:
        _check(form)
    return forms, document.root


def read_inline(data: memoryview) -> Part:
    """Return a small array, in memory of its own.

    Raises
    ------
    ManifestCorrupt, msgspec.DecodeError
    """
    form, raw = _read_inline(data)
    _check(form)
    if form.nbytes != len(raw):
        raise ManifestCorrupt(f"an array of {form.nbytes} bytes has {len(raw)}")
    return Part(form, np.ndarray(form.shape, form.dtype, raw).copy())


def _check(form: ArrayForm) -> None:
    if form.dtype not in STORED or min(form.shape, default=0) < 0:
        raise ManifestCorrupt(f"an array has shape {form.shape} and stored type {form.dtype!r}")


@contextmanager
def reading(subject: str) -> Iterator[None]:
    """Turn what reading a malformed head raises into an error that names `subject`.

    Raises
    ------
    ManifestCorrupt
    """
    try:
        yield
    except TqFsError as error:
        error.subject = error.subject or subject
        raise
    except (LookupError, ValueError, TypeError, ArithmeticError, AttributeError, RuntimeError,
            msgspec.MsgspecError, struct.error) as error:  # fmt: skip
        problem = f"not the head of a value: {type(error).__name__}: {error}"
        raise ManifestCorrupt(problem, subject=subject) from error


def sole_array(head: bytes | memoryview, *, subject: str = "") -> ArrayForm | None:
    """Return the form of a value that is one array, tensor, text or list of numbers; else None.

    It is stored outside, under number 0, where its bytes are `ARRAY_BYTES` or more.

    Raises
    ------
    FormatTooNew, ManifestCorrupt
    """
    with reading(subject):
        forms, root = unseal(head)
        if memoryview(root)[0] not in _EXTENSIONS:
            return None
        leaf = msgspec.msgpack.decode(root, ext_hook=lambda code, data: _form(forms, code, data))
        return leaf if isinstance(leaf, ArrayForm) else None


def _form(forms: tuple[ArrayForm, ...], code: int, data: memoryview) -> ArrayForm | None:
    if code == Leaf.ARRAY:
        return forms[int.from_bytes(data, "little")]
    return _read_inline(data)[0] if code == Leaf.INLINE else None


def chunks_of(head: bytes | memoryview, *, subject: str = "") -> list[ChunkArray]:
    """Return the chunks of routed experts in a value, in its order, without its arrays.

    Those that are cut already are not among them: they do not say which tokens they are of.

    Raises
    ------
    FormatTooNew, ManifestCorrupt
    """
    found: list[ChunkArray] = []
    with reading(subject):
        forms, root = unseal(head)

        def hook(code: int, data: memoryview) -> None:
            if code == Leaf.ARRAY:
                number = int.from_bytes(data, "little")
                found.extend(_chunk(number, forms[number]))
            elif code == Leaf.INLINE and _read_inline(data)[0].chunk is not None:
                part = read_inline(data)
                found.extend(_chunk(part.array, part.form))

        msgspec.msgpack.decode(root, ext_hook=hook)
    return found


def _chunk(where: int | Array, form: ArrayForm) -> list[ChunkArray]:
    chunk = form.chunk
    if chunk is None:
        return []
    return [ChunkArray(where, form, chunk.prefix, chunk.output, chunk.is_first)]


def is_outside(part: Part) -> bool:
    """Return whether an array is large enough to be stored outside of the head."""
    return part.array.nbytes >= ARRAY_BYTES
