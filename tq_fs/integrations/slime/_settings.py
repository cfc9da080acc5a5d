"""What slime's arguments say about the store."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from tq_fs.config import StoreConfig
from tq_fs.errors import InvalidConfig
from tq_fs.fields import LOGPROBS, FieldSpec, logprobs, routed_experts, select

GiB = 1024**3
COLUMN = "prompt"
"""Column of the train data that carries a :class:`tq_fs.Sample` for each sample.

slime hands on only columns that it knows by name. This one it knows, never fills and never reads.
"""
CONSUMER = "train"
ATTRIBUTES = {LOGPROBS: "rollout_log_probs", "routed_experts": "rollout_routed_experts"}
"""How slime's samples and train data call our fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is stored, where, and how it is read.

    Read from slime's arguments, which ``--custom-config-path`` can add to:

    ==========================  ================================================================
    argument                    meaning
    ==========================  ================================================================
    ``tq_fs_config``            YAML file of the store, on every node; without it all is as slime
                                has it
    ``tq_fs_budget_bytes``      of the tensors that are hydrated at a time, on each rank; 2 GiB
    ``tq_fs_pin_memory``        hydrate into pinned memory; false
    ``tq_fs_convert_path``      function that makes the other columns, instead of slime's own
    ==========================  ================================================================

    Attributes
    ----------
    config
        Settings of the store. With ``cluster`` it is the one that runs on this Ray cluster.
    fields
        What is stored. What ``transfer`` leaves out stays in slime's own columns.
    budget_bytes
        Bound of what is hydrated at a time.
    pin_memory
        Whether it is hydrated into pinned memory.
    """

    config: StoreConfig
    fields: tuple[FieldSpec, ...]
    budget_bytes: int = 2 * GiB
    pin_memory: bool = False

    @classmethod
    def of(cls, args: Any) -> Settings | None:
        """Read slime's arguments; None where they switch the store off.

        Raises
        ------
        InvalidConfig
        """
        path = getattr(args, "tq_fs_config", None)
        if path is None:
            return None
        config = read_once(str(path))
        declared = _declared(args)
        chosen = select(declared, config.transfer)
        if not chosen:
            return None
        if config.url is None and config.cluster is None:
            raise InvalidConfig(
                "names neither a url nor a cluster",
                subject=str(path),
                remedy="give url: file:///folder or s3://bucket/prefix, or cluster:",
            )
        return cls(
            config=replace(config, transfer=None),
            fields=tuple(spec for spec in declared if spec.name in chosen),
            budget_bytes=_whole(args, "tq_fs_budget_bytes", 2 * GiB),
            pin_memory=bool(getattr(args, "tq_fs_pin_memory", False)),
        )

    @property
    def in_cluster(self) -> bool:
        """Whether the store runs on this Ray cluster, where any process may release."""
        return self.config.cluster is not None

    def field(self, name: str) -> FieldSpec | None:
        """Return a stored field by its name; None where it stays in slime's column."""
        return next((spec for spec in self.fields if spec.name == name), None)


@functools.lru_cache
def read_once(path: str) -> StoreConfig:
    """Return what a file says of the store: an edit of it does not reach a run that goes on."""
    return StoreConfig.from_yaml(path)


def _declared(args: Any) -> list[FieldSpec]:
    if not getattr(args, "use_rollout_routing_replay", False):
        return [logprobs()]
    return [
        logprobs(),
        routed_experts(
            layers=_whole(args, "num_layers"),
            topk=_whole(args, "moe_router_topk"),
            experts=_whole(args, "num_experts"),
        ),
    ]


def _whole(args: Any, name: str, default: int | None = None) -> int:
    value = getattr(args, name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidConfig(f"{value!r} where an integer >= 1 belongs", subject=f"args.{name}")
    return value


def moe_layers(args: Any, freq: Any = None) -> list[int]:
    """Return which of the model's layers have a router, as slime's replay counts them.

    Parameters
    ----------
    freq
        The model's ``moe_layer_freq``: one layer in so many, or 1 and 0 for each; None for that of
        the arguments.
    """
    count = _whole(args, "num_layers")
    freq = getattr(args, "moe_layer_freq", 1) if freq is None else freq
    if isinstance(freq, list | tuple):
        return [layer for layer, has in enumerate(freq[:count]) if int(has)]
    return [layer for layer in range(count) if layer % (freq or 1) == 0]
