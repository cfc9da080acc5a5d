"""Sessions: which rows a Step has, which Steps make up a Segment, and what is refused."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tq_fs
from tests._rollouts import (
    VIEWS,
    Field,
    Op,
    Rollout,
    assert_batch,
    assert_bits,
    assert_segment,
    logprob_bits,
    open_store,
    routes,
    specs,
    standard_fields,
    visible_steps,
)
from tq_fs.errors import (
    EmptyStep,
    InputError,
    InvalidConfig,
    InvalidField,
    InvalidLineage,
    RowCountMismatch,
    SessionClosed,
    ValueOutOfRange,
    WidthChanged,
)
from tq_fs.keys import Incarnation
from tq_fs.manifests import Mode, View
from tq_fs.trajectory import Trajectory

MODES: tuple[Mode, ...] = ("tito", "snapshot")
LAYERS, TOPK = 4, 2


@pytest.fixture(params=["in memory", "stored"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    fields = standard_fields(LAYERS, TOPK)
    if request.param == "stored":
        opened = open_store(tmp_path, fields)
    else:
        opened = tq_fs.open_store(None, fields=specs(fields))
    with opened:
        yield opened


def values(rows: int, tokens: int, width: tuple[int, ...] = (LAYERS, TOPK)) -> dict[str, Any]:
    return {
        "logprobs": np.zeros(tokens, np.float32),
        "routed_experts": np.zeros((rows, *width), np.int32),
    }


@pytest.mark.parametrize(
    ("mode", "kind", "rows", "first"),
    [
        # 7 tokens came before; the Step brings 3 + 4 of its own
        ("tito", "create", 6, 0),
        ("tito", "branch", 6, 0),
        ("tito", "boundary", 6, 0),
        ("tito", "append", 7, 6),
        ("snapshot", "create", 6, 0),
        ("snapshot", "branch", 6, 0),
        ("snapshot", "boundary", 6, 0),
        ("snapshot", "append", 13, 0),
    ],
)
def test_a_step_has_the_rows_of_the_table(
    store: tq_fs.Store, mode: Mode, kind: Any, rows: int, first: int
) -> None:
    session = store.session("s", mode=mode)
    session.create([1, 2, 3], [4, 5, 6, 7], **values(6, 7))
    parent = None if kind == "create" else 0
    assert session.first_row(kind, parent) == first
    tokens = 14 if (mode, kind) == ("snapshot", "append") else 7
    for wrong in (rows - 1, rows + 1):
        with pytest.raises(RowCountMismatch, match=f"{wrong} rows .* call for {rows}"):
            session.record(
                tq_fs.StepInput(
                    kind=kind,
                    parent=parent,
                    context=[1, 2, 3],
                    response=[4, 5, 6, 7],
                    values=values(wrong, tokens),
                )
            )
    record = session.record(
        tq_fs.StepInput(
            kind=kind,
            parent=parent,
            context=[1, 2, 3],
            response=[4, 5, 6, 7],
            values=values(rows, tokens),
        )
    )
    assert (record.index, record.kind, record.parent) == (1, kind, parent)
    assert len(record.tokens) == tokens


@pytest.mark.parametrize("mode", MODES)
def test_first_row_after_several_appends_counts_the_whole_sequence(
    store: tq_fs.Store, mode: Mode
) -> None:
    rollout = Rollout(standard_fields(LAYERS, TOPK), mode).play(
        [Op("create", 0, 1, 0), Op("append", 0, 0, 5), Op("append", 0, 9, 1)],
        np.random.default_rng(0),
    )
    session = store.session("s", mode=mode)
    firsts = []
    for turn in rollout.turns:
        firsts.append(session.first_row(turn.kind, turn.parent))
        session.record(rollout.step(turn))
    assert firsts == ([0, 0, 5] if mode == "tito" else [0, 0, 0])


def test_first_row_of_an_unknown_parent_is_refused(store: tq_fs.Store) -> None:
    session = store.session("s")
    with pytest.raises(InvalidLineage):
        session.first_row("append", 3)


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_every_segment_add_up_to_its_tokens_but_one(store: tq_fs.Store, mode: Mode) -> None:
    rollout = mixed_rollout(mode)
    session = store.session("s", mode=mode)
    rollout.record(session)
    segments = session.finalize(views=VIEWS)
    batch = store.hydrate(segments)
    assert [len(t) for t in batch["rollout_routed_experts"]] == [
        len(s.tokens) - 1 for s in segments
    ]
    assert [len(t) for t in batch["rollout_log_probs"]] == [s.response_length for s in segments]


def mixed_rollout(mode: Mode) -> Rollout:
    """Return two chains that take turns, a branch, a boundary and an empty append."""
    ops = [
        Op("create", 0, 3, 4),  # 0: chain a
        Op("create", 0, 2, 2),  # 1: chain b
        Op("append", 0, 2, 3),  # 2: a goes on
        Op("append", 1, 0, 0),  # 3: a, without tokens
        Op("append", 0, 1, 4),  # 4: b goes on
        Op("branch", 0, 5, 2),  # 5: chain c, from inside a
        Op("boundary", 2, 4, 1, only_response=True),  # 6: chain d
        Op("append", 3, 3, 0),  # 7: d, context alone
        Op("append", 2, 1, 1, only_response=True),  # 8: c goes on
    ]
    return Rollout(standard_fields(LAYERS, TOPK), mode).play(ops, np.random.default_rng(3))


@pytest.mark.parametrize(
    ("mode", "view", "steps"),
    [
        ("tito", "lineage", [(0, 2, 3), (1, 4), (5, 8), (6, 7)]),
        ("tito", "timeline", [(0,), (1,), (0, 2, 3), (1, 4), (5,), (6, 7), (5, 8)]),
        ("snapshot", "lineage", [(0, 2, 3), (1, 4), (5, 8), (6, 7)]),
        ("snapshot", "timeline", [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,), (8,)]),
    ],
)
def test_chains_that_take_turns_become_the_segments_of_each_view(
    store: tq_fs.Store, mode: Mode, view: View, steps: list[tuple[int, ...]]
) -> None:
    rollout = mixed_rollout(mode)
    assert [t.parent for t in rollout.turns] == [None, None, 0, 2, 1, 0, 2, 6, 5]
    session = store.session("s", mode=mode)
    rollout.record(session)
    segments = session.finalize(views=[view])
    assert [s.steps for s in segments] == steps
    assert [(s.view, s.index) for s in segments] == [(view, i) for i in range(len(steps))]


@pytest.mark.parametrize("mode", MODES)
def test_a_segment_tells_its_tokens_mask_versions_and_response(
    store: tq_fs.Store, mode: Mode
) -> None:
    rollout = mixed_rollout(mode)
    session = store.session("s", mode=mode)
    rollout.record(session)
    segments = session.finalize(views=VIEWS)
    expected = rollout.expected("lineage") + rollout.expected("timeline")
    for segment, want in zip(segments, expected, strict=True):
        assert_segment(segment, want)
    assert_batch(store.hydrate(segments), [e.slime(specs(rollout.fields)) for e in expected])


def test_a_known_chain_gives_known_tokens_mask_and_versions(store: tq_fs.Store) -> None:
    session = store.session("s")
    session.create([1, 2], [3, 4], version="a", **values(3, 4))
    session.append(0, [5], [6, 7], version="a", **values(3, 3))
    session.append(1, [8], [9], version="b", **values(2, 2))
    (segment,) = session.finalize()
    assert segment.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert segment.loss_mask.tolist() == [0, 0, 1, 1, 0, 1, 1, 0, 1]
    assert segment.versions == (("a", 7), ("b", 2))
    assert segment.response_length == 7
    assert segment.session_id == "s"


def test_a_truncated_sample_keeps_what_is_left_of_the_response(store: tq_fs.Store) -> None:
    session = store.session("s")
    session.create([1, 2, 3], [4, 5], **values(4, 5))
    (segment,) = session.finalize()
    lengths = [
        (segment.sample(tokens=n).tokens, segment.sample(tokens=n).response_length)
        for n in (9, 5, 4, 3, 2, 0)
    ]
    assert lengths == [(5, 2), (5, 2), (4, 1), (3, 0), (2, 0), (0, 0)]


# ---------------------------------------------------------------- refusals


def snapshot_of(session: tq_fs.Session) -> list[tuple[int, int]]:
    return [(r.index, len(r.tokens)) for r in session.records]


@pytest.fixture
def begun(store: tq_fs.Store) -> tq_fs.Session:
    session = store.session("s")
    session.create([1, 2], [3], **values(2, 3))
    session.append(0, [4], [5], **values(2, 2))
    return session


BAD_STEPS: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "append to a Step that was continued": (
        InvalidLineage,
        {"kind": "append", "parent": 0, "values": values(2, 2)},
    ),
    "append to an unknown parent": (
        InvalidLineage,
        {"kind": "append", "parent": 7, "values": values(2, 2)},
    ),
    "branch from an unknown parent": (
        InvalidLineage,
        {"kind": "branch", "parent": -1, "values": values(1, 2)},
    ),
    "append without a parent": (
        InvalidLineage,
        {"kind": "append", "parent": None, "values": values(2, 2)},
    ),
    "create with a parent": (
        InvalidLineage,
        {"kind": "create", "parent": 0, "values": values(1, 2)},
    ),
    "an unknown kind": (
        InputError,
        {"kind": "fork", "parent": 0, "values": values(1, 2)},
    ),
    "create without tokens": (
        EmptyStep,
        {"kind": "create", "context": [], "response": [], "values": values(0, 0)},
    ),
    "branch without tokens": (
        EmptyStep,
        {"kind": "branch", "parent": 0, "context": [], "response": [], "values": values(0, 0)},
    ),
    "a row too few": (RowCountMismatch, {"kind": "append", "parent": 1, "values": values(1, 2)}),
    "a row too many": (RowCountMismatch, {"kind": "append", "parent": 1, "values": values(3, 2)}),
    "too many logprobs": (
        RowCountMismatch,
        {"kind": "append", "parent": 1, "values": values(2, 3)},
    ),
    "too few layers": (
        WidthChanged,
        {"kind": "append", "parent": 1, "values": values(2, 2, (LAYERS - 1, TOPK))},
    ),
    "too large a top-k": (
        WidthChanged,
        {"kind": "append", "parent": 1, "values": values(2, 2, (LAYERS, TOPK + 1))},
    ),
    "a field too few": (
        InvalidField,
        {"kind": "append", "parent": 1, "values": {"logprobs": np.zeros(2, np.float32)}},
    ),
    "a field too many": (
        InvalidField,
        {"kind": "append", "parent": 1, "values": {**values(2, 2), "entropy": np.zeros(2)}},
    ),
    "a misspelt field": (
        InvalidField,
        {
            "kind": "append",
            "parent": 1,
            "values": {"logprob": np.zeros(2), "routed_experts": np.zeros((2, 4, 2), int)},
        },
    ),
    "routes that are no integers": (
        InvalidField,
        {
            "kind": "append",
            "parent": 1,
            "values": {**values(2, 2), "routed_experts": np.zeros((2, LAYERS, TOPK))},
        },
    ),
    "token ids in two dimensions": (
        InvalidField,
        {"kind": "append", "parent": 1, "context": [[1]], "values": values(2, 2)},
    ),
    "a token id of 40 bits": (
        ValueOutOfRange,
        {"kind": "append", "parent": 1, "context": [2**40], "values": values(2, 2)},
    ),
}


@pytest.mark.parametrize("what", BAD_STEPS)
def test_a_refused_step_changes_nothing_and_the_session_goes_on(
    begun: tq_fs.Session, store: tq_fs.Store, tmp_path: Path, what: str
) -> None:
    error, step = BAD_STEPS[what]
    before, on_disk = snapshot_of(begun), visible_steps(tmp_path)
    with pytest.raises(error) as caught:
        begun.record(tq_fs.StepInput(**{"context": [7], "response": [8], **step}))
    assert "'s'" in str(caught.value)  # names the session
    assert snapshot_of(begun) == before
    assert visible_steps(tmp_path) == on_disk
    record = begun.append(1, [7], [8], **values(2, 2))
    assert record.index == 2  # no index was used up
    (segment,) = begun.finalize()
    assert segment.tokens.tolist() == [1, 2, 3, 4, 5, 7, 8]
    assert len(store.hydrate([segment])["rollout_routed_experts"][0]) == 6


def test_a_route_out_of_range_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    fields = standard_fields(LAYERS, TOPK, experts=100)
    with open_store(tmp_path, fields) as store:
        session = store.session("s")
        session.create([1, 2], [3], **values(2, 3))
        bad = values(2, 2)
        bad["routed_experts"][1, 3, 1] = 100
        on_disk = visible_steps(tmp_path)
        with pytest.raises(ValueOutOfRange, match=r"id 100 at row 1, layer 3, slot 1"):
            session.append(0, [4], [5], **bad)
        assert visible_steps(tmp_path) == on_disk
        session.append(0, [4], [5], **values(2, 2))
        assert [s.tokens.tolist() for s in session.finalize()] == [[1, 2, 3, 4, 5]]


@pytest.mark.parametrize("layers", [None, 4])
def test_the_width_of_rows_cannot_change_within_a_session(
    tmp_path: Path, layers: int | None
) -> None:
    spec = tq_fs.routed_experts(layers=layers, topk=layers and 2)
    with tq_fs.open_store(
        tmp_path.as_uri(), fields=[tq_fs.logprobs(), spec], prepared_groups=0
    ) as store:
        session = store.session("s")
        session.create([1, 2], [3], **values(2, 3, (4, 2)))
        for width in [(3, 2), (4, 3), (8,), (4, 2, 1)]:
            with pytest.raises(WidthChanged, match=r"\[4, 2\] is expected"):
                session.append(0, [4], [5], **values(2, 2, width))
            with pytest.raises(WidthChanged):
                session.create([4], [5], **values(1, 2, width))
        session.append(0, [4], [5], **values(2, 2, (4, 2)))
        other = store.session("another model's width is its own affair")
        if layers is None:
            other.create([1, 2], [3], **values(2, 3, (6, 1)))
        else:
            with pytest.raises(WidthChanged):
                other.create([1, 2], [3], **values(2, 3, (6, 1)))


def test_a_refused_first_step_does_not_fix_the_width(tmp_path: Path) -> None:
    fields = [tq_fs.logprobs(), tq_fs.routed_experts(experts=8)]
    with tq_fs.open_store(tmp_path.as_uri(), fields=fields, prepared_groups=0) as store:
        session = store.session("s")
        bad = values(2, 3, (3, 3))
        bad["routed_experts"][0, 0, 0] = 8
        with pytest.raises(ValueOutOfRange):
            session.create([1, 2], [3], **bad)
        session.create([1, 2], [3], **values(2, 3, (4, 2)))


@pytest.mark.parametrize("mode", MODES)
def test_an_append_without_tokens_is_valid(store: tq_fs.Store, mode: Mode) -> None:
    rollout = Rollout(standard_fields(LAYERS, TOPK), mode).play(
        [
            Op("create", 0, 1, 0),
            Op("append", 0, 0, 0),
            Op("append", 0, 0, 0),
            Op("append", 0, 1, 2),
        ],
        np.random.default_rng(0),
    )
    session = store.session("s", mode=mode)
    rollout.record(session)
    segments = session.finalize(views=VIEWS)
    expected = rollout.expected("lineage") + rollout.expected("timeline")
    for segment, want in zip(segments, expected, strict=True):
        assert_segment(segment, want)
    assert_batch(store.hydrate(segments), [e.slime(specs(rollout.fields)) for e in expected])


def test_logprobs_of_the_response_alone_are_filled_up_with_zeros(store: tq_fs.Store) -> None:
    session = store.session("s")
    some = np.array([-1.5, -2.5], np.float32)
    session.create([1, 2, 3], [4, 5], logprobs=some, routed_experts=values(4, 0)["routed_experts"])
    session.append(0, [6], [7, 8], logprobs=some, routed_experts=values(3, 0)["routed_experts"])
    (segment,) = session.finalize()
    (logprobs,) = store.hydrate([segment])["rollout_log_probs"]
    assert logprobs.tolist() == [-1.5, -2.5, 0.0, -1.5, -2.5]


def test_a_small_part_of_a_reply_does_not_keep_the_reply(store: tq_fs.Store) -> None:
    session = store.session("s")
    session.create(np.arange(1000), [1], **values(1000, 1001))
    reply = np.arange(1003 * LAYERS * TOPK, dtype=np.int32).reshape(1003, LAYERS, TOPK) % 256
    want = reply[session.first_row("append", 0) :].copy()
    gone = weakref.ref(reply)
    record = session.append(
        0, [1], [2, 3], logprobs=np.zeros(3, np.float32),
        routed_experts=reply[session.first_row("append", 0) :],
    )  # fmt: skip
    del reply
    assert gone() is None
    assert len(want) == 3
    for array in record.arrays.values():
        assert (array.base is None) or array.base.nbytes <= 2 * array.nbytes
    (segment,) = session.finalize()
    assert (store.hydrate([segment])["rollout_routed_experts"][0][-3:].numpy() == want).all()


def test_an_unknown_mode_or_view_is_refused(store: tq_fs.Store) -> None:
    with pytest.raises(InvalidConfig, match="neither tito nor snapshot"):
        store.session("s", mode="tita")  # type: ignore[arg-type]
    session = store.session("s")
    session.create([1, 2], [3], **values(2, 3))
    for views in [(), ("lineage", "lineage"), ("lineage", "life"), ("life",)]:
        with pytest.raises(InvalidConfig):
            session.finalize(views=views)
    session.append(0, [4], [5], **values(2, 2))
    assert len(session.finalize(views=["timeline", "lineage"])) == 2


def test_a_closed_session_takes_no_step(store: tq_fs.Store) -> None:
    session = store.session("s")
    session.create([1, 2], [3], **values(2, 3))
    session.finalize()
    with pytest.raises(SessionClosed, match="finalized"):
        session.append(0, [4], [5], **values(2, 2))
    with pytest.raises(SessionClosed, match="finalized"):
        session.finalize()
    with pytest.raises(SessionClosed, match="finalized"):
        session.discard()
    gone = store.session("s")
    gone.discard()
    with pytest.raises(SessionClosed, match="discarded"):
        gone.create([1, 2], [3], **values(2, 3))


def test_extra_fields_follow_the_rows_their_declaration_says(tmp_path: Path) -> None:
    entropy = tq_fs.FieldSpec(name="entropy", dtype="float32", inner=(2,), stored="float32")
    fields = [
        *standard_fields(LAYERS, TOPK),
        Field(entropy, lambda r, n: logprob_bits(r, 2 * n).reshape(n, 2)),
        Field(
            tq_fs.FieldSpec(name="drafts", dtype="int32", inner=(1, 3), rows="transitions"),
            lambda r, n: routes(r, n, 1, 3, 70_000),
        ),
    ]
    rollout = Rollout(fields, "tito").play(
        [Op("create", 0, 2, 3), Op("append", 0, 1, 2)], np.random.default_rng(0)
    )
    with open_store(tmp_path, fields) as store:
        session = store.session("s")
        rollout.record(session)
        batch = store.hydrate(session.finalize())
    assert batch["rollout_entropy"][0].shape == (8, 2)
    assert batch["rollout_drafts"][0].shape == (7, 1, 3)
    assert_batch(batch, [e.slime(specs(fields)) for e in rollout.expected("lineage")])


# ---------------------------------------------------------------- memory


def grown(trajectory: Trajectory, steps: int, tokens: int) -> list[np.ndarray[Any, Any]]:
    """Record a chain of Steps without fields; return each one's own tokens."""
    owns = []
    for i in range(steps):
        own = np.random.default_rng(i).integers(0, 2**31, tokens, dtype=np.int32)
        step = tq_fs.StepInput(
            kind="append" if i else "create",
            parent=i - 1 if i else None,
            context=own[: tokens // 2],
            response=own[tokens // 2 :],
            values={},
            version=str(i),
        )
        trajectory.commit(trajectory.plan(step), None, frozenset())
        owns.append(own)
    return owns


@pytest.mark.parametrize("mode", MODES)
def test_what_a_session_keeps_of_a_token_is_a_few_bytes(mode: Mode) -> None:
    """Also in snapshot mode, where each Step holds the tokens of all that came before it."""
    gc.collect()
    tracemalloc.start()
    try:
        trajectory = Trajectory(Incarnation("train", "s", "0"), [], mode)
        owns = grown(trajectory, 100, 1000)
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - sum(own.nbytes for own in owns)
    finally:
        tracemalloc.stop()
    assert held / 100_000 < 8
    whole = np.concatenate(owns)
    for i, record in enumerate(trajectory.records()):
        first = 0 if mode == "snapshot" else 1000 * i
        assert_bits(record.tokens, whole[first : 1000 * (i + 1)])


def test_a_branch_and_a_refused_append_leave_a_snapshot_chain_as_it_was() -> None:
    trajectory = Trajectory(Incarnation("train", "s", "0"), [], "snapshot")

    def step(kind: Any, parent: int | None, *ids: int) -> tq_fs.StepInput:
        return tq_fs.StepInput(kind=kind, parent=parent, context=ids, response=[9], values={})

    def commit(planned: Any) -> None:
        trajectory.commit(planned, None, frozenset())

    commit(trajectory.plan(step("create", None, 1)))
    late, early = (trajectory.plan(step("append", 0, n)) for n in (3, 2))
    commit(early)
    with pytest.raises(InvalidLineage):
        commit(late)
    commit(trajectory.plan(step("branch", 2, 1, 5)))
    branch = trajectory.records()[-1].index
    commit(trajectory.plan(step("append", branch, 6)))
    commit(trajectory.plan(step("append", 2, 7)))
    assert [r.tokens.tolist() for r in trajectory.records()] == [
        [1, 9],
        [1, 9, 2, 9],
        [1, 5, 9],
        [1, 5, 9, 6, 9],
        [1, 9, 2, 9, 7, 9],
    ]
