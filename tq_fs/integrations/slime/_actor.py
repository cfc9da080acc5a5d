"""Mixins for slime's training actor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tq_fs.errors import InvalidConfig
from tq_fs.fields import LOGPROBS, ROUTED_EXPERTS
from tq_fs.hydrate import Allocate
from tq_fs.integrations.slime._pinned import pinned_empty
from tq_fs.integrations.slime._routing import RankRouting, RoutingColumn
from tq_fs.integrations.slime._rows import Place
from tq_fs.integrations.slime._settings import COLUMN, Settings, moe_layers
from tq_fs.integrations.slime._store import store_of
from tq_fs.memory import mapped_empty
from tq_fs.store import Store
from tq_fs.trajectory import Sample

if TYPE_CHECKING:
    import torch

    class _Actor:
        """What the mixins use of ``slime.backends.megatron_utils.actor.MegatronTrainRayActor``."""

        args: Any
        model: Any  # chunks, one for each virtual pipeline stage

        def _get_rollout_data(self, rollout_data_ref: Any) -> dict[str, Any]: ...
        def fill_routing_replay(
            self, data_iterator: Any, num_microbatches: Any, rollout_data: Any
        ) -> None: ...
        def save_model(self, rollout_id: int, force_sync: bool = False) -> None: ...
else:
    _Actor = object

ROUTED_COLUMN = f"rollout_{ROUTED_EXPERTS}"
LOGPROBS_COLUMN = "rollout_log_probs"


class HydratingActorMixin(_Actor):
    """Gives slime's actor what the converter has stored, in slime's own shapes.

    Put it before slime's class: ``class Actor(HydratingActorMixin, MegatronTrainRayActor)``.

    ``rollout_log_probs`` are hydrated when the rollout arrives, within the budget at a time, and
    moved to the device as slime does. ``rollout_routed_experts`` are int32 ``[T-1, layers, topk]``
    and hydrated lazily: slime's own ``fill_routing_replay`` takes the column sample by sample, a
    micro-batch after the other, and each is read when it is its turn. Between two of them slime
    still holds the one before. What it copies for the replay, its own layers and rows of all
    micro-batches of a rollout, stays in pinned memory until it has trained: that is slime's.

    Samples that are marked removed get zeros. Samples that were shortened since they were stored
    are clipped to the length the train data give.

    Train data without references, from a run without a store, pass as they are.
    """

    _tq_unfinished: int | None = None

    def _get_rollout_data(self, rollout_data_ref: Any) -> dict[str, Any]:
        """Return slime's train data, with the stored fields among them."""
        data = super()._get_rollout_data(rollout_data_ref)
        if COLUMN not in data:
            return data
        settings = self._tq_settings()
        shard = shortened(data.pop(COLUMN), data["total_lengths"], data["response_lengths"])
        if settings.field(LOGPROBS) is not None:
            data[LOGPROBS_COLUMN] = self._log_probs(shard, data["tokens"][0].device)
        if settings.field(ROUTED_EXPERTS) is not None:
            data[ROUTED_COLUMN] = self._routed_experts(shard, data["micro_batch_indices"])
        return data

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Save the model, then let go of what it has been trained on.

        On a cluster at once; an embedded store's only writer is the RolloutManager, whose next
        conversion sees the checkpoint. One that is saved in the background counts when the next
        one begins.
        """
        super().save_model(rollout_id, force_sync=force_sync)
        settings = Settings.of(self.args)
        if settings is None or not settings.in_cluster or getattr(self.args, "rank", 0) != 0:
            return
        saved, self._tq_unfinished = self._tq_unfinished, rollout_id
        if force_sync or not getattr(self.args, "async_save", False):
            saved, self._tq_unfinished = rollout_id, None
        if saved is not None:
            store_of(settings, writes=False).checkpoint_saved(saved)

    # ------------------------------------------------------------ inside

    def _tq_settings(self) -> Settings:
        settings = Settings.of(self.args)
        if settings is None:
            raise InvalidConfig(
                "the train data hold references, the arguments name no store",
                subject="args.tq_fs_config",
                remedy="give the RolloutManager and the actors the same arguments",
            )
        return settings

    def _tq_store(self) -> Store:
        return store_of(self._tq_settings(), writes=False)

    def _tq_allocate(self) -> Allocate:
        return pinned_empty if self._tq_settings().pin_memory else mapped_empty

    def _log_probs(self, shard: Sequence[Sample], device: torch.device) -> list[torch.Tensor]:
        """Return the shard's logprobs as slime cuts and places them."""
        from slime.backends.megatron_utils.cp_utils import (  # noqa: PLC0415
            slice_log_prob_with_cp,
        )

        def cut(whole: torch.Tensor, sample: Sample) -> torch.Tensor:
            mine: torch.Tensor = slice_log_prob_with_cp(
                whole, sample.tokens, sample.response_length
            )
            return mine

        return self._tq_log_probs(shard, device, cut)

    def _tq_log_probs(
        self,
        shard: Sequence[Sample],
        device: torch.device,
        cut: Callable[[torch.Tensor, Sample], torch.Tensor],
        tokens: Any = None,
    ) -> list[torch.Tensor]:
        batches = self._tq_store().micro_batches(
            shard,
            budget_bytes=self._tq_settings().budget_bytes,
            fields=[LOGPROBS],
            tokens=tokens,
            allocate=self._tq_allocate(),
        )
        return [
            cut(whole, sample).to(device=device)  # done when it returns: the memory goes
            for batch in batches
            for sample, whole in zip(batch.samples, batch.tensors[LOGPROBS_COLUMN], strict=True)
        ]

    def _routed_experts(
        self, shard: Sequence[Sample], micro_batches: Sequence[Sequence[int]]
    ) -> Any:
        settings = self._tq_settings()
        spec = settings.field(ROUTED_EXPERTS)
        assert spec is not None
        return RoutingColumn(
            self._tq_store(),
            shard,
            spec,
            micro_batches,
            budget_bytes=settings.budget_bytes,
            allocate=self._tq_allocate(),
        )


class SlicingActorMixin(HydratingActorMixin):
    """The same, but a rank reads only what it replays: its layers, and its context-parallel rows.

    Overrides slime's ``fill_routing_replay``: what lands in the replay is bit-identical to slime's
    own slice of the whole tensors. A rank holds one micro-batch's part besides what the replay
    keeps; with ``tq_fs_pin_memory`` the replay keeps that part itself, without a copy.
    """

    def _log_probs(self, shard: Sequence[Sample], device: torch.device) -> list[torch.Tensor]:
        place = self._tq_place()
        tokens = None if place.contexts == 1 else (lambda length, _: place.predicted(length))
        return self._tq_log_probs(shard, device, lambda mine, _: mine, tokens)

    def _routed_experts(
        self, shard: Sequence[Sample], micro_batches: Sequence[Sequence[int]]
    ) -> Any:
        settings = self._tq_settings()
        spec = settings.field(ROUTED_EXPERTS)
        assert spec is not None
        return RankRouting(
            self._tq_store(),
            shard,
            spec,
            self._tq_place(),
            micro_batches,
            budget_bytes=settings.budget_bytes,
            allocate=self._tq_allocate(),
        )

    def fill_routing_replay(
        self, data_iterator: Any, num_microbatches: Any, rollout_data: Any
    ) -> None:
        """Record each micro-batch's routes with the replay of each router of this rank.

        Raises
        ------
        InvalidConfig
            The model has another number of routers, or the schedule of micro-batches, than the
            replay.
        BudgetTooSmall, SegmentMissing, StepMissing
        """
        routing = rollout_data.get(ROUTED_COLUMN)
        if not isinstance(routing, RankRouting):
            super().fill_routing_replay(data_iterator, num_microbatches, rollout_data)
            return
        import torch  # noqa: PLC0415  # the package loads without it
        from slime.utils.routing_replay import RoutingReplay  # noqa: PLC0415

        stages = self._tq_stages()
        replays = RoutingReplay.all_routing_replays
        _check_equal("routers", sum(map(len, stages)), len(replays))
        _check_equal("micro-batches", len(routing), sum(num_microbatches))
        for number in range(len(routing)):
            left = iter(replays)
            for layers in stages:
                for routes in routing.read(number, layers):
                    next(left).record(torch.from_numpy(routes))
        del rollout_data[ROUTED_COLUMN]
        for iterator in data_iterator:
            iterator.reset()

    def _tq_place(self) -> Place:
        """Return this rank's place, as Megatron has it."""
        from megatron.core import mpu  # noqa: PLC0415

        return Place(
            context=mpu.get_context_parallel_rank(),
            contexts=mpu.get_context_parallel_world_size(),
            tensor=mpu.get_tensor_model_parallel_rank(),
            tensors=mpu.get_tensor_model_parallel_world_size(),
            split="contiguous" if getattr(self.args, "allgather_cp", False) else "zigzag",
            multiple=self.args.data_pad_size_multiplier,
            sequence_parallel=bool(self.args.sequence_parallel),
        )

    def _tq_stages(self) -> list[list[int]]:
        """Return the layers with a router of each of this rank's model chunks."""
        from megatron.core.transformer.transformer_block import (  # noqa: PLC0415
            get_num_layers_to_build,
        )
        from megatron.core.transformer.transformer_layer import (  # noqa: PLC0415
            get_transformer_layer_offset,
        )

        stages = []
        for number, chunk in enumerate(self.model):
            config = chunk.module.config
            first = get_transformer_layer_offset(config, vp_stage=number)
            mine = range(first, first + get_num_layers_to_build(config, vp_stage=number))
            routed = moe_layers(self.args, config.moe_layer_freq)
            stages.append([layer for layer in routed if layer in mine])
        return stages


def shortened(
    samples: Sequence[Sample], lengths: Sequence[int], responses: Sequence[int]
) -> list[Sample]:
    """Return samples as long as the train data have them."""
    return [
        replace(sample, tokens=int(length), response_length=int(response))
        for sample, length, response in zip(samples, lengths, responses, strict=True)
    ]


def _check_equal(what: str, have: int, want: int) -> None:
    if have != want:
        raise InvalidConfig(f"{have}, slime's replay has {want}", subject=what)
