"""slime with references in place of its large fields, against stand-ins of its modules."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

import tq_fs.cluster
from tests import _clusters
from tests._slime_stand_ins import (
    Iterator as DataIterator,
)
from tests._slime_stand_ins import (
    RolloutManager,
    RolloutSample,
    RoutingReplay,
    Slime,
    Status,
    TrainRayActor,
    World,
    shards,
    world_ranks,
)
from tq_fs import Sample, Segment, Session, Store, errors, open_store
from tq_fs.integrations.slime import (
    COLUMN,
    HydratingActorMixin,
    Settings,
    SlicingActorMixin,
    close_stores,
    convert_samples_to_train_data,
    pinned_empty,
)
from tq_fs.integrations.slime._columns import converted
from tq_fs.integrations.slime._routing import RankRouting, RoutingColumn
from tq_fs.integrations.slime._rows import Place
from tq_fs.integrations.slime._store import store_of
from tq_fs.memory import mapped_empty

LAYERS, TOPK, EXPERTS = 4, 3, 300
LENGTHS = ((9, 4), (16, 16 - 1), (5, 0), (33, 7), (2, 1), (24, 20))  # tokens and response


class Hydrating(HydratingActorMixin, TrainRayActor):
    pass


class Slicing(SlicingActorMixin, TrainRayActor):
    pass


@pytest.fixture
def slime() -> Iterator[Slime]:
    with pytest.MonkeyPatch.context() as patch:
        yield Slime(patch)
        close_stores()


@pytest.fixture
def args(tmp_path: Path) -> SimpleNamespace:
    return arguments(tmp_path, f"url: file://{tmp_path}/store\n")


def arguments(tmp_path: Path, yaml: str, **more: Any) -> SimpleNamespace:
    config = tmp_path / f"tq-fs-{len(list(tmp_path.iterdir()))}.yaml"
    config.write_text(yaml)
    found = SimpleNamespace(
        tq_fs_config=str(config),
        use_rollout_routing_replay=True,
        num_layers=LAYERS,
        moe_router_topk=TOPK,
        num_experts=EXPERTS,
        moe_layer_freq=1,
        data_pad_size_multiplier=1,
        allgather_cp=False,
        sequence_parallel=False,
        save=None,
        rank=0,
    )
    vars(found).update(more)
    return found


def sample(index: int, tokens: int, response: int, **more: Any) -> RolloutSample:
    rng = np.random.default_rng(index)
    routes = rng.integers(0, EXPERTS, (tokens - 1, LAYERS, TOPK), np.int32)
    found = RolloutSample(
        index=index,
        tokens=rng.integers(0, 1000, tokens).tolist(),
        response_length=response,
        rollout_log_probs=rng.standard_normal(response).astype(np.float32).tolist(),
        rollout_routed_experts=torch.from_numpy(routes),
        weight_versions=["3", "4"],
    )
    vars(found).update(more)
    return found


def rollout() -> list[RolloutSample]:
    return [sample(i, tokens, response) for i, (tokens, response) in enumerate(LENGTHS)]


def unstored(args: SimpleNamespace) -> SimpleNamespace:
    """The same arguments without a store: slime's in-memory path."""
    found = copy.copy(args)
    found.tq_fs_config = None
    return found


def received(actor: TrainRayActor, data: dict[str, Any], micro_batch: int = 2) -> dict[str, Any]:
    ((sent, _),) = shards(dict(data), micro_batch=micro_batch)
    return actor._get_rollout_data(sent)


def fill(actor: TrainRayActor, data: dict[str, Any]) -> list[list[torch.Tensor]]:
    """Fill the replay; return what each router has."""
    iterators = [DataIterator(data) for _ in actor.world.chunks]
    actor.fill_routing_replay(iterators, data["num_microbatches"], data)
    assert "rollout_routed_experts" not in data
    assert all(i.offset == 0 and i.resets for i in iterators)
    found = [replay.top_indices_list for replay in RoutingReplay.all_routing_replays]
    for replay in RoutingReplay.all_routing_replays:
        replay.top_indices_list = []
    return found


def same(have: torch.Tensor, want: torch.Tensor) -> bool:
    return (
        have.dtype == want.dtype
        and have.shape == want.shape
        and have.numpy().tobytes() == want.numpy().tobytes()
    )


def assert_same(have: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    assert [same(a, b) for a, b in zip(have, want, strict=True)] == [True] * len(want)


def writer_of(args: SimpleNamespace) -> Store:
    settings = Settings.of(args)
    assert settings is not None
    return store_of(settings, writes=True)


def steps_in(store: Store) -> list[Path]:
    assert store.location is not None
    return [p for p in store.location.rglob("*") if p.name == "zarr.json" and "steps" in p.parts]


# ---------------------------------------------------------------- converter


def test_other_columns_are_slimes_and_the_fields_are_references(
    slime: Slime, args: SimpleNamespace
) -> None:
    samples = rollout()
    data = convert_samples_to_train_data(args, samples)
    want = convert_samples_to_train_data(unstored(args), rollout())
    assert set(want) - set(data) == {"rollout_log_probs", "rollout_routed_experts"}
    assert {n: v for n, v in data.items() if n != COLUMN} == {n: want[n] for n in data if n in want}
    refs = [s.ref for s in data[COLUMN]]
    assert len(set(refs)) == len(samples)
    assert [(s.tokens, s.response_length, s.removed) for s in data[COLUMN]] == [
        (tokens, response, False) for tokens, response in LENGTHS
    ]
    assert len(pickle.dumps(data[COLUMN])) < 400 * len(samples)


def test_samples_are_left_as_they_were(slime: Slime, args: SimpleNamespace) -> None:
    samples = rollout()
    convert_samples_to_train_data(args, samples)
    for have, want in zip(samples, rollout(), strict=True):
        assert torch.equal(have.rollout_routed_experts, want.rollout_routed_experts)
        assert have.rollout_log_probs == want.rollout_log_probs
        assert have.loss_mask is None


def test_references_travel_in_a_column_that_slime_hands_on(
    slime: Slime, args: SimpleNamespace
) -> None:
    data = convert_samples_to_train_data(args, rollout())
    for sent, mine in shards(data, parts=2):
        have = pickle.loads(sent)[COLUMN]
        assert [s.ref for s in have] == [data[COLUMN][i].ref for i in mine]


def test_without_a_store_everything_is_as_slime_has_it(slime: Slime, args: SimpleNamespace) -> None:
    data = convert_samples_to_train_data(unstored(args), rollout())
    slime.be(World(), LAYERS)
    have = received(Slicing(unstored(args), World()), data)
    want = received(TrainRayActor(args, World()), data)
    assert have.keys() == want.keys()
    assert_same(have["rollout_routed_experts"], want["rollout_routed_experts"])


def test_the_class_below_rays_actor_converts(slime: Slime, args: SimpleNamespace) -> None:
    ray = pytest.importorskip("ray")
    vars(slime.manager)["RolloutManager"] = ray.remote(RolloutManager)
    data = convert_samples_to_train_data(args, rollout())
    assert data["sample_indices"] == list(range(len(LENGTHS)))


def normalised(args: Any, samples: Sequence[RolloutSample]) -> tuple[list[float], list[float]]:
    raw = [s.reward for s in samples]
    return raw, [r - 1 for r in raw]


def test_rewards_go_through_slimes_post_process(slime: Slime, args: SimpleNamespace) -> None:
    args.custom_reward_post_process_path = f"{__name__}.normalised"
    slime.put(__name__, normalised=normalised)
    data = convert_samples_to_train_data(args, rollout())
    assert data["rewards"] == [-1.0] * len(LENGTHS)


def with_a_column_of_ours(args: Any, samples: Sequence[RolloutSample]) -> dict[str, Any]:
    return {"tokens": [s.tokens for s in samples], COLUMN: ["mine"] * len(samples)}


def only_some(args: Any, samples: Sequence[RolloutSample]) -> dict[str, Any]:
    assert all(s.rollout_routed_experts is None for s in samples)
    return {"tokens": [s.tokens for s in samples[1:]]}


@pytest.mark.parametrize("path", [with_a_column_of_ours, only_some])
def test_a_conversion_of_the_users_own_may_not_take_our_column_or_drop_samples(
    slime: Slime, args: SimpleNamespace, path: Callable[..., Any]
) -> None:
    slime.put("users", convert=path)
    args.tq_fs_convert_path = "users.convert"
    with pytest.raises(errors.InvalidConfig, match="train data"):
        convert_samples_to_train_data(args, rollout())


def test_lists_of_lists_are_one_rollout(slime: Slime, args: SimpleNamespace) -> None:
    samples = rollout()
    data = convert_samples_to_train_data(args, [samples[:2], [samples[2:4], samples[4:]]])
    assert data["sample_indices"] == list(range(len(LENGTHS)))


def test_fields_that_are_not_transferred_stay_in_slimes_columns(
    slime: Slime, tmp_path: Path
) -> None:
    args = arguments(tmp_path, f"url: file://{tmp_path}/store\ntransfer: [routed_experts]\n")
    data = convert_samples_to_train_data(args, rollout())
    assert "rollout_log_probs" in data
    assert "rollout_routed_experts" not in data
    slime.be(World(), LAYERS)
    have = received(Slicing(args, World()), data)
    assert isinstance(have["rollout_routed_experts"], RankRouting)
    assert [len(t) for t in have["rollout_log_probs"]] == [response for _, response in LENGTHS]


def test_where_slime_has_no_conversion_its_columns_are_made_here(args: SimpleNamespace) -> None:
    vars(args).update(
        advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=True,
        n_samples_per_prompt=2, rollout_batch_size=2, rollout_top_p=0.9,
    )  # fmt: skip
    samples = [
        sample(
            i, 6, 3, reward=float(i), rollout_id=[7, None, 7, None][i],
            remove_sample=i == 1, status=Status.TRUNCATED if i == 2 else Status.COMPLETED,
            loss_mask=[1, 0, 1] if i == 0 else None, train_metadata={"a": i},
            metadata={"round_number": i, "source_name": "math"} | ({"raw_reward": 9} if i else {}),
            rollout_top_p_token_ids=[1, 2, 3], rollout_top_p_token_offsets=[0, 1, 2, 3],
            multimodal_train_inputs={"pixels": i} if i else None, teacher_log_probs=[0.0] * 3,
        )
        for i in range(4)
    ]  # fmt: skip
    data = converted(args, samples)
    assert data["rewards"] == pytest.approx([-0.7071, 0.7071, -0.7071, 0.7071], abs=1e-4)
    assert data["raw_reward"] == [0.0, 9, 9, 9]
    assert data["truncated"] == [0, 0, 1, 0]
    assert data["rollout_ids"] == [7, 0, 7, 1]
    assert data["loss_masks"] == [[1, 0, 1], [0] * 3, [1] * 3, [1] * 3]
    assert data["rollout_mask_sums"] == [5, 0, 5, 3]
    assert data["source_names"] == ["math"] * 4
    assert data["round_number"] == [0, 1, 2, 3]
    assert {*data} >= {
        *("metadata", "multimodal_train_inputs", "teacher_log_probs", "rollout_log_probs"),
        *("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts"),
    }
    with pytest.raises(errors.InvalidField, match="sample 0"):
        converted(args, [sample(0, 6, 3, loss_mask=[1])])
    with pytest.raises(errors.InvalidField, match="sample 0"):
        converted(args, [sample(0, 6, 3)])  # without what top-p kept


# ---------------------------------------------------------------- bad input, failures


def no_logprobs(s: RolloutSample) -> None:
    s.rollout_log_probs = None


def no_routes(s: RolloutSample) -> None:
    s.rollout_routed_experts = None


def logprobs_of_all_tokens(s: RolloutSample) -> None:
    s.rollout_log_probs = [0.0] * len(s.tokens)


def a_row_too_many(s: RolloutSample) -> None:
    routes = s.rollout_routed_experts
    s.rollout_routed_experts = torch.cat([routes, routes[:1]])


def a_layer_too_few(s: RolloutSample) -> None:
    s.rollout_routed_experts = s.rollout_routed_experts[:, 1:]


def a_layer_of_zeros(s: RolloutSample) -> None:
    s.rollout_routed_experts[:, 2] = 0


def an_expert_too_high(s: RolloutSample) -> None:
    s.rollout_routed_experts[1, 1, 1] = EXPERTS


def routes_that_are_floats(s: RolloutSample) -> None:
    s.rollout_routed_experts = s.rollout_routed_experts.float()


def a_response_longer_than_the_sample(s: RolloutSample) -> None:
    s.response_length = len(s.tokens) + 1
    s.rollout_log_probs = [0.0] * s.response_length


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (no_logprobs, errors.FieldMissing),
        (no_routes, errors.FieldMissing),
        (logprobs_of_all_tokens, errors.RowCountMismatch),
        (a_row_too_many, errors.RowCountMismatch),
        (a_layer_too_few, errors.WidthChanged),
        (a_layer_of_zeros, errors.InvalidField),
        (an_expert_too_high, errors.ValueOutOfRange),
        (routes_that_are_floats, errors.InvalidField),
        (a_response_longer_than_the_sample, errors.InvalidField),
    ],
)
def test_a_malformed_sample_is_named_and_nothing_is_left(
    slime: Slime,
    args: SimpleNamespace,
    damage: Callable[[RolloutSample], None],
    error: type[errors.TqFsError],
) -> None:
    slime.at(5)
    samples = rollout()
    damage(samples[3])
    with pytest.raises(error, match="rollout 5, sample 3, position 3"):
        convert_samples_to_train_data(args, samples)
    store = writer_of(args)
    assert list(store.unreleased()) == []
    assert steps_in(store) == []
    assert len(convert_samples_to_train_data(args, rollout())[COLUMN]) == len(LENGTHS)


def test_a_layer_without_a_router_may_be_zeros(slime: Slime, args: SimpleNamespace) -> None:
    args.moe_layer_freq = [1, 1, 0, 1]
    samples = rollout()
    a_layer_of_zeros(samples[3])
    convert_samples_to_train_data(args, samples)


def test_what_fails_after_some_sessions_were_finalized_leaves_nothing(
    slime: Slime, args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ones are finalized when the fourth finds no room."""
    slime.at(0)
    real = Session.finalize
    done: list[list[Segment]] = []

    def full(self: Session, **options: Any) -> Any:
        if "position 3" in self.session_id:
            raise errors.StorageFull("no room", subject="the device")
        done.append(real(self, **options))
        return done[-1]

    monkeypatch.setattr(Session, "finalize", full)
    with pytest.raises(errors.StorageFull):
        convert_samples_to_train_data(args, rollout())
    store = writer_of(args)
    assert done
    assert steps_in(store) == []
    for (segment,) in done:
        with pytest.raises(errors.SegmentMissing):
            store.hydrate([segment])


def test_a_configuration_that_names_no_store_is_refused(slime: Slime, tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidConfig, match=r"tq-fs-\d\.yaml"):
        convert_samples_to_train_data(arguments(tmp_path, "store_id: run-1\n"), rollout())
    args = arguments(tmp_path, f"url: file://{tmp_path}/store\n", num_experts=None)
    with pytest.raises(errors.InvalidConfig, match="num_experts"):
        convert_samples_to_train_data(args, rollout())


def test_references_without_a_store_in_the_actors_arguments_are_refused(
    slime: Slime, args: SimpleNamespace
) -> None:
    data = convert_samples_to_train_data(args, rollout())
    with pytest.raises(errors.InvalidConfig, match="tq_fs_config"):
        received(Hydrating(unstored(args), World()), data)


# ---------------------------------------------------------------- full shapes


def test_full_tensors_are_those_of_the_in_memory_path(slime: Slime, args: SimpleNamespace) -> None:
    slime.be(World(), LAYERS)
    data = received(Hydrating(args, World()), convert_samples_to_train_data(args, rollout()))
    want = received(TrainRayActor(args, World()), unstored_data(args))
    assert COLUMN not in data
    assert_same(data["rollout_log_probs"], want["rollout_log_probs"])
    assert_same(data["rollout_routed_experts"][:], want["rollout_routed_experts"])
    assert data["rollout_routed_experts"][0].shape == (LENGTHS[0][0] - 1, LAYERS, TOPK)


def unstored_data(args: SimpleNamespace) -> dict[str, Any]:
    return convert_samples_to_train_data(unstored(args), rollout())


def test_samples_of_partial_rollouts_keep_what_each_engine_call_gave(
    slime: Slime, args: SimpleNamespace
) -> None:
    """A generation that was preempted and resumed is one sample; nothing of it is told apart."""
    one = sample(0, 20, 12, weight_versions=["3", "3", "5"], loss_mask=[1] * 5 + [0] * 3 + [1] * 4)
    two = sample(1, 8, 3)
    data = convert_samples_to_train_data(args, [copy.deepcopy(one), copy.deepcopy(two)])
    assert data["loss_masks"] == [one.loss_mask, [1] * 3]
    slime.be(World(), LAYERS)
    have = received(Hydrating(args, World()), data)
    assert same(have["rollout_log_probs"][0], torch.tensor(one.rollout_log_probs))
    assert same(have["rollout_routed_experts"][0], one.rollout_routed_experts)
    assert same(have["rollout_routed_experts"][1], two.rollout_routed_experts)


@pytest.mark.parametrize("actor", [Hydrating, Slicing])
def test_removed_samples_are_not_written_and_train_on_zeros(
    slime: Slime, args: SimpleNamespace, actor: type[TrainRayActor]
) -> None:
    samples = rollout()
    for i in (0, 3):
        samples[i].remove_sample = True
    no_routes(samples[0])
    no_logprobs(samples[0])
    data = convert_samples_to_train_data(args, samples)
    assert [s.ref is None for s in data[COLUMN]] == [True, False, False, True, False, False]
    assert data["loss_masks"][3] == [0] * 7
    want = rollout()
    for i in (0, 3):
        want[i].rollout_routed_experts[...] = 0
        want[i].rollout_log_probs = [0.0] * want[i].response_length
    compare(slime, args, data, convert_samples_to_train_data(unstored(args), want), actor)


@pytest.mark.parametrize("actor", [Hydrating, Slicing])
def test_samples_shortened_after_they_were_stored_are_clipped(
    slime: Slime, args: SimpleNamespace, actor: type[TrainRayActor]
) -> None:
    data = convert_samples_to_train_data(args, rollout())
    samples = rollout()
    for i, cut in ((1, 5), (3, 6)):
        left = len(samples[i].tokens) - cut
        samples[i].tokens = data["tokens"][i] = samples[i].tokens[:left]
        samples[i].response_length -= cut
        data["response_lengths"][i] = samples[i].response_length
        samples[i].rollout_log_probs = samples[i].rollout_log_probs[:-cut]
        samples[i].rollout_routed_experts = samples[i].rollout_routed_experts[: left - 1]
    compare(slime, args, data, convert_samples_to_train_data(unstored(args), samples), actor)


def compare(
    slime: Slime,
    args: SimpleNamespace,
    data: dict[str, Any],
    want: dict[str, Any],
    actor: type[TrainRayActor],
    world: World = World(cp=2),  # noqa: B008  # frozen
) -> None:
    """Hold what all ranks train on against what they do on slime's in-memory path."""
    for rank in world_ranks(world):
        slime.be(rank, args.num_layers)
        mine = received(actor(args, rank), data)
        slimes = received(TrainRayActor(args, rank), want)
        assert_same(mine["rollout_log_probs"], slimes["rollout_log_probs"])
        have, expected = fill(actor(args, rank), mine), fill(TrainRayActor(args, rank), slimes)
        assert len(have) == len(expected) == sum(map(len, rank.routers(args.num_layers)))
        for router, wanted in zip(have, expected, strict=True):
            assert_same(router, wanted)


# ---------------------------------------------------------------- slices

STAGES: dict[str, tuple[tuple[tuple[int, int], ...], int | tuple[int, ...]]] = {
    "whole": (((0, 4),), 1),
    "first of two": (((0, 2),), 1),
    "last of two": (((2, 4),), 1),
    "uneven, a dense layer first": (((0, 3),), (0, 1, 1, 1)),
    "every other layer": (((1, 4),), 2),
    "virtual stages": (((0, 1), (2, 3)), 1),
    "a chunk without a router": (((0, 1), (2, 4)), (0, 1, 1, 1)),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_ranks_slice_is_slimes_slice_of_the_whole(
    slime: Slime, args: SimpleNamespace, cp: int, split: str, stage: str
) -> None:
    args.allgather_cp = split == "contiguous"
    chunks, args.moe_layer_freq = STAGES[stage]
    data = convert_samples_to_train_data(args, rollout())
    want = unstored_data(args)
    for tp, parallel, multiple in ((1, False, 1), (2, True, 4), (2, False, 3)):
        args.sequence_parallel, args.data_pad_size_multiplier = parallel, multiple
        world = World(cp=cp, tp=tp, chunks=chunks, freq=args.moe_layer_freq)
        compare(slime, args, data, want, Slicing, world)


@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_slimes_own_fill_takes_the_full_column(
    slime: Slime, args: SimpleNamespace, cp: int, split: str
) -> None:
    args.allgather_cp = split == "contiguous"
    data = convert_samples_to_train_data(args, rollout())
    compare(slime, args, data, unstored_data(args), Hydrating, World(cp=cp))


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    contexts=st.integers(1, 5),
    tensors=st.integers(1, 3),
    multiple=st.integers(1, 9),
    contiguous=st.booleans(),
)
def test_ranks_together_replay_every_row_once(
    lengths: list[int], contexts: int, tensors: int, multiple: int, contiguous: bool
) -> None:
    found: list[tuple[int, int]] = []
    sizes = set()
    for c in range(contexts):
        for t in range(tensors):
            place = Place(
                context=c,
                contexts=contexts,
                tensor=t,
                tensors=tensors,
                split="contiguous" if contiguous else "zigzag",
                multiple=multiple,
                sequence_parallel=True,
            )
            rows = place.rows(lengths)
            sizes.add(sum(p.rows for p in rows))
            found += [(p.sample, r) for p in rows if p.sample is not None
                      for r in range(p.start, p.stop)]  # fmt: skip
    assert sorted(found) == [(i, r) for i, n in enumerate(lengths) for r in range(n - 1)]
    assert len(sizes) == 1  # all ranks have equally many, which collectives need


def test_a_rank_reads_its_own_rows_and_layers_only(
    slime: Slime, args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    args.data_pad_size_multiplier = 1
    data = convert_samples_to_train_data(args, [sample(0, 65, 30)])
    world = World(cp=4, cp_rank=1, chunks=((2, 4),))
    slime.be(world, LAYERS)
    actor = Slicing(args, world)
    mine = received(actor, data)
    hydrated: list[tuple[int, ...]] = []
    real = Store.hydrate

    def watched(self: Store, *given: Any, **options: Any) -> Any:
        found = real(self, *given, **options)
        hydrated.extend(tuple(t.shape) for t in found["rollout_routed_experts"])
        return found

    monkeypatch.setattr(Store, "hydrate", watched)
    fill(actor, mine)
    assert hydrated == [(9, 2, TOPK), (9, 2, TOPK)]  # of 64 rows and 4 layers; 72 with padding


def test_a_model_with_other_routers_than_the_replay_is_refused(
    slime: Slime, args: SimpleNamespace
) -> None:
    data = convert_samples_to_train_data(args, rollout())
    slime.be(World(), LAYERS)
    actor = Slicing(args, World())
    mine = received(actor, data)
    RoutingReplay()
    with pytest.raises(errors.InvalidConfig, match="routers: 4, slime's replay has 5"):
        fill(actor, mine)


# ---------------------------------------------------------------- memory


class Watch:
    """An allocator that knows how much of what it gave is still there.

    Reading threads may hold on to what they have read for a moment: it waits for that to pass.
    """

    def __init__(self) -> None:
        self.live = self.peak = self.largest = 0
        self.limit = 2**63

    def __call__(self, nbytes: int) -> Any:
        self.settle(self.limit - nbytes)
        block = mapped_empty(nbytes)
        self.live += nbytes
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, nbytes)
        weakref.finalize(block.base if block.base is not None else block, self._gone, nbytes)
        return block

    def _gone(self, nbytes: int) -> None:
        self.live -= nbytes

    def settle(self, limit: int) -> int:
        for _ in range(200):
            if self.live <= limit:
                break
            time.sleep(0.01)
        return self.live


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    found = Watch()
    monkeypatch.setattr("tq_fs.integrations.slime._actor.mapped_empty", found)
    return found


@pytest.mark.parametrize("actor", [Hydrating, Slicing])
def test_memory_stays_within_the_budget_of_a_micro_batch(
    slime: Slime, args: SimpleNamespace, watch: Watch, actor: type[TrainRayActor]
) -> None:
    tokens, count = 257, 12
    args.tq_fs_budget_bytes = 2 * tokens * LAYERS * TOPK * 4
    args.data_pad_size_multiplier = 1
    samples = [sample(i, tokens, 100) for i in range(count)]
    data = convert_samples_to_train_data(args, samples)
    slime.be(World(), LAYERS)
    mine = received(actor(args, World()), data)
    del mine["rollout_log_probs"]
    assert watch.settle(0) == 0  # nothing of the routes is there before it is asked for
    watch.limit = 2 * args.tq_fs_budget_bytes  # the next one while slime has the last
    fill(actor(args, World()), mine)
    assert 0 < watch.largest <= args.tq_fs_budget_bytes
    assert watch.peak <= watch.limit


@pytest.mark.parametrize(("actor", "cp"), [(Hydrating, 1), (Slicing, 1)])
def test_a_micro_batch_beyond_the_budget_is_refused_by_number(
    slime: Slime, args: SimpleNamespace, actor: type[TrainRayActor], cp: int
) -> None:
    data = convert_samples_to_train_data(args, rollout())
    args.tq_fs_budget_bytes = (33 + 5) * LAYERS * TOPK * 4 - 100
    slime.be(World(), LAYERS)
    with pytest.raises(errors.BudgetTooSmall, match="micro-batch 1"):
        fill(actor(args, World()), received(actor(args, World()), data))


def test_slices_fit_a_budget_that_whole_tensors_do_not(slime: Slime, args: SimpleNamespace) -> None:
    data = convert_samples_to_train_data(args, rollout())
    args.tq_fs_budget_bytes = 16 * LAYERS * TOPK * 4
    compare(slime, args, data, unstored_data(args), Slicing, World(cp=4, chunks=((0, 2),)))


def test_a_micro_batch_is_read_once(slime: Slime, args: SimpleNamespace, watch: Watch) -> None:
    data = convert_samples_to_train_data(args, rollout())
    slime.be(World(), LAYERS)
    column = received(Hydrating(args, World()), data)["rollout_routed_experts"]
    assert isinstance(column, RoutingColumn)
    first = column[0]
    assert column[0] is first
    held = watch.live
    assert column[1].shape[0] == LENGTHS[1][0] - 1
    assert watch.live <= held
    assert len(column) == len(LENGTHS)
    assert column[-1].shape[0] == LENGTHS[-1][0] - 1
    with pytest.raises(IndexError):
        column[len(LENGTHS)]


def test_pinned_memory_is_asked_for_by_a_setting(
    slime: Slime, args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU there is none: that it is asked for is all that can be told here."""
    asked: list[int] = []

    def pinned(nbytes: int) -> Any:
        asked.append(nbytes)
        return mapped_empty(nbytes)

    monkeypatch.setattr("tq_fs.integrations.slime._actor.pinned_empty", pinned)
    args.tq_fs_pin_memory = True
    data = convert_samples_to_train_data(args, rollout())
    compare(slime, args, data, unstored_data(args), Slicing, World())
    assert asked
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError):
            pinned_empty(8)


# ---------------------------------------------------------------- release


def checkpoint(args: SimpleNamespace, folder: Path, rollout_id: int | str) -> None:
    args.save, args.save_interval = str(folder), 1
    folder.mkdir(exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{rollout_id}\n")


def alive(store: Store, data: dict[str, Any]) -> bool:
    """Whether a rollout's Segments can be read."""
    try:
        store.hydrate([s for s in data[COLUMN] if s.ref])
    except errors.SegmentMissing:
        return False
    return True


def convert_at(slime: Slime, args: SimpleNamespace, rollout_id: int) -> dict[str, Any]:
    slime.at(rollout_id)
    return convert_samples_to_train_data(args, [sample(i, 9, 4) for i in range(2)])


def test_what_no_checkpoint_has_used_stays(
    slime: Slime, args: SimpleNamespace, tmp_path: Path
) -> None:
    checkpoint(args, tmp_path / "ckpt", "release")
    data = [convert_at(slime, args, n) for n in range(4)]
    store = writer_of(args)
    assert [alive(store, d) for d in data] == [True] * 4
    checkpoint(args, tmp_path / "ckpt", 1)
    data.append(convert_at(slime, args, 4))
    assert [alive(store, d) for d in data] == [False, False, True, True, True]


def test_a_checkpoint_of_an_earlier_run_does_not_delete_what_is_being_trained_on(
    slime: Slime, args: SimpleNamespace, tmp_path: Path
) -> None:
    """The folder may name a far later one; the previous rollout may still be in training."""
    checkpoint(args, tmp_path / "ckpt", 500)
    data = [convert_at(slime, args, n) for n in range(4)]
    assert [alive(writer_of(args), d) for d in data] == [False, False, True, True]


def test_without_checkpoints_what_has_been_trained_on_goes(
    slime: Slime, args: SimpleNamespace
) -> None:
    data = [convert_at(slime, args, n) for n in range(4)]
    assert [alive(writer_of(args), d) for d in data] == [False, False, True, True]


def test_without_slimes_rollout_number_nothing_is_released(
    slime: Slime, args: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    slime.at(None)
    data = [convert_samples_to_train_data(args, [sample(0, 9, 4)]) for _ in range(4)]
    store = writer_of(args)
    assert all(alive(store, d) for d in data)
    assert len(list(store.unreleased("train"))) == 4
    assert "not released" in caplog.text


@pytest.mark.parametrize("actor", [Hydrating, Slicing])
def test_a_released_segment_is_a_typed_error_that_names_the_sample(
    slime: Slime, args: SimpleNamespace, actor: type[TrainRayActor]
) -> None:
    data = convert_at(slime, args, 0)
    slime.be(World(), LAYERS)
    writer_of(args).release([data[COLUMN][1].ref])
    with pytest.raises(errors.SegmentMissing) as caught:
        fill(actor(args, World()), received(actor(args, World()), data))
    assert data[COLUMN][1].ref in str(caught.value)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_clusters.Cluster]:
    """A store on two nodes, found by `attach` as a Ray cluster's would be."""
    with _clusters.cluster(tmp_path / "nodes") as found:
        monkeypatch.setattr(tq_fs.cluster, "attach", {_clusters.STORE: found}.__getitem__)
        yield found
        close_stores()


def test_on_a_cluster_a_saved_model_lets_go_at_once(
    slime: Slime, fleet: _clusters.Cluster, tmp_path: Path
) -> None:
    yaml = f"store_id: {_clusters.STORE}\ncluster:\n  paths: [/nvme]\n"
    args = arguments(tmp_path, yaml, save=str(tmp_path / "none"), save_interval=1)
    data = [convert_at(slime, args, n) for n in range(3)]
    with fleet.store([tq_fs.logprobs()]) as store:
        want = [convert_samples_to_train_data(unstored(args), [sample(i, 9, 4) for i in range(2)])]
        compare(slime, args, data[0], want[0], Slicing)
        Slicing(arguments(tmp_path, yaml, rank=1), World()).save_model(0)
        assert readable(store, data) == [True, True, True]  # only one rank tells
        actor = Slicing(args, World())
        actor.save_model(0)
        assert readable(store, data) == [False, True, True]
        args.async_save = True
        actor.save_model(1)
        assert readable(store, data) == [False, True, True]  # it may still be on its way
        actor.save_model(2, force_sync=True)
        assert readable(store, data) == [False, False, False]
        assert actor.saved == [0, 1, 2]


def readable(store: Store, data: Sequence[dict[str, Any]]) -> list[bool]:
    def one(samples: Sequence[Sample]) -> bool:
        try:
            store.hydrate(samples)
        except errors.SegmentMissing:
            return False
        return True

    return [one(d[COLUMN]) for d in data]


def test_an_embedded_store_is_left_to_its_writer(slime: Slime, args: SimpleNamespace) -> None:
    data = convert_at(slime, args, 0)
    actor = Hydrating(args, World())
    actor.save_model(0)
    assert actor.saved == [0]
    assert alive(writer_of(args), data)


@pytest.mark.s3
def test_a_bucket_is_as_good_as_a_folder(slime: Slime, tmp_path: Path, bucket: str) -> None:
    args = arguments(tmp_path, f"url: s3://{bucket}/rollouts\n")
    data = convert_samples_to_train_data(args, rollout())
    compare(slime, args, data, unstored_data(args), Slicing)


# ---------------------------------------------------------------- in processes of its own

PROBE = """
import sys
import tq_fs.integrations.slime
print({"slime", "ray", "torch", "megatron"} & {name.partition(".")[0] for name in sys.modules})
"""


def test_importing_needs_neither_slime_nor_ray_nor_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_a_store_is_opened_once_and_again_after_it_was_closed(
    slime: Slime, args: SimpleNamespace
) -> None:
    first = writer_of(args)
    Path(args.tq_fs_config).write_text(f"url: file://{Path(args.tq_fs_config).parent}/other\n")
    assert writer_of(args) is first
    close_stores()
    second = writer_of(args)
    assert second is not first
    with pytest.raises(errors.StoreBusy):
        open_store(f"file://{Path(args.tq_fs_config).parent}/other", fields=[tq_fs.logprobs()])
