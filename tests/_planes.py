"""Runs of the memory benchmark, made up, with figures that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

from tq_fs.bench._plane_measured import (
    CENTRAL,
    COMPONENTS,
    NVME,
    PATHS,
    QUEUE,
    S3,
    Measured,
    MemoryBench,
    Phase,
    Run,
    Sample,
)

MiB = 1024**2
TOKENS = 1024 * 128 * 8  # a context, prompts and samples, for the planner
PAYLOADS = (1000 * MiB, 2000 * MiB, 4000 * MiB)
DIGESTS = {"s0/logprobs": "aa", "s0/routed_experts": "bb"}

# Proxy, RolloutManager, object store, Controller, StorageUnit [MiB]; the first is idle.
CENTRAL_MIB = ((50, 50, 0, 0, 0), (550, 100, 0, 0, 0), (300, 900, 400, 0, 0), (60, 400, 640, 0, 0))
QUEUE_MIB = ((50, 50, 0, 40, 60), (80, 60, 0, 40, 320), (60, 80, 4, 44, 1012))
NVME_MIB = (60, 50, 0, 40, 60)
S3_MIB = (60, 50, 0, 40, 70)


def sample(clock_s: float, mib: Sequence[int], page_cache: int = 0) -> Sample:
    components = {name: size * MiB for name, size in zip(COMPONENTS, mib, strict=True)}
    return Sample(
        clock_s=clock_s,
        components=components,
        trainers=(400 + int(clock_s)) * MiB,
        page_cache=page_cache * MiB,
    )


def run(
    path: str,
    payload: int,
    idle: Sequence[int],
    *busy: Sequence[int],
    digests: dict[str, str] | None = None,
) -> Run:
    cached = (300, 200) if path in {NVME, S3} else ()
    cache = [*cached, *([0] * len(busy))]
    return Run(
        path=path,
        payload_bytes=payload,
        trajectories=64,
        segments=192,
        tokens=TOKENS * payload // PAYLOADS[0],
        most_waiting=3,
        idle=sample(-1, idle),
        samples=[sample(n, mib, cache[n]) for n, mib in enumerate(busy)],
        phases=[
            Phase(name="rollout", rollout=0, begin_s=0, end_s=1),
            Phase(name="training", rollout=0, begin_s=1, end_s=2),
        ],
        digests=DIGESTS if digests is None else digests,
    )


def grown(idle: Sequence[int], mib: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return two moments: what is added lies in the Proxy first, then in the RolloutManager."""
    proxy, manager, *rest = idle
    return (proxy + mib, manager, *rest), (proxy, manager + mib, *rest)


def all_runs() -> list[Run]:
    """Return runs of all paths; peaks [MiB]: 1600, 1200, 270 280 300, 310 350 370."""
    stored = [
        run(path, payload, idle, *grown(idle, mib))
        for path, idle, growths in ((NVME, NVME_MIB, (60, 70, 90)), (S3, S3_MIB, (90, 130, 150)))
        for payload, mib in zip(PAYLOADS, growths, strict=True)
    ]
    return [
        run(CENTRAL, PAYLOADS[0], *CENTRAL_MIB),
        run(QUEUE, PAYLOADS[0], *QUEUE_MIB),
        *reversed(stored),  # in any order
    ]


def measured(
    runs: Sequence[Run] | None = None,
    absent: dict[str, str] | None = None,
    paths: tuple[str, ...] = PATHS,
) -> Measured:
    return Measured(
        bench=MemoryBench(payloads=PAYLOADS, paths=paths),
        place="folder x",
        runs=all_runs() if runs is None else runs,
        absent=absent or {},
    )
