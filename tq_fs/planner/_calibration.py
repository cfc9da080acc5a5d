"""Measured peaks that a plan scales: the published experiment's, or a benchmark's own."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tq_fs.errors import InvalidConfig
from tq_fs.planner._models import TYPE_BYTES, preset
from tq_fs.planner._sizes import MOST, GiB, KiB

HOLDERS = ("proxy", "rollout_manager", "object_store")
UNIT = "storage_unit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What went through a path while it was measured.

    Attributes
    ----------
    tokens
        Of all Segments.
    row_bytes
        Routing of one token as it was held [bytes].
    nodes, units
        Of the deployment.
    """

    tokens: float
    row_bytes: int
    nodes: int = 1
    units: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Peaks of one path on the master node.

    Attributes
    ----------
    components
        Peak of each component, each at a moment of its own [bytes].
    total
        Peak of their sum at any one moment [bytes]; 0 where it was not measured.
    idle
        What the same processes take without traffic [bytes]; does not scale.
    """

    components: Mapping[str, float]
    total: float = 0.0
    idle: Mapping[str, float] = field(default_factory=dict)

    @property
    def together(self) -> float:
        """The peak of the sum, as a share of the sum of the peaks."""
        added = sum(self.components.values())
        return min(1.0, self.total / added) if self.total and added else 1.0

    def grown(self, name: str) -> float:
        """Return what a component takes for traffic [bytes]."""
        return max(0.0, self.components.get(name, 0.0) - self.idle.get(name, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Peaks of the paths, and the traffic that they belong to.

    Attributes
    ----------
    name
        Where they come from.
    traffic
        Of `central` and `queue`.
    central, queue
        The centralized path, and the one with a queue in memory.
    store, store_traffic
        The path with tq-fs; None where it was not measured: then what stays resident is taken to
        be what stays beside a queue.
    """

    name: str
    traffic: Traffic
    central: Peaks
    queue: Peaks
    store: Peaks | None = None
    store_traffic: Traffic | None = None

    def resident(self, name: str) -> float:
        """Return what a component keeps besides the large fields [bytes]."""
        return self.queue.grown(name)

    def large(self, name: str) -> float:
        """Return what a component holds of the large fields on the centralized path [bytes]."""
        return max(0.0, self.central.grown(name) - self.queue.grown(name))


def _gib(total: float, **components: float) -> Peaks:
    return Peaks(components={n: v * GiB for n, v in components.items()}, total=total * GiB)


# Qwen3.6-35B-A3B on two nodes, 512 prompts of 8 samples, contexts of 64K, int32 ids.
PUBLISHED = Calibration(
    name="published",
    traffic=Traffic(
        tokens=64 * KiB * 512 * 8,
        row_bytes=preset("qwen3.6-35b-a3b").model.row_bytes("int32"),
        nodes=2,
        units=2,
    ),
    central=_gib(757, proxy=80.8, rollout_manager=591.7, object_store=202.5),
    queue=_gib(247, proxy=28.6, rollout_manager=18.7, object_store=1.4, storage_unit=215.1),
)


def read_calibration(path: Path) -> Calibration:
    """Read the JSON of ``tq-fs bench memory``.

    Raises
    ------
    InvalidConfig
        It cannot be read, or says less than is needed.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"cannot be read: {error}", subject=str(path)) from error
    if not isinstance(document, dict):
        raise InvalidConfig("holds no JSON object", subject=str(path))
    return calibration_of(document, path.name)


def calibration_of(document: Mapping[str, Any], name: str = "calibration") -> Calibration:
    """Return the calibration that a benchmark's figures are.

    The paths ``central`` and ``transfer_queue`` are used together or not at all; what is left out
    is that of :data:`PUBLISHED`.

    Raises
    ------
    InvalidConfig
        No path is there, or the traffic that it belongs to is not, or a figure is none.
    """
    found = {path: _peaks(document, path, name) for path in ("central", "transfer_queue", "nvme")}
    central, queue, store = found.values()
    if store is None and (central is None or queue is None):
        raise InvalidConfig(
            "has neither peak.nvme nor both peak.central and peak.transfer_queue",
            subject=name,
            remedy="give the JSON of tq-fs bench memory",
        )
    traffic = _traffic(document, name)
    both = central is not None and queue is not None
    return Calibration(
        name=name,
        traffic=traffic if both else PUBLISHED.traffic,
        central=central if both and central else PUBLISHED.central,
        queue=queue if both and queue else PUBLISHED.queue,
        store=store,
        store_traffic=traffic if store else None,
    )


def _peaks(document: Mapping[str, Any], path: str, name: str) -> Peaks | None:
    """Read ``peak.PATH``, a map, or a number beside the map ``components.PATH``."""
    peak = _entry(document, "peak", path)
    components = peak if isinstance(peak, Mapping) else _entry(document, "components", path)
    if not isinstance(components, Mapping):
        return None
    sizes = _sizes(components, f"{name}, peak.{path}")
    total = sizes.pop("total", 0.0)
    if peak is not None and not isinstance(peak, Mapping):
        total = _number(peak, f"{name}, peak.{path}")
    idle = _entry(document, "idle", path)
    rest = _sizes(idle, f"{name}, idle.{path}") if isinstance(idle, Mapping) else {}
    return Peaks(components=sizes, total=total, idle=rest)


def _entry(document: Mapping[str, Any], group: str, path: str) -> Any:
    """Return ``GROUP.PATH`` of a flat document, or of a nested one; None where it is absent."""
    nested = document.get(group)
    inner = nested.get(path) if isinstance(nested, Mapping) else None
    return document.get(f"{group}.{path}", inner)


def _sizes(values: Mapping[str, Any], subject: str) -> dict[str, float]:
    return {name: _number(value, f"{subject}.{name}") for name, value in values.items()}


def _number(value: Any, subject: str) -> float:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not (plain and 0 <= value <= MOST):
        raise InvalidConfig(f"{value!r} is no number of bytes", subject=subject)
    return float(value)


def _traffic(document: Mapping[str, Any], name: str) -> Traffic:
    settings = document.get("settings")
    if not isinstance(settings, Mapping):
        raise InvalidConfig("has no settings", subject=name, remedy=_NEEDED)
    try:
        found = _traffic_of(settings)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        problem = f"settings cannot be used: {error!r}"
        raise InvalidConfig(problem, subject=name, remedy=_NEEDED) from error
    numbers = (found.tokens, found.row_bytes, found.units, found.nodes)
    if not all(1 <= value <= MOST for value in numbers):
        problem = "settings hold what is below 1, or too large"
        raise InvalidConfig(problem, subject=name, remedy=_NEEDED)
    return found


def _traffic_of(settings: Mapping[str, Any]) -> Traffic:
    tokens = settings.get("tokens")
    if tokens is None:
        each = (float(settings[name]) for name in ("context", "batch", "samples"))
        tokens = math.prod(each) * float(settings.get("segments", 1))
    return Traffic(
        tokens=float(tokens),
        row_bytes=int(settings["layers"]) * int(settings["topk"]) * TYPE_BYTES[settings["dtype"]],
        nodes=int(settings.get("nodes", 1)),
        units=int(settings.get("units", 1)),
    )


_NEEDED = "settings need layers, topk, dtype, and tokens or context, batch, samples, segments"
