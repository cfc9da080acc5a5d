"""What is installed: one import name, typed, without the root links."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_root_links_lead_into_the_package_and_stay_out_of_builds() -> None:
    for name in ("backends", "manifests"):
        link = ROOT / name
        assert link.is_symlink()
        assert link.readlink() == Path("tq_fs") / name
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert set(build["exclude"]) == {"/backends", "/manifests"}
    assert build["targets"]["wheel"]["packages"] == ["tq_fs"]


def test_the_package_is_marked_as_typed() -> None:
    assert files("tq_fs").joinpath("py.typed").is_file()


def test_every_dependency_has_a_tested_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(d for e in project["optional-dependencies"].values() for d in e),
    ]
    names = {re.split("[>=]", d)[0].strip().lower() for d in wanted}
    tested = {
        line.split("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert names <= tested
