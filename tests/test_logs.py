"""Structured logs: one object a line, that says what it is about, wherever it was written."""

from __future__ import annotations

import io
import json
import logging
import logging.handlers
import queue
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests._rollouts import open_store, run_child, short_rollout, specs, standard_fields
from tq_fs.backends import LocalBackend
from tq_fs.budget import ByteBudget
from tq_fs.cache import ChunkCache
from tq_fs.channel import ChannelServer
from tq_fs.channel._wire import PREFIX
from tq_fs.errors import InvalidConfig, StorageFull
from tq_fs.keys import Incarnation
from tq_fs.logs import (
    ContextFilter,
    JsonFormatter,
    TextFormatter,
    carried,
    configure_logs,
    log_context,
)
from tq_fs.reader import SegmentReader
from tq_fs.steps import EncodeOptions
from tq_fs.storage_unit import StorageUnit
from tq_fs.trajectory import Trajectory
from tq_fs.writer import StepWriter


class Lines:
    """A logger of the test's own, and what it wrote."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self._stream = io.StringIO()
        self.handler = logging.StreamHandler(self._stream)
        self.handler.setFormatter(formatter)
        self.log = logging.Logger("tq_fs.test")
        self.log.addHandler(self.handler)

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]


@pytest.fixture
def lines() -> Lines:
    return Lines(JsonFormatter())


# ---------------------------------------------------------------- a line


def test_a_line_says_when_how_bad_who_and_what(lines: Lines) -> None:
    before = datetime.now(UTC) - timedelta(milliseconds=1)  # which the line leaves out
    lines.log.warning("%d tries", 3)
    (line,) = lines.objects
    at = line.pop("time")
    assert line == {"level": "WARNING", "logger": "tq_fs.test", "message": "3 tries"}
    assert at.endswith("Z")
    assert before <= datetime.fromisoformat(at) <= datetime.now(UTC)


def test_an_error_with_newlines_is_one_line_with_its_code_remedy_and_traceback(
    lines: Lines,
) -> None:
    try:
        raise StorageFull("no room\nfor 5 bytes", subject="disk", remedy="make room")
    except StorageFull:
        lines.log.exception("a Step was lost")
    (line,) = lines.objects
    assert (line["code"], line["remedy"]) == ("storage_full", "make room")
    assert line["traceback"].startswith("Traceback")
    assert "for 5 bytes" in line["traceback"]


def test_an_error_among_the_arguments_gives_its_code(lines: Lines) -> None:
    lines.log.warning("%s; try %d", StorageFull("full", remedy="make room"), 2)
    lines.log.warning("%s", ValueError("of somebody else"))
    first, second = lines.objects
    assert (first["code"], first["remedy"]) == ("storage_full", "make room")
    assert first["message"] == "full; make room; try 2"
    assert "code" not in second


def test_what_is_no_json_becomes_text(lines: Lines) -> None:
    lines.log.warning("odd \udcff name", extra={"session": Path("a/b")})
    (line,) = lines.objects
    assert line["session"] == "a/b"
    assert line["message"] == "odd \udcff name"


# ---------------------------------------------------------------- what it is about


def test_a_line_is_about_all_contexts_around_it(lines: Lines) -> None:
    with log_context(store="run-1", unit="u"):
        with log_context(session="s", step=0):
            lines.log.info("inner")
        lines.log.info("outer")
    lines.log.info("outside")
    inner, outer, outside = lines.objects
    assert {k: inner[k] for k in ("store", "session", "step", "unit")} == {
        "store": "run-1",
        "session": "s",
        "step": 0,
        "unit": "u",
    }
    assert (outer["store"], outer["unit"]) == ("run-1", "u")
    assert not {"session", "step"} & set(outer)
    assert not {"store", "session", "step", "unit"} & set(outside)


def test_a_context_ends_with_an_error_too(lines: Lines) -> None:
    with pytest.raises(ValueError, match="x"), log_context(step=3):
        raise ValueError("x")
    lines.log.info("outside")
    assert "step" not in lines.objects[0]


def test_a_loop_may_change_what_its_lines_are_about(lines: Lines) -> None:
    with log_context(store="run-1") as about:
        for step in range(2):
            about.step = step
            lines.log.info("turn")
    assert [(line["store"], line["step"]) for line in lines.objects] == [("run-1", 0), ("run-1", 1)]


def test_what_a_call_says_itself_counts_more(lines: Lines) -> None:
    with log_context(session="s", step=1):
        lines.log.info("x", extra={"step": 2})
    assert (lines.objects[0]["session"], lines.objects[0]["step"]) == ("s", 2)


def test_a_pool_takes_the_context_along_by_carried_only_and_for_the_call_only(
    lines: Lines,
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with log_context(session="s"):
            pool.submit(carried(lines.log.info), "carried").result()
            pool.submit(lines.log.info, "alone").result()
        pool.submit(lines.log.info, "later").result()
    assert [line.get("session") for line in lines.objects] == ["s", None, None]


def test_a_queue_of_records_keeps_what_they_are_about(lines: Lines) -> None:
    """They are formatted later, in another thread, where the context is another one."""
    records: queue.SimpleQueue[Any] = queue.SimpleQueue()
    sender = logging.Logger("tq_fs.sender")
    handler = logging.handlers.QueueHandler(records)
    handler.addFilter(ContextFilter())
    sender.addHandler(handler)
    with log_context(session="s", step=4):
        try:
            raise StorageFull("full", remedy="make room")
        except StorageFull:
            sender.exception("lost")
    listener = logging.handlers.QueueListener(records, lines.handler)
    listener.start()
    listener.stop()
    (line,) = lines.objects
    assert (line["session"], line["step"]) == ("s", 4)
    assert (line["code"], line["remedy"]) == ("storage_full", "make room")
    assert "StorageFull: full" in line["message"], "the handler puts the traceback there"


def test_a_record_of_another_process_keeps_its_traceback(lines: Lines) -> None:
    """A socket's handler sends the traceback as a text."""
    lines.log.handle(
        logging.makeLogRecord({"msg": "lost", "levelno": 40, "exc_text": "Traceback …"})
    )
    assert lines.objects[0]["traceback"] == "Traceback …"


def test_lines_of_a_writer_thread_name_store_session_and_step(lines: Lines, tmp_path: Path) -> None:
    """What a backend logs below it is about the Step that is written, in the caller's store."""
    fields = standard_fields()
    backend = LocalBackend(tmp_path, ahead=0, at=lambda point: lines.log.info("%s", point))
    unit = StorageUnit(backend, "run", options=EncodeOptions())
    budget = ByteBudget(10_000, deadline_s=1, clock=time.monotonic, subject="x")
    trajectory = Trajectory(Incarnation("train", "s 1", "0"), specs(fields))
    with ThreadPoolExecutor(1) as pool:
        writer = StepWriter(unit, frozenset({"logprobs"}), pool=pool, budget=budget)
        with log_context(store="run"):
            for seed in range(2):
                rollout = short_rollout(fields, seed, turns=1)
                writer.submit(trajectory, rollout.step(rollout.turns[0])).result(20)
    backend.close()
    assert {(x["store"], x["session"], x["step"]) for x in lines.objects} == {
        ("run", "s 1", 0),
        ("run", "s 1", 1),
    }


@pytest.mark.parametrize("threads", [1, 2])
def test_lines_of_reading_threads_name_store_session_and_step(
    lines: Lines, tmp_path: Path, threads: int
) -> None:
    class Telling(LocalBackend):
        def open(self, key: str) -> Any:
            lines.log.info("%s", key)
            return super().open(key)

    fields = standard_fields()
    with open_store(tmp_path, fields) as store, ThreadPoolExecutor(1) as pool:
        session = store.session("s 1")
        short_rollout(fields, 0, turns=3).record(session)
        (segment,) = session.finalize()
        assert store.reader is not None
        assert segment.ref is not None
        backend = Telling(tmp_path / store.config.store_id, read_only=True)
        reader = SegmentReader(
            store.reader.resolve,
            {"local": backend},
            pool=pool if threads > 1 else None,
            threads=threads,
            cache=ChunkCache(0),
        )
        with log_context(store="run"):
            for _ in range(20):  # so that either thread takes its share
                reader.read(segment.ref, "logprobs")
        backend.close()
    told = {(x["store"], x["session"], x["step"], x["message"][-19:-13]) for x in lines.objects}
    assert told == {("run", "s 1", i, f"{i:06d}") for i in range(3)}


def test_lines_of_a_unit_name_the_store_and_the_unit(lines: Lines, tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "unit", ahead=0)
    log = logging.getLogger("tq_fs.channel._server")
    log.addHandler(lines.handler)
    try:
        endpoint = f"{tmp_path}/socket"
        server = ChannelServer(backend, store_id="run", unit="u", local=[f"unix:{endpoint}"])
        with closing(socket.socket(socket.AF_UNIX)) as stranger:
            stranger.connect(endpoint)
            stranger.sendall(bytes(PREFIX.size))
            assert stranger.recv(1) == b""
        server.close()
    finally:
        log.removeHandler(lines.handler)
        backend.close()
    (line,) = lines.objects
    assert (line["store"], line["unit"], line["code"]) == ("run", "u", "protocol_mismatch")


# ---------------------------------------------------------------- for people


def test_the_text_form_says_the_same_before_the_message() -> None:
    lines = Lines(TextFormatter())
    with log_context(store="run-1", step=3):
        lines.log.warning("slow")
    lines.log.info("ok")
    first, second = lines.text.splitlines()
    assert first.partition("Z ")[2] == "WARNING tq_fs.test [store=run-1 step=3] slow"
    assert second.partition("Z ")[2] == "INFO tq_fs.test ok"


# ---------------------------------------------------------------- a program's edge


@pytest.mark.usefixtures("untouched_logs")
def test_configured_logs_are_written_once_from_their_level_on() -> None:
    old, new = io.StringIO(), io.StringIO()
    others = len(logging.getLogger().handlers)
    configure_logs("text", stream=old)
    configure_logs("json", level="DEBUG", stream=new)  # takes the first one's place
    logging.getLogger("tq_fs.reader").debug("ours")
    logging.getLogger("botocore").info("of others, and not serious")
    logging.getLogger("botocore").warning("of others")
    assert old.getvalue() == ""
    assert [json.loads(x)["message"] for x in new.getvalue().splitlines()] == ["ours", "of others"]
    assert len(logging.getLogger().handlers) == others + 1


@pytest.mark.usefixtures("untouched_logs")
def test_an_unknown_format_or_level_is_refused_and_changes_nothing() -> None:
    before = list(logging.getLogger().handlers)
    with pytest.raises(InvalidConfig, match="json, text"):
        configure_logs("xml")
    with pytest.raises(InvalidConfig, match="'LOUD' is no level"):
        configure_logs(level="LOUD")
    assert logging.getLogger().handlers == before


def test_importing_leaves_the_logging_of_the_process_alone() -> None:
    done = run_child(
        "import logging, tq_fs, tq_fs.logs\n"
        "names = [n for n in logging.root.manager.loggerDict if n.startswith('tq_fs')]\n"
        "own = [h for n in names for h in logging.getLogger(n).handlers]\n"
        "print(logging.root.handlers, own, logging.root.level, len(names) > 3)"
    )
    assert done.stdout.split("\n")[0] == "[] [] 30 True", done.stderr
