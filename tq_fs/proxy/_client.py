"""ProxyClient: the Proxy from a trainer's or an agent's side, without an event loop."""

from __future__ import annotations

import http.client
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from tq_fs.errors import InvalidConfig, InvalidRequest, ProxyUnavailable
from tq_fs.proxy import _wire as wire
from tq_fs.proxy._capabilities import Capabilities
from tq_fs.proxy._errors import error_of
from tq_fs.proxy._headers import INSTANCE, SESSION, TURN
from tq_fs.proxy._trajectories import JSON, MSGPACK, ReadAnswer, segments_of
from tq_fs.trajectory import Sample, Segment

T = TypeVar("T")


class ProxyClient:
    """Calls a Proxy. Safe to call from many threads: each call has a connection of its own.

    Every method raises the Proxy's own error (of the class that its code names), or:

    * :class:`~tq_fs.errors.ProxyUnavailable`: no answer, or one that is none of a Proxy's. Whether
      the call was done is not known; all but :meth:`chat` without a `turn_id` can be repeated.

    Parameters
    ----------
    url
        ``http://host:port``.
    token
        Bearer token, where the Proxy wants one.
    timeout_s
        Seconds without a sign of the Proxy after which a call fails.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 3600.0) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise InvalidConfig("is no http://host:port", subject=repr(url))
        self.url = url.rstrip("/")
        self._host, self._port = parts.hostname, parts.port or 80
        self._base = parts.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout_s = timeout_s

    # ------------------------------------------------------------ rollout

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        session_id: str,
        instance_id: str | None = None,
        turn_id: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Ask for an answer, which is recorded; returns OpenAI's ``chat.completion``.

        Parameters
        ----------
        messages
            The conversation so far.
        session_id
            Its session.
        instance_id
            What the session belongs to, such as the prompt group.
        turn_id
            Names this request, so that it can be repeated.
        options
            Others of OpenAI's body: ``tools``, ``max_tokens``, ``temperature``, ``seed`` …; not
            ``stream``.
        """
        if options.get("stream"):
            raise InvalidRequest("is not for this client", subject="stream")
        ids = {SESSION: session_id, INSTANCE: instance_id, TURN: turn_id}
        headers = {name: value for name, value in ids.items() if value is not None}
        body = {"messages": list(messages), **options}
        answer: dict[str, Any] = self._post("/v1/chat/completions", body, dict[str, Any], headers)
        return answer

    def pause(self, deadline_s: float | None = None) -> int:
        """Hold up generation until :meth:`resume`; returns how many generations were cut.

        Parameters
        ----------
        deadline_s
            Seconds to wait for them to end.
        """
        body = {} if deadline_s is None else {"deadline_s": deadline_s}
        return self._post("/v1/rollout/pause", body, wire.PauseAnswer).aborted

    def resume(self) -> None:
        """Go on with generation; idempotent."""
        self._post("/v1/rollout/resume", {}, wire.PauseAnswer)

    # ------------------------------------------------------------ sessions

    def finalize(
        self,
        session_id: str,
        *,
        consumers: Sequence[str] | None = None,
        views: Sequence[str] | None = None,
        extra: Mapping[str, Any] | None = None,
        abort: bool = False,
    ) -> wire.FinalizeAnswer:
        """Make a session's Segments; again, the same answer."""
        given = {"consumers": consumers, "views": views, "extra": extra}
        body: dict[str, Any] = {n: value for n, value in given.items() if value is not None}
        body |= {"session_id": session_id, "abort": abort}
        return self._post("/session/finalize", body, wire.FinalizeAnswer)

    def discard(self, session_id: str) -> bool:
        """Break off a session; returns whether there was something to discard. Idempotent."""
        body = {"session_id": session_id}
        return self._post("/session/discard", body, wire.DiscardAnswer).discarded

    # ------------------------------------------------------------ trajectories

    def read(
        self,
        session_ids: Sequence[str] | None = None,
        *,
        instance_id: str | None = None,
        forget: bool = False,
        limit: int | None = None,
        binary: bool = True,
    ) -> list[Segment]:
        """Return the Segments of finalized sessions; arrays that come with them are read-only.

        Parameters
        ----------
        session_ids, instance_id
            Which; all that are kept where both are left out.
        forget
            Let the Proxy forget them once it has sent them; see :meth:`forget`.
        limit
            Whole sessions at most.
        binary
            msgpack, which is smaller and faster than JSON; the same comes of both.
        """
        given = {"session_ids": session_ids, "instance_id": instance_id, "limit": limit}
        body: dict[str, Any] = {n: value for n, value in given.items() if value is not None}
        headers = {"Accept": MSGPACK if binary else JSON}
        answer = self._call("POST", "/trajectory/read", {**body, "forget": forget}, headers=headers)
        return segments_of(_decoded(answer, ReadAnswer, binary=binary))

    def forget(self, session_ids: Iterable[str]) -> int:
        """Let the Proxy keep finalized sessions no longer; returns how many it kept. Idempotent.

        References stay good until they are released.
        """
        body = {"session_ids": list(session_ids)}
        return self._post("/trajectory/forget", body, wire.ForgetAnswer).forgotten

    def release(
        self,
        refs: Iterable[str | Segment | Sample],
        consumer: str = "train",
        *,
        rollout_id: int | None = None,
    ) -> int:
        """Note that a consumer needs Segments no more; see :meth:`tq_fs.Store.release`."""
        named = (ref if isinstance(ref, str) else ref.ref for ref in refs)
        body: dict[str, Any] = {"refs": [r for r in named if r is not None], "consumer": consumer}
        if rollout_id is not None:
            body["rollout_id"] = rollout_id
        return self._post("/trajectory/release", body, wire.ReleaseAnswer).deleted_steps

    def checkpoint_saved(self, rollout_id: int) -> int:
        """Release what is held for a rollout; see :meth:`tq_fs.Store.checkpoint_saved`."""
        body = {"rollout_id": rollout_id}
        return self._post("/trajectory/checkpoint_saved", body, wire.ReleaseAnswer).deleted_steps

    # ------------------------------------------------------------ about it

    def capabilities(self) -> Capabilities:
        """Return what the Proxy can do."""
        return _decoded(self._call("GET", "/integration/capabilities"), Capabilities)

    def health(self) -> wire.Health:
        """Return whether it is there, and whether it is paused."""
        return _decoded(self._call("GET", "/health"), wire.Health)

    def metrics(self) -> str:
        """Return what it counts, as Prometheus' text."""
        return self._call("GET", "/metrics").decode()

    # ------------------------------------------------------------ HTTP

    def _post(
        self, path: str, body: object, kind: type[T], headers: Mapping[str, str] | None = None
    ) -> T:
        return _decoded(self._call("POST", path, body, headers=headers), kind)

    def _call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        sent = None if body is None else msgspec.json.encode(body)
        named = {**self._headers, "Content-Type": JSON, **(headers or {})}
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request(
                method, self._base + path, sent, {n: _header(n, v) for n, v in named.items()}
            )
            answer = connection.getresponse()
            status, found = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ProxyUnavailable(
                f"gave no answer: {error or type(error).__name__}",
                subject=self.url,
                remedy="see that it runs, then ask again",
            ) from error
        finally:
            connection.close()
        if status != 200:
            raise error_of(found, status)
        return found


def _header(name: str, value: str) -> bytes:
    """Return an id as the bytes of a header; the Proxy takes them as UTF-8."""
    if value != value.strip() or any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise InvalidRequest(
            f"{value!r} cannot be sent",
            subject=name,
            remedy="choose ids without control characters, and without spaces at their ends",
        )
    return value.encode()


def _decoded(body: bytes, kind: type[T], *, binary: bool = False) -> T:
    decode = msgspec.msgpack.decode if binary else msgspec.json.decode
    try:
        return decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise ProxyUnavailable(
            f"an answer that is none: {error}", subject="the Proxy", remedy="see its version"
        ) from error
