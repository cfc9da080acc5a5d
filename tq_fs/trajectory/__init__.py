"""Session, StepRecord, Segment: the order of a rollout. Holds no large arrays of its own."""

from tq_fs.trajectory._records import StepKind, StepRecord
from tq_fs.trajectory._segments import (
    Sample,
    Segment,
    build_segment,
    chains,
    check_views,
    pieces,
    response_length,
    segment_entry,
)
from tq_fs.trajectory._session import PlannedStep, StepInput, Trajectory

__all__ = [
    "PlannedStep",
    "Sample",
    "Segment",
    "StepInput",
    "StepKind",
    "StepRecord",
    "Trajectory",
    "build_segment",
    "chains",
    "check_views",
    "pieces",
    "response_length",
    "segment_entry",
]
