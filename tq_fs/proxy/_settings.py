"""What the Proxy is told at its start: one frozen value, checked once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tq_fs.errors import InvalidConfig
from tq_fs.ingest import RoutingPolicy
from tq_fs.manifests import Mode
from tq_fs.trajectory import VersionRule, check_views

MiB = 1024 * 1024
GiB = 1024 * MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """Settings of a Proxy; every one has a default.

    Attributes
    ----------
    model
        The model's name, as answers give it.
    upstreams
        Base URLs of the rollout engines, such as ``http://10.0.0.7:30000``.
    token
        What requests other than ``/health`` carry as ``Authorization: Bearer …``; None for none.
    partition, mode
        See :meth:`tq_fs.Store.session`.
    views, consumers
        Of a finalize that names none; see :meth:`tq_fs.Session.finalize`.
    context_length
        Tokens that the model can take, prompt and answer together; None does not check.
    max_new_tokens
        Tokens to generate at most for a request that does not say. None: what is left of the
        context.
    sampling
        Sampling parameters, in the engine's words, for requests that do not say otherwise.
    partial_rollout
        Go on with a generation that a weight update has cut, after it. Where it is off it is
        generated anew, and a session that spans two weight versions is refused.
    max_version_span
        Most weight versions that a session may span; None for any.
    routing_check
        What becomes of routing rows that no router gives: ``warn``, ``reject`` or ``off``.
    dense_layers
        Layers of the routing that do not route, and are not looked at.
    timeout_s
        Seconds that the engine may take for one generation.
    pause_deadline_s
        Seconds that a pause waits for generations to stop, where it does not say.
    paused_s
        Seconds that a request waits while generation is paused.
    reply_bytes
        Bound of the bytes of engine replies that are being read at once.
    body_bytes
        Bound of the body of one request.
    session_idle_s
        Seconds without a request after which an open session is discarded.
    sweep_s
        Seconds between two looks for such sessions.
    open_sessions
        Bound of the sessions that are open at once.
    kept_sessions, kept_bytes
        Finalized sessions that are kept to be read, and bytes of their tokens and in-memory
        fields. None of them is ever dropped for room: where one bound is reached, new sessions are
        refused until some are forgotten.
    cpu_threads
        Threads that render, tokenize, parse and check.
    store_threads
        Threads that wait for the store: of each, those that record and those that finalize,
        discard and release.
    """

    model: str = "tq-fs"
    upstreams: tuple[str, ...] = ()
    token: str | None = field(default=None, repr=False)
    partition: str = "train"
    mode: Mode = "tito"
    views: tuple[str, ...] = ("lineage",)
    consumers: tuple[str, ...] = ("train",)
    context_length: int | None = None
    max_new_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    partial_rollout: bool = True
    max_version_span: int | None = None
    routing_check: RoutingPolicy = "warn"
    dense_layers: tuple[int, ...] = ()
    timeout_s: float = 3600.0
    pause_deadline_s: float = 60.0
    paused_s: float = 3600.0
    reply_bytes: int = 512 * MiB
    body_bytes: int = 64 * MiB
    session_idle_s: float = 3600.0
    sweep_s: float = 30.0
    open_sessions: int = 65536
    kept_sessions: int = 65536
    kept_bytes: int = 64 * GiB
    cpu_threads: int = 4
    store_threads: int = 16

    def __post_init__(self) -> None:
        """Refuse values that make no sense.

        Raises
        ------
        InvalidConfig
        """
        check_views(self.views)
        VersionRule(partial_rollout=self.partial_rollout, max_span=self.max_version_span)
        for name in _WHOLE:
            _check_whole(name, getattr(self, name))
        for name in _SECONDS:
            _check_seconds(name, getattr(self, name))
        if self.mode not in ("tito", "snapshot"):
            raise InvalidConfig(f"{self.mode!r} is neither tito nor snapshot", subject="mode")
        if self.routing_check not in ("warn", "reject", "off"):
            raise InvalidConfig(
                f"{self.routing_check!r}", subject="routing_check", remedy="warn, reject or off"
            )
        if self.token is not None and not _is_token(self.token):
            raise InvalidConfig(
                "is no bearer token", subject="token", remedy="printable ASCII without spaces"
            )
        if self.context_length is None and self.max_new_tokens is None:
            raise InvalidConfig(
                "one of them has to bound a generation",
                subject="context_length, max_new_tokens",
                remedy="give the length of the model's context",
            )


_WHOLE = (
    *("context_length", "max_new_tokens", "reply_bytes", "body_bytes", "open_sessions"),
    *("kept_sessions", "kept_bytes", "cpu_threads", "store_threads"),
)
_SECONDS = ("timeout_s", "pause_deadline_s", "paused_s", "session_idle_s", "sweep_s")


def _check_whole(name: str, value: object) -> None:
    if value is None and name in ("context_length", "max_new_tokens"):
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidConfig(f"{value!r} where a whole number >= 1 belongs", subject=name)


def _check_seconds(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise InvalidConfig(f"{value!r} where a number of seconds > 0 belongs", subject=name)


def _is_token(text: str) -> bool:
    return bool(text) and all("!" <= character <= "~" for character in text)
