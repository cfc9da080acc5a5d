"""``tq-fs recover``: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests._rollouts import (
    FIELDS,
    assert_batch,
    contents,
    open_store,
    record,
    refs_of,
    short_rollout,
    specs,
)
from tq_fs.cli import main
from tq_fs.recovery import Recovery

KEYS = {field.name for field in fields(Recovery)}


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """Give a store with two finalized sessions and one that was never finalized."""
    with open_store(tmp_path, FIELDS, persist_trajectories=True) as store:
        record(store, "a", 1)
        record(store, "b", 2)
        short_rollout(FIELDS, 3).record(store.session("open"))
    return tmp_path


def damage_manifest(folder: Path, session: str) -> None:
    (path,) = folder.glob(f"*/manifests/train/{session}/*/manifest.json")
    path.write_bytes(b"{")


def lose_step(folder: Path, session: str) -> str:
    """Delete an object of a session's Step 1; return the Step's place."""
    (path,) = folder.glob(f"*/steps/train/{session}/*/000001/logprobs/c.0")
    path.unlink()
    return str(path.parents[1].relative_to(folder / "default"))


def recover(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["recover", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def count(printed: str, what: str) -> int:
    """Return the number that stands before some words."""
    found = re.search(rf"^ *([0-9,]+) +{what}", printed, re.MULTILINE)
    assert found is not None, printed
    return int(found[1].replace(",", ""))


def test_it_says_what_was_found_and_what_was_removed(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = recover(capsys, filled.as_uri())
    assert (code, err) == (0, "")
    assert count(out, "finalized sessions") == 2
    assert count(out, "Segments, 2 of them unreleased") == 2
    assert count(out, "Steps that they need, [0-9,]+ bytes") == 6
    assert count(out, "sessions that were never finalized: removed") == 1
    assert count(out, "Steps that nothing refers to: removed") == 3
    assert not any("/open/" in path for path in contents(filled))
    code, out, _ = recover(capsys, filled.as_uri())
    assert count(out, "sessions that were never finalized: removed") == 0


def test_a_dry_run_says_the_same_and_changes_nothing(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(filled)
    code, would, _ = recover(capsys, filled.as_uri(), "--dry-run")
    assert code == 0
    assert contents(filled) == before
    assert count(would, "sessions that were never finalized: would be removed") == 1
    _, did, _ = recover(capsys, filled.as_uri())
    assert did.split() == would.replace("would be removed", "removed").split()


def test_what_is_not_whole_or_unreadable_is_named_with_exit_code_1(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = lose_step(filled, "a")
    code, out, _ = recover(capsys, filled.as_uri())
    assert code == 1
    assert count(out, "Steps that are needed and not there") == 1
    assert f"not whole: {place}\n" in out
    damage_manifest(filled, "a")
    for arguments in (["--dry-run"], []):
        code, out, _ = recover(capsys, filled.as_uri(), *arguments)
        assert code == 1
        assert count(out, "manifests that cannot be used, left alone") == 1
        assert re.search(r"^unreadable: train/a/[0-9a-f]+$", out, re.MULTILINE)


def test_a_manifest_that_was_made_anew_is_named_with_exit_code_0(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage_manifest(filled, "a")
    code, out, _ = recover(capsys, filled.as_uri())
    assert code == 0
    assert count(out, "manifests made anew") == 1
    assert count(out, "finalized sessions") == 2
    assert re.search(r"^made anew: train/a/[0-9a-f]+$", out, re.MULTILINE)
    with open_store(filled, FIELDS) as store:
        want = [
            e.slime(specs(FIELDS))
            for s in (1, 2)
            for e in short_rollout(FIELDS, s).expected("lineage")
        ]
        assert_batch(store.hydrate(sorted(store.unreleased())), want)


def test_many_names_are_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(tmp_path, FIELDS) as store:
        for i in range(23):
            record(store, f"s{i}", i)
    for path in tmp_path.glob("default/manifests/train/*/*/manifest.json"):
        path.write_bytes(b"")
    code, out, _ = recover(capsys, tmp_path.as_uri(), "--dry-run")
    assert code == 1
    assert out.count("unreadable: ") == 20
    assert "and 3 more" in out


def test_json_on_standard_output_is_all_that_is_there(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = lose_step(filled, "b")
    code, out, _ = recover(capsys, filled.as_uri(), "--json", "-", "--dry-run")
    document = json.loads(out)
    assert code == 1
    assert set(document) == KEYS
    assert document["incomplete"] == [place]
    assert (document["sessions"], document["swept_sessions"], document["swept_steps"]) == (2, 1, 3)


def test_json_goes_to_a_file_beside_the_text(
    filled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    code, out, _ = recover(capsys, filled.as_uri(), "--json", path)
    assert code == 0
    assert json.loads(path.read_text())["sessions"] == count(out, "finalized sessions") == 2


def test_settings_come_from_a_file_and_the_store_id_from_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, sessions in (("run-1", 1), ("run-2", 2)):
        with open_store(tmp_path, FIELDS, store_id=name) as store:
            for i in range(sessions):
                record(store, f"s{i}", i)
    config = tmp_path / "config.yaml"
    config.write_text("store_id: run-1\n")
    url = tmp_path.as_uri()
    _, out, _ = recover(capsys, url, "--config", config)
    assert count(out, "finalized sessions") == 1
    _, out, _ = recover(capsys, url, "--config", config, "--store-id", "run-2")
    assert count(out, "finalized sessions") == 2
    code, _, err = recover(capsys, url)  # the store "default" is not there
    assert code == 1
    assert "check URL and store_id [wrong_store]" in err
    assert not (tmp_path / "default").exists()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nowhere", "no URL"),
        ("file:relative", "not an absolute folder"),
        ("file://elsewhere/folder", "file:///absolute/folder"),
        ("http://example.org/store", "cannot be written to"),
        ("nope://there", "nope"),
        ("s3://", "s3://bucket/prefix"),
    ],
)
def test_a_wrong_url_exits_with_2_and_says_what_is_right(
    url: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = recover(capsys, url, "--dry-run")
    assert (code, out) == (2, "")
    assert words in err
    assert err.startswith("tq-fs: ")
    assert "Traceback" not in err


@pytest.mark.parametrize("text", ["store: 1\n", "- 1\n", "tier: {policy: write-back}\n", "{"])
def test_a_wrong_configuration_exits_with_2(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(text)
    code, _, err = recover(capsys, tmp_path.as_uri(), "--config", config)
    assert code == 2
    assert err.startswith("tq-fs: ")
    assert recover(capsys, tmp_path.as_uri(), "--config", tmp_path / "none.yaml")[0] == 2


def test_a_place_without_a_store_exits_with_1_and_is_not_made_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "empty"
    for arguments in (["--dry-run"], []):
        code, out, err = recover(capsys, folder.as_uri(), *arguments)
        assert (code, out) == (1, "")
        assert "there is no store; check URL and store_id" in err
    assert not folder.exists()


def test_a_store_that_is_open_elsewhere_exits_with_1(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_store(filled, FIELDS):
        code, _, err = recover(capsys, filled.as_uri())
        assert code == 1
        assert "[store_busy]" in err
        assert recover(capsys, filled.as_uri(), "--dry-run")[0] == 0


def test_no_url_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["recover"])
    assert exit_.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.s3
def test_a_bucket_is_recovered_by_the_installed_command(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import tq_fs

    url = f"s3://{bucket}/runs"
    with tq_fs.open_store(url, fields=specs(FIELDS), store_id="run-7") as store:
        refs = refs_of(record(store, "a", 1)[0])
        short_rollout(FIELDS, 3).record(store.session("open"))
    config = tmp_path / "config.yaml"
    config.write_text("driver: s3fs\nretry_deadline_s: 5\n")
    command: list[Any] = [sys.executable, "-m", "tq_fs.cli", "recover", url]
    command += ["--store-id", "run-7", "--config", config, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["sessions"], document["swept_sessions"]) == (1, 1)
    with tq_fs.open_store(url, fields=specs(FIELDS), store_id="run-7", read_only=True) as store:
        assert list(store.unreleased()) == refs
    code, _, err = recover(capsys, f"{url}x")
    assert code == 1
    assert "[wrong_store]" in err
    code, _, err = recover(capsys, f"s3://{bucket}-missing/runs")
    assert code == 1
    assert "[bucket_missing]" in err
