"""Imports point down, and ``import tq_fs`` is light and does nothing."""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tq_fs

PACKAGE = Path(tq_fs.__file__).parent

# Low to high. A module imports from rows above its own only (and, in a package, from itself);
# ``tq_fs`` is the package's own ``__init__``.
LAYERS = (
    ("errors",),
    ("metrics", "logs"),
    ("keys", "fields", "budget", "cache", "memory", "storage_options", "placement"),
    ("config",),
    ("model_config", "narrow", "planner"),
    ("ingest",),
    ("steps",),
    ("backends",),
    ("manifests",),
    ("trajectory",),
    ("plan", "storage_unit", "claim", "store_folder", "channel"),
    ("recovery", "released", "served", "units"),
    ("places",),
    ("controller", "writer", "placing"),
    ("reader",),
    ("hydrate", "session", "embedded"),
    ("micro_batches", "values"),
    ("store",),
    ("operate",),
    ("tq_fs",),
    ("cluster",),
    ("flags",),
    ("rollout", "keeper", "proxy"),
    ("integrations",),
    ("testing", "demo"),
    ("bench",),
    ("cli",),
)
EDGES = {"cluster", "rollout", "keeper", "proxy", "integrations", "testing", "bench", "demo", "cli"}
RANK = {unit: rank for rank, layer in enumerate(LAYERS) for unit in layer}

STORAGE = {"aiobotocore", "aiohttp", "boto3", "botocore", "fsspec", "obstore", "s3fs"}
OPTIONAL = STORAGE | {
    "torch", "tensordict", "ray", "transformers", "matplotlib", "psutil", "tensorstore", "pytest",
    "cryptography", "prometheus_client", "slime", "megatron", "transfer_queue", "omegaconf", "zmq",
    "fastapi", "starlette", "uvicorn", "tokenizers",
}  # fmt: skip
ONLY_JUDGES = {"zarr"}  # opens Steps for users and tests; the fast path does without
TORCH = {"torch", "tensordict"}
TENSORS = {"hydrate", "values"}  # give tensors to who asks for some
LINKS = {"backends", "manifests"}  # at the root of the repository: tq_fs by another name


class Import(NamedTuple):
    """One import statement's target; `lazy` inside a function, `typing` for annotations only."""

    importer: str
    target: str
    line: int
    lazy: bool
    typing: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit(module: str) -> str:
    """The row entry a module of ours belongs to: ``tq_fs.steps._codecs`` to ``steps``."""
    _, _, rest = module.partition(".")
    return rest.split(".")[0] if rest else module


class Finder(ast.NodeVisitor):
    """Collects the imports of one module, with what surrounds them."""

    def __init__(self, importer: str, modules: set[str]) -> None:
        self.found: list[Import] = []
        self._importer = importer
        self._modules = modules
        self._lazy = self._typing = False

    def _add(self, node: ast.stmt, target: str) -> None:
        self.found.append(Import(self._importer, target, node.lineno, self._lazy, self._typing))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        assert node.level == 0, f"{self._importer}:{node.lineno}: imports are absolute"
        for alias in node.names:
            name = f"{base}.{alias.name}"
            self._add(node, name if name in self._modules else base)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        before, self._lazy = self._lazy, True
        self.generic_visit(node)
        self._lazy = before

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_If(self, node: ast.If) -> None:
        before, self._typing = self._typing, ast.unparse(node.test) == "TYPE_CHECKING"
        for child in node.body:
            self.visit(child)
        self._typing = before
        for child in node.orelse:
            self.visit(child)


@functools.cache
def imports() -> list[Import]:
    paths = {module_name(p): p for p in sorted(PACKAGE.rglob("*.py"))}
    found = []
    for module, path in paths.items():
        finder = Finder(module, set(paths))
        finder.visit(ast.parse(path.read_text(), str(path)))
        found += finder.found
    return found


def ours(found: Import) -> bool:
    return found.target.split(".")[0] == PACKAGE.name


def of_storage(found: Import) -> bool:
    return found.target.split(".")[0] in STORAGE


def of_tls(found: Import) -> bool:
    return found.target.split(".")[0] == "cryptography"


def of_metrics(found: Import) -> bool:
    return found.target.split(".")[0] in {"prometheus_client", "ray"}


def of_figures(found: Import) -> bool:
    return found.target.split(".")[0] == "matplotlib" and (found.lazy or found.typing)


def test_every_module_has_a_layer() -> None:
    modules = {module_name(p) for p in PACKAGE.rglob("*.py")}
    assert {unit(m) for m in modules} <= set(RANK)
    assert len(modules) > 20
    assert sum(map(ours, imports())) > 100


def test_arrows_point_down() -> None:
    """Also lazy ones, and those for annotations: a cycle is a cycle."""
    upwards = [
        str(found)
        for found in imports()
        if ours(found)
        and unit(found.importer) != unit(found.target)
        and RANK[unit(found.importer)] <= RANK[unit(found.target)]
    ]
    assert upwards == []


def test_modules_of_a_package_are_imported_by_its_name_only() -> None:
    """Private ones, ``_x``, belong to their package; others see what it exports."""
    private = [
        str(found)
        for found in imports()
        if ours(found)
        and any(part.startswith("_") for part in found.target.split("."))
        and unit(found.importer) != unit(found.target)
    ]
    assert private == []


def test_nothing_imports_the_links_at_the_root() -> None:
    """A class that is reached by two names is two classes."""
    assert [str(f) for f in imports() if f.target.split(".")[0] in LINKS] == []


def test_optional_libraries_stay_at_the_edges() -> None:
    """Some go deeper: torch in hydrate and values when tensors are asked for, else in annotations
    (tensordict brings torch); what talks to object stores in the backends, when one is made; and
    where metrics go, when they go there; and what draws a plan, when one is drawn."""
    wrong = [
        str(found)
        for found in imports()
        if found.target.split(".")[0] in OPTIONAL | ONLY_JUDGES
        and unit(found.importer) not in EDGES
        and not (unit(found.importer) in TENSORS and found.target in TORCH and found.lazy)
        and not (found.target == "torch" and found.typing)
        and not (unit(found.importer) == "backends" and of_storage(found) and found.lazy)
        and not (unit(found.importer) == "channel" and of_tls(found) and found.lazy)
        and not (unit(found.importer) == "metrics" and of_metrics(found) and found.lazy)
        and not (found.target == "prometheus_client" and found.typing)
        and not (unit(found.importer) == "planner" and of_figures(found))
    ]
    assert wrong == []
    assert any(map(of_storage, imports()))


PROBE = """
import json, os, sys, threading

read = set()
look_up = os._Environ.__getitem__

def record(self, key):
    read.add(key)
    return look_up(self, key)

os._Environ.__getitem__ = record
import tq_fs
json.dump(
    {
        "modules": sorted({name.partition(".")[0] for name in sys.modules}),
        "threads": [t.name for t in threading.enumerate()],
        "tasks": len(os.listdir("/proc/self/task")),
        "environment": sorted(map(str, read)),
        "file": tq_fs.__file__,
    },
    sys.stdout,
)
"""


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    """What a fresh interpreter looks like after ``import tq_fs``."""
    environment = {
        **os.environ,
        "TQ_FS_ROOT": "1",
        "TQ_DURABILITY": "step",
        "OPENBLAS_NUM_THREADS": "1",  # numpy's own threads are not ours
        "PYTHONPATH": str(PACKAGE.parent),
    }
    command = [sys.executable, "-W", "error", "-c", PROBE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["file"] == str(PACKAGE / "__init__.py")
    return found


def test_import_loads_no_optional_library(probe: dict[str, Any]) -> None:
    assert "numpy" in probe["modules"]
    assert (OPTIONAL | ONLY_JUDGES) & set(probe["modules"]) == set()


def test_import_starts_no_thread(probe: dict[str, Any]) -> None:
    assert probe["threads"] == ["MainThread"]
    assert probe["tasks"] == 1


def test_import_reads_none_of_our_environment(probe: dict[str, Any]) -> None:
    assert [name for name in probe["environment"] if name.startswith("TQ")] == []
