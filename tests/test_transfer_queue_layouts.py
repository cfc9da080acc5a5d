"""Ranges and layouts of values that were put into a real TransferQueue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("transfer_queue", reason="TransferQueue is not installed")

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue.storage.simple_storage import StorageKeyNotFoundError

import tq_fs.values
from tests._layouts import Expected, World, rows_of, selections
from tests._value_parts import chunk, partial, same
from tq_fs.errors import InvalidSelection, StaleReference, ValueMissing
from tq_fs.hydrate import Selection
from tq_fs.integrations.dressage import LayoutSample, hydrate, refs_of
from tq_fs.integrations.transfer_queue import async_read_range, read_range

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves its log files to the end
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
PARTITION = "train"


@pytest.fixture(scope="module", autouse=True)
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start TransferQueue with values in a folder."""
    root: Path = tmp_path_factory.mktemp("values")
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        ours = {"url": f"file://{root}", "store_id": "run-1", "allow_pickle": True}
        backend = {"storage_backend": "TqFs", "TqFs": ours}
        tq.init(OmegaConf.create({"backend": backend}))
        yield
    finally:
        tq.close()
        ray.shutdown()


def put(key: str, **fields: Any) -> None:
    columns = {name: NonTensorStack(value) for name, value in fields.items()}
    tq.kv_batch_put(
        keys=[key], partition_id=PARTITION, fields=TensorDict(columns, batch_size=1), tags=[{}]
    )


def get(key: str, field: str) -> Any:
    """Return a whole value, as the in-memory path has it."""
    found = tq.kv_batch_get([key], partition_id=PARTITION, select_fields=[field])[field]
    return found.tolist()[0] if isinstance(found, NonTensorStack) else found[0]


@pytest.fixture
def key(request: pytest.FixtureRequest) -> Iterator[str]:
    name = request.node.name
    yield name
    tq.kv_clear([name], partition_id=PARTITION)


@pytest.mark.parametrize("rows", [30, 9000])
def test_a_range_is_what_the_whole_value_says_there(key: str, rows: int) -> None:
    random = np.random.default_rng(rows)
    tensor = torch.from_numpy(random.integers(0, 256, (rows, 6, 2), dtype=np.int32))
    logprobs = random.normal(size=rows).tolist()
    put(key, tensor=tensor, array=tensor.numpy(), logprobs=logprobs)
    whole = {name: get(key, name) for name in ("tensor", "array", "logprobs")}
    for name, value in whole.items():
        found = read_range(key, name, partition_id=PARTITION, tokens=(7, 29))
        same(found, value[7:29])
    found = read_range(key, "tensor", partition_id=PARTITION, tokens=(7, 29), layers=(2, 5))
    same(found, whole["tensor"][7:29, 2:5])


def test_chunks_of_a_partial_rollout_are_one_array(key: str) -> None:
    chunks, rows = partial(np.random.default_rng(0), [4000, 9000, 9010], "ndarray", (6, 2))
    put(key, re=chunks)
    found = read_range(key, "re", partition_id=PARTITION, tokens=(3990, 9005), layers=(1, 3))
    same(found, rows[3990:9005, 1:3])


def test_reading_does_not_stall_the_event_loop(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(key, array=np.arange(99_999))
    threads: list[threading.Thread] = []
    ours = tq_fs.values.read_range

    def noted(*args: Any, **settings: Any) -> Any:
        threads.append(threading.current_thread())
        return ours(*args, **settings)

    monkeypatch.setattr(tq_fs.values, "read_range", noted)
    found = asyncio.run(async_read_range(key, "array", partition_id=PARTITION, tokens=(5, 9)))
    assert found.tolist() == [5, 6, 7, 8]
    assert threading.main_thread() not in threads
    assert len(threads) == 1


def test_what_is_not_there_is_what_transfer_queue_expects(key: str) -> None:
    put(key, array=np.arange(9))
    with pytest.raises(StorageKeyNotFoundError, match=r"key 'nobody' \(train\): is not there"):
        read_range("nobody", "array", partition_id=PARTITION)
    with pytest.raises(StorageKeyNotFoundError, match=r"key 'nobody' \(train\): is not there"):
        asyncio.run(async_read_range("nobody", "array", partition_id=PARTITION))
    with pytest.raises(StorageKeyNotFoundError, match=r"key 'a', 'b', 'c' and 1 others"):
        refs_of([key, *"abcd"], "array", partition_id=PARTITION)
    with pytest.raises(StorageKeyNotFoundError, match="'other' of sample"):
        read_range(key, "other", partition_id=PARTITION)
    with pytest.raises(ValueMissing, match=r"key '.*' \(nowhere\)"):
        read_range(key, "array", partition_id="nowhere")
    with pytest.raises(InvalidSelection, match=r"\[0, 9\)"):
        read_range(key, "array", partition_id=PARTITION, tokens=(5, 10))


@pytest.mark.parametrize("seed", range(4))
def test_what_is_hydrated_is_what_whole_values_give(seed: int) -> None:
    world = World(np.random.default_rng(seed)).fill(6)
    for name, fields in world.values.items():
        put(name, **fields)
    for name in world.values:  # from here on only what kv_batch_get gives is known
        world.values[name] = {field: get(name, field) for field in ("logprobs", "routing")}
    refs = {}
    for field in ("logprobs", "routing"):
        for ref in refs_of(list(world.values), field, partition_id=PARTITION):
            refs[ref.key, field] = msgspec.to_builtins(ref)
    samples = [world.sample(refs) for _ in range(12)]
    tokens, layers = selections(world.random)
    select = Selection(tokens=tokens, layers=layers)
    expected = [s.tensors(tokens, layers) for s in samples]
    budget = 4096 + max(sum(a.nbytes + 64 for a in e.values()) for e in expected)
    batches = list(hydrate([_sample(s) for s in samples], budget_bytes=budget, select=select))
    found = {n: [t for b in batches for t in b.tensors[n]] for n in expected[0]}
    for name, tensors in found.items():
        for tensor, want in zip(tensors, (e[name] for e in expected), strict=True):
            same(tensor.numpy(), want)
    tq.kv_clear(list(world.values), partition_id=PARTITION)


def _sample(expected: Expected) -> LayoutSample:
    return LayoutSample.of(
        expected.plain,
        tokens=expected.tokens,
        response_length=expected.response_length,
        removed=expected.removed,
    )


def test_layouts_ride_through_ray(key: str) -> None:
    """A trainer is another process, which joins by what Ray carries."""
    rows = np.random.default_rng(3).integers(0, 256, (9000, 6, 2), dtype=np.int32)
    put(key, re=chunk(rows, 40, True))
    (ref,) = refs_of([key], "re", partition_id=PARTITION)
    fragment = {"ref": msgspec.to_builtins(ref), "source_start": 0, "target_start": 0}
    plain = {
        "logical_field": "routed_experts",
        "codec": "",
        "fragments": [{**fragment, "length": 9000}],
        "token_count": 9001,
        "shape": [9000, 6, 2],
    }

    @ray.remote(num_cpus=0)
    def train(layouts: Any) -> Any:
        sample = LayoutSample.of(layouts, tokens=8001, response_length=5)
        select = Selection(layers=(2, 4))
        (batch,) = hydrate([sample], size=1, select=select)
        return batch.tensors["rollout_routed_experts"][0].numpy().copy()

    same(np.array(ray.get(train.remote([plain]))), rows[:8000, 2:4])


def test_a_key_that_was_put_again_is_stale(key: str) -> None:
    put(key, lp=[0.5] * 20)
    (ref,) = refs_of([key], "lp", partition_id=PARTITION)
    tq.kv_clear([key], partition_id=PARTITION)
    put(key, lp=[0.25] * 20)
    plain = {
        "logical_field": "full_logprobs",
        "codec": "",
        "fragments": [
            {"ref": msgspec.to_builtins(ref), "source_start": 0, "target_start": 0, "length": 20}
        ],
        "token_count": 20,
        "shape": [20],
    }
    sample = LayoutSample.of([plain], tokens=20, response_length=20)
    with pytest.raises(StaleReference, match="'lp' of key"):
        list(hydrate([sample], size=1))


def test_what_is_compared_with_is_whole() -> None:
    """The judge of the tests above, on its own: chunks by the rule of partial rollouts."""
    chunks, rows = partial(np.random.default_rng(0), [20, 30, 50], "base64", (6, 2))
    begin, found = rows_of("routing", chunks)
    assert begin == 0
    same(found, rows)
