"""Session, StepRecord, Segment: the order of a rollout. Holds no large arrays of its own."""

from tq_fs.trajectory._chunks import RolloutChunk, join_chunks
from tq_fs.trajectory._closed import ClosedSession
from tq_fs.trajectory._conversation import Conversation
from tq_fs.trajectory._document import (
    TRAJECTORY_SCHEMA,
    TrajectoryDocument,
    decode_trajectory,
    encode_trajectory,
    trajectory_document,
)
from tq_fs.trajectory._history import messages_of
from tq_fs.trajectory._input import PlannedStep, StepInput
from tq_fs.trajectory._prompt import Renderer
from tq_fs.trajectory._records import StepKind, StepRecord
from tq_fs.trajectory._segments import (
    Sample,
    Segment,
    build_segment,
    chains,
    check_views,
    pieces,
    response_length,
)
from tq_fs.trajectory._session import Trajectory
from tq_fs.trajectory._turn import Turn
from tq_fs.trajectory._versions import ANY_VERSIONS, VersionRule

__all__ = [
    "ANY_VERSIONS",
    "TRAJECTORY_SCHEMA",
    "ClosedSession",
    "Conversation",
    "PlannedStep",
    "Renderer",
    "RolloutChunk",
    "Sample",
    "Segment",
    "StepInput",
    "StepKind",
    "StepRecord",
    "Trajectory",
    "TrajectoryDocument",
    "Turn",
    "VersionRule",
    "build_segment",
    "chains",
    "check_views",
    "decode_trajectory",
    "encode_trajectory",
    "join_chunks",
    "messages_of",
    "pieces",
    "response_length",
    "trajectory_document",
]
