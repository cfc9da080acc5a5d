"""Which units a store has, as the Controller knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["live", "draining", "restarting", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitAddress:
    """A StorageUnit and the ways to it.

    Attributes
    ----------
    name
        In manifests; stays with its folder.
    node, node_name
        Id and name of the node it runs on.
    state
        ``live``; ``draining``: takes no new sessions; ``restarting``: may come back; ``lost``: will
        not.
    local, remote
        Endpoints for processes of its node, and for others.
    folder
        Where its files lie on its node.
    weight
        Its share of new sessions; 0 for none.
    free_bytes
        Room on its device when it was last asked.
    """

    name: str
    node: str
    node_name: str
    state: State
    local: str
    remote: str
    folder: str
    weight: int = 1
    free_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All units of a store at one moment.

    Attributes
    ----------
    epoch
        Of the Controller that says so.
    version
        Raised by each change that matters to clients.
    units
        By name.
    unnamed
        Units that have not reported to this Controller yet, so that their names are not known.
    """

    epoch: int = 0
    version: int = 0
    units: tuple[UnitAddress, ...] = ()
    unnamed: int = 0
