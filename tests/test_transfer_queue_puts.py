"""The threads that carry out puts, and columns of TensorDicts; without a queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

pytest.importorskip("transfer_queue", reason="TransferQueue is not installed")

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tq_fs.errors import InvalidField, SessionClosed
from tq_fs.integrations.transfer_queue._columns import batch_of, columns_of, plain
from tq_fs.integrations.transfer_queue._puts import Notice, Put, Puts, Waiter
from tq_fs.values import ValueStore

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


class Told:
    """Notes what the controller would be told; says what it is asked to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.notices: list[Notice] = []
        self.error = error

    def __call__(self, notice: Notice | None) -> None:
        if notice is None:
            return
        self.notices.append(notice)
        if self.error is not None:
            raise self.error


class Nothing:
    """Values of which all are put at once."""

    def commit(self, partition: str, prepared: list[Any]) -> int:
        assert (partition, prepared) == ("p", [])
        return 0


def run(told: Told, *writes: Callable[[], Any]) -> list[Any]:
    """Return what each of several puts at once has come to."""

    async def all_of_them() -> list[Any]:
        puts = Puts(cast("ValueStore", Nothing()), told, threads=2)
        waiters = [Waiter() for _ in writes]
        for i, (write, waiter) in enumerate(zip(writes, waiters, strict=True)):
            puts.ask(Put("p", write, [i], 1, waiter))
        found = await asyncio.wait_for(
            asyncio.gather(*(w.end() for w in waiters), return_exceptions=True), 10
        )
        await asyncio.to_thread(puts.close)
        with pytest.raises(SessionClosed):
            puts.ask(Put("p", writes[0], [0], 1, Waiter()))
        return list(found)

    return asyncio.run(all_of_them())


def stored(generation: int) -> Callable[[], Any]:
    return lambda: (generation, {"x": {"dtype": torch.int8, "shape": (1,)}})


def test_puts_end_with_their_generations_and_are_told_of_together() -> None:
    told = Told()
    assert run(told, *(stored(10 + i) for i in range(4))) == [10, 11, 12, 13]
    known = {i: fields for notice in told.notices for i, fields in notice.known.items()}
    assert known == {i: {"x": 10 + i} for i in range(4)}
    assert len(told.notices) < 4


@pytest.mark.parametrize("error", [ValueError("malformed"), OSError(), MemoryError()])
def test_puts_end_when_the_controller_cannot_be_told(error: Exception) -> None:
    assert run(Told(error), *(stored(i) for i in range(3))) == [0, 1, 2]


def test_a_put_that_raises_ends_alone() -> None:
    def stops() -> Any:
        return next(iter([]))

    def fails() -> Any:
        raise InvalidField("is bad", subject="x")

    first, second, third, fourth = run(Told(), stored(1), stops, fails, stored(4))
    assert (first, fourth) == (1, 4)
    assert isinstance(second, RuntimeError)
    assert isinstance(third, InvalidField)


# ---------------------------------------------------------------- columns


def test_one_value_for_all_samples_is_each_ones() -> None:
    data = TensorDict({"a": "hi", "b": NonTensorData([1, 2, 3], batch_size=[2])}, batch_size=[2])
    assert columns_of(plain(data)) == {"a": ["hi", "hi"], "b": [[1, 2, 3], [1, 2, 3]]}


def test_a_list_or_an_array_of_all_samples_holds_their_values() -> None:
    texts = np.array([b"x", b"yy"])
    data = TensorDict({"b": NonTensorData([[1], "two"], batch_size=[2]), "c": texts}, [2])
    found = columns_of(plain(data))
    assert found["b"] == [[1], "two"]
    assert list(found["c"]) == [b"x", b"yy"]


def test_a_stack_is_one_value_for_each_sample() -> None:
    data = TensorDict({"a": NonTensorStack("x", {"y": 1})}, batch_size=[2])
    assert columns_of(plain(data)) == {"a": ["x", {"y": 1}]}


def test_columns_of_columns_are_refused_by_name() -> None:
    inner = TensorDict({"y": torch.zeros(2, 3)}, batch_size=[2])
    with pytest.raises(InvalidField, match="a: is a TensorDict"):
        plain(TensorDict({"a": inner}, batch_size=[2]))


@pytest.mark.parametrize(
    "values",
    [
        [torch.tensor([2**60 + 1]), torch.tensor([0.5])],
        [torch.tensor(1), torch.tensor(0.5)],
        [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.float32)],
    ],
)
def test_tensors_of_several_types_come_back_as_they_are(values: list[torch.Tensor]) -> None:
    found = batch_of({"x": values}, 2)["x"]
    for have, want in zip(
        found.tolist() if hasattr(found, "tolist") else found, values, strict=True
    ):
        assert (have.dtype, have.shape) == (want.dtype, want.shape)
        assert have.equal(want)
