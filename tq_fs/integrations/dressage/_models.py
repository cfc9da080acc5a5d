"""References, fragments and layouts as they ride in a sample's meta data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from tq_fs.errors import InvalidSegment
from tq_fs.fields import LOGPROBS, ROUTED_EXPERTS, FieldSpec, logprobs, routed_experts

Count = Annotated[int, msgspec.Meta(ge=0)]
LogicalField = Literal["full_logprobs", "routed_experts"]
_NAMES: dict[str, str] = {"full_logprobs": LOGPROBS, "routed_experts": ROUTED_EXPERTS}


class Ref(msgspec.Struct, frozen=True, kw_only=True):
    """A value in TransferQueue.

    Attributes
    ----------
    store_id
        The store of tq-fs that it lies in; empty where nobody checks.
    partition, key, field
        As ``transfer_queue.kv_put`` had them.
    incarnation_id
        Which of the values that were put under that name: the name of its group in the store, which
        is never used again, neither by a later put nor by a later run, and stays what it is where a
        checkpoint is loaded (:func:`refs_of` gives it). Empty for the one that is there when it is
        read.
    """

    store_id: str
    partition: str
    key: str
    field: str
    incarnation_id: str = ""

    def __str__(self) -> str:
        """Name the value for messages."""
        return f"{self.field!r} of key {self.key!r} ({self.partition})"


class Fragment(msgspec.Struct, frozen=True, kw_only=True):
    """A run of rows of a value inside a layout.

    Attributes
    ----------
    ref
        The value.
    source_start
        Its first row: of an array; of the sequence, where it is chunks of routed experts; or of
        chunks that are cut already (with ``row_count``), one after the other.
    target_start
        The layout's row that this becomes.
    length
        Rows of routed experts, tokens of logprobs.
    """

    ref: Ref
    source_start: Count
    target_start: Count
    length: Count


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What one field of a sample is made of.

    Attributes
    ----------
    logical_field
        ``full_logprobs`` or ``routed_experts``.
    codec
        How the program that put the values has encoded them. Not read: values know what they are.
    fragments
        They make up all rows, once each.
    token_count
        Tokens T of the whole segment.
    shape
        ``[T]``, or ``[T-1, layers, topk]``.
    """

    logical_field: LogicalField
    fragments: tuple[Fragment, ...]
    token_count: Count
    shape: tuple[Count, ...]
    codec: str = ""

    @property
    def field(self) -> str:
        """Name of the field in tq-fs."""
        return _NAMES[self.logical_field]

    @property
    def rows(self) -> int:
        """Its rows: one for each token, or for each transition."""
        return self.token_count if self.field == LOGPROBS else max(0, self.token_count - 1)

    @property
    def inner(self) -> tuple[int, ...]:
        """Shape of a row."""
        return self.shape[1:]

    def spec(self) -> FieldSpec:
        """Declare the field as tq-fs knows it."""
        if self.field == LOGPROBS:
            return logprobs()
        return routed_experts(layers=self.shape[1], topk=self.shape[2])


def layout_of(plain: Any) -> Layout:
    """Return a layout from what rides in meta data: a dict, or an object with such attributes.

    Raises
    ------
    InvalidSegment
        Something is missing, of another type, or does not fit the rest; the message says what.
    """
    name = plain.get("logical_field") if isinstance(plain, Mapping) else None
    subject = f"layout of {name}" if isinstance(name, str) else "layout"
    try:
        layout = msgspec.convert(plain, Layout, from_attributes=True)
    except msgspec.ValidationError as error:
        raise InvalidSegment(f"is none: {error}", subject=subject) from error
    _check_shape(layout, subject)
    return msgspec.structs.replace(layout, fragments=_ordered(layout, subject))


def _check_shape(layout: Layout, subject: str) -> None:
    axes = 1 if layout.field == LOGPROBS else 3
    good = len(layout.shape) == axes and layout.shape[0] == layout.rows
    if not good or 0 in layout.inner:
        form = "[T]" if axes == 1 else "[T-1, layers, topk]"
        raise InvalidSegment(
            f"has shape {list(layout.shape)} where {form} belongs, T = {layout.token_count}",
            subject=subject,
        )


def _ordered(layout: Layout, subject: str) -> tuple[Fragment, ...]:
    """Return the fragments in the order of their rows, once they cover them exactly."""
    found = sorted((f for f in layout.fragments if f.length), key=lambda f: f.target_start)
    end = 0
    for fragment in found:
        if fragment.target_start != end:
            what = "leave a gap" if fragment.target_start > end else "overlap"
            raise InvalidSegment(
                f"its fragments {what}: {fragment.ref} starts at row {fragment.target_start}, "
                f"row {end} comes next",
                subject=subject,
            )
        end += fragment.length
    if end != layout.rows:
        raise InvalidSegment(
            f"its fragments make up {end} rows, its shape says {layout.rows}", subject=subject
        )
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSample:
    """A sample with layouts.

    Attributes
    ----------
    tokens
        Its length in tokens; shorter than its layouts where it was truncated.
    response_length
        Tokens of the response, the tail of the sample.
    layouts
        By the name of their field in tq-fs.
    removed
        Whether training is to ignore it: its fields are zeros, and nothing is read.
    """

    tokens: int
    response_length: int
    layouts: Mapping[str, Layout]
    removed: bool = False

    @classmethod
    def of(
        cls, layouts: Any, *, tokens: int, response_length: int, removed: bool = False
    ) -> LayoutSample:
        """Make one of plain layouts: several of them, or a dict with one for each field.

        Raises
        ------
        InvalidSegment
            One is no layout, or two are of one field.
        """
        items: Iterable[Any] = layouts.values() if isinstance(layouts, Mapping) else layouts or ()
        found: dict[str, Layout] = {}
        for layout in map(layout_of, items):
            if layout.field in found:
                raise InvalidSegment("is there twice", subject=f"layout of {layout.logical_field}")
            found[layout.field] = layout
        return cls(tokens=tokens, response_length=response_length, layouts=found, removed=removed)
