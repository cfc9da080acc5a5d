"""What a model's routers choose: recorded, or replaced by what a rollout chose.

Every router has one hook, put there once; what it does, each thread says for itself. Several
threads may therefore run one model at once, recording or replaying.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

# Logits `[rows, experts]`; weights and ids of the chosen experts, each `[rows, topk]`.
RouterOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
RouterHook = Callable[[int, nn.Module, Any, RouterOutput], RouterOutput | None]

_of_this_thread = threading.local()  # .hook, while a block below runs


def install(routers: Sequence[nn.Module]) -> None:
    """Let the blocks below see what these routers choose: one for each layer, in order."""
    for layer, router in enumerate(routers):
        router.register_forward_hook(partial(_call, layer))


def _call(layer: int, router: nn.Module, args: Any, output: RouterOutput) -> RouterOutput | None:
    hook: RouterHook | None = getattr(_of_this_thread, "hook", None)
    return None if hook is None else hook(layer, router, args, output)


@contextmanager
def _hooked(hook: RouterHook) -> Iterator[None]:
    """Call `hook(layer, router, args, output)` after every router that this thread runs.

    A block inside another one takes its place until it is left.
    """
    before = getattr(_of_this_thread, "hook", None)
    _of_this_thread.hook = hook
    try:
        yield
    finally:
        _of_this_thread.hook = before


@contextmanager
def recorded(layers: int) -> Iterator[list[list[torch.Tensor]]]:
    """Collect, by layer, the chosen experts `[rows, topk]` of every forward pass in the block."""
    chosen: list[list[torch.Tensor]] = [[] for _ in range(layers)]

    def record(layer: int, _router: nn.Module, _args: Any, output: RouterOutput) -> None:
        chosen[layer].append(output[2])

    with _hooked(record):
        yield chosen


@contextmanager
def replayed(routing: torch.Tensor) -> Iterator[None]:
    """Send all tokens but the last where `routing` int64 `[T - 1, layers, topk]` says."""

    def replay(layer: int, router: nn.Module, _args: Any, output: RouterOutput) -> RouterOutput:
        logits, _, free = output
        experts = torch.cat([routing[:, layer], free[-1:]])
        # The steps of Qwen3MoeTopKRouter, with a gather in place of its top-k.
        weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, experts)
        if router.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), experts

    with _hooked(replay):
        yield


def stacked(chosen: list[list[torch.Tensor]], batch: int) -> NDArray[np.int32]:
    """Return the experts recorded over successive passes, int32 `[B, T, layers, topk]`."""
    by_layer = [
        torch.cat([rows.view(batch, -1, rows.shape[-1]) for rows in passes], dim=1)
        for passes in chosen
    ]
    return torch.stack(by_layer, dim=2).to(torch.int32).numpy()
