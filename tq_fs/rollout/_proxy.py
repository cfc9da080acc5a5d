"""Proxy: records what the engine replies, and hands on Segments without the large fields."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from tq_fs.errors import TqFsError
from tq_fs.fields import FieldSpec
from tq_fs.manifests import Mode
from tq_fs.rollout._store import open_here
from tq_fs.session import Session
from tq_fs.trajectory import Segment
from tq_fs.units import Passed


class Agent(Protocol):
    """Plays rollouts on an engine whose replies reach the Proxy's process, not through Ray."""

    def play(self, session: Session) -> None:
        """Play one session to its end: record each reply of the engine as it comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """Settings of a Proxy.

    Attributes
    ----------
    store_id
        The store on this Ray cluster; None for the in-memory path, where values travel in the
        Segments.
    fields
        Declared per-token fields.
    consumers
        Who has to release each Segment.
    mode, views
        See :meth:`tq_fs.Store.session` and :meth:`tq_fs.Session.finalize`.
    compact
        Whether ids that stay in memory are kept in their stored type.
    cpus
        As Ray counts them.
    """

    store_id: str | None
    fields: tuple[FieldSpec, ...]
    consumers: tuple[str, ...] = ("train",)
    mode: Mode = "tito"
    views: tuple[str, ...] = ("lineage",)
    compact: bool = False
    cpus: float = 0.0


class Proxy:
    """An actor. Only references of stored fields, and what is resident, leave it through Ray."""

    def __init__(self, config: ProxyConfig, agent: Agent) -> None:
        self._config = config
        self._agent = agent
        self._store = open_here(config.store_id, config.fields, compact=config.compact)

    def rollout(self, session_id: str) -> list[Segment]:
        """Play one session and return its Segments; what fails leaves nothing behind."""
        session = self._store.session(session_id, mode=self._config.mode)
        try:
            self._agent.play(session)
            return session.finalize(consumers=self._config.consumers, views=self._config.views)
        except BaseException:
            with suppress(TqFsError):  # the sweep is the last chance
                session.discard()
            raise

    def passed(self) -> Passed:
        """Return what has passed between this process and the units."""
        return self._store.passed()

    def pid(self) -> int:
        """Return the process, for operators and benchmarks."""
        return os.getpid()

    def close(self) -> None:
        """Close the store; idempotent."""
        self._store.close()
