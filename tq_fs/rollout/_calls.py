"""Answers of actors, with our errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from tq_fs.errors import ActorLost, TqFsError


def gather(calls: Sequence[Any]) -> list[Any]:
    """Wait for calls of actors, and return their answers in order.

    Raises
    ------
    ActorLost
        An actor ended, and is not started again.
    TqFsError
        The first that one of them raised.
    """
    try:
        answers: list[Any] = ray.get(list(calls))
    except RayTaskError as error:
        if isinstance(error.cause, TqFsError):
            raise error.cause from error
        raise
    except RayActorError as error:
        raise ActorLost(
            str(error), subject="an actor", remedy="see its log; what it read is still stored"
        ) from error
    return answers
