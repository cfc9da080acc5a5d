"""A folder's store from other processes: ``tq-fs serve`` and ``tqfs://`` URLs."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tq_fs
from tests._rollouts import FIELDS, assert_batch, assert_bits, record, refs_of, run_child, specs
from tq_fs.backends import STAGING
from tq_fs.channel import ChannelBackend, Identity
from tq_fs.cli import main
from tq_fs.errors import (
    InvalidConfig,
    StorageUnreachable,
    StoreBusy,
    StoreFenced,
    WrongStore,
)
from tq_fs.served import ServedStore


@contextmanager
def served(folder: Path, **named: Any) -> Iterator[ServedStore]:
    named = {"local": [f"unix:{folder}/socket"], **named}
    with ServedStore((folder / "stores").as_uri(), **named) as found:
        yield found


def open_at(url: str, **settings: Any) -> tq_fs.Store:
    settings = {"retry_deadline_s": 20, "reader_threads": 2, "writer_threads": 2, **settings}
    return tq_fs.open_store(url, fields=specs(FIELDS), **settings)


def channel_of(store: tq_fs.Store) -> ChannelBackend:
    assert store.reader is not None
    backend = store.reader._backends["local"]
    assert isinstance(backend, ChannelBackend)
    return backend


def test_one_node_records_and_another_trains_with_no_file_opened(tmp_path: Path) -> None:
    """The reader runs in a process that cannot reach the folder."""
    with served(tmp_path) as where, open_at(where.urls[0]) as store:
        segments, want = record(store, "a", 1)
        assert (
            channel_of(store).sent_bytes > sum(e["rollout_routed_experts"].nbytes for e in want) / 4
        )
        child = """
import os, sys
url, *refs = sys.argv[1:]
from tests.test_served import FIELDS, assert_batch, open_at, channel_of, record, specs
import tq_fs
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
with tq_fs.open_store(None, fields=specs(FIELDS)) as off:
    _, want = record(off, "a", 1)
with open_at(url, read_only=True) as reader:
    assert_batch(reader.hydrate(refs), want)
    assert channel_of(reader).received_bytes > 0
assert not [path for path in opened if "/stores/" in path]
print("same")
"""
        done = run_child(child, where.urls[0], *refs_of(segments))
        assert done.stdout.strip() == "same", done.stderr


def test_sessions_outlive_their_writer_and_go_when_released(tmp_path: Path) -> None:
    with served(tmp_path) as where:
        with open_at(where.urls[0]) as store:
            segments, want = record(store, "a", 1)
        with open_at(where.urls[0]) as store:
            assert store.recovery.sessions == 1
            refs = list(store.unreleased())
            assert refs == refs_of(segments)
            again = list(store.segments(refs))
            assert_bits(again[0].tokens, segments[0].tokens)
            assert_batch(store.hydrate(again), want)
            store.release(refs)
            assert list(channel_of(store).walk("steps")) == []
    assert list((tmp_path / "stores" / "default" / "steps").rglob("zarr.json")) == []


def test_the_later_writer_takes_the_store(tmp_path: Path) -> None:
    with served(tmp_path) as where, open_at(where.urls[0]) as first:
        session = first.session("a")
        with open_at(where.urls[0]) as second:
            record(second, "b")
            session.create(context=[1], response=[2], **_values(first, 2))
            with pytest.raises(StoreFenced):
                session.finalize()
            assert len(list(second.unreleased())) > 0


def _values(store: tq_fs.Store, tokens: int) -> dict[str, Any]:
    import numpy as np

    return {
        spec.name: np.zeros(
            (tokens - (spec.rows == "transitions"), *(spec.inner or ())), spec.dtype
        )
        for spec in specs(FIELDS)
    }


def test_a_folder_is_served_once_and_not_written_beside_that(tmp_path: Path) -> None:
    folder = (tmp_path / "stores").as_uri()
    with served(tmp_path):
        with pytest.raises(StoreBusy), served(tmp_path, local=[f"unix:{tmp_path}/other"]):
            pass
        with pytest.raises(StoreBusy):
            open_at(folder)
    with open_at(folder) as store:  # nor served while it is written
        record(store, "a")
        with pytest.raises(StoreBusy), served(tmp_path):
            pass
    with served(tmp_path) as where, open_at(where.urls[0], read_only=True) as reader:
        assert len(list(reader.unreleased())) > 0


def test_what_a_killed_server_was_writing_is_swept(tmp_path: Path) -> None:
    with served(tmp_path):
        pass
    half = tmp_path / "stores" / "default" / STAGING / "half-a-group"
    half.mkdir(parents=True)
    (half / "c.0").write_bytes(b"x" * 1000)
    with served(tmp_path):
        assert not half.exists()


def test_a_start_that_fails_lets_go_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="is no endpoint"), served(tmp_path, local=["nowhere"]):
        pass
    with served(tmp_path):
        pass


def test_a_store_of_another_id_is_refused(tmp_path: Path) -> None:
    with (
        served(tmp_path, store_id="run-1") as where,
        pytest.raises(WrongStore, match="serves 'run-1', this client wants 'run-2'"),
    ):
        open_at(where.urls[0], store_id="run-2")


@pytest.mark.parametrize(
    ("url", "settings", "match"),
    [
        ("tqfs://host:1/folder", {}, "says more than where"),
        ("tqfs://host:1?x=1", {}, "says more than where"),
        ("tqfs://host", {}, "is no endpoint"),
        ("tqfs:///s", {"driver": "s3fs"}, "is for object stores"),
        ("tqfs:///s", {"tier": {"folder": "/x"}}, "is for object stores"),
        ("tqfs:///s", {"storage_options": {"key": "a"}}, r"unknown options \['key'\]"),
        ("tqfs:///s", {"storage_options": {"identity": "/no/such"}}, "cannot be read"),
        ("tqfs:///s", {"storage_options": {"identity": "/dev/null"}}, "no key and certificate"),
    ],
)
def test_what_makes_no_sense_is_refused(url: str, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidConfig, match=match):
        open_at(url, **settings)


def test_an_identity_is_kept_in_a_file_of_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "store.pem"
    made = Identity.new("s")
    made.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Identity.load(path) == made
    with pytest.raises(InvalidConfig, match="cannot be written"):
        made.save(path)
    assert Identity.load(path) == made


# ---------------------------------------------------------------- the command


@contextmanager
def serving(*arguments: object) -> Iterator[tuple[list[str], subprocess.Popen[str]]]:
    """Run ``tq-fs serve``, and give the URLs that it prints."""
    listens = sum(a == "--listen" for a in arguments)
    command = [sys.executable, "-m", "tq_fs.cli", "serve", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(Path(tq_fs.__file__).parents[1])}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        try:
            lines = [child.stdout.readline() for _ in range(listens)]
            yield [line.rpartition(" ")[2].strip() for line in lines], child
        finally:
            child.kill()


def test_the_command_serves_over_tls_until_it_is_told_to_end(tmp_path: Path) -> None:
    pem = tmp_path / "store.pem"
    listen = ["--listen", "tcp:127.0.0.1:0", "--listen", f"unix:{tmp_path}/socket"]
    with serving(tmp_path / "stores", *listen, "--identity", pem) as (urls, child):
        here, there = urls
        assert here == f"tqfs://{tmp_path}/socket"
        assert there.startswith("tqfs://127.0.0.1:")
        with open_at(there, storage_options={"identity": str(pem)}) as store:
            segments, want = record(store, "a", 1)
        with open_at(here, read_only=True) as reader:
            assert_batch(reader.hydrate(segments), want)
        with pytest.raises(StorageUnreachable):
            open_at(there, retry_deadline_s=0)
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
    assert not (tmp_path / "socket").exists()


def test_a_killed_unit_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    listen = ["--listen", f"unix:{tmp_path}/socket"]
    with serving(tmp_path / "stores", *listen) as ([url], child):
        store = open_at(url)
        kept = [record(store, f"s{i}", i) for i in range(4)]
        child.kill()
        child.wait()
        assert (tmp_path / "socket").exists()  # and is in nobody's way
        with serving(tmp_path / "stores", *listen):
            kept.append(record(store, "after", 9))  # it is waited for, and nothing begins again
            for segments, want in kept:
                assert_batch(store.hydrate(segments), want)
            store.close()
            with open_at(url) as again:
                assert again.recovery.sessions == 5
                assert again.recovery.incomplete == ()


def test_nobody_is_served_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path), "--listen", "tcp:127.0.0.1:0"]) == 2
    assert "give --identity, or --no-encryption" in capsys.readouterr().err
