"""Docstrings are plain text first; on the site their roles, examples and tables become Markdown."""

from __future__ import annotations

import re

import griffe

ROLE = re.compile(r":[a-z]+:`(~?)([^`]+)`")
EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"^=+  .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)


class PlainDocstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Rewrite that of a member."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        """Rewrite that of the package, which is nobody's member."""
        self.on_object(obj=pkg)


def markdown(text: str) -> str:
    """Return a docstring with names as code, and examples and tables as they are typed."""
    text = ROLE.sub(named, text)
    text = EXAMPLE.sub(r"```pycon\n\g<0>\n```", text)
    return TABLE.sub(r"```text\n\g<0>\n```", text)


def named(role: re.Match[str]) -> str:
    """Return the name that a role gives, the last part of it where it says so."""
    return f"`{role[2].rpartition('.')[2] if role[1] else role[2]}`"
