"""Small stand-ins for the parts of slime and Megatron that our integration touches.

Written from the shapes and rules of slime at commit 624b824 (38 commits after 0.3.1): which columns
the train data have and which of them travel, how routes and logprobs are padded and cut, what the
replay is given. What is not needed for that is left out.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

# What slime's RolloutManager sends to a data-parallel rank; any other column stays behind.
TRAVELLING = (
    *("tokens", "multimodal_train_inputs", "response_lengths", "rewards", "truncated"),
    *("loss_masks", "round_number", "sample_indices", "rollout_ids", "rollout_mask_sums"),
    *("rollout_log_probs", "rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
    *("rollout_routed_experts", "source_names", "prompt", "teacher_log_probs"),
)
TYPES = {"tokens": torch.long, "loss_masks": torch.int, "rollout_log_probs": torch.float32}


class Status(Enum):
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


@dataclass
class RolloutSample:
    """slime's ``Sample``."""

    index: int
    tokens: list[int]
    response_length: int
    reward: float = 0.0
    rollout_log_probs: Any = None
    rollout_routed_experts: Any = None
    loss_mask: list[int] | None = None
    remove_sample: bool = False
    status: Status = Status.COMPLETED
    rollout_id: int | None = None
    weight_versions: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    teacher_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None

    def get_reward_value(self, args: Any) -> float:
        return self.reward


class RolloutManager:
    """Converts samples as slime does, in so far as tests look."""

    args: Any
    custom_convert_samples_to_train_data_func: Any
    custom_reward_post_process_func: Any

    def __init__(self) -> None:
        raise AssertionError("this would start engines")

    def _convert_samples_to_train_data(self, samples: list[RolloutSample]) -> dict[str, Any]:
        assert self.custom_convert_samples_to_train_data_func is None, "it would call us again"
        rewards = [sample.reward for sample in samples]
        if self.custom_reward_post_process_func is not None:
            rewards = self.custom_reward_post_process_func(self.args, samples)[1]
        for sample in samples:
            if sample.loss_mask is None:
                sample.loss_mask = [1] * sample.response_length
            assert len(sample.loss_mask) == sample.response_length
            if sample.remove_sample:
                sample.loss_mask = [0] * sample.response_length
        data: dict[str, Any] = {
            "tokens": [sample.tokens for sample in samples],
            "response_lengths": [sample.response_length for sample in samples],
            "rewards": rewards,
            "truncated": [int(sample.status == Status.TRUNCATED) for sample in samples],
            "loss_masks": [sample.loss_mask for sample in samples],
            "sample_indices": [sample.index for sample in samples],
        }
        for name in ("rollout_log_probs", "rollout_routed_experts"):
            if getattr(samples[0], name) is not None:
                data[name] = [getattr(sample, name) for sample in samples]
        return data


def shards(
    data: dict[str, Any], parts: int = 1, micro_batch: int = 2
) -> list[tuple[bytes, list[int]]]:
    """Return what each data-parallel rank is sent, and which samples those are."""
    data["total_lengths"] = [len(tokens) for tokens in data["tokens"]]
    out = []
    for part in range(parts):
        mine = list(range(part, len(data["tokens"]), parts))
        sent = {name: [data[name][i] for i in mine] for name in TRAVELLING if name in data}
        for name, dtype in TYPES.items():
            if name in sent:
                sent[name] = [torch.as_tensor(v, dtype=dtype) for v in sent[name]]
        if "rollout_routed_experts" in sent:
            name = "rollout_routed_experts"
            sent[name] = [torch.as_tensor(v).contiguous() for v in sent[name]]
        sent["partition"] = mine
        sent["total_lengths"] = data["total_lengths"]
        starts = range(0, len(mine), micro_batch)
        sent["micro_batch_indices"] = [
            list(range(i, min(i + micro_batch, len(mine)))) for i in starts
        ]
        sent["num_microbatches"] = [len(starts)]
        out.append((pickle.dumps(sent), mine))
    return out


# ---------------------------------------------------------------- the training side


@dataclass(frozen=True, kw_only=True)
class World:
    """One rank's place, as Megatron would tell it, and the model's layers there."""

    cp: int = 1
    cp_rank: int = 0
    tp: int = 1
    tp_rank: int = 0
    chunks: tuple[tuple[int, int], ...] = ((0, 4),)
    freq: int | tuple[int, ...] = 1

    def routers(self, layers: int) -> list[list[int]]:
        freq = self.freq
        has = [i % freq == 0 if isinstance(freq, int) else bool(freq[i]) for i in range(layers)]
        return [[i for i in range(a, b) if has[i]] for a, b in self.chunks]


class RoutingReplay:
    """What a router replays, micro-batch by micro-batch."""

    all_routing_replays: list[RoutingReplay] = []  # noqa: RUF012  # as slime has it

    def __init__(self) -> None:
        self.top_indices_list: list[torch.Tensor] = []
        RoutingReplay.all_routing_replays.append(self)

    def record(self, top_indices: torch.Tensor) -> None:
        self.top_indices_list.append(top_indices.clone())


def ranged(rows: int, experts: torch.Tensor, count: int) -> torch.Tensor:
    """Return rows of padding: numbers that rise through all places, modulo the experts."""
    shape = (rows, *experts.shape[1:])
    return (torch.arange(rows * shape[1] * shape[2], dtype=experts.dtype) % count).view(shape)


def lengthened(experts: torch.Tensor, multiple: int, count: int) -> torch.Tensor:
    return torch.cat([experts, ranged(-len(experts) % multiple, experts, count)])


def chunked(values: torch.Tensor, world: World) -> torch.Tensor:
    """Return a rank's two chunks of values whose number is a multiple of twice the ranks."""
    chunks = values.chunk(2 * world.cp)
    return torch.cat([chunks[world.cp_rank], chunks[-1 - world.cp_rank]])


def replayed(experts: Sequence[torch.Tensor], world: World, args: Any) -> torch.Tensor:
    """Return what a rank replays of a micro-batch, all layers: slime's rule, on whole tensors."""
    one = [torch.cat([e, ranged(1, e, args.num_experts)]) for e in experts]
    step = world.tp * args.data_pad_size_multiplier
    if args.allgather_cp:
        rows = lengthened(torch.cat(one), world.cp * step, args.num_experts)
        rows = rows.chunk(world.cp)[world.cp_rank]
    else:
        if world.cp > 1:
            one = [chunked(lengthened(e, 2 * world.cp, args.num_experts), world) for e in one]
        rows = lengthened(torch.cat(one), step, args.num_experts)
    return rows.chunk(world.tp)[world.tp_rank] if args.sequence_parallel else rows


def slice_log_prob(world: World) -> Callable[[Any, int, int], Any]:
    """Return slime's ``slice_log_prob_with_cp`` for a rank: it has what its tokens predict."""

    def cut(values: torch.Tensor, total: int, response: int) -> torch.Tensor:
        assert len(values) == response
        if world.cp == 1:
            return values
        size = -(-total // (2 * world.cp))
        fed = [
            range(c * size, (c + 1) * size)
            for c in (world.cp_rank, 2 * world.cp - 1 - world.cp_rank)
        ]
        mine = [t + 1 - (total - response) for chunk in fed for t in chunk]
        return values[[i for i in mine if 0 <= i < response]]

    return cut


class Iterator:
    """slime's ``DataIterator``."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.offset = 0
        self.resets = 0

    def get_next(self, names: Sequence[str]) -> dict[str, Any]:
        mine = self.data["micro_batch_indices"][self.offset]
        self.offset += 1
        return {name: [self.data[name][i] for i in mine] for name in names}

    def reset(self) -> None:
        self.offset = 0
        self.resets += 1


class TrainRayActor:
    """slime's training actor, without a model."""

    def __init__(self, args: Any, world: World) -> None:
        self.args = args
        self.world = world
        config = SimpleNamespace(
            moe_layer_freq=list(world.freq) if isinstance(world.freq, tuple) else world.freq,
            chunks=world.chunks,
        )
        self.model = [SimpleNamespace(module=SimpleNamespace(config=config)) for _ in world.chunks]
        self.saved: list[int] = []

    def _get_rollout_data(self, rollout_data_ref: bytes) -> dict[str, Any]:
        data: dict[str, Any] = pickle.loads(rollout_data_ref)
        data["total_lengths"] = [data["total_lengths"][i] for i in data["partition"]]
        if "rollout_log_probs" in data:
            cut = slice_log_prob(self.world)
            lengths = zip(
                data["rollout_log_probs"], data["total_lengths"], data["response_lengths"],
                strict=True,
            )  # fmt: skip
            data["rollout_log_probs"] = [cut(*one) for one in lengths]
        return data

    def fill_routing_replay(
        self, data_iterator: Sequence[Iterator], num_microbatches: Sequence[int], rollout_data: Any
    ) -> None:
        if "rollout_routed_experts" not in rollout_data:
            raise ValueError("no routed experts")
        for _ in range(sum(num_microbatches)):
            batch = data_iterator[0].get_next(["rollout_routed_experts", "tokens"])
            experts = batch["rollout_routed_experts"]
            for one, tokens in zip(experts, batch["tokens"], strict=True):
                assert len(one) == len(tokens) - 1
            rows = replayed(experts, self.world, self.args)
            replays = iter(RoutingReplay.all_routing_replays)
            for chunk in self.world.routers(self.args.num_layers):
                for layer in chunk:
                    next(replays).record(rows[:, layer])
            assert next(replays, None) is None
        del rollout_data["rollout_routed_experts"]
        for iterator in data_iterator:
            iterator.reset()

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        self.saved.append(rollout_id)


class Slime:
    """The stand-ins, under the names that slime and Megatron have."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.hooks = self.put("slime.rollout.sample_hooks", _current_rollout_id=0)
        self.manager = self.put("slime.ray.rollout", RolloutManager=RolloutManager)
        self.put("slime.utils.routing_replay", RoutingReplay=RoutingReplay)
        patch.setattr(RoutingReplay, "all_routing_replays", [])

    def put(self, name: str, **contents: Any) -> ModuleType:
        parts = name.split(".")
        for end in range(1, len(parts)):
            parent = ".".join(parts[:end])
            if parent not in sys.modules:
                self._patch.setitem(sys.modules, parent, ModuleType(parent))
        module = ModuleType(name)
        vars(module).update(contents)
        self._patch.setitem(sys.modules, name, module)
        return module

    def at(self, rollout_id: int | None) -> None:
        """Say which rollout slime is at."""
        vars(self.hooks)["_current_rollout_id"] = rollout_id

    def be(self, world: World, layers: int) -> None:
        """Be a rank: what Megatron tells of it, and a replay for each of its routers."""
        mpu = ModuleType("mpu")
        for kind, rank, size in (
            ("context", world.cp_rank, world.cp),
            ("tensor_model", world.tp_rank, world.tp),
        ):
            setattr(mpu, f"get_{kind}_parallel_rank", lambda rank=rank: rank)
            setattr(mpu, f"get_{kind}_parallel_world_size", lambda size=size: size)
        self.put("megatron.core", mpu=mpu)
        transformer = "megatron.core.transformer"
        self.put(
            f"{transformer}.transformer_block",
            get_num_layers_to_build=lambda config, vp_stage: (
                config.chunks[vp_stage][1] - config.chunks[vp_stage][0]
            ),
        )
        self.put(
            f"{transformer}.transformer_layer",
            get_transformer_layer_offset=lambda config, vp_stage: config.chunks[vp_stage][0],
        )
        self.put(
            "slime.backends.megatron_utils.cp_utils", slice_log_prob_with_cp=slice_log_prob(world)
        )
        RoutingReplay.all_routing_replays = []
        for layers_of_chunk in world.routers(layers):
            for _ in layers_of_chunk:
                RoutingReplay()


def world_ranks(world: World) -> list[World]:
    """Return all ranks that share a micro-batch and its layers."""
    return [replace(world, cp_rank=c, tp_rank=t) for c in range(world.cp) for t in range(world.tp)]
