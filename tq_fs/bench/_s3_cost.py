"""Time and processor time of every way, interleaved."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from tq_fs.bench._s3_load import Destination, Load
from tq_fs.bench._s3_place import Place
from tq_fs.bench._s3_ways import UNSIGNED, WAYS, folder_of, ways
from tq_fs.bench._timing import Timings, Variant, interleave, runs_in

_SETTLE_S = 0.05  # for what the server does behind the last answer


class Cost(NamedTuple):
    """What writing or reading a group takes, by way.

    Attributes
    ----------
    wall
        Seconds of a run over its groups.
    cpu
        Seconds of processor time of this process, all threads, likewise.
    """

    wall: Timings
    cpu: Timings

    def throughput(self, way: str, base: str) -> float:
        """Return a way's throughput as a share of another one's."""
        return self.wall.ratio(base, way)


def measure_load(
    place: Place, load: Load, *, repeats: int, progress: Callable[[], object]
) -> dict[str, Cost]:
    """Write and read a load in all ways; return the costs by verb.

    Everything read is compared with what was written, outside of the timed part.

    Parameters
    ----------
    progress
        Called after each run.

    Raises
    ------
    WrongBytes
        A way gives something else back.
    TqFsError
        The server fails.
    """
    destination = Destination(load)
    groups = load.groups
    backend = place.backend("auto")
    try:
        with ways(place, load, destination) as found, _no_collection():
            clear = {name: partial(backend.delete, folder_of(load, name)) for name in found}
            check = {name: partial(way.check, destination) for name, way in found.items()}
            puts = {n: (partial(w.put, groups), clear[n]) for n, w in found.items()}
            gets = {n: (partial(w.get, groups), check[n]) for n, w in found.items()}
            put = _measure(puts, len(groups), repeats=repeats, progress=progress)
            for name, way in found.items():
                way.put(groups)
                way.get(groups)
                check[name]()
            gets.pop(UNSIGNED, None)  # there is nothing to sign
            get = _measure(gets, len(groups), repeats=repeats, progress=progress)
            for remove in clear.values():
                remove()
            return {"put": put, "get": get}
    finally:
        backend.close()


def runs_of_load(repeats: int) -> int:
    """Return how often :func:`measure_load` calls `progress`."""
    return runs_in(WAYS, repeats) + runs_in(WAYS, repeats) - (repeats + 1)


def _measure(
    runs: Mapping[str, tuple[Callable[[], object], Callable[[], object]]],
    count: int,
    *,
    repeats: int,
    progress: Callable[[], object],
) -> Cost:
    """Time runs over `count` groups, each with what comes after it, which is not timed."""
    cpu = Timings({name: [] for name in runs})

    def timed(name: str, run: Callable[[], object]) -> None:
        start = time.process_time()
        run()
        cpu.seconds[name].append((time.process_time() - start) / count)

    variants = {
        name: Variant(partial(timed, name, run), before=_settle, after=after)
        for name, (run, after) in runs.items()
    }
    wall = interleave(variants, repeats=repeats, steps=count, progress=progress)
    for seconds in cpu.seconds.values():
        del seconds[0]  # the round that does not count
    return Cost(wall, cpu)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector out of the runs, and what is there before out of its sight."""
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def _settle() -> None:
    gc.collect()
    time.sleep(_SETTLE_S)
