"""The configurations in the pages on TransferQueue are ones that the backend takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from tq_fs import StoreConfig, errors
from tq_fs.keeper import ValueConfig

PAGES = Path(__file__).parent.parent / "docs" / "integrations"
GUIDE = PAGES / "transfer-queue.md"
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
OVERRIDE = re.compile(r"^'?\+?transfer_queue\.(backend\.\S+?)=([^'\n]*)'?$", re.MULTILINE)
FRAMEWORKS = ["dressage.md", "relax.md", "roll.md", "verl.md"]


def sections(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield what stands under ``TqFs`` at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "TqFs":
                yield inner
            else:
                yield from sections(inner)


def documented() -> list[tuple[str, Mapping[str, Any]]]:
    return [
        (page.name, section)
        for page in sorted(PAGES.glob("*.md"))
        for block in BLOCK.findall(page.read_text())
        if "TqFs:" in block
        for section in sections(yaml.safe_load(block))
    ]


def table(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading of the guide."""
    text = GUIDE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


@pytest.mark.parametrize(("page", "section"), documented())
def test_a_documented_section_is_one_that_the_backend_takes(
    page: str, section: Mapping[str, Any]
) -> None:
    assert ValueConfig.of(section).store.store_id == "run-1", page


def test_every_page_of_a_framework_shows_a_section() -> None:
    assert {*FRAMEWORKS, GUIDE.name} <= {page for page, _ in documented()}


def test_the_guide_shows_every_kind_of_place() -> None:
    kinds = [ValueConfig.of(section).kind for page, section in documented() if page == GUIDE.name]
    assert {*kinds} == {"folder", "cluster", "objects"}


def test_every_block_that_selects_the_backend_has_its_section() -> None:
    for page in PAGES.glob("*.md"):
        for block in BLOCK.findall(page.read_text()):
            if "storage_backend: TqFs" in block:
                assert list(sections(yaml.safe_load(block))), page


def test_the_overrides_for_verl_make_a_section_that_the_backend_takes() -> None:
    found: dict[str, Any] = {}
    for path, value in OVERRIDE.findall((PAGES / "verl.md").read_text()):
        *outer, last = path.split(".")
        inner = found
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = yaml.safe_load(value)
    assert found["backend"]["storage_backend"] == "TqFs"
    assert ValueConfig.of(found["backend"]["TqFs"]).kind == "cluster"


def test_the_settings_in_the_guide_are_those_that_there_are() -> None:
    own = {field.name for field in fields(ValueConfig)} - {"store"} | {"config"}
    store = {field.name for field in fields(StoreConfig)}
    told = {name for row in table("Settings") for name in re.findall(r"`(\w+)`", row[0])}
    assert own <= told
    assert told <= own | store


@pytest.mark.parametrize("name", ["allow_pickle", "checkpoints", "sweep_s"])
def test_the_defaults_in_the_guide_are_those_that_there_are(name: str) -> None:
    default = next(field.default for field in fields(ValueConfig) if field.name == name)
    told = next(row[1] for row in table("Settings") if row[0] == f"`{name}`")
    assert yaml.safe_load(told.split(" ")[0]) == default


def test_the_errors_in_the_guide_are_those_of_the_package() -> None:
    rows = [row[0] for row in table("What it says")]
    told = [pair for row in rows for pair in re.findall(r"`(\w+)` \(`(\w+)`\)", row)]
    assert len(told) >= 8
    for kind, code in told:
        assert getattr(errors, kind).code == code
