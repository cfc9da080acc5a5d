"""What all parts of a value are built with: leaves, items, and the way out with what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from msgspec.msgpack import Ext

from tq_fs.values.codec._forms import ArrayForm, Part
from tq_fs.values.codec._head import Mark, array_leaf, inline_leaf, is_outside

DEEPEST = 100
_REMEDY = "put arrays, tensors, numbers, text and containers of them, or set allow_pickle: true"
_UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError)
_MARKS = {mark: Ext(int(mark), b"") for mark in Mark}


class Refused(Exception):  # never leaves this package
    """A part cannot be stored; each container on the way out adds its step to `path`."""

    def __init__(self, problem: str, remedy: str = _REMEDY) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy
        self.path: list[str] = []


def mark(kind: Mark) -> Ext:
    """Return the first item of an array that makes up a `kind`."""
    return _MARKS[kind]


class Builder:
    """Builds the root of one value, and collects its large arrays.

    Parameters
    ----------
    build
        Returns the node of a value at a depth, with this builder.
    allow_pickle
        Pickle parts that have no form of their own.
    """

    def __init__(self, build: Callable[[Builder, Any, int], Any], allow_pickle: bool) -> None:
        self.parts: list[Part] = []
        self._build = build
        self._allow_pickle = allow_pickle

    def items(self, items: Iterable[Any], depth: int, where: str = "[{}]") -> list[Any]:
        """Return the nodes of the items of a container at `depth`."""
        check_depth(depth)
        nodes: list[Any] = []
        try:
            for item in items:
                nodes.append(self._build(self, item, depth + 1))  # noqa: PERF401  # for the path
        except Refused as refused:
            refused.path.append(where.format(len(nodes)))
            raise
        return nodes

    def node(self, value: Any, depth: int) -> Any:
        """Return what stands for `value` in the head."""
        return self._build(self, value, depth)

    def leaf(self, part: Part) -> Ext:
        """Return the leaf of an array, which goes outside if it is large."""
        if not is_outside(part):
            return inline_leaf(part)
        self.parts.append(part)
        return array_leaf(len(self.parts) - 1)

    def blob(self, data: bytes | bytearray, memory: str) -> Ext:
        """Return the leaf of bytes that are a `memory`."""
        array = np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)
        return self.leaf(Part(ArrayForm(array.shape, "uint8", memory), array))

    def other(self, value: Any, problem: str = "") -> Ext:
        """Pickle what has no form of its own, if that is allowed."""
        problem = problem or f"is a {type_name(value)}"
        if not self._allow_pickle:
            raise Refused(f"{problem}, which is stored as a pickle only")
        try:
            data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        except _UNPICKLABLE as error:
            remedy = "put something that can be pickled"
            raise Refused(f"{problem}, and pickling it fails: {error}", remedy) from error
        return self.blob(data, "pickle")


def check_depth(depth: int) -> None:
    """Refuse a container that lies too deep, or in itself."""
    if depth >= DEEPEST:
        raise Refused(f"nests deeper than {DEEPEST} levels", "flatten it, or break the cycle")


def type_name(value: Any) -> str:
    """Return the full name of a value's type."""
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return module + kind.__qualname__
