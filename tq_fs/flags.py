"""The flags with which a program takes large fields out of the way; all off by default.

>>> import argparse
>>> from tq_fs import flags
>>> parser = argparse.ArgumentParser()
>>> flags.add_arguments(parser)
>>> found = flags.from_arguments(parser.parse_args(["--use-rollout-routing-replay"]))
>>> found.enabled, [spec.name for spec in found.fields({"num_hidden_layers": 4,
...     "num_experts": 16, "num_experts_per_tok": 2})]
(False, ['logprobs', 'routed_experts'])

What they say together:

======================  ===========================================================================
without any             logprobs are recorded, and stay in memory
replay                  the experts chosen are recorded too
queue                   what is recorded and is selected goes to the store of the configuration file
queue, experts chosen   refused without replay: nothing would be recorded to store
experts' type           counts with and without the queue; refused where the model has more experts
======================  ===========================================================================
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tq_fs.config import StoreConfig
from tq_fs.errors import InvalidConfig
from tq_fs.fields import (
    LOGPROBS,
    NARROW_TYPES,
    ROUTED_EXPERTS,
    FieldSpec,
    logprobs,
    routed_experts,
)
from tq_fs.metrics import Metrics
from tq_fs.model_config import routed_experts_of_model
from tq_fs.store import Store, open_store

ENABLE = "--enable-transfer-queue"
CONFIG = "--transfer-queue-config"
PARAMS = "--transfer-params"
DTYPE = "--routed-experts-dtype"
REPLAY = "--use-rollout-routing-replay"

NAMES = (LOGPROBS, ROUTED_EXPERTS)
DTYPES = ("int32", "uint16", "uint8", "auto")
ModelConfig = str | Path | Mapping[str, Any]


# ---------------------------------------------------------------- on a command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser, others' too; those that it has already stay as they are.

    slime's own parser, say, has ``--use-rollout-routing-replay``.
    """
    group = parser.add_argument_group(
        "large fields of rollouts",
        "Per-token fields (the logprob of each token, the experts that each layer chose)\n"
        "can be written to disk or to an object store as they come, instead of being\n"
        "held in memory until training. Off unless they are asked for.",
    )
    for flag, options in _options().items():
        _add(parser, group, flag, options)


def _add(
    parser: argparse.ArgumentParser,
    group: argparse._ArgumentGroup,  # argparse has no public name for it
    flag: str,
    options: Mapping[str, Any],
) -> None:
    if parser.get_default(_attribute(flag)) is not None:
        return  # also where the parser would let ours take its place
    try:
        group.add_argument(flag, **options)
    except argparse.ArgumentError:
        return  # it is there, with None for its default


def _options() -> dict[str, dict[str, Any]]:
    return {
        ENABLE: {
            "action": "store_true",
            "help": f"store the fields that {PARAMS} names, in what {CONFIG} describes; without it "
            "every field stays in memory",
        },
        CONFIG: {
            "metavar": "FILE",
            "help": "YAML file that says where, by its url (file:///nvme/tq-fs, "
            "s3://bucket/prefix …) or by its cluster of Ray nodes, and further settings of the "
            f"store; needed with {ENABLE}",
        },
        PARAMS: {
            "nargs": "+",
            "choices": NAMES,
            "metavar": "FIELD",
            "help": f"fields to store: {' or '.join(NAMES)}, or both; what is not named stays in "
            "memory (default: those that the file names, else all that are recorded)",
        },
        DTYPE: {
            "choices": DTYPES,
            "default": "int32",
            "help": "type in which ids of experts are kept and stored, with a store and without; "
            "uint8 takes a quarter of int32 and holds up to 256 experts, uint16 half and 65,536; "
            "auto is the narrowest that the model's experts fit. Training always gets int32 "
            "(default: %(default)s)",
        },
        REPLAY: {
            "action": "store_true",
            "help": "record which experts the rollout chose, so that training can choose the same "
            f"(R3, for mixture-of-experts models); needed to store {ROUTED_EXPERTS}",
        },
    }


def _attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def from_arguments(namespace: argparse.Namespace) -> TransferFlags:
    """Return what was asked for on the command line; reads the configuration file.

    Flags that the namespace lacks are off.

    Raises
    ------
    InvalidConfig
        The flags contradict each other, or the file cannot be used; names the flag.
    """
    enabled = bool(getattr(namespace, _attribute(ENABLE), False))
    file = getattr(namespace, _attribute(CONFIG), None)
    params = getattr(namespace, _attribute(PARAMS), None)
    if isinstance(params, str):
        params = params.replace(",", " ").split()
    return TransferFlags(
        enabled=enabled,
        config=_read_config(file) if enabled and file is not None else None,
        params=None if params is None else tuple(params),
        experts_dtype=getattr(namespace, _attribute(DTYPE), None) or "int32",
        replay=bool(getattr(namespace, _attribute(REPLAY), False)),
    )


def _read_config(file: str | Path) -> StoreConfig:
    try:
        return StoreConfig.from_yaml(file)
    except InvalidConfig as error:
        about = error.subject if str(file) in error.subject else f"{file}, {error.subject}"
        raise InvalidConfig(
            error.problem, subject=f"{CONFIG} {about}", remedy=error.remedy
        ) from error


# ---------------------------------------------------------------- what they mean


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFlags:
    """What becomes of the per-token fields of a rollout.

    Attributes
    ----------
    enabled
        Whether anything is stored; else everything stays in memory.
    config
        Settings of the store, with a ``url`` or a ``cluster``; needed where it is enabled.
    params
        Names of the fields to store; None: those of ``config.transfer``, else all.
    experts_dtype
        Type of ids of experts in memory and in the store: ``int32``, ``uint16``, ``uint8`` or
        ``auto``.
    replay
        Whether the experts chosen are recorded.

    Raises
    ------
    InvalidConfig
        They contradict each other; names the flag.
    """

    enabled: bool = False
    config: StoreConfig | None = None
    params: tuple[str, ...] | None = None
    experts_dtype: str = "int32"
    replay: bool = False

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if self.experts_dtype not in DTYPES:
            raise InvalidConfig(
                f"{self.experts_dtype!r} is no type for ids of experts",
                subject=DTYPE,
                remedy=f"one of {', '.join(DTYPES)}",
            )
        _check_names(self.params, PARAMS)
        if self.enabled:
            self._check_store()

    def _check_store(self) -> None:
        if self.config is None:
            raise InvalidConfig(
                f"is missing, and {ENABLE} is given",
                subject=CONFIG,
                remedy="name a YAML file with the store's url, file:///nvme/tq-fs say",
            )
        if self.config.url is None and self.config.cluster is None:
            raise InvalidConfig(
                "the file says neither url nor cluster",
                subject=CONFIG,
                remedy="add the line url: file:///nvme/tq-fs, say",
            )
        said = CONFIG if self.params is None else PARAMS
        wanted = self.config.transfer if self.params is None else self.params
        if self.params is None:
            _check_names(wanted, f"{CONFIG}, transfer")
        if wanted is not None and not wanted:
            raise InvalidConfig(
                f"names no field, and {ENABLE} is given",
                subject=said,
                remedy=f"name {' or '.join(NAMES)}, or leave {ENABLE} out",
            )
        if ROUTED_EXPERTS in (wanted or ()) and not self.replay:
            raise InvalidConfig(
                f"{ROUTED_EXPERTS} can only be stored where they are recorded",
                subject=said,
                remedy=f"give {REPLAY} too, or name {LOGPROBS} alone",
            )

    @property
    def selected(self) -> tuple[str, ...]:
        """Names of the fields that are stored; empty without the queue."""
        if not self.enabled or self.config is None:
            return ()
        wanted = self.config.transfer if self.params is None else self.params
        recorded = NAMES if self.replay else (LOGPROBS,)
        return recorded if wanted is None else tuple(n for n in recorded if n in wanted)

    def fields(
        self, model_config: ModelConfig | None = None, *, dense_layers: bool = True
    ) -> list[FieldSpec]:
        """Return what is recorded of each token.

        Parameters
        ----------
        model_config
            The model's ``config.json``, its folder, or the parsed mapping. None: layers, top-k and
            the number of experts are not known beforehand, and no id is held against it.
        dense_layers
            Whether the engine's rows have layers without experts too, as SGLang's have.

        Raises
        ------
        InvalidConfig
            The model has more experts than the type can tell apart, or none at all.
        """
        if not self.replay:
            return [logprobs()]
        if model_config is None:
            return [logprobs(), routed_experts(stored=self.experts_dtype)]
        experts = _declare(model_config, dense_layers)
        end = NARROW_TYPES.get(self.experts_dtype)
        if end is not None and experts.limit is not None and experts.limit > end:
            fitting = [t for t, n in NARROW_TYPES.items() if n >= experts.limit]
            raise InvalidConfig(
                f"{self.experts_dtype} holds {end:,} experts, the model has {experts.limit:,}",
                subject=DTYPE,
                remedy=f"use {' or '.join([*fitting, 'auto'])}",
            )
        return [logprobs(), replace(experts, stored=self.experts_dtype)]

    def store_config(self) -> StoreConfig:
        """Return the settings of the store; without the queue those of one that is off."""
        if not self.enabled or self.config is None:
            return StoreConfig(transfer=(), compact=True)
        return replace(self.config, transfer=self.selected, compact=True)

    def url(self) -> str | None:
        """Return where the store lies; None without the queue, or where a cluster says it."""
        if not self.enabled or self.config is None or self.config.cluster is not None:
            return None
        return self.config.url

    def open(
        self,
        model_config: ModelConfig | None = None,
        *,
        dense_layers: bool = True,
        read_only: bool = False,
        metrics: Metrics | None = None,
    ) -> Store:
        """Open the store, which is one in memory without the queue.

        Where the file has a ``cluster``, attaches to the one that runs on Ray: its store's settings
        are those that it was started with, but for the fields that are stored.

        Parameters
        ----------
        model_config, dense_layers
            See :meth:`fields`.
        read_only
            Only hydrate; a cluster's store is always open for both.
        metrics
            Counts what passes; stays the caller's.

        Returns
        -------
        Store
            A context manager; close it.

        Raises
        ------
        InvalidConfig, DependencyMissing, StoreBusy, WrongStore, UnitsUnavailable
        BucketMissing, StorageDenied, StorageFailed
        """
        fields = self.fields(model_config, dense_layers=dense_layers)
        config = self.store_config()
        if self.enabled and config.cluster is not None:
            from tq_fs.cluster import attach  # noqa: PLC0415  # needs Ray

            return attach(config.store_id).store(
                fields, metrics=metrics, transfer=config.transfer, compact=config.compact
            )
        return open_store(
            self.url(), fields=fields, config=config, read_only=read_only, metrics=metrics
        )


def _declare(model_config: ModelConfig, dense_layers: bool) -> FieldSpec:
    try:
        return routed_experts_of_model(model_config, dense_layers=dense_layers)
    except InvalidConfig as error:
        raise InvalidConfig(
            error.problem,
            subject=f"{REPLAY}, {error.subject}",
            remedy=f"leave {REPLAY} out for a model without experts",
        ) from error


def _check_names(names: Sequence[str] | None, subject: str) -> None:
    unknown = sorted({str(name) for name in names or ()} - set(NAMES))
    if unknown:
        raise InvalidConfig(
            f"unknown fields {', '.join(unknown)}",
            subject=subject,
            remedy=f"choose from {', '.join(NAMES)}",
        )
