"""``tq-fs proxy`` as a process of its own: how it starts, what it records, how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

import tq_fs
from tests._engines import FakeEngine
from tq_fs import errors
from tq_fs.cli import main
from tq_fs.cli._proxy import _until_signalled
from tq_fs.demo.tokenizer import save_tokenizer
from tq_fs.proxy import ProxyClient
from tq_fs.trajectory import Segment

ROOT = Path(__file__).parent.parent
REPLAY = "--use-rollout-routing-replay"
LAYERS, TOPK, EXPERTS = 4, 2, 16  # of the tiny model that save_tokenizer describes
PATIENCE_S = 60

pytestmark = pytest.mark.usefixtures("untouched_logs")  # some commands run in this process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(layers=LAYERS, topk=TOPK, experts=EXPERTS) as engine:
        yield engine


class Process:
    """A Proxy that runs, and what became of it."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        assert process.stdout is not None
        self._process = process
        self._log = log
        self.url = process.stdout.readline().strip()
        self.client = ProxyClient(self.url, timeout_s=PATIENCE_S) if self.url else None

    @property
    def log(self) -> str:
        return self._log.read_text()

    def end(self, name: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal; return the exit code."""
        self._process.send_signal(name)
        return self._process.wait(PATIENCE_S)

    def said(self) -> str:
        """Return what else came on standard output."""
        assert self._process.stdout is not None
        return self._process.stdout.read()

    def talk(self, session_id: str, *, turns: int = 2) -> list[Segment]:
        """Let an agent take some turns, finalize, and read."""
        client = self.connected
        messages: list[dict[str, object]] = []
        for turn in range(turns):
            messages.append({"role": "user", "content": f"question {turn}"})
            answer = client.chat(messages, session_id=session_id, max_tokens=8)
            messages.append(answer["choices"][0]["message"])
        client.finalize(session_id)
        return client.read([session_id])

    @property
    def connected(self) -> ProxyClient:
        assert self.client is not None, self.log
        return self.client


@contextmanager
def proxy(
    model: Path, upstream: str, folder: Path, *more: str | Path, **environment: str
) -> Iterator[Process]:
    command = ["proxy", "--model", str(model), "--upstream", upstream, "--port", "0"]
    log = folder / f"log-{len(list(folder.glob('log-*')))}"
    clean = {n: v for n, v in os.environ.items() if n != "TQ_FS_PROXY_TOKEN"}
    with (
        log.open("w") as written,
        subprocess.Popen(
            [sys.executable, "-m", "tq_fs.cli", *command, *map(str, more)],
            stdout=subprocess.PIPE,
            stderr=written,
            text=True,
            cwd=ROOT,
            env={**clean, **environment},
        ) as process,
    ):
        try:
            yield Process(process, log)
        finally:
            process.kill()


def stored(folder: Path) -> list[str | Path]:
    """Return the flags of a store below a folder."""
    config = folder / "store.yaml"
    config.write_text(f"url: {(folder / 'store').as_uri()}\nstore_id: run-1\n")
    return [REPLAY, "--enable-transfer-queue", "--transfer-queue-config", config]


def steps_in(folder: Path, session_id: str) -> list[Path]:
    return list((folder / "store").glob(f"**/steps/train/*{session_id}*/*/[0-9]*"))


# ---------------------------------------------------------------- what it does


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["auto", "int32"])
def test_tensors_are_the_same_with_a_store_and_without(
    model: Path, engine: FakeEngine, tmp_path: Path, dtype: str
) -> None:
    typed = ["--routed-experts-dtype", dtype]
    with proxy(model, engine.url, tmp_path, REPLAY, *typed) as off:
        (kept,) = off.talk("a")
        assert off.end() == 0
        assert off.said() == ""
    with proxy(model, engine.url, tmp_path, *stored(tmp_path), *typed) as on:
        (segment,) = on.talk("a")
        assert on.end() == 0
    assert kept.ref is None
    assert kept.arrays["routed_experts"].dtype == ("uint8" if dtype == "auto" else "int32")
    assert segment.ref is not None
    assert segment.arrays == {}
    assert segment.tokens.tolist() == kept.tokens.tolist()
    fields = [tq_fs.logprobs(), tq_fs.routed_experts_of_model(model)]
    url = (tmp_path / "store").as_uri()
    with (
        tq_fs.open_store(url, fields=fields, store_id="run-1", read_only=True) as store,
        tq_fs.open_store(None, fields=fields) as memory,
    ):
        want, got = memory.hydrate([kept]), store.hydrate([segment])
    for name in ("rollout_log_probs", "rollout_routed_experts"):
        assert got[name][0].dtype == want[name][0].dtype
        assert got[name][0].equal(want[name][0]), name


def test_it_prints_its_url_and_nothing_else(
    model: Path, engine: FakeEngine, tmp_path: Path
) -> None:
    with proxy(model, engine.url, tmp_path) as running:
        assert running.url.startswith("http://127.0.0.1:"), running.log
        assert running.connected.health().status == "ok"
        (segment,) = running.talk("a", turns=1)
        assert running.end() == 0
        assert running.said() == ""
    assert set(segment.arrays) == {"logprobs"}
    assert segment.extra["conversation"]


def test_its_options_reach_it(model: Path, engine: FakeEngine, tmp_path: Path) -> None:
    options = [
        *("--mode", "snapshot", "--views", "timeline", "lineage", "--consumers", "train", "eval"),
        *("--routing-check", "reject", "--no-partial-rollout", "--max-version-span", "3"),
        *("--context-length", "4096", "--served-model-name", "tiny-1", REPLAY),
    ]
    with proxy(model, engine.url, tmp_path, *options) as running:
        found = running.connected.capabilities()
        assert (found.model, found.context_length, found.mode) == ("tiny-1", 4096, "snapshot")
        assert (found.views, found.consumers) == (["timeline", "lineage"], ["train", "eval"])
        assert (found.partial_rollout, found.max_version_span) == (False, 3)
        assert [field.name for field in found.fields] == ["logprobs", "routed_experts"]
        engine.fault("one-id")
        with pytest.raises(errors.RoutingSuspect):
            running.talk("a")


def test_the_context_is_the_model_s_where_nobody_says(
    model: Path, engine: FakeEngine, tmp_path: Path
) -> None:
    with proxy(model, engine.url, tmp_path) as running:
        found = running.connected.capabilities()
    assert (found.model, found.context_length) == ("tiny", 32768)


@pytest.mark.parametrize("where", ["file", "environment"])
def test_a_token_is_asked_for(model: Path, engine: FakeEngine, tmp_path: Path, where: str) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    given: list[str | Path] = ["--token-file", tmp_path / "token"] if where == "file" else []
    variable = {"TQ_FS_PROXY_TOKEN": "other" if where == "file" else "s3cret"}
    with proxy(model, engine.url, tmp_path, *given, **variable) as running:
        assert running.connected.health().status == "ok"
        with pytest.raises(errors.Unauthorized):
            running.connected.capabilities()
        known = ProxyClient(running.url, token="s3cret")
        assert known.capabilities().model == "tiny"
        assert "s3cret" not in running.log


def test_metrics_have_an_address_of_their_own(
    model: Path, engine: FakeEngine, tmp_path: Path
) -> None:
    pytest.importorskip("prometheus_client")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = "{}:{}".format(*free.getsockname())
    given: list[str | Path] = [*stored(tmp_path), "--metrics", where, "--no-token"]
    with proxy(model, engine.url, tmp_path, *given) as running:
        running.talk("a")
        with urlopen(f"http://{where}/metrics") as page:
            text = page.read().decode()
        own = running.connected.metrics()
    assert 'tqfs_steps_written_total{role="proxy",store="run-1"' in text
    assert "tqfs_proxy_requests_total{" in text
    assert "tqfs_steps_written_total{" in own


def test_log_lines_are_json_where_that_is_asked_for(
    model: Path, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.fault("one-id")
    with proxy(model, engine.url, tmp_path, REPLAY, "--log-format", "json") as running:
        running.talk("a", turns=1)
        running.end()
        lines = [json.loads(line) for line in running.log.splitlines()]
    assert any(line["logger"].startswith("tq_fs.") for line in lines), lines
    assert all(set(line) >= {"time", "level", "message"} for line in lines)


# ---------------------------------------------------------------- how it ends


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_beside_a_request_that_hangs(
    model: Path, engine: FakeEngine, tmp_path: Path, name: signal.Signals
) -> None:
    engine.fault("hang")
    with proxy(model, engine.url, tmp_path) as running, ThreadPoolExecutor(1) as agents:
        asked = agents.submit(running.talk, "a")
        while not engine.asked:
            assert not asked.done(), asked.result()
            time.sleep(0.01)
        assert running.end(name) == 0
        error = asked.exception(PATIENCE_S)
        assert isinstance(error, errors.ProxyUnavailable)
        assert error.problem == "is being stopped"


def test_a_signal_ends_it_while_it_starts_too() -> None:
    before = signal.getsignal(signal.SIGTERM)
    went_on = []
    with _until_signalled():
        os.kill(os.getpid(), signal.SIGTERM)
        went_on.append(True)
    assert not went_on
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_what_was_finalized_stays_and_open_sessions_are_swept(
    model: Path, engine: FakeEngine, tmp_path: Path
) -> None:
    with proxy(model, engine.url, tmp_path, *stored(tmp_path)) as running:
        (segment,) = running.talk("done")
        question = [{"role": "user", "content": "x"}]
        running.connected.chat(question, session_id="open", max_tokens=4)
        assert running.end() == 0
        assert steps_in(tmp_path, "open")
    with proxy(model, engine.url, tmp_path, *stored(tmp_path)) as running:
        assert not steps_in(tmp_path, "open")
        assert steps_in(tmp_path, "done")
        assert segment.ref is not None
        assert running.connected.release([segment.ref]) == 2
        assert running.end() == 0
    assert not steps_in(tmp_path, "done")


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--transfer-params", "entropy"], "argument --transfer-params: invalid choice: 'entropy'"),
        (["--mode", "other"], "argument --mode: invalid choice"),
        (["--port", "x"], "argument --port: invalid int value"),
    ],
)
def test_wrong_usage_is_told_by_the_parser(
    arguments: list[str], said: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["proxy", "--model", str(model), "--upstream", "http://127.0.0.1:9", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--enable-transfer-queue"], "--transfer-queue-config: is missing"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0: would let everybody in; give --token-file"),
        (["--token-file", "/none"], "--token-file: cannot be read"),
        (["--token-file", "{empty}"], "--token-file {empty}: holds nothing"),
        (["--metrics", "9100"], "--metrics: '9100' is no HOST:PORT"),
        (["--port", "{taken}"], "127.0.0.1:{taken}: cannot be listened at"),
        (["--max-new-tokens", "0"], "max_new_tokens: 0"),
        (["--timeout-s", "0"], "timeout_s: 0"),
        (["--max-version-span", "-1"], "max_span: -1"),
        (["--upstream", "localhost:30000"], "localhost:30000: is no base URL of an engine"),
        (["--upstream", "http://me:secret@gpu-0:30000"], "gpu-0:30000: has a user or password"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(
    arguments: list[str],
    said: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TQ_FS_PROXY_TOKEN", raising=False)
    (tmp_path / "empty").write_text("\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = {"empty": str(tmp_path / "empty"), "taken": taken.getsockname()[1]}
        filled = [argument.format(**given) for argument in arguments]
        base = ["proxy", "--model", str(model), "--upstream", "http://127.0.0.1:9"]
        assert main([*base, *filled]) == 2
    assert f"tq-fs: {said.format(**given)}" in capsys.readouterr().err


def test_a_type_too_small_for_the_model_is_refused_before_anything_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_fs.proxy.ChatTemplate.from_model", lambda model: pytest.fail("slow"))
    large = save_tokenizer(tmp_path / "large", {"num_experts": 384})
    flags = [*map(str, stored(tmp_path)), "--routed-experts-dtype", "uint8"]
    base = ["proxy", "--model", str(large), "--upstream", "http://127.0.0.1:9"]
    assert main([*base, *flags]) == 2
    said = capsys.readouterr().err
    assert "--routed-experts-dtype: uint8 holds 256 experts, the model has 384" in said
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_folder_that_is_no_model_s_is_refused(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert main(["proxy", "--model", str(tmp_path), "--upstream", "http://127.0.0.1:9"]) == 2
    assert f"--model, {tmp_path / 'config.json'}: " in capsys.readouterr().err


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["proxy", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "example:\n  tq-fs proxy --model" in shown
    assert "X-Session-Id" in shown
