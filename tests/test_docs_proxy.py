"""docs/proxy.md: its commands, its answers, its tables."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from tests._engines import FakeEngine
from tests.test_docs import ROOT, all_commands, blocks
from tq_fs import errors, flags
from tq_fs.demo.tokenizer import save_tokenizer
from tq_fs.proxy._errors import status_of
from tq_fs.proxy._routes import ROUTES

PAGE = "docs/proxy.md"
TEXT = (ROOT / PAGE).read_text()
URL = "http://127.0.0.1:8800"  # of the page
PATIENCE_S = 60


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(layers=4, topk=2, experts=16) as engine:
        yield engine


def started(command: str, engine: FakeEngine, folder: Path) -> subprocess.Popen[str]:
    """Start a command of the documentation with what it names put in place."""
    model = save_tokenizer(folder / "model")
    config = folder / "store.yaml"
    config.write_text(f"url: {(folder / 'store').as_uri()}\n")
    (folder / "token").write_text("secret")
    line = re.sub(r"/models/\S+", str(model), command)
    line = re.sub(r"--upstream http://\S+", f"--upstream {engine.url}", line)
    line = re.sub(r"\S+\.yaml", str(config), line)
    line = line.replace("--token-file token", f"--token-file {folder / 'token'}")
    line = line.replace("--host 0.0.0.0", "--host 127.0.0.1")
    words = [*shlex.split(line)[1:], "--port", "0"]
    return subprocess.Popen(
        [sys.executable, "-m", "tq_fs.cli", *words], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def ended(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in all_commands() if c.startswith("tq-fs proxy --m")])
def test_a_proxy_of_the_documentation_starts(
    command: str, engine: FakeEngine, tmp_path: Path
) -> None:
    with started(command, engine, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        assert ended(process) == 0


def test_the_requests_of_the_page_are_answered_as_it_says(
    engine: FakeEngine, tmp_path: Path
) -> None:
    if which("curl") is None:
        pytest.skip("curl is not installed")
    start, *requests = [
        line
        for page, body in blocks("bash")
        if page == PAGE
        for line in body.replace("\\\n", " ").splitlines()
    ]
    requests = [line for line in requests if line.startswith("curl ")]
    answers = []
    with started(start, engine, tmp_path) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        for line in requests:
            done = subprocess.run(
                shlex.split(line.replace(URL, url)), capture_output=True, text=True, check=True
            )
            answers.append(json.loads(done.stdout))
        assert ended(process) == 0
    chat, finalized, read, paused, resumed = answers
    (told,) = (body for page, body in blocks("json") if page == PAGE)
    assert shape(chat) == shape(json.loads(told))
    assert len(finalized["segments"]) == len(read["segments"]) == 1
    assert read["segments"][0]["arrays"].keys() == {"logprobs"}
    assert (paused["paused"], resumed["paused"]) == (True, False)


def shape(value: object) -> object:
    """Return the names and types of a JSON value; what texts and numbers say aside."""
    if isinstance(value, dict):
        return {name: shape(below) for name, below in value.items()}
    return [shape(below) for below in value] if isinstance(value, list) else type(value)


def table(head: str) -> list[list[str]]:
    """Return the cells of the rows of the first table from `head` on."""
    _, _, rest = TEXT.partition(head)
    rows = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)
    assert rows is not None
    lines = rows[0].splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in lines]


def test_all_endpoints_are_told() -> None:
    told = {pair for row in table("## Endpoints") for pair in re.findall(r"`(\w+ /[^`]+)`", row[0])}
    assert told == {f"{route.method} {route.path}" for route in ROUTES}


def test_codes_are_told_with_their_status() -> None:
    kinds, left = dict[str, type[errors.TqFsError]](), [errors.TqFsError]
    while left:
        kind = left.pop()
        kinds[kind.code] = kind
        left += kind.__subclasses__()
    told = [
        (code, int(row[0]))
        for row in table("## When something goes wrong")[2:]
        for code in re.findall("`(.*?)`", row[1])
    ]
    assert len(told) > 15
    found = {code: status_of(kinds[code]("")) for code, _ in told if code != "internal"}
    assert dict(told) == {**found, "internal": 500}


def test_all_flags_are_told() -> None:
    rows = "".join(row[0] for row in table("## Flags"))
    assert all(
        f"`{flag}" in rows
        for flag in (flags.ENABLE, flags.CONFIG, flags.PARAMS, flags.DTYPE, flags.REPLAY)
    )
