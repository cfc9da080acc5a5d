"""One Step is one Zarr v3 group: layout, encoding, decoding and chunk ranges. Pure: no I/O."""

from tq_fs.steps._arrays import (
    GROUP,
    Buffer,
    EncodeOptions,
    Form,
    Scratch,
    array_form,
    default_codec,
    encode_array,
    form_of_layout,
    shard_index,
)
from tq_fs.steps._codecs import check, decode, verify
from tq_fs.steps._encode import EncodedStep, FieldArray, encode_step
from tq_fs.steps._entry import (
    MASK_SUFFIX,
    STEP_SCHEMA,
    ArrayEntry,
    StepAttributes,
    StepEntry,
    attributes_json,
    check_schema,
    read_attributes,
)
from tq_fs.steps._layout import CHECKSUM_BYTES, ArrayLayout, Part, known_layout, layout_for
from tq_fs.steps._measure import measure_group
from tq_fs.steps._metadata import array_json, group_json

__all__ = [
    "CHECKSUM_BYTES",
    "GROUP",
    "MASK_SUFFIX",
    "STEP_SCHEMA",
    "ArrayEntry",
    "ArrayLayout",
    "Buffer",
    "EncodeOptions",
    "EncodedStep",
    "FieldArray",
    "Form",
    "Part",
    "Scratch",
    "StepAttributes",
    "StepEntry",
    "array_form",
    "array_json",
    "attributes_json",
    "check",
    "check_schema",
    "decode",
    "default_codec",
    "encode_array",
    "encode_step",
    "form_of_layout",
    "group_json",
    "known_layout",
    "layout_for",
    "measure_group",
    "read_attributes",
    "shard_index",
    "verify",
]
