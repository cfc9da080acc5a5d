"""The documentation's site: all pages are in it, and its own machinery does what it says."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tq_fs import errors

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \|", re.MULTILINE)
MARKER = "<!-- the help of every command: docs/_hooks.py -->"


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages(nav: object) -> Iterator[str]:
    """Yield the pages of a navigation, in its order."""
    if isinstance(nav, str):
        yield nav
    for entry in nav if isinstance(nav, list) else []:
        for below in entry.values() if isinstance(entry, dict) else [entry]:
            yield from pages(below)


def error_classes() -> set[type[errors.TqFsError]]:
    found, left = set(), [errors.TqFsError]
    while left:
        kind = left.pop()
        found.add(kind)
        left += kind.__subclasses__()
    return {kind for kind in found if kind.__module__ == errors.__name__}


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(pages(CONFIG["nav"])) == sorted(
        page.relative_to(DOCS).as_posix() for page in DOCS.glob("**/*.md")
    )


def test_every_design_note_is_in_their_list() -> None:
    listed = re.findall(r"\]\((\d{4}[^)]*)\)", (DOCS / "design/README.md").read_text())
    assert listed == sorted(note.name for note in DOCS.glob("design/0*.md"))


def test_every_error_class_is_explained_with_its_code() -> None:
    told = ROW.findall((DOCS / "failures.md").read_text())
    assert sorted(told) == sorted((kind.code, kind.__name__) for kind in error_classes())


def test_every_configuration_file_is_linked() -> None:
    linked = re.findall(
        r"examples/configs/([\w-]+\.yaml)\)", (DOCS / "configuration.md").read_text()
    )
    assert sorted(linked) == sorted(p.name for p in ROOT.glob("examples/configs/*.yaml"))


def test_every_module_of_the_api_pages_is_there() -> None:
    named = {
        name
        for page in DOCS.glob("api/*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    }
    assert {"tq_fs", "tq_fs.errors", "tq_fs.config"} <= named
    for name in named:
        assert importlib.util.find_spec(name) is not None


def test_a_page_that_makes_a_browser_fetch_something_is_noticed(hooks: ModuleType) -> None:
    assert hooks.fetched('<script defer src="https://cdn.example/x.js">') == [
        "https://cdn.example/x.js"
    ]
    assert hooks.fetched("<link rel=stylesheet href=//fonts.example/css>") == [
        "//fonts.example/css"
    ]
    assert hooks.fetched('<link rel="canonical" href="http://127.0.0.1:8000/README.html">') == []
    assert hooks.fetched('<a href="https://zarr.dev"><img src="images/tiers.svg"></a>') == []


def test_the_help_of_every_command_is_put_into_its_page(hooks: ModuleType) -> None:
    assert MARKER in (DOCS / "command-line.md").read_text()
    assert hooks.HELP == MARKER
    text = hooks.help_text()
    for command in ("demo", "verify", "cluster start", "bench step", "plan", "proxy"):
        assert f"## tq-fs {command}\n\n```text\nusage: tq-fs {command} " in text


@pytest.mark.parametrize(
    ("page", "link", "shown"),
    [
        ("operating.md", "(../examples/configs)", "(files/examples/configs/README.md)"),
        (
            "guides/tiers.md",
            "(../../examples/configs/tiered.yaml)",
            "(../files/examples/configs/tiered.yaml.md)",
        ),
        ("guides/tiers.md", "(../object-stores.md#tiers)", "(../object-stores.md#tiers)"),
        ("format.md", "(https://zarr.dev)", "(https://zarr.dev)"),
    ],
)
def test_links_out_of_the_documentation_lead_to_pages_that_show_the_files(
    hooks: ModuleType, page: str, link: str, shown: str
) -> None:
    assert hooks.moved(page, f"[it]{link}") == f"[it]{shown}"


def test_a_file_that_is_shown_is_shown_whole(hooks: ModuleType) -> None:
    path = ROOT / "examples/configs/tiered.yaml"
    assert f"````yaml\n{path.read_text()}````" in hooks.content_of(path)
    assert "(tiered.yaml.md)" in hooks.content_of(path.parent)
    assert "(configs/tiered.yaml.md)" in hooks.content_of(path.parent.parent)


def test_docstrings_become_markdown() -> None:
    griffe = pytest.importorskip("griffe")
    package = griffe.load(
        "tq_fs", search_paths=[ROOT], extensions=griffe.load_extensions(DOCS / "_docstrings.py")
    )
    assert "```pycon\n>>> import numpy" in package.docstring.value
    assert "```text\n====" in package["flags"].docstring.value
    assert "by `tq_fs.Store.session`" in package["session.Session"].docstring.value
