"""The columns of slime's train data that are none of ours."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from tq_fs.errors import InvalidField

_log = logging.getLogger(__name__)
_NORMALISED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_DIVIDED = ("grpo", "gspo", "cispo")


def other_columns(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """Return what slime's conversion makes of samples.

    By the function that ``tq_fs_convert_path`` names, else by slime's own conversion, else, where
    there is no such thing, by a conversion to the columns that slime had at commit 624b824
    (after 0.3.1).
    """
    path = getattr(args, "tq_fs_convert_path", None)
    if path:
        return dict(load(path)(args, list(samples)))
    manager = _manager(args)
    if manager is not None:
        return dict(manager._convert_samples_to_train_data(list(samples)))
    _log.warning("slime's own conversion was not found: the columns of slime 0.3.1 are made here")
    return converted(args, samples)


def load(path: str) -> Any:
    """Return what ``module.name`` names."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _manager(args: Any) -> Any:
    """Return a RolloutManager that can convert and nothing else; None where slime has none."""
    try:
        from slime.ray.rollout import RolloutManager  # noqa: PLC0415
    except ImportError:
        return None
    actor = getattr(RolloutManager, "__ray_metadata__", None)  # below Ray's actor is the class
    kind = getattr(actor, "modified_class", RolloutManager)
    if not hasattr(kind, "_convert_samples_to_train_data"):
        return None
    manager = kind.__new__(kind)  # its __init__ would start engines
    manager.args = args
    manager.custom_convert_samples_to_train_data_func = None  # that is us
    post = getattr(args, "custom_reward_post_process_path", None)
    manager.custom_reward_post_process_func = load(post) if post else None
    return manager


# ---------------------------------------------------------------- where slime cannot be asked


def converted(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """Return the columns that slime makes of samples, except the two large ones where absent.

    Raises
    ------
    InvalidField
        A loss mask, or what top-p sampling kept, does not fit its response.
    """
    masks = [_loss_mask(s) for s in samples]
    if _by_top_p(args):
        _check_top_p(samples)
    raw, rewards = _rewards(args, samples)
    ids = _rollout_ids(samples)
    totals: dict[int, int] = {}
    for number, mask in zip(ids, masks, strict=True):
        totals[number] = totals.get(number, 0) + sum(mask)
    data: dict[str, Any] = {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": rewards,
        "raw_reward": raw,
        "truncated": [int(getattr(s.status, "value", s.status) == "truncated") for s in samples],
        "sample_indices": [s.index for s in samples],
        "rollout_ids": ids,
        "loss_masks": masks,
        "rollout_mask_sums": [totals[number] for number in ids],
    }
    return data | _optional(args, samples)


def _optional(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    metadata = [getattr(s, "metadata", None) or {} for s in samples]
    if any("raw_reward" in m for m in metadata):
        pairs = zip(samples, metadata, strict=True)
        data["raw_reward"] = [m.get("raw_reward", s.reward) for s, m in pairs]
    if "round_number" in metadata[0]:
        data["round_number"] = [m["round_number"] for m in metadata]
    kept = ["rollout_log_probs", "rollout_routed_experts", "teacher_log_probs"]
    if _by_top_p(args):
        kept += ["rollout_top_p_token_ids", "rollout_top_p_token_offsets"]
    for name in kept:
        if getattr(samples[0], name, None) is not None:
            data[name] = [getattr(s, name) for s in samples]
    if getattr(samples[0], "train_metadata", None) is not None:
        data["metadata"] = [s.train_metadata for s in samples]
    inputs = [getattr(s, "multimodal_train_inputs", None) for s in samples]
    if any(i is not None for i in inputs):
        data["multimodal_train_inputs"] = inputs
    if getattr(samples[0], "metadata", None) is not None:
        data["source_names"] = [
            getattr(s, "source", None) or m.get("source_name") or "unknown"
            for s, m in zip(samples, metadata, strict=True)
        ]
    return data


def _rewards(args: Any, samples: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    post = getattr(args, "custom_reward_post_process_path", None)
    if post:
        raw, rewards = load(post)(args, list(samples))
        return raw, rewards
    raw = [s.get_reward_value(args) for s in samples]
    if args.advantage_estimator not in _NORMALISED or not args.rewards_normalization:
        return raw, raw
    import torch  # noqa: PLC0415  # slime's arithmetic, to the bit

    group = args.n_samples_per_prompt
    whole = len(raw) == group * args.rollout_batch_size
    rewards = torch.tensor(raw, dtype=torch.float).reshape(-1, group if whole else len(raw))
    rewards = rewards - rewards.mean(-1, keepdim=True)
    if args.advantage_estimator in _DIVIDED and args.grpo_std_normalization:
        rewards = rewards / (rewards.std(-1, keepdim=True) + 1e-6)
    return raw, rewards.flatten().tolist()


def _loss_mask(sample: Any) -> list[int]:
    if sample.loss_mask is not None and len(sample.loss_mask) != sample.response_length:
        raise InvalidField(
            f"a loss mask of {len(sample.loss_mask)} for a response of {sample.response_length}",
            subject=f"sample {sample.index}",
        )
    if sample.remove_sample:
        return [0] * sample.response_length
    return [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask


def _rollout_ids(samples: Sequence[Any]) -> list[int]:
    """Return whose samples belong together; one that does not say gets a number of its own."""
    given = [getattr(s, "rollout_id", None) for s in samples]
    taken = set(given)
    free = (number for number in range(2 * len(given) + 1) if number not in taken)
    return [next(free) if number is None else number for number in given]


def _by_top_p(args: Any) -> bool:
    return bool(getattr(args, "rollout_top_p", 1.0) != 1.0)


def _check_top_p(samples: Sequence[Any]) -> None:
    for sample in samples:
        ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
        whole = ids is not None and offsets is not None
        if not whole or len(offsets) != sample.response_length + 1 or int(offsets[-1]) != len(ids):
            raise InvalidField(
                f"what top-p kept does not fit a response of {sample.response_length}",
                subject=f"sample {sample.index}",
            )
