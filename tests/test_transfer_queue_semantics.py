"""What puts, gets and clears of TransferQueue mean on our backend, in a real one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

pytest.importorskip("transfer_queue", reason="TransferQueue is not installed")

import psutil
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict

import tq_fs.integrations.transfer_queue  # noqa: F401  # registers the backend
from tq_fs.errors import ValueUnsupported
from tq_fs.integrations.transfer_queue._puts import LARGE_BYTES

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves its log files to the end
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),  # nested tensors are a prototype
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
T = TypeVar("T")
PARTITION = "train"
LARGE = 256 * 1024  # values of an array of its own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start a queue in a folder; what is left of it is checked at the end."""
    root = tmp_path_factory.mktemp("values")
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    own = {"url": root.as_uri(), "store_id": "semantics"}
    tq.init(OmegaConf.create({"backend": {"storage_backend": "TqFs", "TqFs": own}}))
    yield root / "semantics"
    tq.close()
    ray.shutdown()


@pytest.fixture(autouse=True)
def empty(folder: Path) -> Iterator[None]:
    yield
    for partition, keys in tq.kv_list().items():
        if keys:
            tq.kv_clear(list(keys), partition)
    # Clears leave nothing, whatever a test has put; what was replaced goes a moment later.
    assert soon_gone(lambda: files(folder)) == []


def soon_gone(look: Callable[[], list[T]]) -> list[T]:
    """Return what is left of something after a while, or nothing once it is gone."""
    until = time.monotonic() + 10
    while (left := look()) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def files(folder: Path) -> list[Path]:
    return [path for path in (folder / "values").rglob("*") if path.is_file()]


def totals() -> dict[str, int]:
    found: dict[str, int] = tq.get_client().storage_manager.values.calls.totals()
    return found


def row(value: float, count: int = LARGE) -> torch.Tensor:
    return torch.full((1, count), value)


def batch(**columns: Any) -> TensorDict:
    return TensorDict(columns, batch_size=1)


def rows(got: TensorDict, field: str) -> list[torch.Tensor]:
    return list(got[field].unbind())


# ---------------------------------------------------------------- puts and clears


def test_a_clear_that_comes_late_leaves_the_sample_that_has_the_index_now(folder: Path) -> None:
    client = tq.get_client()
    earlier = client.put(batch(x=row(1.0)), partition_id="late")
    client.clear_samples(earlier)
    now = client.put(batch(x=row(2.0)), partition_id="late")
    assert now.global_indexes == earlier.global_indexes  # TransferQueue reuses them at once

    client._run_coroutine(client.storage_manager.clear_data(earlier))

    assert rows(client.get_data(now), "x")[0].equal(row(2.0)[0])
    client.clear_samples(now)


def test_a_put_replaces_an_earlier_one_whose_files_go(folder: Path) -> None:
    for version in range(3):
        tq.kv_put("key", PARTITION, {"x": row(version)[0], "small": torch.tensor(version)})
    got = tq.kv_batch_get("key", PARTITION)
    assert rows(got, "x")[0].equal(row(2)[0])
    assert got["small"].tolist() == [2]
    assert totals()["values"] == 2


def test_a_put_that_is_refused_leaves_no_trace(folder: Path) -> None:
    class Strange:
        pass

    before = totals()
    with pytest.raises(ValueUnsupported, match="Strange"):
        tq.kv_put("key", PARTITION, {"x": row(1.0)[0], "bad": Strange()})
    assert totals() == before
    assert files(folder) == []


def test_keys_of_different_fields_are_cleared_together(folder: Path) -> None:
    tq.kv_put("one", PARTITION, {"a": row(1.0)[0]})
    tq.kv_put("two", PARTITION, {"b": "text", "c": torch.arange(3)})
    tq.kv_clear(["one", "two"], PARTITION)
    assert totals()["values"] == 0
    assert files(folder) == []


def test_what_comes_back_is_writable_and_nobody_elses(folder: Path) -> None:
    tq.kv_put("key", PARTITION, {"x": row(1.0)[0], "small": torch.zeros(4)})
    for _ in range(2):
        got = tq.kv_batch_get("key", PARTITION)
        for field, want in (("x", row(1.0)[0]), ("small", torch.zeros(4))):
            (found,) = rows(got, field)
            assert found.equal(want)
            found += 7


def test_a_parser_turns_references_into_what_is_stored(folder: Path) -> None:
    def parse(columns: dict[str, Any]) -> None:
        columns["x"] = [torch.full((4,), float(name)) for name in columns["x"]]

    tq.kv_put("key", PARTITION, {"x": "3"}, data_parser=parse)
    assert rows(tq.kv_batch_get("key", PARTITION), "x")[0].equal(torch.full((4,), 3.0))


# ---------------------------------------------------------------- many at once


def test_puts_of_many_at_once_are_all_there_whatever_their_shapes(folder: Path) -> None:
    """Several are told of together: those of one schema and partition in one notice."""

    def fields(number: int) -> dict[str, Any]:
        tokens = 20_000 + 10_000 * (number % 3)
        return {"x": torch.full((tokens,), float(number)), "n": torch.tensor(number)}

    async def put(number: int) -> None:
        await tq.async_kv_put(f"k{number}", f"p{number % 2}", fields(number), tag={"n": number})

    async def put_all() -> None:
        await asyncio.gather(*(put(number) for number in range(24)))

    asyncio.run(put_all())
    for partition in (0, 1):
        numbers = range(partition, 24, 2)
        got = tq.kv_batch_get([f"k{n}" for n in numbers], f"p{partition}")
        assert got["n"].tolist() == list(numbers)
        meta = tq.get_client().kv_retrieve_meta([f"k{n}" for n in numbers], f"p{partition}")
        told = [tuple(shape) for shape in meta.get_shapes("x")]
        assert told == [tuple(fields(n)["x"].shape) for n in numbers]
        for number, found in zip(numbers, rows(got, "x"), strict=True):
            assert found.equal(fields(number)["x"])


def test_small_puts_do_not_wait_for_a_large_one(folder: Path) -> None:
    large = torch.zeros(16 * LARGE_BYTES // 4)
    ended: list[str] = []

    async def put(name: str, value: torch.Tensor) -> None:
        await tq.async_kv_put(name, PARTITION, {name: value})
        ended.append(name)

    async def put_both() -> None:
        first = asyncio.create_task(put("large", large))
        await asyncio.sleep(0.01)
        await asyncio.gather(first, *(put(f"small{i}", torch.zeros(8)) for i in range(4)))

    asyncio.run(put_both())
    assert set(ended) == {"large", *(f"small{i}" for i in range(4))}
    assert rows(tq.kv_batch_get("large", PARTITION), "large")[0].equal(large)


def test_a_put_whose_caller_gave_up_has_ended_before_the_next(folder: Path) -> None:
    async def give_up() -> None:
        task = asyncio.create_task(tq.async_kv_put("key", PARTITION, {"x": row(1.0)[0]}))
        await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    tq.kv_put("key", PARTITION, {"x": row(2.0)[0]})
    assert rows(tq.kv_batch_get("key", PARTITION), "x")[0].equal(row(2.0)[0])


# ---------------------------------------------------------------- the end


def test_closing_ends_all_threads_and_the_keeper(folder: Path) -> None:
    """The last one, because the queue of this module begins anew."""
    manager = tq.get_client().storage_manager
    assert {t.name for t in threading.enumerate()} >= {"tq-fs-put", "tq-fs-commit"}
    assert len(keepers()) == 1
    tq.close()
    left = [t.name for t in threading.enumerate() if t.name.startswith(("tq-fs", "TQ_STORAGE"))]
    assert left == []
    assert soon_gone(keepers) == []  # Ray ends it a moment later
    manager.close()  # a second time does nothing
    own = {"url": folder.parent.as_uri(), "store_id": "semantics"}  # free again
    tq.init(OmegaConf.create({"backend": {"storage_backend": "TqFs", "TqFs": own}}))


def keepers() -> list[int]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if "KeeperActor" in " ".join(child.cmdline()):
                found.append(child.pid)
    return found
