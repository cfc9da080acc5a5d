"""Values of tests: groups that nobody wrote for an index, and stores over any place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests._rollouts import run_child, spawn_child, tree
from tests.test_value_codec import same
from tq_fs.backends import LocalBackend
from tq_fs.cache import ChunkCache
from tq_fs.channel import ChannelBackend
from tq_fs.errors import InvalidConfig
from tq_fs.reader import SegmentReader
from tq_fs.steps import EncodeOptions
from tq_fs.values import (
    Keeper,
    OnePlace,
    Place,
    StoredGroup,
    ValueCalls,
    ValueEntry,
    ValueIndex,
    ValuePlaces,
    ValueStore,
)
from tq_fs.values._entry import NamedEntry

__all__ = [
    "Kept",
    "kept",
    "open_store",
    "run_child",
    "same",
    "same_columns",
    "spawn_child",
    "stored_group",
    "tree",
]

STORE = "run"
_numbers = itertools.count()


def stored_group(*names: tuple[int, str], path: str = "", unit: str = "") -> StoredGroup:
    """Return a group of values that lies nowhere."""
    number = next(_numbers)
    path = path or f"values/r/{number % 256:02x}/{number:016x}-0-{number:x}"
    values = [NamedEntry(i, f, ValueEntry(at=k, nbytes=1)) for k, (i, f) in enumerate(names)]
    return StoredGroup(unit, path, 100, tuple(values))


def place_of(group: StoredGroup) -> Place:
    return Place(group.unit, group.path)


def same_columns(have: dict[str, Any], want: dict[str, Sequence[Any]]) -> bool:
    return set(have) == set(want) and all(
        len(have[name]) == len(want[name])
        and all(same(a, b) for a, b in zip(have[name], want[name], strict=True))
        for name in want
    )


# ---------------------------------------------------------------- stores


def open_store(
    calls: ValueCalls,
    places: ValuePlaces,
    opened: ExitStack,
    *,
    run: str = "r1",
    threads: int = 2,
    allow_pickle: bool = False,
    compact: bool = True,
) -> ValueStore:
    """Open values of a run over places that are open."""
    readers = opened.enter_context(ThreadPoolExecutor(threads))
    reader = SegmentReader(
        _no_references, places.readers, pool=readers, threads=threads, cache=ChunkCache(1 << 20)
    )
    return ValueStore(
        STORE,
        run,
        calls=calls,
        places=places,
        reader=reader,
        pool=opened.enter_context(ThreadPoolExecutor(threads)),
        options=EncodeOptions(compact=compact),
        allow_pickle=allow_pickle,
    )


def _no_references(refs: Any) -> Any:
    raise InvalidConfig("values have names", subject=str(refs))


class Kept:
    """A run's values and their keeper, in this process."""

    def __init__(
        self,
        folder: Path,
        places: ValuePlaces,
        opened: ExitStack,
        run: str = "r1",
        checkpoints: int = 2,
        now_ns: Callable[[], int] | None = None,
        **named: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.places = places
        self.index = ValueIndex(folder / f"{run}.sqlite", STORE)
        opened.callback(self.index.close)
        clock = {} if now_ns is None else {"now_ns": now_ns}
        self.keeper = Keeper(
            self.index,
            places,
            STORE,
            run,
            checkpoints=checkpoints,
            sweep_s=0,
            check=lambda: None,
            **clock,
        )
        opened.callback(self.keeper.close)
        self.values = open_store(self.keeper, places, opened, run=run, **named)


@contextmanager
def kept(folder: Path, run: str = "r1", backend: Any = None, **named: Any) -> Iterator[Kept]:
    """Keep values in a folder: bytes below ``store``, the index below ``index``."""
    with ExitStack() as opened:
        if backend is None:
            backend = LocalBackend(folder / "store", ahead=0)
            opened.callback(backend.close)
        yield Kept(folder / "index", OnePlace(backend), opened, run, **named)


def channel_to(endpoint: str, **named: Any) -> ChannelBackend:
    return ChannelBackend(endpoint, store_id=STORE, unit="keeper", named=True, **named)
