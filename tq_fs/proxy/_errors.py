"""Errors as HTTP answers, and back.

============================================  ======  =======================
error                                         status  type
============================================  ======  =======================
``InputError``                                400     invalid_request_error
``Unauthorized``                              401     authentication_error
``MissingError``                              404     not_found_error
``ConflictError``, ``SessionBusy``            409     conflict_error
``UpstreamTimeout``                           504     upstream_error
``UpstreamUnavailable``, ``UpstreamRefused``  502     upstream_error
``CorruptError``                              502     upstream_error
``CapacityError``, other ``RetryError``       503     overloaded_error
any other, and ``StepTooLarge``               500     server_error
============================================  ======  =======================

The body is ``{"error": {"message", "type", "code", "subject", "remedy"}}``; ``code`` is the error's
own, and stable. 503 comes with ``Retry-After``.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tq_fs import errors
from tq_fs.errors import TqFsError

_STATUS: tuple[tuple[type[TqFsError], int], ...] = (  # the first that fits
    (errors.UpstreamTimeout, 504),
    (errors.UpstreamUnavailable, 502),
    (errors.UpstreamRefused, 502),
    (errors.CorruptError, 502),
    (errors.SessionBusy, 409),
    (errors.RetryError, 503),
    (errors.CapacityError, 503),
    (errors.Unauthorized, 401),
    (errors.StepTooLarge, 500),
    (errors.InputError, 400),
    (errors.MissingError, 404),
    (errors.ConflictError, 409),
)
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    500: "server_error",
    502: "upstream_error",
    503: "overloaded_error",
    504: "upstream_error",
}
RETRY_AFTER_S = 1


class ErrorBody(msgspec.Struct, kw_only=True):
    """What went wrong.

    Attributes
    ----------
    message
        The whole sentence: subject, problem, remedy.
    type
        The kind of error, in OpenAI's words.
    code
        Stable; see :mod:`tq_fs.errors`.
    subject, remedy
        The object it happened to, and what can be done.
    """

    message: str
    type: str
    code: str
    subject: str = ""
    remedy: str = ""


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """The body of every answer that is none."""

    error: ErrorBody


def status_of(error: TqFsError) -> int:
    """Return the HTTP status of an error."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def error_body(error: TqFsError) -> bytes:
    """Return the answer's body as JSON."""
    return plain_error(
        status_of(error), error.code, str(error), subject=error.subject, remedy=error.remedy
    )


def plain_error(
    status: int, code: str, message: str, *, subject: str = "", remedy: str = ""
) -> bytes:
    """Return the same for what is none of this package's errors."""
    body = ErrorBody(
        message=message,
        type=_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error"),
        code=code,
        subject=subject,
        remedy=remedy,
    )
    return msgspec.json.encode(ErrorAnswer(error=body))


def error_of(body: bytes, status: int) -> TqFsError:
    """Return the error that an answer tells of, of its own class where this version knows it."""
    try:
        told = msgspec.json.decode(body, type=ErrorAnswer).error
    except msgspec.DecodeError:
        text = body[:200].decode("utf-8", "replace")
        return errors.ProxyUnavailable(f"HTTP status {status}: {text!r}", subject="the Proxy")
    kind = _CODES.get(told.code, errors.FatalError if status < 500 else errors.RetryError)
    problem = told.message.removeprefix(f"{told.subject}: ").removesuffix(f"; {told.remedy}")
    return kind(problem, subject=told.subject, remedy=told.remedy)


def _all(kind: type[TqFsError]) -> Iterator[type[TqFsError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _all(below)


_CODES = {kind.code: kind for kind in _all(TqFsError)}
