"""The demo's model: what it records is what it used, and replaying that closes the gap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")

from tq_fs.demo import routers
from tq_fs.demo.engine import Reply, TinyMoe, _sampled

PROMPT_LENGTHS = (9, 30, 17, 1)
NEW_TOKENS = 24


def make_prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[np.ndarray]:
    random = np.random.default_rng(7)
    return [random.integers(0, 512, length) for length in lengths]


def generate(moe: TinyMoe, new_tokens: int = NEW_TOKENS) -> list[Reply]:
    prompts = make_prompts()
    return moe.generate(prompts, max_new_tokens=new_tokens, seeds=range(len(prompts)))


def assert_same(left: Reply, right: Reply) -> None:
    for name in Reply.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)


@contextmanager
def experts_fed(moe: TinyMoe) -> Iterator[list[list[np.ndarray]]]:
    """The ids that reach each layer's experts, downstream of every hook on the routers."""
    fed: list[list[np.ndarray]] = [[] for _ in range(moe.layers)]

    def tap(ids: list[np.ndarray]) -> Any:
        return lambda _module, args: ids.append(args[1].numpy().copy())

    handles = [
        layer.mlp.experts.register_forward_pre_hook(tap(ids))
        for layer, ids in zip(moe.model.model.layers, fed, strict=True)
    ]
    try:
        yield fed
    finally:
        for handle in handles:
            handle.remove()


def foreign_routing(moe: TinyMoe, rows: int) -> np.ndarray:
    """Distinct experts per row that no router chose."""
    every = np.broadcast_to(np.arange(moe.experts), (rows, moe.layers, moe.experts))
    shuffled = np.random.default_rng(0).permuted(every, axis=-1)
    return shuffled[..., : moe.topk].astype(np.int32)


def hooked(moe: TinyMoe) -> bool:
    """Whether this thread still records or replays, or another hook than the first is there."""
    hooks = {len(layer.mlp.gate._forward_hooks) for layer in moe.model.model.layers}
    return hooks != {1} or getattr(routers._of_this_thread, "hook", None) is not None


@pytest.fixture(scope="module")
def moe() -> TinyMoe:
    return TinyMoe()


@pytest.fixture(scope="module")
def replies(moe: TinyMoe) -> list[Reply]:
    return generate(moe)


def test_reply_has_one_routing_row_per_token_but_the_last(
    moe: TinyMoe, replies: list[Reply]
) -> None:
    for prompt, reply in zip(make_prompts(), replies, strict=True):
        np.testing.assert_array_equal(reply.prompt_ids, prompt)
        rows = len(prompt) + NEW_TOKENS - 1
        assert reply.routed_experts.shape == (rows, moe.layers, moe.topk)
        assert reply.output_ids.shape == reply.output_logprobs.shape == (NEW_TOKENS,)
        assert reply.output_logits.shape == (NEW_TOKENS, moe.vocab)
        assert reply.tokens.shape == (rows + 1,)


def test_reply_has_the_dtypes_of_the_engine(replies: list[Reply]) -> None:
    reply = replies[0]
    ids = (reply.prompt_ids, reply.output_ids, reply.tokens, reply.routed_experts)
    assert {array.dtype for array in ids} == {np.dtype(np.int32)}
    assert reply.output_logprobs.dtype == reply.output_logits.dtype == np.float32


def test_reply_owns_its_arrays(replies: list[Reply]) -> None:
    # A view would keep the whole batch alive, or share memory with a sibling.
    for name in ("output_ids", "output_logprobs", "routed_experts", "output_logits"):
        assert getattr(replies[0], name).base is None, name


def test_experts_of_a_token_are_distinct_and_vary_by_token_and_layer(
    moe: TinyMoe, replies: list[Reply]
) -> None:
    ids = np.sort(replies[1].routed_experts, axis=-1)
    assert ids.min() >= 0
    assert ids.max() < moe.experts
    assert (np.diff(ids, axis=-1) > 0).all()
    sets = np.unique(ids.reshape(-1, moe.topk), axis=0)
    assert len(sets) > 0.7 * ids.shape[0] * moe.layers


def test_logprobs_are_those_of_the_logits_at_temperature_one(replies: list[Reply]) -> None:
    for reply in replies:
        logits = reply.output_logits.astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        chosen = logprobs[np.arange(NEW_TOKENS), reply.output_ids]
        np.testing.assert_allclose(reply.output_logprobs, chosen, atol=1e-5)


def test_same_seeds_give_the_same_model_and_replies(replies: list[Reply]) -> None:
    for first, second in zip(replies, generate(TinyMoe()), strict=True):
        assert_same(first, second)


def test_another_seed_gives_other_weights_or_other_samples(
    moe: TinyMoe, replies: list[Reply]
) -> None:
    prompt = make_prompts()[:1]
    seeded = moe.generate(prompt, max_new_tokens=NEW_TOKENS, seeds=[99])[0]
    assert not np.array_equal(seeded.output_ids, replies[0].output_ids)
    other = TinyMoe(layers=1, seed=1).model.lm_head.weight
    assert not torch.equal(other, TinyMoe(layers=1, seed=2).model.lm_head.weight)


def test_building_leaves_the_global_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    TinyMoe(layers=1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_sequence_draws_from_its_own_seed_only() -> None:
    logits = torch.randn(1, 512, generator=torch.Generator().manual_seed(0))
    alone, among = np.random.default_rng(5), [np.random.default_rng(seed) for seed in (1, 5, 9)]
    for _ in range(20):
        assert _sampled(logits.expand(3, -1), among)[1] == _sampled(logits, [alone])[0]


def test_sampling_follows_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.3])
    generators = [np.random.default_rng(seed) for seed in range(4000)]
    drawn = _sampled(probabilities.log().expand(4000, -1), generators)
    shares = np.bincount(drawn[:, 0].numpy(), minlength=4) / 4000
    np.testing.assert_allclose(shares, probabilities.numpy(), atol=0.04)
    assert shares[1] == 0


def test_a_sequence_alone_repeats_what_it_did_in_the_batch(
    moe: TinyMoe, replies: list[Reply]
) -> None:
    # A batch sums floats in another order than a single sequence does, so a near-tie may flip an
    # expert (seen in 1 of 360,000 rows) and change what follows. One of four may therefore differ.
    same = 0
    for seed, (prompt, batched) in enumerate(zip(make_prompts(), replies, strict=True)):
        (alone,) = moe.generate([prompt], max_new_tokens=NEW_TOKENS, seeds=[seed])
        same += np.array_equal(alone.output_ids, batched.output_ids) and np.array_equal(
            np.sort(alone.routed_experts), np.sort(batched.routed_experts)
        )
    assert same >= len(replies) - 1


def test_recorded_routing_is_what_reached_the_experts(moe: TinyMoe) -> None:
    prompt = make_prompts((11,))
    with experts_fed(moe) as fed:
        (reply,) = moe.generate(prompt, max_new_tokens=5, seeds=[0])
    assert [len(ids) for ids in fed[0]] == [11, 1, 1, 1, 1]
    used = np.stack([np.concatenate(ids) for ids in fed], axis=1)
    np.testing.assert_array_equal(reply.routed_experts, used)


def test_replayed_routing_is_what_reaches_the_experts(moe: TinyMoe) -> None:
    tokens = make_prompts((12,))[0]
    routing = foreign_routing(moe, rows=11)
    with torch.no_grad(), experts_fed(moe) as fed:
        moe.forward(tokens, routing=routing)
    used = np.stack([ids[0] for ids in fed], axis=1)
    np.testing.assert_array_equal(used[:-1], routing)
    assert (np.diff(np.sort(used[-1]), axis=-1) > 0).all()


def test_replayed_experts_are_weighted_by_the_training_router(moe: TinyMoe) -> None:
    block = moe.model.model.layers[3].mlp
    seen: dict[str, torch.Tensor] = {}
    # The logits that the router itself computed: replay takes others' ids and weights only.
    gate = block.gate.register_forward_hook(lambda _m, _args, out: seen.update(logits=out[0]))
    experts = block.experts.register_forward_pre_hook(
        lambda _m, args: seen.update(ids=args[1], weights=args[2])
    )
    with gate, experts, torch.no_grad():
        moe.forward(make_prompts((12,))[0], routing=foreign_routing(moe, rows=11))
    probabilities = torch.softmax(seen["logits"], dim=-1).gather(1, seen["ids"])
    torch.testing.assert_close(
        seen["weights"], probabilities / probabilities.sum(dim=-1, keepdim=True)
    )


def test_replay_in_float32_reproduces_the_logits_of_the_rollout(
    moe: TinyMoe, replies: list[Reply]
) -> None:
    for reply in replies:
        with torch.no_grad():
            logits = moe.forward(reply.tokens, routing=reply.routed_experts)
        assert logits.dtype == torch.float32
        sampled_from = logits[-NEW_TOKENS - 1 : -1].numpy()
        np.testing.assert_allclose(sampled_from, reply.output_logits, rtol=0, atol=1e-4)
        logprobs = moe.token_logprobs(logits, reply.tokens)
        assert logprobs.shape == (len(reply.tokens) - 1,)
        np.testing.assert_allclose(
            logprobs[-NEW_TOKENS:].numpy(), reply.output_logprobs, rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay_of_its_own_choice_changes_neither_logits_nor_gradients(
    moe: TinyMoe, dtype: torch.dtype
) -> None:
    tokens = make_prompts((20,))[0]
    gates = [layer.mlp.gate.weight for layer in moe.model.model.layers]
    results = []
    for routing in (None, moe.routing_of(tokens, dtype)):
        logits = moe.forward(tokens, routing=routing, dtype=dtype)
        loss = -moe.token_logprobs(logits, tokens).mean()
        results.append((logits.detach(), torch.autograd.grad(loss, gates)))
    (free, free_grads), (replayed, replayed_grads) = results
    torch.testing.assert_close(replayed, free, rtol=0, atol=1e-5)
    for layer, (ours, theirs) in enumerate(zip(replayed_grads, free_grads, strict=True)):
        assert ours.abs().max() > 0, layer
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_replay_in_bfloat16_closes_the_logprob_gap(seed: int) -> None:
    moe = TinyMoe(seed=seed)
    free: list[np.ndarray] = []
    replayed: list[np.ndarray] = []
    flipped: list[float] = []
    for reply in generate(moe, new_tokens=64):
        for gaps, routing in ((free, None), (replayed, reply.routed_experts)):
            with torch.no_grad():
                logits = moe.forward(reply.tokens, routing=routing, dtype=torch.bfloat16)
            logprobs = moe.token_logprobs(logits, reply.tokens)[-64:].numpy()
            gaps.append(np.abs(logprobs - reply.output_logprobs))
        chosen = moe.routing_of(reply.tokens, torch.bfloat16)
        flipped.append((np.sort(chosen) != np.sort(reply.routed_experts)).any(-1).mean())
    assert 0.05 < np.mean(flipped) < 0.5
    assert np.mean(free) > 2.5 * np.mean(replayed)
    assert np.max(free) > 2.5 * np.max(replayed)


def test_gradient_reaches_every_gate_under_replay_in_bfloat16(
    moe: TinyMoe, replies: list[Reply]
) -> None:
    reply = replies[0]
    gates = [layer.mlp.gate.weight for layer in moe.model.model.layers]
    logits = moe.forward(reply.tokens, routing=reply.routed_experts, dtype=torch.bfloat16)
    loss = -moe.token_logprobs(logits, reply.tokens)[-NEW_TOKENS:].mean()
    for gradient in torch.autograd.grad(loss, gates):
        assert gradient.dtype == torch.float32
        assert gradient.isfinite().all()
        assert gradient.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forward_that_raises_leaves_the_model_as_it_was(
    moe: TinyMoe, replies: list[Reply], dtype: torch.dtype
) -> None:
    reply = replies[0]
    with torch.no_grad():
        before = moe.forward(reply.tokens)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory, say")

    handle = moe.model.model.layers[-1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        moe.forward(reply.tokens, routing=reply.routed_experts, dtype=dtype)
    with pytest.raises(RuntimeError, match="out of memory"):
        generate(moe)
    handle.remove()
    assert not hooked(moe)
    assert {weight.dtype for weight in moe.model.parameters()} == {torch.float32}
    with torch.no_grad():
        assert torch.equal(moe.forward(reply.tokens), before)


def test_nothing_stays_hooked_after_use(moe: TinyMoe, replies: list[Reply]) -> None:
    reply = replies[0]
    moe.routing_of(reply.tokens)
    moe.forward(reply.tokens, routing=reply.routed_experts)
    assert not hooked(moe)


def test_a_single_token_has_no_rows_and_still_runs(moe: TinyMoe) -> None:
    token = np.array([3])
    routing = moe.routing_of(token)
    assert routing.shape == (0, moe.layers, moe.topk)
    assert torch.equal(moe.forward(token, routing=routing), moe.forward(token))


def test_no_prompts_give_no_replies(moe: TinyMoe) -> None:
    assert moe.generate([], max_new_tokens=1, seeds=[]) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda routing: routing[:-1], "must be integers"),
        (lambda routing: routing[:, :-1], "must be integers"),
        (lambda routing: routing.astype(np.float32), "must be integers"),
        (lambda routing: np.where(routing == routing[0, 0, 0], -1, routing), "not in 0..63"),
        (lambda routing: routing + 64, "not in 0..63"),
    ],
)
def test_routing_that_does_not_fit_is_refused(
    moe: TinyMoe, replies: list[Reply], change: Any, message: str
) -> None:
    reply = replies[0]
    with pytest.raises(ValueError, match=message):
        moe.forward(reply.tokens, routing=change(reply.routed_experts))
    assert not hooked(moe)


@pytest.mark.parametrize("prompt", [[], [512], [-1], [[1, 2]], [0.5]])
def test_prompts_that_are_no_token_ids_are_refused(moe: TinyMoe, prompt: list[Any]) -> None:
    with pytest.raises(ValueError, match="tokens"):
        moe.generate([np.array(prompt)], max_new_tokens=1, seeds=[0])


def test_arguments_that_do_not_fit_are_refused(moe: TinyMoe) -> None:
    with pytest.raises(ValueError, match="seeds"):
        moe.generate(make_prompts(), max_new_tokens=1, seeds=[0])
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        moe.generate(make_prompts((4,)), max_new_tokens=0, seeds=[0])
    with pytest.raises(ValueError, match="multiple of 16"):
        TinyMoe(hidden=40)
    with pytest.raises(ValueError, match="topk=9"):
        TinyMoe(experts=8, topk=9)
