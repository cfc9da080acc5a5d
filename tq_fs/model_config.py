"""What a model's ``config.json`` says of its routing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tq_fs.errors import InvalidConfig
from tq_fs.fields import FieldSpec, routed_experts


def routed_experts_of_model(
    config: str | Path | Mapping[str, Any], *, dense_layers: bool = False, stored: str = "auto"
) -> FieldSpec:
    """Declare ``routed_experts`` from a model's ``config.json``.

    Parameters
    ----------
    config
        The file, its folder, or the parsed mapping.
    dense_layers
        Whether the engine records ids for dense layers too, as SGLang does for models that have
        some: they count as layers then.
    stored
        Stored type.

    Raises
    ------
    InvalidConfig
        The configuration describes no mixture of experts.
    """
    values = _read_model_config(config)
    try:
        return _declare(values.get("text_config") or values, config, dense_layers, stored)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, InvalidConfig):
            raise
        raise _unknown_routing(config, error) from error


def dense_layers_of_model(config: str | Path | Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers that have no experts to choose from, by a model's ``config.json``.

    An engine that records dense layers too says nothing of worth about them.

    Parameters
    ----------
    config
        The file, its folder, or the parsed mapping.

    Raises
    ------
    InvalidConfig
    """
    values = _read_model_config(config)
    inner = values.get("text_config") or values
    try:
        layers = _first(inner, "num_hidden_layers")
        return tuple(i for i in range(layers) if not _is_moe_layer(inner, i))
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise _unknown_routing(config, error) from error


def _unknown_routing(config: str | Path | Mapping[str, Any], error: Exception) -> InvalidConfig:
    return InvalidConfig(
        f"describes its routing in a way unknown here ({error})",
        subject=str(config)[:120],
        remedy="give layers, topk and experts yourself",
    )


def _declare(
    values: Mapping[str, Any],
    config: str | Path | Mapping[str, Any],
    dense_layers: bool,
    stored: str,
) -> FieldSpec:
    experts = _first(values, "num_experts", "n_routed_experts", "num_local_experts")
    topk = _first(values, "num_experts_per_tok", "moe_topk", "moe_top_k")
    layers = _first(values, "num_hidden_layers")
    if not (experts and topk and layers):
        raise InvalidConfig(
            "the model's configuration names no experts, top-k or layers",
            subject=str(config)[:120],
            remedy="give layers, topk and experts yourself",
        )
    if not dense_layers:
        layers = sum(_is_moe_layer(values, i) for i in range(layers))
    return routed_experts(layers=layers, topk=topk, experts=experts, stored=stored)


def _read_model_config(config: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"cannot be read: {error}", subject=str(path)) from error
    if not isinstance(values, dict):
        raise InvalidConfig("holds no JSON object", subject=str(path))
    return values


def _first(values: Mapping[str, Any], *names: str) -> int:
    return next((int(values[name]) for name in names if values.get(name)), 0)


def _is_moe_layer(values: Mapping[str, Any], index: int) -> bool:
    """Tell whether layer `index` routes, by the keys of Qwen, DeepSeek, GLM and MiniMax."""
    if index in (values.get("mlp_only_layers") or ()):
        return False
    if index < int(values.get("first_k_dense_replace") or 0):
        return False
    every = values.get("moe_layer_freq") or 1
    if isinstance(every, list):
        return bool(every[index])
    if index % int(every):
        return False
    return (index + 1) % int(values.get("decoder_sparse_step") or 1) == 0
