"""A store on several units: recorded, read and released, also when one of them ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests._clusters import Cluster, cluster, readers_of, units_of
from tests._rollouts import (
    assert_batch,
    record,
    refs_of,
    specs,
    standard_fields,
)
from tq_fs.keys import SegmentRef

FIELDS = standard_fields()
SPECS = specs(FIELDS)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path, 2) as made:
        yield made


def test_what_was_recorded_on_many_units_is_read_bit_for_bit_from_any_node(two: Cluster) -> None:
    with two.store(SPECS) as writer, two.store(SPECS, "n0") as near, two.store(SPECS) as far:
        recorded = [record(writer, f"s{i}", i) for i in range(12)]
        refs = [ref for segments, _ in recorded for ref in refs_of(segments)]
        wants = [want for _, found in recorded for want in found]
        for store in (near, far):
            assert_batch(store.hydrate(refs), wants)
        homes = {ref.incarnation.home for ref in map(_parse, refs)}
        assert homes == {two.unit("n0").name, two.unit("n1").name}
        mine = two.unit("n0").name
        assert set(readers_of(near).files) == {mine}
        assert not readers_of(far).files
        assert units_of(far).received_bytes > units_of(near).received_bytes > 0
        assert near.passed().files == {mine: "n0"}
        assert far.passed().files == {}
        whole = far.passed().received_bytes
        assert whole == near.passed().received_bytes + near.passed().file_bytes


def _parse(ref: str) -> SegmentRef:
    return SegmentRef.parse(ref)
