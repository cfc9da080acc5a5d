"""The path of ``tq-fs bench memory`` through TransferQueue, which lacks in most environments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transfer_queue")

from tests.test_bench_memory_paths import SMALL, check_run
from tq_fs.bench import _plane_sittings as sittings
from tq_fs.bench._plane_measured import CENTRAL, QUEUE


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_tensors_through_the_queue_are_the_same(tmp_path: Path, dtype: str) -> None:
    bench = replace(SMALL, paths=(CENTRAL, QUEUE), dtype=dtype, root=tmp_path)
    measured = sittings.measure(bench, lambda text: None)
    central, queue = measured.runs
    for run in measured.runs:
        check_run(run, bench)
    assert queue.digests == central.digests
    held, most = (max(s.components["object_store"] for s in run.samples) for run in measured.runs)
    assert most < held // 2, "only tokens and references, which at this scale are a quarter"
