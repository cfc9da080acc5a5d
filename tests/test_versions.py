"""Weight versions: which token is whose, and which may stand in one trajectory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tq_fs
from tests._clusters import cluster
from tests._rollouts import (
    FIELDS,
    VIEWS,
    Op,
    Rollout,
    assert_batch,
    assert_segment,
    open_store,
    specs,
    visible_steps,
)
from tests.test_writer import Gate, opened  # noqa: F401  # a fixture
from tq_fs.errors import ConflictError, InvalidConfig, InvalidField, VersionSpan, WidthChanged
from tq_fs.keys import Incarnation
from tq_fs.manifests import Mode
from tq_fs.trajectory import StepKind, Trajectory, VersionRule

MODES: tuple[Mode, ...] = ("tito", "snapshot")
Runs = Sequence[tuple[str, int]]


@pytest.fixture(params=["in memory", "stored"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "stored":
        store = open_store(tmp_path, FIELDS, persist_trajectories=True)
    else:
        store = tq_fs.open_store(None, fields=specs(FIELDS))
    with store:
        yield store


def step(
    context: int,
    response: int,
    *,
    version: str = "",
    versions: Runs = (),
    kind: StepKind = "create",
    parent: int | None = None,
    held: int | None = None,
) -> tq_fs.StepInput:
    """Return a Step of zeros; `held` are its tokens where they are more than its own."""
    tokens = held or context + response
    rows = tokens if kind == "append" and held is None else tokens - 1
    return tq_fs.StepInput(
        kind=kind,
        parent=parent,
        context=np.arange(context),
        response=np.arange(response),
        version=version,
        versions=versions,
        values={
            "logprobs": np.zeros(tokens, np.float32),
            "routed_experts": np.zeros((rows, 4, 2), np.int32),
        },
    )


# ---------------------------------------------------------------- whose token is it


@pytest.mark.parametrize(
    ("versions", "want"),
    [
        ((("1", 4),), [("1", 7)]),
        ((("1", 1), ("2", 3)), [("1", 4), ("2", 3)]),
        ((("1", 1), ("2", 2), ("1", 1)), [("1", 4), ("2", 2), ("1", 1)]),
        ((("1", 1), ("1", 3)), [("1", 7)]),  # cut, and gone on with by the same weights
        ((("1", 1), ("2", 0), ("1", 3)), [("1", 7)]),  # of another that gave nothing
        ((("1", 4), ("2", 0)), [("1", 7)]),
        ((("1", 0), ("2", 4)), [("1", 3), ("2", 4)]),  # which read the prompt, and gave no token
        ([["1", 2], ["2", 2]], [("1", 5), ("2", 2)]),  # as JSON has it
    ],
)
def test_prompt_tokens_count_to_the_first_run(
    store: tq_fs.Store, versions: Runs, want: Runs
) -> None:
    session = store.session("s")
    record = session.record(step(3, 4, versions=versions))
    assert list(record.versions) == want
    assert record.version == want[-1][0]
    (segment,) = session.finalize()
    assert list(segment.versions) == want
    assert segment.loss_mask.tolist() == [0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(("response", "versions"), [(0, ()), (0, [("a", 0)]), (0, [("a", 0)] * 2)])
def test_a_step_without_tokens_of_its_own_has_a_version_all_the_same(
    store: tq_fs.Store, response: int, versions: Runs
) -> None:
    session = store.session("s")
    session.record(step(1, 2, version="a"))
    given_once = {"version": "a"} if not versions else {"versions": versions}
    record = session.record(step(0, response, kind="append", parent=0, **given_once))
    assert record.versions == (("a", 0),)
    assert record.version == "a"
    (segment,) = session.finalize()
    assert segment.versions == (("a", 3),)


def test_a_chain_joins_the_runs_of_its_steps(store: tq_fs.Store) -> None:
    session = store.session("s")
    session.record(step(2, 3, versions=[("1", 1), ("2", 2)]))
    session.record(step(1, 2, version="2", kind="append", parent=0))
    session.record(step(1, 2, versions=[("2", 1), ("10", 1)], kind="append", parent=1))
    (segment,) = session.finalize()
    assert segment.versions == (("1", 3), ("2", 7), ("10", 1))
    assert sum(n for _, n in segment.versions) == len(segment.tokens)


def test_a_snapshot_chain_keeps_the_version_that_generated_each_token(store: tq_fs.Store) -> None:
    session = store.session("s", mode="snapshot")
    session.record(step(2, 3, versions=[("1", 1), ("2", 2)]))
    session.record(step(1, 3, versions=[("3", 2), ("4", 1)], kind="append", parent=0, held=9))
    lineage, first, second = session.finalize(views=VIEWS)
    assert lineage.versions == (("1", 3), ("2", 2), ("3", 3), ("4", 1))
    assert first.versions == (("1", 3), ("2", 2))
    assert second.versions == (("3", 8), ("4", 1))  # the whole prompt was read by 3


@pytest.mark.parametrize("mode", MODES)
def test_runs_come_back_from_a_trajectory_that_was_kept(tmp_path: Path, mode: Mode) -> None:
    ops = [
        Op("create", versions=3),
        Op("append", versions=2),
        Op("branch", response=9, versions=4),
        Op("append", 1, 0, 0, versions=2),
        Op("append", 0, 2, 6, versions=3),
        Op("boundary", versions=2),
    ]
    rollout = Rollout(FIELDS, mode).play(ops, np.random.default_rng(4))
    with open_store(tmp_path, FIELDS, persist_trajectories=True) as store:
        session = store.session("s", mode=mode)
        rollout.record(session)
        made = session.finalize(views=VIEWS)
    expected = [e for view in VIEWS for e in rollout.expected(view)]
    assert any(len(set(e.versions)) > 2 for e in expected)
    with open_store(tmp_path, FIELDS, read_only=True) as store:
        again = list(store.segments(store.unreleased()))
        for segment, want in zip([*made, *again], expected * 2, strict=True):
            assert_segment(segment, want)
        assert_batch(store.hydrate(again), [e.slime(specs(FIELDS)) for e in expected])


# ---------------------------------------------------------------- what is no run


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ({"versions": [("1", 3)]}, "3 tokens where 4"),
        ({"versions": [("1", 5)]}, "5 tokens where 4"),
        ({"versions": [("1", 7)]}, "7 tokens where 4"),  # the prompt's are not to be counted
        ({"versions": [("1", 5), ("2", -1)]}, "-1 tokens"),
        ({"versions": [("1", 4.0)]}, r"4\.0 tokens"),
        ({"versions": [("1", True), ("2", 3)]}, "True tokens"),
        ({"versions": [(1, 4)]}, "1 is no text"),
        ({"versions": [(None, 4)]}, "None is no text"),
        ({"version": 1}, "1 is no text"),
        ({"version": "1", "versions": [("1", 4)]}, "give one of them"),
        ({"versions": [("1",)]}, "is no pair"),
        ({"versions": [("1", 2, 2)]}, "is no pair"),
        ({"versions": [4]}, "is no pair"),
        ({"versions": "1"}, "is no pair"),
    ],
)
def test_versions_that_do_not_fit_are_refused_and_nothing_changes(
    store: tq_fs.Store, tmp_path: Path, what: dict[str, Any], match: str
) -> None:
    session = store.session("s")
    with pytest.raises(InvalidField, match=match) as caught:
        session.record(step(3, 4, **what))
    assert "'s'" in str(caught.value)
    assert session.records == []
    assert visible_steps(tmp_path) == set()
    assert session.record(step(3, 4, version="1")).index == 0


# ---------------------------------------------------------------- which may stand together


def spoken(session: tq_fs.Session) -> list[tuple[int, tuple[tuple[str, int], ...]]]:
    return [(r.index, r.versions) for r in session.records]


def test_without_partial_rollout_every_token_is_of_one_version(
    store: tq_fs.Store, tmp_path: Path
) -> None:
    session = store.session("s", versions=VersionRule(partial_rollout=False))
    refused = [
        step(2, 3, versions=[("7", 1), ("8", 2)]),
        step(2, 3, versions=[("7", 0), ("8", 3)]),  # the prompt was read by 7
    ]
    for bad in refused:
        with pytest.raises(VersionSpan, match=r"'s'.*'7', '8'.*partial_rollout"):
            session.record(bad)
    assert spoken(session) == []
    session.record(step(2, 3, version="7"))
    session.record(step(2, 3, versions=[("7", 3)], kind="append", parent=0))
    kinds: list[tuple[StepKind, int | None]] = [
        ("create", None), ("append", 1), ("branch", 0), ("boundary", 1),
    ]  # fmt: skip
    before, on_disk = spoken(session), visible_steps(tmp_path)
    for kind, parent in kinds:
        for version in ("8", ""):
            with pytest.raises(VersionSpan):
                session.record(step(2, 3, version=version, kind=kind, parent=parent))
    assert spoken(session) == before
    assert visible_steps(tmp_path) == on_disk
    for kind, parent in kinds:
        session.record(step(2, 3, version="7", kind=kind, parent=parent))
    assert [index for index, _ in spoken(session)] == [0, 1, 2, 3, 4, 5]  # no index was used up
    assert {v for s in session.finalize(views=VIEWS) for v, _ in s.versions} == {"7"}


def test_another_session_begins_anew_with_any_version(store: tq_fs.Store) -> None:
    rule = VersionRule(partial_rollout=False)
    for version in ("7", "8"):
        store.session("s", versions=rule).record(step(2, 3, version=version))


def test_without_a_rule_any_versions_stand_together(store: tq_fs.Store) -> None:
    session = store.session("s")
    for i, version in enumerate(["1", "100", "default", ""]):
        session.record(step(1, 2, version=version, kind="create"))
        assert len(session.records) == i + 1


def test_a_version_may_be_so_old_and_no_older(store: tq_fs.Store) -> None:
    session = store.session("s", versions=VersionRule(max_span=2))
    session.record(step(1, 3, versions=[("9", 2), ("10", 1)]))
    session.record(step(1, 3, version="11", kind="append", parent=0))
    for version in ("8", "12"):
        with pytest.raises(VersionSpan, match=r"are 3 apart.*max_span above 2"):
            session.record(step(1, 3, version=version, kind="append", parent=1))
    session.record(step(1, 3, version="10", kind="append", parent=1))
    (segment,) = session.finalize()
    assert segment.versions == (("9", 3), ("10", 1), ("11", 4), ("10", 4))


@pytest.mark.parametrize(
    ("versions", "span"),
    [
        ([], 0),
        (["3"], 0),
        ([""], 0),
        (["3", "7"], 4),
        (["10", "9"], 1),  # numbers, not texts
        (["007", "7"], 0),
        (["a", "b", "a"], 1),
        (["3", "7", "default"], 2),  # one that is no number: they are counted
        (["3", ""], 1),
        (["-3", "3"], 1),
        (["1.5", "3"], 1),
        (["٣", "9"], 1),  # a digit, but none that a version is written with
        (["²", "9"], 1),
        (["9" * 5000, "1"], 1),  # more digits than a number is read from
    ],
)
def test_how_far_versions_are_apart(versions: list[str], span: int) -> None:
    VersionRule(max_span=span).check(versions, "x")
    if span:
        with pytest.raises(VersionSpan, match=f"{span} apart"):
            VersionRule(max_span=span - 1).check(versions, "x")


@settings(deadline=None)
@given(
    steps=st.lists(
        st.lists(
            st.tuples(st.integers(0, 12).map(str) | st.just("x"), st.integers(0, 3)),
            min_size=1,
            max_size=3,
        ),
        max_size=6,
    ),
    partial=st.booleans(),
    most=st.none() | st.integers(0, 6),
)
def test_a_rule_lets_in_what_its_words_say(
    steps: list[list[tuple[str, int]]], partial: bool, most: int | None
) -> None:
    trajectory = Trajectory(
        Incarnation("train", "s", "0"),
        [],
        versions=VersionRule(partial_rollout=partial, max_span=most),
    )
    seen: set[str] = set()
    recorded = 0
    for runs in steps:
        own = {runs[0][0]} | {version for version, n in runs if n}  # the first has the prompt
        whole = own | seen
        if all(v.isdigit() for v in whole):
            far = max(map(int, whole)) - min(map(int, whole))
        else:
            far = len(whole) - 1
        bad = (len(whole) > 1 and not partial) or (most is not None and far > most)
        given_step = tq_fs.StepInput(
            kind="create", context=[1], response=[2] * sum(n for _, n in runs), versions=runs,
            values={},
        )  # fmt: skip
        if bad:
            with pytest.raises(VersionSpan):
                trajectory.plan(given_step)
        else:
            trajectory.commit(trajectory.plan(given_step), None, frozenset())
            seen, recorded = whole, recorded + 1
        assert len(trajectory.records()) == recorded


def test_steps_that_were_planned_together_are_held_against_each_other(
    opened: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    gate = Gate("members written")
    store = opened(gate, writer_threads=2)
    session = store.session("s", versions=VersionRule(partial_rollout=False))
    both = [session.submit(step(2, 3, version=v)) for v in ("1", "2")]
    for _ in both:
        assert gate.arrived.acquire(timeout=20)
    gate.open.set()
    errors = [f.exception(timeout=20) for f in both]
    assert [type(e) for e in errors if e] == [VersionSpan]
    (record,) = session.records
    assert {p.rsplit("/", 1)[1] for p in visible_steps(tmp_path)} == {f"{record.index:06d}"}
    assert len(session.finalize()) == 1


def test_a_step_that_was_refused_leaves_no_version_behind(tmp_path: Path) -> None:
    """Its routing is out of range, which the writer sees after its versions were found good."""
    with open_store(tmp_path, FIELDS) as store:
        session = store.session("s", versions=VersionRule(partial_rollout=False))
        bad = step(2, 3, version="1")
        bad.values["routed_experts"][0] = 256  # type: ignore[index]
        with pytest.raises(tq_fs.errors.ValueOutOfRange):
            session.record(bad)
        session.record(step(2, 3, version="2"))


def test_a_step_that_lost_to_another_width_leaves_no_version_behind() -> None:
    trajectory = Trajectory(
        Incarnation("train", "s", "0"),
        [tq_fs.FieldSpec(name="drafts", dtype="int32", inner=None)],
        versions=VersionRule(max_span=1),
    )

    def planned(version: str, width: int) -> Any:
        values = {"drafts": np.zeros((1, width), np.int32)}
        return trajectory.plan(
            tq_fs.StepInput(kind="create", context=[], response=[1], version=version, values=values)
        )

    first, other = planned("1", 2), planned("2", 3)
    trajectory.commit(first, None, frozenset({"drafts"}))
    with pytest.raises(WidthChanged):
        trajectory.commit(other, None, frozenset({"drafts"}))
    trajectory.commit(planned("0", 2), None, frozenset({"drafts"}))  # not two apart
    assert [r.version for r in trajectory.records()] == ["1", "0"]


def test_a_session_of_a_cluster_has_the_same_rule(tmp_path: Path) -> None:
    with cluster(tmp_path) as made, made.store(specs(FIELDS)) as store:
        session = store.session("s", versions=VersionRule(max_span=1))
        session.record(step(2, 3, versions=[("1", 2), ("2", 1)]))
        with pytest.raises(VersionSpan):
            session.record(step(2, 3, version="3"))
        (segment,) = session.finalize()
        assert segment.versions == (("1", 4), ("2", 1))


@pytest.mark.parametrize(
    "what",
    [{"max_span": -1}, {"max_span": 1.0}, {"max_span": True}, {"partial_rollout": 1}],
)
def test_a_rule_that_makes_no_sense_is_refused(what: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        VersionRule(**what)


def test_the_error_lists_a_few_versions_and_is_a_conflict() -> None:
    many = [str(i) for i in range(40)]
    with pytest.raises(VersionSpan) as caught:
        VersionRule(partial_rollout=False).check(many, "Step 3")
    assert isinstance(caught.value, ConflictError)
    assert "'0', '1', '2'" in str(caught.value)
    assert len(str(caught.value)) < 200


def test_runs_never_have_equal_neighbours_nor_empty_ones(store: tq_fs.Store) -> None:
    rollout = Rollout(FIELDS, "tito").play(
        [Op("create", response=9, versions=6), *[Op("append", response=5, versions=4)] * 5],
        np.random.default_rng(1),
    )
    session = store.session("s")
    rollout.record(session)
    (segment,) = session.finalize()
    assert all(n > 0 for _, n in segment.versions)
    assert all(a[0] != b[0] for a, b in itertools.pairwise(segment.versions))
