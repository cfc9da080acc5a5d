"""What the site needs beside the pages: the command line's help, and files that pages link to."""

from __future__ import annotations

import argparse
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from tq_fs.cli._main import _parser

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(\]\()([^)#:\s]+)(\)|#)")
FETCHED = re.compile(
    r"<(?:img|script|link(?![^>]*canonical))\b[^>]*?(?:href|src)=[\"']?((?:https?:)?//[^\"'\s>]+)"
)
HELP = "<!-- the help of every command: docs/_hooks.py -->"
SHOWN = "files"
"""Folder of the site with what lies outside of docs/ and is linked to."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Show each file that lies outside of docs/, and is linked to, on a page of its own."""
    from mkdocs.structure.files import File, InclusionLevel  # noqa: PLC0415 (tests do without)

    sources = {page.src_uri: page.content_string for page in files.documentation_pages()}
    linked = {path for uri, text in sources.items() for path in outside(uri, text)}
    linked |= {path for folder in linked for path in below(folder)}
    for path in sorted(linked):
        page = File.generated(config, page_of(path), content=content_of(path))
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links out of docs/ to the pages above, and put the help in its place."""
    del config, files
    return moved(page.file.src_uri, markdown).replace(HELP, help_text())


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that would make a browser fetch something from elsewhere."""
    for page in sorted(Path(config.site_dir).glob("**/*.html")):
        if sources := fetched(page.read_text()):
            raise SystemExit(f"{page}: fetches {', '.join(sources)}")


def fetched(html: str) -> list[str]:
    """Return the URLs of other hosts that a browser fetches to show a page."""
    return FETCHED.findall(html)


def outside(uri: str, text: str) -> Iterator[Path]:
    """Yield what lies outside of docs/ and is linked to."""
    for _, target, _ in LINK.findall(text):
        path = (ROOT / "docs" / uri).parent / target
        if posixpath.normpath(posixpath.join(posixpath.dirname(uri), target)).startswith("../"):
            yield path.resolve()


def moved(uri: str, text: str) -> str:
    """Return a page's text with its links out of docs/ led to where their files are shown."""

    def replaced(link: re.Match[str]) -> str:
        target = link[2]
        if any(outside(uri, link[0])):
            path = ((ROOT / "docs" / uri).parent / target).resolve()
            target = posixpath.relpath(page_of(path), posixpath.dirname(uri) or ".")
        return f"{link[1]}{target}{link[3]}"

    return LINK.sub(replaced, text)


def below(folder: Path) -> list[Path]:
    """Return the files of a folder, and of the folders in it."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc")


def page_of(path: Path) -> str:
    """Return the page that shows a file or folder."""
    name = path.relative_to(ROOT).as_posix()
    return f"{SHOWN}/{name}/README.md" if path.is_dir() else f"{SHOWN}/{name}.md"


def content_of(path: Path) -> str:
    """Return that page's text."""
    title = f"# `{path.relative_to(ROOT).as_posix()}`\n\n"
    if path.is_dir():
        pages = {p: posixpath.relpath(page_of(p), page_of(path) + "/..") for p in below(path)}
        return title + "".join(f"- [{p.relative_to(path)}]({page})\n" for p, page in pages.items())
    if path.suffix == ".md":
        return path.read_text()
    return f"{title}````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}````\n"


def help_text() -> str:
    """Return the help of every command, each under its own heading."""
    with mock.patch.dict(os.environ, COLUMNS="96"):
        return "\n\n".join(
            f"## {p.prog}\n\n```text\n{p.format_help()}```" for p in commands(_parser())
        )


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of its commands, the commands that do something."""
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not groups:
        yield parser
    for group in groups:
        for command in group.choices.values():
            yield from commands(command)
