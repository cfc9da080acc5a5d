"""Structured logs: one JSON object a line, with the store, the session and the Step."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, ParamSpec, TextIO, TypeVar, get_args

from tq_fs.errors import InvalidConfig, TqFsError

P = ParamSpec("P")
T = TypeVar("T")
Format = Literal["json", "text"]

FIELDS = ("store", "session", "step", "unit")  # what a line may be about

_here: ContextVar[log_context | None] = ContextVar("tq_fs.logs", default=None)


# ---------------------------------------------------------------- what a line is about


class log_context:  # noqa: N801  # a word for a with statement, as in contextlib
    """Say what the log lines of a block are about; an inner block adds to an outer one.

    Holds for the thread or task. What is handed to a pool takes it along by :func:`carried`.
    ``extra={"step": 3}`` of a single call counts more.

    Every Step that is written or read passes one: it notes what it is given, in 1 to 3 µs, and
    leaves the rest to the formatter.

    Attributes
    ----------
    store, session, step, unit
        The store's id, the session's id, the Step's index and the unit's name; None says nothing.
        A loop inside the block may change them, which takes less than a block for each turn.
    """

    __slots__ = ("_outer", "_token", *FIELDS)

    def __init__(
        self,
        *,
        store: str | None = None,
        session: str | None = None,
        step: int | None = None,
        unit: str | None = None,
    ) -> None:
        self.store, self.session, self.step, self.unit = store, session, step, unit

    def __enter__(self) -> log_context:
        """Begin."""
        self._outer = _here.get()
        self._token = _here.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        """End; lines are about what they were about before."""
        _here.reset(self._token)

    def fields(self) -> dict[str, object]:
        """Return what is said here, and around."""
        outer = self._outer.fields() if self._outer is not None else {}
        mine = ((name, getattr(self, name)) for name in FIELDS)
        return {**outer, **{name: value for name, value in mine if value is not None}}


def carried(call: Callable[P, T]) -> Callable[P, T]:
    """Return `call`, to run in any thread with what log lines are about here and now."""
    here = _here.get()
    if here is None:
        return call

    def run(*args: P.args, **named: P.kwargs) -> T:
        token = _here.set(here)
        try:
            return call(*args, **named)
        finally:
            _here.reset(token)

    return run


class ContextFilter(logging.Filter):
    """Puts what a line is about on its record, for handlers that pass it to another thread.

    One such is :class:`logging.handlers.QueueHandler`; others do without.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add to the record, and let it pass."""
        vars(record).update(_about(record) | _error(record))
        return True


def _about(record: logging.LogRecord) -> dict[str, object]:
    here = _here.get()
    said = (here.fields() if here is not None else {}) | vars(record)
    return {name: said[name] for name in FIELDS if name in said}


def _error(record: logging.LogRecord) -> dict[str, object]:
    """Return code and remedy of the error that a line tells of; empty where it tells of none."""
    raised = record.exc_info[1] if record.exc_info else None
    args = record.args if isinstance(record.args, tuple) else ()
    for error in (raised, *args):
        if isinstance(error, TqFsError):
            return {"code": error.code, "remedy": error.remedy}
    return {name: value for name, value in vars(record).items() if name in {"code", "remedy"}}


# ---------------------------------------------------------------- how it is written


class JsonFormatter(logging.Formatter):
    """One JSON object a line.

    ``time`` (ISO 8601, UTC), ``level``, ``logger`` and ``message`` always; ``store``, ``session``,
    ``step`` and ``unit`` where known; ``code`` and ``remedy`` where the line tells of a
    :class:`~tq_fs.errors.TqFsError`, as its exception or among its arguments; ``traceback`` where
    there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_about(record),
            **_error(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        elif record.exc_text:  # from another process, which sends no traceback as such
            line["traceback"] = record.exc_text
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """The same for a person: ``time LEVEL logger [store=… step=…] message``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(about)s%(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802, ARG002
        """Return the time as in JSON."""
        return _time(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the first line."""
        about = " ".join(f"{name}={value}" for name, value in _about(record).items())
        record.about = f"[{about}] " if about else ""
        return super().formatMessage(record)


def _time(record: logging.LogRecord) -> str:
    time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return time.replace("+00:00", "Z")


# ---------------------------------------------------------------- a program's edge


class _Handler(logging.StreamHandler[TextIO]):
    """The one that :func:`configure_logs` made, and replaces."""


def configure_logs(
    format: str = "json",  # noqa: A002  # the word of the configuration
    *,
    level: str = "INFO",
    stream: TextIO | None = None,
) -> None:
    """Write the process's log lines to a stream. For a program's start; a library leaves it be.

    Handlers that others have added stay. Other packages' lines are written from ``WARNING`` on.

    Parameters
    ----------
    format
        ``json`` for machines, ``text`` for people.
    level
        Of this package's lines: ``DEBUG``, ``INFO``, ``WARNING``, ``ERROR`` or ``CRITICAL``.
    stream
        None for standard error.

    Raises
    ------
    InvalidConfig
        There is no such format or level.
    """
    if format not in get_args(Format):
        raise InvalidConfig(f"{format!r} is none of {', '.join(get_args(Format))}", subject="logs")
    number = logging.getLevelNamesMapping().get(level)
    if number is None:
        raise InvalidConfig(f"{level!r} is no level", subject="logs", remedy="INFO, say")
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(max(number, logging.WARNING))
    logging.getLogger("tq_fs").setLevel(number)
