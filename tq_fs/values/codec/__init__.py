"""Values that a program puts, as bytes and arrays; and back, exactly."""

from __future__ import annotations

from tq_fs.values.codec._arrays import restore
from tq_fs.values.codec._decode import decode
from tq_fs.values.codec._encode import EncodedValue, encode
from tq_fs.values.codec._forms import ARRAY_BYTES, ArrayForm, RoutedChunk
from tq_fs.values.codec._head import ChunkArray, chunks_of, sole_array
from tq_fs.values.codec._outline import ArrayLeaf, OtherLeaf, kind_of, outline

__all__ = [
    "ARRAY_BYTES",
    "ArrayForm",
    "ArrayLeaf",
    "ChunkArray",
    "EncodedValue",
    "OtherLeaf",
    "RoutedChunk",
    "chunks_of",
    "decode",
    "encode",
    "kind_of",
    "outline",
    "restore",
    "sole_array",
]
