"""A small mixture-of-experts model that rolls out and trains, with its routing recorded.

`TinyMoe` is the `Qwen3MoeForCausalLM` of transformers with few, random weights. `generate`
stands in for the inference engine: it returns what SGLang's `/generate` returns with
`return_logprob` and `return_routed_experts`. `forward` stands in for the trainer: the same
weights in a precision of choice, routing freely or as a rollout did (rollout routing replay, R3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.func import functional_call
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tq_fs.demo.routers import install, recorded, replayed, stacked


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """What the engine returns for one prompt of P tokens that it continued by N.

    Attributes
    ----------
    prompt_ids
        int32 `[P]`.
    output_ids
        int32 `[N]`.
    output_logprobs
        float32 `[N]`: log-probability of each output token at temperature 1.
    routed_experts
        int32 `[P + N - 1, layers, topk]`: the expert ids each token was sent to, in the router's
        order (most probable first). The last token was never fed to the model and has no row.
    output_logits
        float32 `[N, vocab]`: the logits each output token was sampled from.
    """

    prompt_ids: NDArray[np.int32]
    output_ids: NDArray[np.int32]
    output_logprobs: NDArray[np.float32]
    routed_experts: NDArray[np.int32]
    output_logits: NDArray[np.float32]

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Prompt and output, int32 `[P + N]`."""
        return np.concatenate([self.prompt_ids, self.output_ids])


class TinyMoe:
    """Random-weight Qwen3-MoE on the CPU, all layers MoE, as rollout engine and as trainer.

    Several threads may generate at once; `forward` wants the model for itself. A model that others
    share is changed between their calls only.

    Parameters
    ----------
    layers, experts, topk
        MoE layers, experts of each, and experts a token is sent to in each.
    hidden
        Width of the residual stream; a multiple of 16, which the grouped matmul asks for.
    vocab
        Token ids are `[0, vocab)`. None of them ends a sequence.
    seed
        Of the weights. The global random state is neither used nor changed.

    Attributes
    ----------
    model
        The model itself, float32, for an optimizer to update.
    """

    def __init__(
        self,
        *,
        layers: int = 12,
        experts: int = 64,
        topk: int = 8,
        hidden: int = 64,
        vocab: int = 512,
        seed: int = 0,
    ) -> None:
        if hidden <= 0 or hidden % 16:
            raise ValueError(f"hidden={hidden} must be a positive multiple of 16")
        if not 0 < topk <= experts:
            raise ValueError(f"topk={topk} must be in 1..experts={experts}")
        self._take(_build(_config(layers, experts, topk, hidden, vocab), seed))

    @classmethod
    def around(cls, model: Qwen3MoeForCausalLM) -> TinyMoe:
        """Take a model as it is: all layers MoE, float32, and no other TinyMoe's."""
        moe = cls.__new__(cls)
        moe._take(model)
        return moe

    def _take(self, model: Qwen3MoeForCausalLM) -> None:
        config = model.config
        self.layers, self.topk = int(config.num_hidden_layers), int(config.num_experts_per_tok)
        self.experts, self.vocab = int(config.num_experts), int(config.vocab_size)
        self.model = model
        install([layer.mlp.gate for layer in model.model.layers])

    def generate(
        self, prompts: Sequence[NDArray[Any]], *, max_new_tokens: int, seeds: Sequence[int]
    ) -> list[Reply]:
        """Continue each prompt by `max_new_tokens` tokens, sampled at temperature 1.

        The same call gives the same replies. A sequence draws from its own seed, so that the rest
        of the batch does not change its random numbers. The batch's shape does change the order of
        float32 sums, by about 1e-5 in the logits: once in some hundred thousand choices an
        expert at a near-tie differs from that of the sequence alone, and what follows may too.

        Parameters
        ----------
        prompts
            Integer arrays `[P_i]`, none empty.
        seeds
            One per prompt.

        Returns
        -------
        list of Reply
            In the order of `prompts`.
        """
        if len(seeds) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need as many seeds, not {len(seeds)}")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
        checked = [self._checked(prompt) for prompt in prompts]
        if not checked:
            return []
        generators = [np.random.default_rng(seed) for seed in seeds]
        with torch.no_grad(), recorded(self.layers) as chosen:
            tokens, logits = self._decode(checked, generators, max_new_tokens)
        return _replies(checked, tokens, logits, stacked(chosen, len(checked)))

    def forward(
        self,
        tokens: NDArray[Any],
        *,
        routing: NDArray[np.int32] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Training forward pass over one sequence of T tokens, differentiable.

        Parameters
        ----------
        tokens
            Integer array `[T]`.
        routing
            int32 `[T - 1, layers, topk]`: experts to use in place of the router's choice. Their
            weights are this pass's own router probabilities, so gradients reach the router. The
            last token has no row and routes freely.
        dtype
            Of parameters and activations. Gradients arrive at the float32 parameters.

        Returns
        -------
        torch.Tensor
            Logits, float32 `[T, vocab]`.

        Raises
        ------
        ValueError
            `tokens` or `routing` has another shape, or ids out of range (-1: route unknown).
        """
        ids = self._checked(tokens)
        if routing is None:
            return self._logits(ids, dtype)
        with replayed(self._checked_routing(routing, len(ids))):
            return self._logits(ids, dtype)

    def routing_of(
        self, tokens: NDArray[Any], dtype: torch.dtype = torch.float32
    ) -> NDArray[np.int32]:
        """Experts that a training forward pass chooses by itself.

        Returns
        -------
        numpy.ndarray
            int32 `[T - 1, layers, topk]`, as `Reply.routed_experts`.
        """
        with torch.no_grad(), recorded(self.layers) as chosen:
            self.forward(tokens, dtype=dtype)
        return stacked(chosen, 1)[0, :-1]

    def token_logprobs(self, logits: torch.Tensor, tokens: NDArray[Any]) -> torch.Tensor:
        """Log-probability of each token but the first, given those before it.

        Parameters
        ----------
        logits
            `[T, vocab]`, of `forward`.
        tokens
            Integer array `[T]`.

        Returns
        -------
        torch.Tensor
            float32 `[T - 1]`; the last N belong to the N output tokens of a Reply.
        """
        return _logprobs_of(logits[:-1], self._checked(tokens)[1:])

    def _decode(
        self, prompts: list[torch.Tensor], generators: list[np.random.Generator], new_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output tokens int64 `[B, N]` and their logits float32 `[B, N, vocab]`."""
        ids, mask = _left_padded(prompts)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        tokens, logits, cache = [], [], None
        for _ in range(new_tokens):
            out = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logits.append(out.logits[:, 0])
            ids, cache = _sampled(logits[-1], generators), out.cache
            tokens.append(ids)
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            positions = positions[:, -1:] + 1
        return torch.cat(tokens, dim=1), torch.stack(logits, dim=1)

    def _logits(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # Casting inside the graph is what mixed-precision training does with its float32 masters;
        # autocast would leave the residual stream and the experts in float32.
        weights = {name: weight.to(dtype) for name, weight in self.model.named_parameters()}
        call = {"input_ids": ids[None], "use_cache": False}
        logits: torch.Tensor = functional_call(self.model, weights, kwargs=call).logits
        return logits[0].float()

    def _checked(self, tokens: NDArray[Any]) -> torch.Tensor:
        ids = np.asarray(tokens)
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise ValueError(f"tokens must be integers [T >= 1], not {ids.dtype} {ids.shape}")
        if ids.min() < 0 or ids.max() >= self.vocab:
            raise ValueError(f"tokens {ids.min()}..{ids.max()} are not all in 0..{self.vocab - 1}")
        return torch.from_numpy(ids.astype(np.int64))

    def _checked_routing(self, routing: NDArray[np.int32], length: int) -> torch.Tensor:
        ids, shape = np.asarray(routing), (length - 1, self.layers, self.topk)
        if ids.shape != shape or ids.dtype.kind not in "iu":
            raise ValueError(
                f"routing of {length} tokens must be integers {shape}, not {ids.dtype} {ids.shape}"
            )
        if ids.size and (ids.min() < 0 or ids.max() >= self.experts):
            raise ValueError(f"experts {ids.min()}..{ids.max()} are not in 0..{self.experts - 1}")
        return torch.from_numpy(ids.astype(np.int64))


def _config(layers: int, experts: int, topk: int, hidden: int, vocab: int) -> Qwen3MoeConfig:
    config = Qwen3MoeConfig(
        num_hidden_layers=layers,
        num_experts=experts,
        num_experts_per_tok=topk,
        norm_topk_prob=True,
        hidden_size=hidden,
        moe_intermediate_size=hidden // 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab,
        # Linear maps keep the variance of what they are given. Router logits thus have unit
        # variance: the weights of the chosen experts are of one magnitude, and those at ranks
        # topk and topk + 1 are often close enough for bfloat16 to swap them.
        initializer_range=hidden**-0.5,
    )
    # The fastest on a CPU at this size: generation takes 1.5 times as long with "batched_mm",
    # which copies the weights of every token's experts, and 3.5 times with "eager", which loops
    # over experts in Python.
    config._experts_implementation = "grouped_mm"
    return config


def _build(config: Qwen3MoeConfig, seed: int) -> Qwen3MoeForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config)
    _balance(model)
    return model


@torch.no_grad()
def _balance(model: Qwen3MoeForCausalLM) -> None:
    """Scale random weights so that the model shows what a trained one shows.

    As initialized, attention's mean over the context outweighs the token itself, so that in the
    middle layers most tokens of a sequence share one set of experts; and a flipped expert hardly
    moves the logits, which are nearly uniform. Measured with these gains: bfloat16 flips a fifth
    of the routing rows, and replay divides the mean logprob gap by 5, the largest by 10.
    """
    model.model.embed_tokens.weight.mul_(model.config.hidden_size**0.5)
    for layer in model.model.layers:
        layer.mlp.experts.down_proj.mul_(2.0)
    model.lm_head.weight.mul_(2.0)


def _left_padded(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, int64 `[B, P]`; prompts end together, so decoding aligns."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


def _sampled(logits: torch.Tensor, generators: list[np.random.Generator]) -> torch.Tensor:
    """One token per row of `[B, vocab]`, each by its own generator; int64 `[B, 1]`."""
    cumulative = torch.softmax(logits.double(), dim=-1).cumsum(dim=-1)
    draws = torch.tensor([[generator.random()] for generator in generators], dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    return tokens.clamp(max=logits.shape[-1] - 1)


def _logprobs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float32 `[...]` of logits `[..., vocab]` and token ids `[...]`."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return logprobs.gather(-1, tokens[..., None])[..., 0]


def _replies(
    prompts: list[torch.Tensor],
    tokens: torch.Tensor,
    logits: torch.Tensor,
    routing: NDArray[np.int32],
) -> list[Reply]:
    """Cut a left-padded batch into replies, without the routing of the padding."""
    longest = max(map(len, prompts))
    logprobs = _logprobs_of(logits, tokens).numpy()
    return [
        Reply(
            prompt_ids=prompt.numpy().astype(np.int32),
            output_ids=tokens[row].numpy().astype(np.int32),
            output_logprobs=logprobs[row].copy(),
            routed_experts=routing[row, longest - len(prompt) :].copy(),
            output_logits=logits[row].numpy().copy(),
        )
        for row, prompt in enumerate(prompts)
    ]
