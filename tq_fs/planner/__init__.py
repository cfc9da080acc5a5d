"""Capacity planning: what a model, context and batch need in memory, on disk and in requests.

Arithmetic on frozen values. Peaks are those of a measured run, scaled.
"""

from tq_fs.planner._calibration import (
    PUBLISHED,
    Calibration,
    Peaks,
    Traffic,
    calibration_of,
    read_calibration,
)
from tq_fs.planner._deployment import Deployment, Ranks
from tq_fs.planner._fields import central_fields, shares, stored_fields
from tq_fs.planner._figure import curve, draw_plan
from tq_fs.planner._memory import (
    PathMemory,
    central_memory,
    exceeding_batch,
    first_above,
    queue_memory,
    store_memory,
    unit_factor,
)
from tq_fs.planner._models import PRESETS, Preset, RoutedModel, preset
from tq_fs.planner._plan import Plan, plan
from tq_fs.planner._sizes import GiB, KiB, MiB, TiB, parse_count, parse_size, size_text
from tq_fs.planner._storage import Bandwidth, Requests, Space
from tq_fs.planner._trainer import Hydration
from tq_fs.planner._workload import Workload

__all__ = [
    "PRESETS",
    "PUBLISHED",
    "Bandwidth",
    "Calibration",
    "Deployment",
    "GiB",
    "Hydration",
    "KiB",
    "MiB",
    "PathMemory",
    "Peaks",
    "Plan",
    "Preset",
    "Ranks",
    "Requests",
    "RoutedModel",
    "Space",
    "TiB",
    "Traffic",
    "Workload",
    "calibration_of",
    "central_fields",
    "central_memory",
    "curve",
    "draw_plan",
    "exceeding_batch",
    "first_above",
    "parse_count",
    "parse_size",
    "plan",
    "preset",
    "queue_memory",
    "read_calibration",
    "shares",
    "size_text",
    "store_memory",
    "stored_fields",
    "unit_factor",
]
