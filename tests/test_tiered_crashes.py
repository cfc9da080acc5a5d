"""A tier whose process is killed: what was acknowledged is there, and the rest is whole or gone."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests._rollouts import run_child, spawn_child
from tests._tiers import GROUP_BYTES, KiB, group, held, step, until
from tq_fs.backends import FsspecBackend, LocalBackend, NodeCache, Retry
from tq_fs.backends._tiered import TieredBackend

CHILD = """
import itertools, json, os, random, sys
from _tiers import GROUP_BYTES, KiB, group, held, step
from tq_fs.backends import FsspecBackend, LocalBackend, NodeCache, Retry
from tq_fs.backends._tiered import TieredBackend

folder, policy, start, target, nth = sys.argv[1:]
start, left = int(start), int(nth)

def at(point):
    global left
    if point == target:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), 9)

def say(*words):
    print(json.dumps(words), flush=True)

front = LocalBackend(f"{folder}/front", ahead=0, at=at)
back = FsspecBackend(f"file://{folder}/store", retry=Retry(deadline_s=0), at=at)
cache = NodeCache(f"{folder}/cache", 40 * KiB, at=at)
tier = TieredBackend(
    front, back, policy=policy, cache=cache, at=at, upload_threads=2,
    capacity_bytes=5 * GROUP_BYTES, high_water=0.8, low_water=0.4,
)
tier.recover()
places = {}
for i in range(start, start + 40):
    say("publishing", i)
    places[i] = tier.publish(step(i), group(i))
    say("published", i, places[i])
    oldest = min(places)
    assert held(tier, places[oldest], group(oldest))
    if i % 3 == 2:
        say("deleting", oldest)
        assert tier.delete(step(oldest))
        say("deleted", oldest)
        del places[oldest]
    if i % 8 == 7:
        say("deleting", i)
        assert tier.delete(places[i])
        say("deleted", i)
        del places[i]
tier.close()
say("closed")
"""


class Past:
    """What a process said that it did, and began."""

    def __init__(self) -> None:
        self.published: dict[int, str] = {}
        self.begun: set[int] = set()
        self.deleting: set[int] = set()

    def hear(self, lines: str) -> None:
        """Read the lines of a process, of which the last may be cut."""
        for line in lines.splitlines():
            if not line.endswith("]"):
                continue
            what, *about = json.loads(line)
            if what == "publishing":
                self.begun.add(about[0])
            elif what == "published":
                self.begun.discard(about[0])
                self.published[about[0]] = about[1]
            elif what == "deleting":
                self.deleting.add(about[0])
                del self.published[about[0]]
            elif what == "deleted":
                self.deleting.discard(about[0])


@contextmanager
def reopened(folder: Path, policy: str) -> Iterator[tuple[TieredBackend, FsspecBackend]]:
    front = LocalBackend(folder / "front", ahead=0)
    back = FsspecBackend(f"file://{folder}/store", retry=Retry(deadline_s=0))
    cache = NodeCache(folder / "cache", 40 * KiB)
    capacity = 5 * GROUP_BYTES
    tier = TieredBackend(front, back, policy=policy, cache=cache, capacity_bytes=capacity)
    try:
        yield tier, back
    finally:
        tier.close()
        front.close()
        back.close()


def check(folder: Path, policy: str, past: Past) -> None:
    """Start again, and hold what is there against what was said."""
    for part in (folder / "store").rglob("*.part"):
        part.unlink()  # the driver's for plain files; an object store has no half-written objects
    with reopened(folder, policy) as (tier, back):
        if policy == "write-through":
            assert all(held(back, place, group(i)) for i, place in past.published.items())
        assert_whole(back)
        tier.recover()
        until(lambda: tier.stats().front_bytes == GROUP_BYTES * len(seen(tier.front)))
        for i, place in past.published.items():
            assert held(tier, place, group(i))
        tier.settle("")
        for i, place in past.published.items():
            assert held(back, place, group(i))
            assert tier.publish(step(i), group(i)) == place
        assert_whole(tier)
        unsure = past.begun | past.deleting
        assert {int(place.split("/")[4]) for place in seen(tier)} <= {*past.published, *unsure}
        for i in unsure:  # the store removes what was being removed, or was never said
            tier.delete(step(i))
        wanted = set(past.published.values())
        assert {key.rpartition("/try-")[0] for key, _ in back.walk("")} == {
            place.rpartition("/try-")[0] for place in wanted
        }
        assert seen(tier) == seen(back) == wanted
        past.begun.clear()
        past.deleting.clear()
    left = [name for _, _, names in os.walk(folder / "cache") for name in names]
    assert not [name for name in left if name.endswith(".part")]
    assert os.listdir(folder / "front" / ".staging") == []


def seen(backend: Any) -> set[str]:
    """Return the places of the groups that a backend shows, by their commits."""
    keys = [key for key, _ in backend.walk("steps")]
    return {key.removesuffix("/zarr.json") for key in keys if key.endswith("/zarr.json")}


def assert_whole(backend: Any) -> None:
    """Check that no group is visible in part."""
    for place in seen(backend):
        assert held(backend, place, group(int(place.split("/")[4])))


BACK_ONLY = ("front published", "upload queued", "uploading", "uploaded")
STORE = ("member uploaded", "committed", "deleting", "deleted")
DISK = ("staged", "members written", "renamed", "delete renamed")
POINTS = (*TieredBackend.POINTS, *NodeCache.POINTS, *STORE, *DISK)
LATER = ("front published", "uploading", "uploaded", "evicted", "delete done", "member uploaded")
KILLS = [
    *(("write-back", point, 1) for point in POINTS),
    *(("write-back", point, 5) for point in LATER),
    *(("write-through", point, 1) for point in POINTS if point not in BACK_ONLY),
]


@pytest.mark.parametrize(("policy", "point", "nth"), KILLS)
def test_a_killed_process_loses_nothing_it_acknowledged(
    tmp_path: Path, policy: str, point: str, nth: int
) -> None:
    done = run_child(CHILD, tmp_path, policy, 0, point, nth)
    assert done.returncode == -signal.SIGKILL, f"{point!r} was not reached: {done.stderr}"
    past = Past()
    past.hear(done.stdout)
    check(tmp_path, policy, past)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["write-back", "write-through"])
def test_a_process_killed_at_any_moment_again_and_again(tmp_path: Path, policy: str) -> None:
    numbers = random.Random(policy)
    past = Past()
    for run in range(4):
        process = spawn_child(CHILD, tmp_path, policy, 100 * run, "", 0)
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(numbers.randrange(4, 60))]
        process.kill()
        rest = process.stdout.read()  # not by communicate, which passes over what is buffered
        _, error = process.communicate(timeout=20)
        assert "Traceback" not in error, error
        past.hear("".join(said) + rest)
        check(tmp_path, policy, past)
    assert past.published
