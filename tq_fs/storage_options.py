"""Options of a storage driver, whose secrets do not get out.

A value may be a reference to a secret: ``env:NAME`` (an environment variable) or ``file:/path``
(the first line of a file). References are looked up where a connection is made, in the process that
makes it, so that they can travel. A secret that stands there literally stays in its process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tq_fs.errors import InvalidConfig

_SECRET = (
    *("secret", "token", "key", "password", "passwd", "passphrase", "credential", "sas"),
    *("connection_string", "authorization"),
)
_PUBLIC = {"key_file"}
_MASK = "***"


class StorageOptions(Mapping[str, Any]):
    """Options by name. Printing shows no secret; pickling one that stands there literally fails."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._options = dict(options or {})

    def __getitem__(self, name: str) -> Any:
        """Return an option as it was given."""
        return self._options[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self._options)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._options)

    def __repr__(self) -> str:
        """Show options without secrets."""
        shown = {n: _MASK if _literal_secret(n, v) else v for n, v in self._options.items()}
        return f"StorageOptions({shown})"

    def __hash__(self) -> int:
        """Hash by name, for frozen values that hold options."""
        return hash(tuple(sorted(self._options)))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle references.

        Raises
        ------
        InvalidConfig
            A secret stands there literally.
        """
        for name, value in self._options.items():
            if _literal_secret(name, value):
                raise InvalidConfig(
                    "holds a secret, which is not sent to another process",
                    subject=f"storage option {name!r}",
                    remedy="give a reference (env:NAME or file:/path), a profile, or nothing and "
                    "the environment",
                )
        return StorageOptions, (self._options,)

    def text(self, name: str) -> str | None:
        """Return an option as text, references looked up; None where it is not given.

        Raises
        ------
        InvalidConfig
            What it refers to is not there.
        """
        value = self.resolved(name)
        return None if value is None else str(value)

    def resolved(self, name: str) -> Any:
        """Return an option, references looked up; None where it is not given."""
        return _look_up(name, self._options.get(name))

    def all_resolved(self) -> dict[str, Any]:
        """Return all options, references looked up."""
        return {name: self.resolved(name) for name in self._options}


def without_secrets(url: str) -> str:
    """Return a URL without the parts that may hold a secret: user, query and fragment."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    return scheme + separator + re.split("[?#]", rest.rpartition("@")[2])[0]


def _literal_secret(name: str, value: object) -> bool:
    if isinstance(value, Mapping):
        return any(_literal_secret(n, v) for n, v in value.items())
    secret = name not in _PUBLIC and any(part in name.lower() for part in _SECRET)
    return secret and value is not None and not _is_reference(value)


def _is_reference(value: object) -> bool:
    return isinstance(value, str) and value.startswith(("env:", "file:"))


def _look_up(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {n: _look_up(n, v) for n, v in value.items()}
    if not _is_reference(value):
        return value
    kind, _, where = value.partition(":")
    try:
        if kind == "env":
            return os.environ[where]
        with open(where) as file:
            return file.readline().strip()
    except (KeyError, OSError) as error:
        raise InvalidConfig(
            f"refers to {value}, which is not there", subject=f"storage option {name!r}"
        ) from error
