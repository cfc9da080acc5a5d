"""Whether the copy of one Step is what its manifest says: every byte of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from tq_fs.backends import COMMIT, Backend, LocalBackend, ObjectReader
from tq_fs.errors import (
    ChunkCorrupt,
    CorruptError,
    FormatTooNew,
    ManifestCorrupt,
    ObjectMissing,
    ObjectShort,
    StorageDenied,
    StorageFailed,
)
from tq_fs.keys import StepKey
from tq_fs.manifests import SessionManifest
from tq_fs.operate._findings import Finding
from tq_fs.steps import (
    MASK_SUFFIX,
    ArrayEntry,
    ArrayLayout,
    StepEntry,
    array_json,
    decode,
    read_attributes,
    shard_index,
    verify,
)

Bytes = npt.NDArray[np.uint8]
_FAILURES = (StorageFailed, StorageDenied)
_Problem = CorruptError | ObjectMissing | StorageFailed | StorageDenied


@dataclass(slots=True)
class Checked:
    """What was read of a Step, and what is wrong with it."""

    chunks: int = 0
    nbytes: int = 0
    unchecked_nbytes: int = 0
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class StepCopy:
    """A Step in one tier, all of whose objects are there in their full size.

    Attributes
    ----------
    manifest, step
        What the store says of it.
    tier, backend
        Where the copy lies.
    members
        Names of the objects that lie there.
    """

    manifest: SessionManifest
    step: StepEntry
    tier: str
    backend: Backend
    members: frozenset[str]

    @property
    def failures(self) -> tuple[type[StorageFailed] | type[StorageDenied], ...]:
        """What is wrong with one object only: an object store that fails, fails altogether."""
        return _FAILURES if isinstance(self.backend, LocalBackend) else ()

    @property
    def path(self) -> str:
        """Path of the incarnation."""
        return self.manifest.incarnation.path

    def finding(self, kind: str, name: str, detail: str) -> Finding:
        """Return that something is wrong with one of its objects."""
        place = f"{self.step.place(self.path)}/{name}"
        return Finding(
            kind=kind,
            path=self.path,
            place=place,
            detail=detail,
            step=self.step.index,
            tier=self.tier,
        )


def check_step(copy: StepCopy) -> Checked:
    """Read a Step whole and return what is wrong with it.

    What seems wrong is read once more: it may have changed on its way.
    """
    checked = Checked()
    findings = [*_metadata(copy)]
    for name, array in arrays_of(copy.step):
        if array.layout.chunks:
            problem = _object_problem(copy, name, array, checked)
            if problem is not None:
                member = f"{name}/{array.layout.object_name}"
                findings.append(copy.finding(*_kind(problem, member)))
    checked.findings = tuple(findings)
    return checked


def _kind(problem: _Problem, member: str) -> tuple[str, str, str]:
    kinds = {ObjectShort: "truncated", ObjectMissing: "missing"}
    kind = "failed" if isinstance(problem, _FAILURES) else kinds.get(type(problem), "corrupt")
    return kind, member, problem.problem


def arrays_of(step: StepEntry) -> Iterator[tuple[str, ArrayEntry]]:
    """Yield name and entry of each array of a Step, the masks of unknown values too."""
    for name, entry in step.fields.items():
        yield name, entry
        if entry.mask is not None:
            yield name + MASK_SUFFIX, entry.mask


# ---------------------------------------------------------------- values


def _object_problem(
    copy: StepCopy, name: str, array: ArrayEntry, checked: Checked
) -> _Problem | None:
    """Return why an array's object cannot be used, having read it twice."""
    key = f"{copy.step.place(copy.path)}/{name}/{array.layout.object_name}"
    checked.chunks += array.layout.chunks
    checked.nbytes += array.nbytes
    if array.layout.plain and not array.checksum:
        checked.unchecked_nbytes += array.nbytes
    for is_last in (False, True):
        try:
            with copy.backend.open(key) as reader:
                _check_object(reader, array)
        except (ChunkCorrupt, ObjectShort, ObjectMissing, *copy.failures) as error:
            if is_last:
                return error
        else:
            return None
    return None


def _check_object(reader: ObjectReader, array: ArrayEntry) -> None:
    """Read an object chunk by chunk.

    Raises
    ------
    ChunkCorrupt, ObjectShort, ObjectMissing
    """
    layout, sizes = array.layout, array.sizes
    offsets = layout.offsets(sizes)
    reader.ahead(0, array.nbytes)
    for position in range(layout.chunks):
        stored = _read(reader, offsets[position], offsets[position + 1])
        wanted = layout.stored_nbytes(position, sizes)
        try:
            _check_chunk(stored[:wanted], layout)
        except ChunkCorrupt as error:
            raise ChunkCorrupt(f"chunk {position} {error.problem}") from error
        if stored[wanted:].any():
            raise ChunkCorrupt(f"the gap behind chunk {position} holds something")
    if layout.sharded:
        index = _read(reader, offsets[-1], array.nbytes)
        if index.tobytes() != shard_index(layout, sizes):
            raise ChunkCorrupt("its shard index is not the one that was written")


def _read(reader: ObjectReader, start: int, stop: int) -> Bytes:
    data = np.empty(stop - start, np.uint8)
    reader.readinto([data], start)
    return data


def _check_chunk(stored: Bytes, layout: ArrayLayout) -> None:
    if layout.checksum:
        verify(stored)
    elif not layout.plain:
        decode(stored, layout, lambda nbytes: np.empty(nbytes, np.uint8))


# ---------------------------------------------------------------- metadata


def _metadata(copy: StepCopy) -> Iterator[Finding]:
    """Yield what is wrong with a Step's own description."""
    place = copy.step.place(copy.path)
    for name in [COMMIT, *(f"{n}/{COMMIT}" for n, _ in arrays_of(copy.step))]:
        if name not in copy.members and name != COMMIT:
            continue  # the compact layout has none
        try:
            data = copy.backend.get(f"{place}/{name}")
            problem = _json_problem(data, copy, name)
        except ObjectMissing as error:
            yield copy.finding("missing", name, error.problem)
        except FormatTooNew as error:
            yield copy.finding("too-new", name, error.problem)
        except CorruptError as error:
            yield copy.finding("corrupt", name, error.problem)
        except copy.failures as error:
            yield copy.finding("failed", name, error.problem)
        else:
            if problem:
                yield copy.finding("mismatch", name, problem)


def _json_problem(data: bytes, copy: StepCopy, name: str) -> str:
    return _group_problem(data, copy) if name == COMMIT else _array_problem(data, copy, name)


def _group_problem(data: bytes, copy: StepCopy) -> str:
    """Return what a group's metadata says that the manifest does not; empty for nothing.

    Raises
    ------
    CorruptError
    """
    found = read_attributes(data, COMMIT)
    key = StepKey(copy.manifest.incarnation, copy.step.index)
    if (found.store_id, found.key) != (copy.manifest.store_id, key):
        return f"says it is {found.key} of store {found.store_id!r}"
    own = msgspec.structs.replace(copy.step, unit=found.step.unit, attempt=found.step.attempt)
    if own != found.step:
        return "describes its arrays otherwise than the manifest does"
    group = msgspec.json.decode(data)
    arrays = (group.get("consolidated_metadata") or {}).get("metadata")
    wanted = {n: msgspec.json.decode(array_json(a.layout)) for n, a in arrays_of(copy.step)}
    return "" if arrays == wanted else "its consolidated metadata is not that of its arrays"


def _array_problem(data: bytes, copy: StepCopy, name: str) -> str:
    entry = dict(arrays_of(copy.step))[name.rpartition("/")[0]]
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ManifestCorrupt(f"is no JSON: {error}") from error
    wanted = msgspec.json.decode(array_json(entry.layout))
    return "" if found == wanted else "describes the array otherwise than the manifest does"
