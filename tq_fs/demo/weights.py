"""A tiny model's folder: configuration, tokenizer and weights, as transformers has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, Qwen3MoeForCausalLM

from tq_fs.demo.engine import TinyMoe
from tq_fs.demo.tokenizer import save_tokenizer
from tq_fs.errors import InvalidConfig

WEIGHTS = "model.safetensors"


def save_model(moe: TinyMoe, folder: str | Path) -> Path:
    """Write a folder that an engine can serve, and take weights from, and return it."""
    folder = Path(folder)
    moe.model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    return save_tokenizer(folder, config)  # which names stop tokens, too


def load_model(folder: str | Path, *, seed: int = 0) -> TinyMoe:
    """Read a model; where the folder has no weights, give it random ones.

    Parameters
    ----------
    seed
        Of random weights.

    Raises
    ------
    InvalidConfig
        No configuration of a Qwen3-MoE, or weights that do not fit it.
    """
    folder = _there(folder)
    if (folder / WEIGHTS).is_file():
        return TinyMoe.around(_read(folder))
    try:
        config = AutoConfig.from_pretrained(str(folder))
        return TinyMoe(
            layers=config.num_hidden_layers,
            experts=config.num_experts,
            topk=config.num_experts_per_tok,
            hidden=config.hidden_size,
            vocab=config.vocab_size,
            seed=seed,
        )
    except (AttributeError, OSError, ValueError) as error:
        raise InvalidConfig(f"holds no such model: {error}", subject=str(folder)) from error


def take_weights(moe: TinyMoe, folder: str | Path) -> None:
    """Give a model the weights of a folder; all of them or, if they do not fit, none.

    Raises
    ------
    InvalidConfig
        They cannot be read, or are another model's; `moe` is unchanged.
    """
    found = _read(_there(folder)).state_dict()
    own = moe.model.state_dict()
    other = sorted(
        name
        for name in found.keys() | own.keys()
        if name not in found or name not in own or found[name].shape != own[name].shape
    )
    if other:
        raise InvalidConfig(
            f"holds weights of another model: {', '.join(other[:3])} and so on differ",
            subject=str(folder),
        )
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(found[name])


def _there(folder: str | Path) -> Path:
    """Return a folder that exists: transformers would look for others in the network."""
    if not Path(folder).is_dir():
        raise InvalidConfig("is no folder", subject=str(folder), remedy="give a model's folder")
    return Path(folder)


def _read(folder: Path) -> Qwen3MoeForCausalLM:
    try:
        loaded: Any = Qwen3MoeForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, output_loading_info=True
        )
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise InvalidConfig(f"cannot be read: {error}", subject=str(folder)) from error
    model: Qwen3MoeForCausalLM
    model, said = loaded
    _complain(folder, said)
    model.config._experts_implementation = "grouped_mm"  # as TinyMoe says
    return model


def _complain(folder: Path, said: dict[str, Any]) -> None:
    wrong = {what: sorted(map(str, names)) for what, names in said.items() if names}
    if wrong:
        raise InvalidConfig(
            "; ".join(f"{what}: {', '.join(names[:3])}" for what, names in wrong.items()),
            subject=str(folder),
            remedy="give weights of this very configuration",
        )
