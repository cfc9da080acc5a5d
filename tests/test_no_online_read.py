"""No online read: what a rollout does, it does without reading a stored field again.

Every read of an object of a Step is refused here, in a folder by the backend, in an object store
by the server. All of a session's life has to go on without. Hydrating then fails: so this test can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote

import numpy as np
import pytest

import tq_fs
from tests._fault_proxy import Message, error_answer
from tests._proxies import TOOL, user, world
from tests._rollouts import (
    FIELDS,
    VIEWS,
    Op,
    Rollout,
    assert_segment,
    refs_of,
    specs,
    turning_rollout,
)
from tests._ways import gate_before
from tq_fs.backends import LocalBackend
from tq_fs.errors import InvalidLineage, SegmentMissing, StorageDenied, TqFsError, VersionSpan
from tq_fs.manifests import Mode
from tq_fs.trajectory import VersionRule

Open = Callable[..., tq_fs.Store]


class _Blind(LocalBackend):
    """Reads documents, and no object of a Step."""

    asked: list[str]

    def get(self, key: str) -> bytes:
        self._refuse(key)
        return super().get(key)

    def open(self, key: str) -> Any:
        self._refuse(key)
        return super().open(key)

    def _refuse(self, key: str) -> None:
        if key.startswith("steps/"):
            _Blind.asked.append(key)
            _deny(key)


def _deny(key: str) -> NoReturn:
    raise StorageDenied("no Step is to be read", subject=key)


@contextmanager
def blind_folder(folder: Path) -> Iterator[tuple[Open, list[str]]]:
    _Blind.asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tq_fs.places.LocalBackend", _Blind)

        def opened(**settings: Any) -> tq_fs.Store:
            return tq_fs.open_store(
                folder.as_uri(), fields=specs(FIELDS), persist_trajectories=True, **settings
            )

        yield opened, _Blind.asked


@contextmanager
def blind_bucket(server: Any, bucket: str, driver: str) -> Iterator[tuple[Open, list[str]]]:
    asked: list[str] = []

    def answer(request: Message) -> Message | None:
        path = unquote(request.path.partition("?")[0])
        if request.method != "GET" or "/steps/" not in path:
            return None
        asked.append(path)
        return error_answer(request, "403 Forbidden", "AccessDenied", "No Step is to be read.")

    with gate_before(server) as gate:
        gate.answer = answer

        def opened(**settings: Any) -> tq_fs.Store:
            return tq_fs.open_store(
                f"s3://{bucket}/runs", fields=specs(FIELDS), driver=driver, **settings
            )

        yield opened, asked


@pytest.fixture(
    params=[
        "file",
        pytest.param("obstore", marks=pytest.mark.s3),
        pytest.param("s3fs", marks=pytest.mark.s3),
    ]
)
def blind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Open, list[str]]]:
    """Give what opens a store whose Steps cannot be read, and the reads that were asked for."""
    if request.param == "file":
        with blind_folder(tmp_path) as found:
            yield found
        return
    server = request.getfixturevalue("s3_server")
    with blind_bucket(server, request.getfixturevalue("bucket"), request.param) as found:
        yield found


HISTORY = [
    Op("create", 0, 3, 4, versions=2),
    Op("append", 0, 2, 3),
    Op("create", 0, 2, 2),
    Op("append", 1, 1, 4, only_response=True),
    Op("branch", 0, 5, 2, versions=3),
    Op("append", 0, 0, 0),
    Op("boundary", 2, 4, 1),
    Op("append", 1, 3, 2),
]


@pytest.mark.parametrize("mode", ["tito", "snapshot"])
def test_a_session_lives_without_reading_a_step(blind: tuple[Open, list[str]], mode: Mode) -> None:
    opened, asked = blind
    rollout = Rollout(FIELDS, mode).play(HISTORY, np.random.default_rng(3))
    expected = [e for view in VIEWS for e in rollout.expected(view)]
    with opened() as store:
        session = store.session("s", mode=mode)
        rollout.record(session)
        refuse_what_breaks_a_rule(session)
        segments = session.finalize(views=VIEWS, consumers=["train", "eval"], extra={"label": 1})
        again = list(store.segments(refs_of(segments)))
        for segment, want in zip([*segments, *again], expected * 2, strict=True):
            assert_segment(segment, want)
        discard_and_use_again(store, mode)
        hold_to_one_version(store, mode)
        assert set(store.unreleased("eval")) == set(refs_of(segments))
        assert store.release(segments, "train") == 0
    with opened() as store:  # a run that goes on
        assert set(store.unreleased("eval")) == set(refs_of(segments))
        assert_segment(next(store.segments(refs_of(segments))), expected[0])
        assert asked == []
        with pytest.raises(StorageDenied):  # or else nothing was refused
            store.hydrate(segments)
        assert asked
        asked.clear()
        assert store.release(segments[:-1], "eval", rollout_id=4) == 0
        deleted = store.checkpoint_saved(4) + store.release(segments, "eval")
        assert deleted == with_rows(session)
        assert list(store.unreleased()) == []
        with pytest.raises(SegmentMissing):
            list(store.segments(refs_of(segments)))
        assert asked == []


def refuse_what_breaks_a_rule(session: tq_fs.Session) -> None:
    """Be refused before a put, and after one."""
    values: dict[str, Any] = {
        "logprobs": np.zeros(2, np.float32), "routed_experts": np.zeros((2, 4, 2), np.int32)
    }  # fmt: skip
    with pytest.raises(InvalidLineage):
        session.append(0, [1], [2], **values)
    wrong = {**values, "routed_experts": np.full((1, 4, 2), 256, np.int32)}
    with pytest.raises(TqFsError):
        session.create([1], [2], **wrong)


def discard_and_use_again(store: tq_fs.Store, mode: Mode) -> None:
    """Throw a session away, and use its id anew: the second use is another incarnation."""
    first = store.session("again", mode=mode)
    turning_rollout(mode=mode).record(first)
    first.discard()
    first.discard()
    second = store.session("again", mode=mode)
    turning_rollout(mode=mode).record(second)
    assert second.incarnation_id != first.incarnation_id
    made = second.finalize(views=VIEWS)
    assert store.release(made) == with_rows(second)


def with_rows(session: tq_fs.Session) -> int:
    """Return how many Steps a Segment refers to: those that hold a token."""
    return sum(len(record.tokens) > 0 for record in session.records)


def hold_to_one_version(store: tq_fs.Store, mode: Mode) -> None:
    session = store.session("one version", mode=mode, versions=VersionRule(max_span=0))
    values: dict[str, Any] = {
        "logprobs": np.zeros(2, np.float32), "routed_experts": np.zeros((1, 4, 2), np.int32)
    }  # fmt: skip
    session.create([1], [2], version="1", **values)
    with pytest.raises(VersionSpan):
        session.branch(0, [1], [2], version="2", **values)
    assert store.release(session.finalize(views=VIEWS)) == 1


@pytest.mark.parametrize("mode", ["tito", "snapshot"])
def test_the_proxy_reads_no_step(tmp_path: Path, mode: Mode) -> None:
    with blind_folder(tmp_path) as (_, asked), world(tmp_path, mode=mode, views=VIEWS) as w:
        said = w.play("s", turns=3)
        for messages in (said[:-1], [*said[:-3], user("or this")], [user("in short")]):
            assert w.chat("s", messages).status == 200
        assert w.chat("s", [*said, user("and")], tools=[TOOL]).status == 200
        w.engine.fault("abort", after=2)  # goes on by itself, under other weights
        w.engine.version = "1"
        assert w.chat("s", [*said, user("more")]).status == 200
        assert {r.kind for r in w.store_records("s")} == {"create", "append", "branch", "boundary"}
        w.play("given up")
        w.client.discard("given up")
        w.client.finalize("s")
        segments = w.client.read(["s"])
        assert asked == []
        with pytest.raises(StorageDenied):
            w.store.hydrate(segments)
        assert asked
        w.client.release(segments)
        assert w.steps_on_disk() == 0
