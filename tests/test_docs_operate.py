"""docs/operating.md: its commands, its findings, its messages."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import tq_fs
from tests._rollouts import FIELDS, record, short_rollout, specs
from tests.test_docs import FENCE, OPERATOR, ROOT, all_commands
from tq_fs.operate import REMEDIES

TEXT = (ROOT / "docs/operating.md").read_text()
COMMANDS = [c for c in all_commands() if c.startswith(OPERATOR)]
PLACE = re.compile(r"(file:///nvme|s3://my-bucket)/runs")


def fill(url: str) -> None:
    with tq_fs.open_store(url, fields=specs(FIELDS), store_id="run-7") as store:
        record(store, "math-17", 1)
        short_rollout(FIELDS, 2).record(store.session("math-19"))


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=pytest.mark.s3) if "s3://" in c else c for c in COMMANDS],
)
def test_commands_of_the_guide_run(
    command: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = tmp_path.as_uri()
    if "s3://" in command:
        url = f"s3://{request.getfixturevalue('bucket')}/runs"
    fill(url)
    words = shlex.split(PLACE.sub(url, command))[1:]
    done = subprocess.run(
        [sys.executable, "-m", "tq_fs.cli", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    is_young = "s3://" in command and "--grace-s 0" not in command
    finds = words[0] in {"verify", "repair"} and "--yes" not in words and not is_young
    assert done.returncode == finds, done.stderr
    assert done.stdout
    assert done.stderr == ""


def test_every_operator_command_is_in_the_guide() -> None:
    told = {c.split()[1] for c in COMMANDS}
    assert told == {"ls", "show", "stat", "verify", "repair", "gc"}
    assert all(PLACE.search(c) for c in COMMANDS)
    assert len(FENCE.findall(TEXT)) > 6


def test_the_findings_of_the_guide_are_those_of_verify() -> None:
    table = TEXT.partition("| finding |")[2].partition("\n\n")[0]
    told = re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)
    assert told == list(REMEDIES)


@pytest.mark.parametrize(
    "words",
    re.findall(r"^\| `([^`]+)`", TEXT.partition("| says |")[2].partition("\n\n")[0], re.MULTILINE),
)
def test_the_messages_of_the_guide_are_those_of_the_package(words: str) -> None:
    part = words.replace("s3://…", "").strip().removeprefix("is ")
    sources = "".join(p.read_text() for p in (ROOT / "tq_fs").rglob("*.py"))
    assert part in sources
