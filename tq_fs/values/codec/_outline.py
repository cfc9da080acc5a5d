"""What a value is, seen from its head: its containers, with leaves where arrays belong."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from tq_fs.values.codec._forms import Array, ArrayForm
from tq_fs.values.codec._head import Leaf, Mark, read_inline, reading, unseal


class ArrayLeaf(NamedTuple):
    """An array of a value.

    Attributes
    ----------
    where
        Its number among those stored outside, or the array itself where it is small; of the stored
        type.
    form
        How it is stored, and what it is in memory.
    """

    where: int | Array
    form: ArrayForm


class OtherLeaf(NamedTuple):
    """A leaf that is no array, or the mark at the head of a container."""

    name: str


def outline(head: bytes | memoryview, *, subject: str = "") -> Any:
    """Return a value's dicts, lists, text and numbers, with an `ArrayLeaf` for each array.

    What is none of these is a list that begins with an `OtherLeaf`, or an `OtherLeaf`.

    Raises
    ------
    FormatTooNew, ManifestCorrupt
    """
    with reading(subject):
        forms, root = unseal(head)

        def hook(code: int, data: memoryview) -> ArrayLeaf | OtherLeaf:
            if code == Leaf.ARRAY:
                number = int.from_bytes(data, "little")
                return ArrayLeaf(number, forms[number])
            if code == Leaf.INLINE:
                form, array = read_inline(data)
                return ArrayLeaf(array, form)
            kind = Leaf if code < min(Mark) else Mark
            return OtherLeaf(kind(code).name.lower())

        return msgspec.msgpack.decode(root, ext_hook=hook)


def kind_of(outlined: Any) -> str:
    """Name a value's type for messages."""
    if isinstance(outlined, ArrayLeaf):
        return outlined.form.memory.replace(":", " ", 1)
    if isinstance(outlined, OtherLeaf):
        return outlined.name
    if isinstance(outlined, list) and outlined and isinstance(outlined[0], OtherLeaf):
        return kind_of(outlined[0])
    return type(outlined).__name__
