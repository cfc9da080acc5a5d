"""The converter that slime calls in its RolloutManager."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tq_fs.errors import InvalidConfig
from tq_fs.fields import FieldSpec
from tq_fs.integrations.slime._columns import other_columns
from tq_fs.integrations.slime._offload import offload
from tq_fs.integrations.slime._settings import ATTRIBUTES, COLUMN, Settings, moe_layers
from tq_fs.integrations.slime._store import store_of
from tq_fs.store import Store

_log = logging.getLogger(__name__)
_BEHIND = 2
"""When rollout k is converted, k-2 has been trained on; k-1 too, unless slime trains meanwhile."""


def convert_samples_to_train_data(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """Convert a rollout as slime does, with references in place of the large fields.

    For ``--custom-convert-samples-to-train-data-path``. Without ``args.tq_fs_config`` the result is
    slime's own.

    Before anything is written, what earlier rollouts left and no checkpoint needs any more is
    deleted. The samples themselves are not changed.

    Parameters
    ----------
    args
        slime's arguments; :class:`Settings` tells which count here.
    samples
        slime's samples, also as a list of lists.

    Returns
    -------
    dict
        slime's columns, without ``rollout_log_probs`` and ``rollout_routed_experts`` where they are
        stored, and with the column `COLUMN`: a :class:`tq_fs.Sample` for each sample.

    Raises
    ------
    InputError, FieldMissing
        A sample is malformed, by name.
    CapacityError, RetryError
        There is no room, or the store does not answer in time.

    Nothing of the rollout is visible in the store after any of them.
    """
    flat = list(_flat(samples))
    settings = Settings.of(args)
    if settings is None:
        return other_columns(args, flat)
    data = other_columns(args, [_without(s, settings.fields) for s in flat])
    if COLUMN in data or len(data["tokens"]) != len(flat):
        raise InvalidConfig(
            f"has a column {COLUMN!r}, or not all of {len(flat)} samples",
            subject="the train data",
            remedy="leave that column and filtering out of tq_fs_convert_path",
        )
    store = store_of(settings, writes=True)
    rollout_id = _rollout_id()
    if rollout_id is not None:
        _let_go(store, args, rollout_id)
    data[COLUMN] = offload(
        store,
        flat,
        settings.fields,
        rollout_id=rollout_id,
        routed_layers=moe_layers(args) if settings.field("routed_experts") else (),
    )
    return data


def _flat(samples: Sequence[Any]) -> Iterator[Any]:
    for sample in samples:
        if isinstance(sample, list):
            yield from _flat(sample)
        else:
            yield sample


def _without(sample: Any, fields: Sequence[FieldSpec]) -> Any:
    """Return a shallow copy of a sample that lacks the fields."""
    light = copy.copy(sample)
    for spec in fields:
        setattr(light, ATTRIBUTES[spec.name], None)
    return light


# ---------------------------------------------------------------- release


def _rollout_id() -> int | None:
    """Return the rollout that slime is at; None where it does not tell."""
    try:
        hooks = import_module("slime.rollout.sample_hooks")
    except ImportError:
        hooks = None
    found = getattr(hooks, "_current_rollout_id", None)
    if found is None:
        _log.warning("slime names no rollout: what is stored is not released by itself")
    return found


def _let_go(store: Store, args: Any, rollout_id: int) -> None:
    """Delete what has been trained on and will not be trained on again after a crash.

    Megatron's own note of the last checkpoint tells; a run that saves none forgets at once.
    """
    done = rollout_id - _BEHIND
    if getattr(args, "save", None) and _saves(args):
        noted = _last_checkpoint(Path(args.save))
        done = min(done, -1 if noted is None else noted)  # of an earlier run it may be larger
    if done >= 0:
        store.checkpoint_saved(done)


def _saves(args: Any) -> bool:
    return getattr(args, "save_interval", None) is not None or getattr(args, "release_train", False)


def _last_checkpoint(folder: Path) -> int | None:
    try:
        return int((folder / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):
        return None  # none yet
