"""What is known of a value that is stored: where its bytes lie, and what its group says of it."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tq_fs.steps import ArrayEntry

VALUES_SCHEMA = "tq-fs/values/1"
ROOT = "values"
SMALL = "small"
DEEP = 4  # components of a group's path: root, run, shard, group; below may be an attempt


class Place(NamedTuple):
    """Where a group of values lies.

    Attributes
    ----------
    unit
        The StorageUnit; empty where all that the store has lies in one place.
    path
        Of the group.
    """

    unit: str
    path: str


class ValueEntry(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One value as it is stored in its group.

    Attributes
    ----------
    head
        What the value is (msgpack), where that is short and there are arrays.
    at, nbytes, crc
        Else: where the head lies in the group's array ``small``, and its CRC-32C.
    first
        Number of its first array: they are called ``a<number>``.
    arrays
        Its large arrays.
    """

    head: bytes = b""
    at: int = 0
    nbytes: int = 0
    crc: int = 0
    first: int = 0
    arrays: tuple[ArrayEntry, ...] = ()

    def name(self, number: int) -> str:
        """Return the name of one of its arrays."""
        return f"a{self.first + number}"


class NamedEntry(msgspec.Struct, frozen=True, array_like=True):
    """A value with what it is called."""

    index: int
    field: str
    entry: ValueEntry


class GroupAttributes(msgspec.Struct, frozen=True, kw_only=True):
    """The value under ``tq_fs`` in the attributes of a group of values."""

    schema: str
    store_id: str
    run: str
    partition: str
    values: tuple[NamedEntry, ...]


class StoredGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group that was published.

    Attributes
    ----------
    unit, path
        Its place.
    nbytes
        Of its objects.
    values
        What lies in it.
    """

    unit: str
    path: str
    nbytes: int
    values: tuple[NamedEntry, ...]


class Found(NamedTuple):
    """A value that is there: what it is, where, and since which put."""

    entry: ValueEntry
    place: Place
    generation: int


def group_path(path: str) -> str:
    """Return a group's path without that of an attempt to write it."""
    return "/".join(path.split("/")[:DEEP])
