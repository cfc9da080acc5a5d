"""What the operator's commands print for people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from tq_fs.operate import (
    REMEDIES,
    Finding,
    ListedSession,
    Repaired,
    ShownSession,
    ShownStep,
    Space,
    StoreSpace,
    Verified,
    age_classes,
)

_MOST_LINES = 50
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))
_LINE = "{state:<10} {segments:>12} {steps:>7} {nbytes:>10} {age:>8}  {name}{more}"

_HEAD = _LINE.format(
    state="STATE",
    segments="SEGMENTS",
    steps="STEPS",
    nbytes="BYTES",
    age="AGE",
    name="PARTITION/SESSION@INCARNATION",
    more="",
)


def age_text(now_ns: int, then_ns: int) -> str:
    """Return how long ago something was: ``3 d``; ``?`` where it is not known."""
    if not then_ns:
        return "?"
    age_s = max(0, now_ns - then_ns) // 10**9
    return next((f"{age_s // s} {unit}" for s, unit in _UNITS if age_s >= s), f"{age_s} s")


def listing(sessions: Iterable[ListedSession], now_ns: int) -> Iterator[ListedSession]:
    """Print one line for each session as it comes, and pass it on."""
    print(_HEAD, flush=True)
    for session in sessions:
        print(_line(session, now_ns), flush=True)
        yield session


def _line(session: ListedSession, now_ns: int) -> str:
    has_segments = session.state == "finalized"
    released = ", ".join(f"{n} by {consumer}" for consumer, n in session.released.items() if n)
    more = f"  (released: {released})" if released else ""
    if session.problem:
        more = f"  ({session.problem})"
    return _LINE.format(
        state=session.state,
        segments=f"{session.unreleased}/{session.segments}" if has_segments else "-",
        steps=session.steps,
        nbytes=decimal(session.nbytes),
        age=age_text(now_ns, session.opened_ns),
        name=f"{session.partition}/{session.session}@{session.incarnation}",
        more=more,
    )


def session(shown: ShownSession, now_ns: int, console: Console) -> None:
    """Print a session's tree of Steps, and its Segments."""
    say(console, _HEAD)
    say(console, _line(shown.summary, now_ns))
    if shown.problem:
        say(console, f"its trajectory cannot be used: {shown.problem}")
    known = "as recorded" if shown.recorded else "as their Segments say"
    say(console, f"{len(shown.steps):,} Steps, {known if shown.segments else 'without a manifest'}")
    for line in _tree(shown.steps):
        say(console, line)
    for segment in shown.segments:
        who = ", ".join(segment.released_by)
        say(
            console,
            f"Segment {segment.view}/{segment.index}: {segment.tokens:,} tokens, "
            f"{segment.response_tokens:,} of them response, Steps "
            f"{', '.join(map(str, segment.steps))}{f'; released by {who}' if who else ''}",
        )
        say(console, f"  {segment.ref}")


def _tree(steps: Sequence[ShownStep]) -> Iterator[str]:
    """Yield the Steps depth first; what is appended stands below, what branches off is indented."""
    children: dict[int | None, list[ShownStep]] = defaultdict(list)
    known = {step.index for step in steps}
    for step in steps:
        children[step.parent if step.parent in known else None].append(step)
    waiting = [(root, 0, "") for root in reversed(children[None])]
    while waiting:
        step, depth, mark = waiting.pop()
        yield f"{'    ' * depth}{mark}{_step(step)}"
        mine = children[step.index]
        waiting += [(branch, depth + 1, "└─ ") for branch in reversed(mine[1:])]
        waiting += [(first, depth, "│  ") for first in mine[:1]]


def _step(step: ShownStep) -> str:
    kind = f" {step.kind}" if step.kind else ""
    versions = ", ".join(dict.fromkeys(version for version, _ in step.versions))
    where = f"{step.unit}: {step.place}" if step.unit else step.place or "in memory only"
    if step.place and not step.tiers:
        where = f"{'NOT WHOLE' if step.needed else 'released'}, {where}"
    tiers = f" ({', '.join(step.tiers)})" if step.tiers not in {(), ("store",)} else ""
    return (
        f"{step.index}{kind}: {step.tokens:,} tokens, {decimal(step.nbytes)}"
        f"{f', version {versions}' if versions else ''}, {where}{tiers}"
    )


def space(found: StoreSpace, console: Console) -> None:
    """Print what a store takes up."""
    say(
        console,
        f"{found.finalized:,} finalized sessions; {found.steps:,} Steps of {found.sessions:,} "
        "sessions lie in the store",
    )
    for tier, kinds in found.by_tier.items():
        _table(f"tier: {tier}", kinds, console)
    _table("Steps by field", found.by_field, console)
    _table("Steps by age of their session", age_classes(found), console)
    if found.disk_bytes is not None and found.disk_free_bytes is not None:
        free, size = decimal(found.disk_free_bytes), decimal(found.disk_bytes)
        say(console, f"file system: {free} free of {size}")


def _table(title: str, spaces: Mapping[str, Space], console: Console) -> None:
    table = Table(box=None, title=title, title_justify="left", show_header=False, min_width=40)
    for _ in range(3):
        table.add_column(justify="right")
    for name, taken in spaces.items():
        table.add_row(name, decimal(taken.nbytes), f"{taken.objects:,} objects")
    console.print(table)


def verified(found: Verified, console: Console, *, most: int = _MOST_LINES) -> None:
    """Print what was looked at, and what is wrong."""
    say(
        console,
        f"looked at {found.sessions:,} finalized sessions, {found.segments:,} Segments, "
        f"{found.steps:,} Steps: {found.chunks:,} chunks, {decimal(found.nbytes)}",
    )
    if found.unchecked_nbytes:
        unchecked = decimal(found.unchecked_nbytes)
        say(console, f"{unchecked} have no checksum (checksum: false): only sizes were compared")
    if found.open_sessions:
        say(
            console,
            f"{found.open_sessions:,} sessions have no manifest and may still be recorded",
        )
    findings(found.findings, console, most=most)
    kinds = found.kinds()
    for kind, count in kinds.items():
        say(console, f"{count:,} {kind}: {REMEDIES[kind]}")
    if not kinds:
        say(console, "nothing is wrong")


def findings(some: list[Finding], console: Console, *, most: int = _MOST_LINES) -> None:
    """Print findings, one a line, and how many more there are."""
    for finding in some[:most]:
        tier = f" [{finding.tier}]" if finding.tier in ("front", "back") else ""
        say(console, f"{finding.kind}: {finding.place}{tier}: {finding.detail}")
    if len(some) > most:
        say(console, f"and {len(some) - most:,} more; --json names all")


def repaired(done: Repaired, console: Console, *, most: int = _MOST_LINES) -> None:
    """Print what was done, or would be, and what is left."""
    for action in done.actions[:most]:
        would = "would " if done.dry_run else ""
        size = f" ({decimal(action.nbytes)})" if action.nbytes else ""
        say(console, f"{would}{action.kind}: {action.place}: {action.detail}{size}")
        for ref in action.refs:
            say(console, f"  lost to training: {ref}")
    if len(done.actions) > most:
        say(console, f"and {len(done.actions) - most:,} more; --json names all")
    for path in done.rebuilt:
        say(console, f"made anew: manifests/{path}")
    freed = decimal(sum(action.nbytes for action in done.actions))
    if not done.actions and not done.rebuilt:
        say(console, "nothing to do")
    elif done.dry_run:
        say(console, f"nothing was changed; --yes does it, and frees {freed}")
    else:
        say(console, f"freed {freed}")
    if not done.dry_run and done.left:
        say(console, f"{len(done.left):,} findings are left:")
        findings(done.left, console, most=most)


def say(console: Console, text: str) -> None:
    """Print a line as it is, however long."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
