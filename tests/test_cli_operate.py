"""The operator's commands: what they print, what they write, and their exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import tq_fs
from tests._rollouts import (
    FIELDS,
    Op,
    Rollout,
    contents,
    open_store,
    record,
    refs_of,
    sealed,
    short_rollout,
    specs,
)
from tq_fs.cli import main

Capture = pytest.CaptureFixture[str]
READERS = ("ls", "stat", "verify", "show")
COMMANDS = (*READERS, "repair", "gc")


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """Give a store with two finalized sessions and one that was never finalized."""
    folder = tmp_path / "store"
    with open_store(folder, FIELDS, persist_trajectories=True) as store:
        record(store, "a", 1)
        record(store, "b", 2)
        short_rollout(FIELDS, 3).record(store.session("open"))
    return folder


def run(capsys: Capture, *arguments: object) -> tuple[int, str, str]:
    code = main([*map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def words_of(command: str, url: object) -> list[object]:
    return [command, url, "a"] if command == "show" else [command, url]


def child(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tq_fs.cli", *map(str, arguments)]


def damage(folder: Path) -> None:
    """Flip a bit of one chunk of session a."""
    (path,) = folder.glob("default/steps/train/a/*/000001/logprobs/c.0")
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------- ls, stat, verify


def test_ls_prints_one_line_for_each_session(filled: Path, capsys: Capture) -> None:
    code, out, err = run(capsys, "ls", filled.as_uri())
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 4
    assert re.search(r"^finalized +1/1 +3 +\d.* train/a@[0-9a-f]{24}$", out, re.MULTILINE)
    assert re.search(r"^orphan +- +3 +\d.* train/open@[0-9a-f]{24}$", out, re.MULTILINE)
    _, out, _ = run(capsys, "ls", filled.as_uri(), "--finalized")
    assert "orphan" not in out


def test_ls_says_who_has_released_what(tmp_path: Path, capsys: Capture) -> None:
    with open_store(tmp_path, FIELDS) as store:
        segments, _ = record(store, "a", 1, consumers=("actor", "critic"))
        store.release(refs_of(segments), "critic")
    _, out, _ = run(capsys, "ls", tmp_path.as_uri())
    assert "(released: 1 by critic)" in out


def test_ls_writes_json_that_says_whether_it_is_all(filled: Path, capsys: Capture) -> None:
    code, out, _ = run(capsys, "ls", filled.as_uri(), "--json", "-")
    document = json.loads(out)
    assert code == 0
    assert document["complete"] is True
    assert document["store_id"] == "default"
    assert [s["session"] for s in document["sessions"]] == ["a", "b", "open"]
    assert document["sessions"][0]["released"] == {"train": 0}


def test_ls_of_an_empty_store_lists_nothing(tmp_path: Path, capsys: Capture) -> None:
    open_store(tmp_path, FIELDS).close()
    code, out, _ = run(capsys, "ls", tmp_path.as_uri(), "--json", "-")
    assert (code, json.loads(out)["sessions"]) == (0, [])
    code, out, _ = run(capsys, "ls", tmp_path.as_uri())
    assert (code, len(out.splitlines())) == (0, 1)


def many(tmp_path: Path, count: int) -> str:
    """Give a store of many finalized sessions; only their manifests are there."""
    with open_store(tmp_path, FIELDS) as store:
        record(store, "a", 1)
    (source,) = tmp_path.glob("default/manifests/train/a/*")
    document = json.loads((source / "manifest.json").read_text())
    for n in range(count):
        folder = source.parents[1] / f"s{n:05d}" / source.name
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_bytes(sealed({**document, "session_id": f"s{n:05d}"}))
    return tmp_path.as_uri()


@pytest.mark.parametrize("arguments", [[], ["--json", "-"]], ids=["text", "json"])
def test_ls_streams_and_can_be_interrupted(tmp_path: Path, arguments: list[str]) -> None:
    url = many(tmp_path, 3000)
    # Its standard output is a pipe that nobody empties: it cannot be done before it is told to end.
    with subprocess.Popen(
        child("ls", url, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        head = "".join(process.stdout.readline() for _ in range(5))
        process.send_signal(signal.SIGINT)
        out = process.stdout.read()
        assert process.stderr is not None
        err = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in err
    if arguments:
        document = json.loads(head + out)
        assert document["complete"] is False
        assert 0 < len(document["sessions"]) < 3001
    else:
        assert 4 < len((head + out).splitlines()) < 3001


def test_ls_ends_quietly_where_its_reader_has_seen_enough(tmp_path: Path) -> None:
    url = many(tmp_path, 3000)
    with subprocess.Popen(
        child("ls", url), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_stat_says_what_is_taken_by_tier_field_and_age(filled: Path, capsys: Capture) -> None:
    code, out, _ = run(capsys, "stat", filled.as_uri())
    assert code == 0
    for words in ("2 finalized sessions; 9 Steps of 3 sessions", "routed_experts", "under 1 hour",
                  "tier: store", "manifests", "file system:"):  # fmt: skip
        assert words in out
    code, out, _ = run(capsys, "stat", filled.as_uri(), "--json", "-")
    document = json.loads(out)
    assert document["by_field"]["logprobs"]["objects"] == 9
    assert document["by_tier"]["store"]["manifests"]["objects"] == 4


def test_verify_exits_with_0_where_nothing_is_wrong(tmp_path: Path, capsys: Capture) -> None:
    with open_store(tmp_path, FIELDS) as store:
        record(store, "a", 1)
    code, out, err = run(capsys, "verify", tmp_path.as_uri())
    assert (code, err) == (0, "")
    assert "looked at 1 finalized sessions, 1 Segments, 3 Steps: 6 chunks" in out
    assert "nothing is wrong" in out


def test_verify_names_findings_and_what_to_do_with_exit_code_1(
    filled: Path, capsys: Capture
) -> None:
    damage(filled)
    code, out, _ = run(capsys, "verify", filled.as_uri())
    assert code == 1
    assert re.search(r"^corrupt: steps/train/a/\S+/000001/logprobs/c.0: .*checksum", out, re.M)
    assert re.search(r"^orphan: steps/train/open/\S+: 3 Steps of a session", out, re.M)
    assert "1 orphan: Steps of a session that was never finalized: gc removes them" in out
    code, out, _ = run(capsys, "verify", filled.as_uri(), "--json", "-")
    document = json.loads(out)
    assert code == 1
    assert document["kinds"] == {"corrupt": 1, "orphan": 1}
    assert document["findings"][0]["step"] == 1
    assert run(capsys, "verify", filled.as_uri(), "--no-data")[0] == 1


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_that_can_be_parsed(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert f"example:\n  tq-fs {command} " in out
    assert "--json" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_json_goes_to_a_file_beside_the_text(
    filled: Path, tmp_path: Path, capsys: Capture, command: str
) -> None:
    path = tmp_path / "report.json"
    run(capsys, *words_of(command, filled.as_uri()), "--json", path)
    document = json.loads(path.read_text())
    assert (document["store_id"], document["url"]) == ("default", f"{filled.as_uri()}/default")
    before = contents(filled)
    for more in [[], ["--yes"]] if command in {"repair", "gc"} else [[]]:
        words = [*words_of(command, filled.as_uri()), *more]
        code, out, err = run(capsys, *words, "--json", tmp_path / "no" / "f")
        assert (code, out) == (2, "")
        assert "--json" in err
    assert contents(filled) == before  # it is noticed first


@pytest.mark.parametrize("command", COMMANDS)
def test_without_leave_no_command_changes_anything(
    filled: Path, capsys: Capture, command: str
) -> None:
    damage(filled)
    before = contents(filled)
    run(capsys, *words_of(command, filled.as_uri()))
    assert contents(filled) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_all_work_beside_the_process_that_writes(
    filled: Path, capsys: Capture, command: str
) -> None:
    with open_store(filled, FIELDS) as store:
        session = store.session("live")
        short_rollout(FIELDS, 5).record(session)
        code, out, err = run(capsys, *words_of(command, filled.as_uri()))
        assert (code, err) == (0, "")
        assert "orphan" not in out
        session.finalize()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        ("nothing", 1, "there is no store"),
        ("something else", 1, "there is no store"),
        ("half", 1, "half of a store"),
        ("torn", 1, "checksum"),
        ("newer", 1, "upgrade tq-fs"),
        ("another", 1, "is store 'other'"),
        ("no url", 2, "no URL"),
    ],
)
def test_what_is_no_store_of_ours_is_said_so(
    filled: Path, capsys: Capture, command: str, make: str, code: int, words: str
) -> None:
    root = filled / "default"
    url = filled.as_uri()
    store = root / "store.json"
    if make == "nothing":
        url += "/elsewhere"
    elif make == "something else":
        (filled / "elsewhere" / "default" / "photos").mkdir(parents=True)
        url += "/elsewhere"
    elif make == "half":
        store.unlink()
    elif make == "torn":
        store.write_bytes(store.read_bytes()[:30])
    elif make == "newer":
        document = json.loads(store.read_bytes())
        store.write_bytes(sealed({**document, "schema": "tq-fs/store/9"}))
    elif make == "another":
        document = json.loads(store.read_bytes())
        store.write_bytes(sealed({**document, "store_id": "other"}))
    else:
        url = "nowhere"
    before = contents(filled)
    have, out, err = run(capsys, *words_of(command, url))
    assert (have, out) == (code, "")
    assert words in err
    assert err.startswith("tq-fs: ")
    assert err.count("\n") == 1
    assert contents(filled) == before


def test_where_other_stores_lie_their_names_are_told(filled: Path, capsys: Capture) -> None:
    code, _, err = run(capsys, "ls", filled.as_uri(), "--store-id", "run-8")
    assert code == 1
    assert "'default'" in err
    assert "--store-id" in err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("what", ["folder", "manifests"])
def test_without_permission_the_place_and_the_remedy_are_told(
    tmp_path: Path, command: str, what: str
) -> None:
    with tempfile.TemporaryDirectory() as name:  # below folders that others may pass
        folder = Path(name)
        folder.chmod(0o755)
        with open_store(folder, FIELDS) as store:
            record(store, "a", 1)
        (folder / "default" / ("" if what == "folder" else "manifests")).chmod(0o700)
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, *map(str, words_of(command, folder.as_uri()))],
            env={**os.environ, "PYTHONPATH": str(Path(tq_fs.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1, done.stderr
    assert "check owner, mode and mount options [storage_denied]" in done.stderr
    assert "Traceback" not in done.stderr


AS_NOBODY = """
import os, sys
import rich.progress, rich.tree
from tq_fs.cli import main
os.setuid(65534)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.s3
@pytest.mark.parametrize("command", COMMANDS)
def test_a_bucket_that_is_not_there_is_said_so(
    bucket: str, tmp_path: Path, capsys: Capture, command: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("retry_deadline_s: 5\n")
    url = f"s3://{bucket}-missing/runs"
    code, _, err = run(capsys, *words_of(command, url), "--config", config)
    assert (code, "[bucket_missing]" in err) == (1, True)
    code, _, err = run(capsys, *words_of(command, f"s3://{bucket}/runs"))
    assert (code, "there is no store" in err) == (1, True)
    tq_fs.open_store(f"s3://{bucket}/runs", fields=specs(FIELDS), store_id="run-7").close()
    _, _, err = run(capsys, *words_of(command, f"s3://{bucket}/runs"))
    assert "stores there (--store-id): 'run-7'" in err


@pytest.mark.s3
def test_a_store_in_a_bucket_is_seen_beside_the_process_that_writes(
    bucket: str, capsys: Capture
) -> None:
    url = f"s3://{bucket}/runs"
    with tq_fs.open_store(url, fields=specs(FIELDS)) as store:
        record(store, "a", 1)
        session = store.session("live")
        short_rollout(FIELDS, 5).record(session)
        for command in READERS:
            code, _, err = run(capsys, *words_of(command, url))
            assert (code, err) == (0, ""), command
        session.finalize()
        record(store, "b", 2)  # and goes on
    code, out, _ = run(capsys, "verify", url, "--json", "-")
    assert (code, json.loads(out)["sessions"]) == (0, 3)


# ---------------------------------------------------------------- show, repair, gc


def test_show_prints_the_tree_the_segments_and_where_steps_lie(
    filled: Path, capsys: Capture
) -> None:
    code, out, _ = run(capsys, "show", filled.as_uri(), "a")
    assert code == 0
    assert "3 Steps, as recorded" in out
    assert re.search(r"^0 create: .*, local: steps/train/a/[0-9a-f]+/000000$", out, re.MULTILINE)
    assert re.search(r"^│  1 append: ", out, re.MULTILINE)
    assert re.search(r"^Segment lineage/0: .* Steps 0, 1, 2$", out, re.MULTILINE)
    assert "  tqfs1:default/train/a/" in out
    (path,) = filled.glob("default/steps/train/a/*/000001/logprobs/c.0")
    path.unlink()
    assert "NOT WHOLE, local: steps/train/a/" in run(capsys, "show", filled.as_uri(), "a")[1]
    code, out, _ = run(capsys, "show", filled.as_uri(), "open")
    assert (code, "3 Steps, without a manifest" in out) == (0, True)


def test_a_branch_is_indented_and_a_long_chain_is_not(tmp_path: Path, capsys: Capture) -> None:
    ops = [Op("create"), *[Op("append", 0)] * 30, Op("branch", 2), Op("append", 1)]
    rollout = Rollout(FIELDS, "tito").play(ops, np.random.default_rng(1))
    with open_store(tmp_path, FIELDS, persist_trajectories=True) as store:
        session = store.session("a")
        rollout.record(session)
        session.finalize()
    _, out, _ = run(capsys, "show", tmp_path.as_uri(), "a")
    assert "\n│  30 append: " in out
    assert "\n    └─ 31 branch: " in out
    assert "\n    │  32 append: " in out


def test_a_session_that_is_not_there_is_said_so(filled: Path, capsys: Capture) -> None:
    code, out, err = run(capsys, "show", filled.as_uri(), "nobody")
    assert (code, out) == (1, "")
    assert "tq-fs ls names all sessions [session_missing]" in err


def test_repair_says_what_it_would_do_and_does_it_when_it_may(
    filled: Path, capsys: Capture
) -> None:
    damage(filled)
    code, out, _ = run(capsys, "repair", filled.as_uri())
    assert code == 1
    assert re.search(r"^would remove: steps/train/open/\S+: 3 Steps", out, re.MULTILINE)
    assert re.search(r"^would set aside: steps/train/a/\S+: Steps 1 cannot be read", out, re.M)
    assert re.search(r"^  lost to training: tqfs1:default/train/a/\S+/lineage/0$", out, re.M)
    assert "nothing was changed; --yes does it, and frees" in out
    code, out, _ = run(capsys, "repair", filled.as_uri(), "--yes")
    assert code == 0
    assert re.search(r"^remove: steps/train/open/", out, re.MULTILINE)
    assert re.search(r"^set aside: steps/train/a/", out, re.MULTILINE)
    assert run(capsys, "verify", filled.as_uri())[0] == 0
    code, out, _ = run(capsys, "repair", filled.as_uri(), "--yes", "--json", "-")
    assert (code, json.loads(out)["actions"]) == (0, [])


def test_gc_says_what_it_would_remove_and_does_it_when_it_may(
    filled: Path, capsys: Capture
) -> None:
    code, out, _ = run(capsys, "gc", filled.as_uri())
    assert code == 0
    assert re.search(r"^would remove: steps/train/open/\S+: 3 Steps .*\(\d", out, re.MULTILINE)
    code, out, _ = run(capsys, "gc", filled.as_uri(), "--yes")
    assert (code, "freed " in out) == (0, True)
    assert "nothing to do" in run(capsys, "gc", filled.as_uri(), "--yes")[1]
    assert run(capsys, "verify", filled.as_uri())[0] == 0


@pytest.mark.parametrize("command", ["repair", "gc"])
def test_a_store_that_is_being_written_is_not_taken(
    filled: Path, capsys: Capture, command: str
) -> None:
    with open_store(filled, FIELDS) as store:
        code, _, err = run(capsys, command, filled.as_uri(), "--yes")
        assert (code, "[store_busy]" in err) == (1, True)
        record(store, "c", 3)


@pytest.mark.s3
@pytest.mark.parametrize("command", ["repair", "gc"])
def test_a_bucket_in_which_sessions_may_be_open_is_not_taken(
    bucket: str, capsys: Capture, command: str
) -> None:
    url = f"s3://{bucket}/runs"
    with tq_fs.open_store(url, fields=specs(FIELDS)) as store:
        session = store.session("live")
        short_rollout(FIELDS, 5).record(session)
        code, _, err = run(capsys, command, url, "--yes")
        assert (code, "--grace-s 0" in err) == (1, True)
        session.finalize()  # it was not fenced
    with tq_fs.open_store(url, fields=specs(FIELDS)) as store:
        short_rollout(FIELDS, 5).record(store.session("lost"))
    assert run(capsys, command, url, "--yes", "--grace-s", "0")[0] == 0
    code, out, _ = run(capsys, "verify", url, "--grace-s", "0", "--json", "-")
    assert (code, json.loads(out)["sessions"]) == (0, 1)


@pytest.mark.parametrize("given", ["-1", "inf", "nan", "soon"])
def test_a_grace_that_is_no_time_is_wrong_usage(given: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["verify", "file:///tmp/x", f"--grace-s={given}"])
    assert exit_.value.code == 2
    assert "--grace-s" in capsys.readouterr().err
