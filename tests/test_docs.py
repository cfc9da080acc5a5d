"""Every command and every piece of Python in the README and in docs/ is run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import tq_fs
from tq_fs import errors

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
COMMAND = re.compile(r"`((?:tq-fs|python|make) [^`]+)`")
# What makes a long command short; the last of two equal options counts.
SHORTER = {
    "tq-fs demo --store": "--payload-mib 8",
    "tq-fs demo --ray": "--payload-mib 32",
    "tq-fs plan": "--figure {tmp}/figure.png",
    "tq-fs bench step": "--tokens 64 --layers 4 --topk 2 --repeats 1 --root {tmp}",
    "tq-fs bench channel": "--repeats 1 --root {tmp}",
    "tq-fs bench controller": "--steps 30500 --root {tmp}",
    "tq-fs bench cluster": "--repeats 1 --steps 30500 --bytes 100000000 --sessions 2 --root {tmp}",
    "tq-fs bench proxy": "--repeats 1 --sessions 2 --turns 2 --tokens 64 --long-tokens 512 "
    "--layers 4 --held-sessions 1 --held-turns 4 --root {tmp}",
    "tq-fs bench memory": "--payload 4MiB --paths central,nvme --rollouts 2 --root {tmp}",
    "tq-fs bench s3": "--server moto --objects 8 --repeats 1 --write-back-bytes 1000000",
}
NEEDS = {
    "tq-fs plan": "matplotlib",
    "tq-fs bench cluster": "ray",
    "tq-fs bench memory": "ray",
    "tq-fs bench proxy": "fastapi",
}
OPERATOR = tuple(f"tq-fs {name} " for name in ("ls", "show", "stat", "verify", "repair", "gc"))
BUCKET = "s3://my-bucket/"  # of the pages; a bucket of the test's own takes its place


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (page.relative_to(ROOT).as_posix(), body)
        for page in PAGES
        for kind, body in FENCE.findall(page.read_text())
        if kind == language
    ]


def commands(*, cluster: bool = False) -> list[str]:
    """Return what is run here; or what tests/test_cluster_ray.py runs, on a cluster.

    tests/test_docs_proxy.py runs what needs an engine, tests/test_docs_operate.py what needs a
    store.
    """
    found = [c for c in all_commands() if c.startswith("tq-fs cluster") == cluster]
    found = [c for c in found if not c.startswith(("tq-fs proxy", "curl ", *OPERATOR))]
    assert found
    return found


def all_commands() -> list[str]:
    """Return every command of every page; one that goes on over several lines as one."""
    fenced = [
        line.split("#")[0].strip()
        for _, body in blocks("bash")
        for line in body.replace("\\\n", " ").splitlines()
    ]
    inline = [c for page in PAGES for c in COMMAND.findall(page.read_text())]
    return sorted({c for c in [*fenced, *inline] if c})


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_python_in_the_documentation_runs(page: str, code: str, tmp_path: Path) -> None:
    code = re.sub(r"file:///tmp/[\w-]+", f"file://{tmp_path}/store", code)
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, f"{page}: {run.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_commands_in_the_documentation_run(
    command: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if command.startswith("tq-fs serve"):
        serve(command, tmp_path)
        return
    line = command
    if BUCKET in command:
        line = command = command.replace(BUCKET, f"s3://{request.getfixturevalue('bucket')}/")
        url = re.findall(r"s3://\S+", command)[0]
        tq_fs.open_store(url, fields=[tq_fs.logprobs()], store_id="run-1").close()
    for start, more in SHORTER.items():
        if command.startswith(start):
            pytest.importorskip(NEEDS.get(start, "tq_fs"))
            line = f"{command} {more.format(tmp=tmp_path)}"
    words = shlex.split(line)
    if words[0] == "make":
        words.insert(1, "--dry-run")  # CI runs `make test`, and `make demo` ends in a command below
    elif words[0] == "tq-fs":
        words = [sys.executable, "-m", "tq_fs.cli", *words[1:]]
        if words[3:4] == ["demo"]:
            words += ["--figure", str(tmp_path / "figure.png")]
    elif words[0] == "python":
        words[0] = sys.executable
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{line}\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}"


def serve(command: str, tmp_path: Path) -> None:
    """Run a command that serves until it is told to end."""
    changed = command.replace("/nvme/", f"{tmp_path}/").replace("store.pem", f"{tmp_path}/s.pem")
    words = shlex.split(re.sub(r":\d+( |$)", r":0\1", changed))
    with subprocess.Popen(
        [sys.executable, "-m", "tq_fs.cli", *words[1:]], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        said = child.stdout.readline()
        child.terminate()
        assert child.wait(30) == 0
    assert "at tqfs://" in said


def test_the_two_commands_of_the_readme_are_what_the_makefile_runs() -> None:
    text = (ROOT / "Makefile").read_text()
    assert "tq-fs demo" in text
    assert "tox run" in text
    assert {"make demo", "make test"} <= set(commands())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_in_the_documentation_lead_somewhere(page: Path) -> None:
    missing = [t for t in LINK.findall(page.read_text()) if not (page.parent / t).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_documentation_names_no_absent_file_of_the_project(page: Path) -> None:
    named = re.findall(r"`((?:tq_fs|docs|tests|examples|benchmarks)/[\w./-]+)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_error_codes_of_the_guide_are_those_of_the_package() -> None:
    known, left = set(), [errors.TqFsError]
    while left:
        kind = left.pop()
        known.add(kind.code)
        left += kind.__subclasses__()
    table = (
        (ROOT / "docs/object-stores.md").read_text().partition("| code |")[2].partition("\n\n")[0]
    )
    told = {
        code for row in table.splitlines()[2:] for code in re.findall("`(.*?)`", row.split("|")[1])
    }
    assert len(told) > 20
    assert told <= known
