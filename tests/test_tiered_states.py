"""A tier against a dict: whatever is done to it, and whenever it crashes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests._tiers import GROUP_BYTES, POLICIES, KiB, Tiers, crash, group, held, step
from tq_fs.backends import NodeCache
from tq_fs.errors import BackpressureTimeout, ObjectExists, StorageUnreachable

STEPS = st.integers(0, 7)
SOME = st.lists(STEPS, min_size=1, max_size=6, unique=True)
CAPACITY = 3 * GROUP_BYTES
DOWN = (StorageUnreachable, BackpressureTimeout)


class Tier(RuleBasedStateMachine):
    """Steps by index: what was acknowledged, and what may be there though its removal failed."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.tiers = Tiers(self.folder)
        self.wanted: dict[int, tuple[int, str]] = {}
        self.unsure: set[int] = set()
        self.used: set[int] = set()
        self.contents = 0

    @property
    def down(self) -> bool:
        return self.tiers.client.failure is not None

    @initialize(policy=st.sampled_from(POLICIES))
    def start(self, policy: str) -> None:
        cache = NodeCache(self.folder / "cache", 30 * KiB)
        self.tier = self.tiers.open(
            policy,
            cache=cache,
            capacity_bytes=CAPACITY,
            high_water=0.75,
            low_water=0.5,
            queue_bytes=5 * 9 * KiB,
            deadline_s=0.05,
            upload_threads=2,
        )
        self.tier.recover()

    def teardown(self) -> None:
        with suppress(AttributeError):
            self.heal()
            self.tier.settle("")
            self.check_store()
        self.tiers.close()
        shutil.rmtree(self.folder)

    def check_store(self) -> None:
        """Compare the object store with what was acknowledged."""
        assert self.tiers.uploaded() == {place for _, place in self.wanted.values()}
        assert all(held(self.tiers.back, place, group(c)) for c, place in self.wanted.values())

    # ------------------------------------------------------------ what is done to it

    @rule(indexes=SOME)
    def publish(self, indexes: list[int]) -> None:
        for index in indexes:
            self.publish_one(index)

    def publish_one(self, index: int) -> None:
        if index in self.unsure:
            return
        if index in self.wanted:
            content, place = self.wanted[index]
            self.may_fail(lambda: self.same(index, content, place))
            return
        self.contents += 1
        content = self.contents

        def new() -> None:
            fresh = index not in self.used
            self.used.add(index)
            place = self.tier.publish(step(index), group(content), fresh=fresh)
            self.wanted[index] = (content, place)

        self.may_fail(new)

    def same(self, index: int, content: int, place: str) -> None:
        assert self.tier.publish(step(index), group(content)) == place
        with pytest.raises((ObjectExists, *(DOWN if self.down else ()))):
            self.tier.publish(step(index), group(0))

    @rule(index=STEPS)
    def delete(self, index: int) -> None:
        there = index in self.wanted
        self.wanted.pop(index, None)
        self.unsure.add(index)

        def remove() -> None:
            found = self.tier.delete(step(index))
            assert found or not there
            self.unsure.discard(index)

        self.may_fail(remove)

    @rule()
    def read(self) -> None:
        for content, place in self.wanted.values():
            self.may_fail(lambda p=place, c=content: self.there(p, c))  # type: ignore[misc]

    def there(self, place: str, content: int) -> None:
        assert held(self.tier, place, group(content))

    @rule(index=STEPS)
    def distrust(self, index: int) -> None:
        if index in self.wanted:
            self.may_fail(lambda: self.tier.distrust(f"{self.wanted[index][1]}/zarr.json"))

    @rule(index=STEPS)
    def cool(self, index: int) -> None:
        self.tier.cool([step(index)])

    @rule()
    def settle(self) -> None:
        self.may_fail(lambda: self.tier.settle(""))

    def may_fail(self, call: Callable[[], Any]) -> None:
        """Call what the object store may refuse while it is down."""
        try:
            call()
        except DOWN:
            assert self.down

    # ------------------------------------------------------------ what befalls it

    @rule(in_part=st.booleans())
    def fail(self, in_part: bool) -> None:
        """Let the object store fail: at everything, or at uploads of some Steps."""
        some = tuple(step(i) for i in (0, 1, 2, 3))
        self.tiers.client.refuses = lambda operation, key: (
            not in_part or (operation == "put" and key.startswith(some))
        )
        self.tiers.client.failure = StorageUnreachable("no answer")

    @rule()
    def heal(self) -> None:
        self.tiers.client.failure = None
        for index in sorted(self.unsure):
            self.tier.delete(step(index))
        self.unsure.clear()

    @rule(policy=st.sampled_from(POLICIES))
    def crash(self, policy: str) -> None:
        crash(self.tier)
        self.tiers.client.failure = None
        self.start(policy)
        self.heal()

    @rule(policy=st.sampled_from(POLICIES))
    def close(self, policy: str) -> None:
        self.may_fail(self.tier.close)
        if not self.down and not self.unsure:
            self.check_store()
        self.tiers.client.failure = None
        self.start(policy)
        self.heal()

    # ------------------------------------------------------------ what always holds

    @precondition(lambda self: hasattr(self, "tier"))
    @invariant()
    def within_its_room(self) -> None:
        assert self.tier.stats().front_bytes <= CAPACITY

    @precondition(lambda self: hasattr(self, "tier") and not self.down)
    @invariant()
    def shows_what_was_acknowledged(self) -> None:
        names = {int(name) for name in self.tier.list("steps/train/s/i") if self.visible(name)}
        assert names - self.unsure == set(self.wanted)

    def visible(self, name: str) -> bool:
        return any(self.tier.walk(f"steps/train/s/i/{name}"))


def test_a_tier_is_a_dict_that_survives() -> None:
    run_state_machine_as_test(
        Tier, settings=settings(max_examples=40, stateful_step_count=40, deadline=None)
    )


def test_the_machine_meets_what_it_is_about() -> None:
    """A run that was written down: evictions, promotions, failed uploads and spills."""
    machine = Tier()
    machine.start("write-back")
    try:
        for index in range(8):
            machine.publish([index])
            machine.settle()
        machine.read()
        for index in range(8):
            machine.delete(index)
        machine.fail(in_part=True)
        machine.publish([0, 1, 2, 4, 5, 6])
        machine.read()
        machine.settle()
        stats = machine.tier.stats()
        assert 0 not in (stats.evicted, stats.promoted, stats.upload_failures, stats.spilled)
        machine.crash("write-through")
        machine.settle()
        machine.check_store()
    finally:
        machine.teardown()
