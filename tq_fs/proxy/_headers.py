"""What the headers of a chat request say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tq_fs.errors import InvalidRequest

SESSION = "X-Session-Id"
INSTANCE = "X-Instance-Id"
TURN = "X-Turn-Id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a chat request comes from.

    Attributes
    ----------
    session_id
        Its session.
    instance_id
        What the session belongs to, such as the prompt group; kept, and not looked at.
    turn_id
        Names the request: the same one again gives the recorded answer.
    """

    session_id: str
    instance_id: str | None = None
    turn_id: str | None = None

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Origin:
        """Read the headers; ids are UTF-8.

        Raises
        ------
        InvalidRequest
            There is no session id, or an id is no UTF-8.
        """
        session_id = _text(headers, SESSION)
        if not session_id:
            raise InvalidRequest(
                "is missing", subject=SESSION, remedy="send the id of the rollout's session"
            )
        return cls(
            session_id=session_id,
            instance_id=_text(headers, INSTANCE),
            turn_id=_text(headers, TURN) or None,
        )


def _text(headers: Mapping[str, str], name: str) -> str | None:
    found = headers.get(name)
    if found is None:
        return None
    try:
        return found.encode("latin-1").decode()  # as the framework decodes it, and back
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            "is no UTF-8", subject=name, remedy="send the bytes of UTF-8, or ASCII"
        ) from error
