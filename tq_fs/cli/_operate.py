"""``tq-fs ls``, ``stat``, ``verify``: into a store, as those see it who look after it."""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from tq_fs.cli import _operate_text as text
from tq_fs.cli._json import STDOUT, Interruptible, check_json, stream_json, write_json
from tq_fs.config import StoreConfig
from tq_fs.operate import (
    GRACE_S,
    OpenedStore,
    Repaired,
    check_quiet,
    collect_waste,
    list_sessions,
    measure_space,
    opened_store,
    repair_store,
    show_session,
    verify_store,
)

INTERRUPTED = 130  # as shells say it of a process that ended by Ctrl-C
Commands = argparse._SubParsersAction

_LS = """\
Lists the sessions of a store: Segments (those not released yet, of all), Steps that are needed and
their bytes, age, and who has released what. First those that are finalized, then those that are
being recorded (open) or were never finalized (orphan). Lines come as they are found; Ctrl-C ends
it. Changes nothing, and works beside the process that writes.

example:
  tq-fs ls file:///nvme/runs --store-id run-7
"""

_STAT = """\
Says what a store takes up: by tier and kind of object, by field, and by the age of sessions. Reads
no object, only what there is. Changes nothing, and works beside the process that writes.

example:
  tq-fs stat s3://bucket/runs --store-id run-7 --json -
"""

_SHOW = """\
Shows a session: the tree of its Steps and where each of them lies, and its Segments with their
references and who has released them. Changes nothing, and works beside the process that writes.

example:
  tq-fs show file:///nvme/runs math-17 --store-id run-7
"""

_VERIFY = """\
Reads all that sessions need, on several threads: every chunk against its checksum, every manifest
against the Steps that lie there. Finds flipped bits, truncated objects, Steps that are missing,
manifests without data, Steps without a manifest. Changes nothing, and works beside the process that
writes. Exit code 1: something was found.

example:
  tq-fs verify file:///nvme/runs --store-id run-7
"""

_REPAIR = """\
Leaves a store that verifies. Verifies it, removes Steps and documents that nobody needs, makes
damaged manifests and metadata anew where what is left allows it, and sets aside what cannot be
used: below quarantine/ in the store, where nothing looks for it and gc leaves it alone. What a
manifest refers to and is whole is never deleted. Says what it would do, and does it with --yes
only: then it takes the store for writing, and a process that still has it open can write no more.
Exit code 1: something is wrong (without --yes), or still wrong.

example:
  tq-fs repair file:///nvme/runs --store-id run-7
"""

_GC = """\
Makes room: removes Steps of sessions that were never finalized and Steps that all consumers have
released, where a process has left any. Says what it would do, and does it with --yes only: then it
takes the store for writing, and a process that still has it open can write no more. Verifies
nothing.

example:
  tq-fs gc file:///nvme/runs --store-id run-7
"""


def add_operate(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the commands that look into a store."""
    parser = _add(commands, "ls", "list a store's sessions", _LS)
    parser.add_argument(
        "--finalized", action="store_true", help="leave out sessions without a manifest: quicker"
    )
    parser.set_defaults(run=_ls)
    parser = _add(commands, "show", "one session: lineage, Segments, where its Steps lie", _SHOW)
    parser.add_argument(
        "session", help="its id, a Segment's reference, or partition/session@incarnation"
    )
    parser.add_argument("--partition", help="only of this partition")
    parser.set_defaults(run=_show)
    _add(commands, "stat", "what a store takes up", _STAT).set_defaults(run=_stat)
    parser = _add(commands, "verify", "read a store and find what is wrong", _VERIFY)
    parser.add_argument("--no-data", action="store_true", help="do not read values, only listings")
    parser.set_defaults(run=_verify)
    parser = _add(commands, "repair", "leave a store that verifies", _REPAIR)
    parser.add_argument("--yes", action="store_true", help="do it, not only say it")
    parser.set_defaults(run=_repair)
    parser = _add(commands, "gc", "remove what nobody needs", _GC)
    parser.add_argument("--yes", action="store_true", help="do it, not only say it")
    parser.add_argument(
        "--quarantine", action="store_true", help="remove what repairs have set aside, too"
    )
    parser.set_defaults(run=_gc)


def _add(
    commands: Commands[argparse.ArgumentParser], name: str, what: str, description: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=what,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("url", help="of the store: file:///absolute/folder, s3://bucket/prefix …")
    add("--store-id", help="the run (default: that of --config, or 'default')")
    add("--config", type=Path, metavar="FILE", help="YAML file with further settings, tiers say")
    add(
        "--grace-s",
        type=_seconds,
        default=GRACE_S,
        metavar="N",
        help="where no lock tells whether a process writes: sessions without a manifest that "
        "began, or wrote a Step, less than N seconds ago may still be recorded; 0: nobody writes "
        "(default: %(default)g)",
    )
    add("--json", metavar="FILE", help="write the report as JSON; - is standard output")
    return parser


def _seconds(given: str) -> float:
    value = float(given)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{given} is no number of seconds")
    return value


def config_of(arguments: argparse.Namespace) -> StoreConfig:
    """Return the settings that a command was given."""
    config = StoreConfig.from_yaml(arguments.config) if arguments.config else StoreConfig()
    if arguments.store_id is not None:
        config = replace(config, store_id=arguments.store_id)
    return config


@contextmanager
def _opened(arguments: argparse.Namespace, *, write: bool = False) -> Iterator[OpenedStore]:
    check_json(arguments.json)
    config, grace_s = config_of(arguments), arguments.grace_s
    if write:
        with opened_store(arguments.url, config, grace_s=grace_s) as store:
            check_quiet(store)
    with opened_store(arguments.url, config, write=write, grace_s=grace_s) as store:
        yield store


@contextmanager
def progress_bar(total: int | None, what: str) -> Iterator[tuple[Progress, Any]]:
    """Show a bar on a terminal's standard error while something long goes on."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[more]}"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        yield bar, bar.add_task(what, total=total, more="")


def _ls(arguments: argparse.Namespace) -> int:
    with _opened(arguments) as store, Interruptible() as until:
        sessions = until.over(list_sessions(store, finalized_only=arguments.finalized))
        if arguments.json != STDOUT:
            sessions = text.listing(sessions, time.time_ns())
        if arguments.json:
            rows = map(asdict, sessions)
            stream_json(_head(store), "sessions", rows, arguments.json, is_complete=until.is_whole)
        else:
            deque(sessions, maxlen=0)  # they are printed
    return INTERRUPTED if until.is_interrupted else 0


def _show(arguments: argparse.Namespace) -> int:
    with _opened(arguments) as store:
        shown = list(show_session(store, arguments.session, partition=arguments.partition))
    if arguments.json:
        found = [asdict(session) for session in shown]
        write_json({**_head(store), "incarnations": found}, arguments.json)
    if arguments.json != STDOUT:
        for session in shown:
            text.session(session, time.time_ns(), Console())
    return 0


def _stat(arguments: argparse.Namespace) -> int:
    with _opened(arguments) as store, progress_bar(None, "objects") as (bar, task):
        found = measure_space(store, lambda n: bar.advance(task, n))
    if arguments.json:
        write_json({**_head(store), **asdict(found)}, arguments.json)
    if arguments.json != STDOUT:
        text.space(found, Console())
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    with _opened(arguments) as store, _session_bar(store) as progress:
        found = verify_store(store, data=not arguments.no_data, progress=progress)
    if arguments.json:
        kinds = {"kinds": found.kinds()}
        write_json({**_head(store), **asdict(found), **kinds}, arguments.json)
    if arguments.json != STDOUT:
        text.verified(found, Console())
    return 1 if found.findings else 0


def _repair(arguments: argparse.Namespace) -> int:
    with _opened(arguments, write=arguments.yes) as store, _session_bar(store) as progress:
        done = repair_store(store, dry_run=not arguments.yes, progress=progress)
    _tell(store, done, arguments)
    return 1 if done.left else 0


def _gc(arguments: argparse.Namespace) -> int:
    with _opened(arguments, write=arguments.yes) as store, _session_bar(store) as progress:
        done = collect_waste(
            store, dry_run=not arguments.yes, quarantine=arguments.quarantine, progress=progress
        )
    _tell(store, done, arguments)
    return 1 if done.left and arguments.yes else 0


def _head(store: OpenedStore) -> dict[str, str]:
    """Return what each JSON document begins with."""
    return {"store_id": store.store_id, "url": store.places.url}


def _tell(store: OpenedStore, done: Repaired, arguments: argparse.Namespace) -> None:
    if arguments.json:
        write_json({**_head(store), **asdict(done)}, arguments.json)
    if arguments.json != STDOUT:
        text.repaired(done, Console())


@contextmanager
def _session_bar(store: OpenedStore) -> Iterator[Callable[[int, int], None]]:
    """Show how many sessions, and how many bytes, were looked at."""
    total = sum(1 for _ in store.catalog.entries())
    with progress_bar(total, "sessions") as (bar, task):
        nbytes = 0

        def advance(sessions: int, more: int) -> None:
            nonlocal nbytes
            nbytes += more
            bar.update(task, advance=sessions, more=decimal(nbytes))

        yield advance
