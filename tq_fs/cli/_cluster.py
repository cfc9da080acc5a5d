"""``tq-fs cluster``: a store on the nodes of a Ray cluster, seen from a terminal."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from tq_fs.cli import _report as report
from tq_fs.errors import DependencyMissing

if TYPE_CHECKING:
    from tq_fs.cluster import StoreCluster

_CLUSTER = """\
Starts a store's Controller and StorageUnits on the nodes of a Ray cluster, and looks after them.
What is started goes on after the command: rollout and training attach to it by its store_id.

example:
  tq-fs cluster start examples/configs/ray-cluster.yaml
"""

_START = """\
Starts what the file says, or attaches where it runs already. Returns once every unit reports; where
one cannot be started in time, says which, and stops the others again.

example:
  tq-fs cluster start examples/configs/ray-cluster.yaml
"""

_STATUS = """\
Asks the Controller and all units. Exit code 1: a unit is being started anew, or is lost.

example:
  tq-fs cluster status run-1 --json -
"""

_DRAIN = """\
Gives a unit no new sessions, before its node leaves; what it holds can still be read. It can leave
once its Segments are released, or at once where Steps lie in an object store too.

example:
  tq-fs cluster drain run-1 node-3-5f0c2a91
"""

_SWEEP = """\
Removes what nobody refers to: Steps of sessions whose process is gone, and what deletions that were
broken off have left. It does so by itself every cluster.sweep_s seconds.

example:
  tq-fs cluster sweep run-1
"""

_STOP = """\
Ends the Controller and all units. What they hold stays on their disks, and is there again after the
next start.

example:
  tq-fs cluster stop run-1
"""

Commands = argparse._SubParsersAction  # argparse has no public name for it


def add_cluster(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command and what is below it."""
    parser = _add(commands, "cluster", "a store on the nodes of a Ray cluster", _CLUSTER)
    below = parser.add_subparsers(dest="cluster", required=True, metavar="WHAT")
    start = _add(below, "start", "start what a file says", _START)
    start.add_argument("config", type=Path, help="YAML file with the store's settings")
    start.set_defaults(run=_start)
    for name, about, text, run in (
        ("status", "what runs where", _STATUS, _status),
        ("drain", "give a unit no new sessions", _DRAIN, _drain),
        ("sweep", "remove what nobody refers to", _SWEEP, _sweep),
        ("stop", "end the Controller and all units", _STOP, _stop),
    ):
        one = _add(below, name, about, text)
        one.add_argument("store_id", help="the run")
        one.set_defaults(run=run)
        if name == "drain":
            one.add_argument("unit", help="its name, as the status tells it")
            one.add_argument("--undo", action="store_true", help="give it new sessions again")
        if name in ("status", "sweep"):
            one.add_argument("--json", metavar="FILE", help="write as JSON; - is standard output")


def _add(
    commands: Commands[argparse.ArgumentParser], name: str, about: str, text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if name != "cluster":
        parser.add_argument(
            "--address",
            default="auto",
            help="of the Ray cluster (default: the one that this machine belongs to)",
        )
    return parser


# ---------------------------------------------------------------- what they do


def _cluster(arguments: argparse.Namespace) -> Any:
    """Return the package, joined to the Ray cluster that was named."""
    try:
        import ray  # noqa: PLC0415  # optional

        from tq_fs import cluster  # noqa: PLC0415
    except ImportError as error:
        raise DependencyMissing(
            "Ray is not installed", subject="tq-fs cluster", remedy="pip install 'tq-fs[ray]'"
        ) from error
    if arguments.address != "auto" and not ray.is_initialized():
        ray.init(arguments.address, log_to_driver=False)
    return cluster


def _attached(arguments: argparse.Namespace) -> StoreCluster:
    found: StoreCluster = _cluster(arguments).attach(arguments.store_id)
    return found


def _start(arguments: argparse.Namespace) -> int:
    found: StoreCluster = _cluster(arguments).start(arguments.config)
    _show(found.status(), Console())
    return 0


def _status(arguments: argparse.Namespace) -> int:
    found = _attached(arguments)
    found.layout()  # asks all units now
    status = found.status()
    if arguments.json:
        _write_json(status, arguments.json)
    if arguments.json != "-":
        _show(status, Console())
    return int(any(unit["state"] in ("restarting", "lost") for unit in status["units"]))


def _drain(arguments: argparse.Namespace) -> int:
    _attached(arguments).drain(arguments.unit, on=not arguments.undo)
    print(f"unit {arguments.unit} {'takes' if arguments.undo else 'takes no'} new sessions")
    return 0


def _sweep(arguments: argparse.Namespace) -> int:
    found = _attached(arguments).sweep()
    if arguments.json:
        _write_json(asdict(found), arguments.json)
    if arguments.json != "-":
        report.swept(found, Console())
    return int(bool(found.incomplete))


def _stop(arguments: argparse.Namespace) -> int:
    _attached(arguments).stop()
    print(f"store {arguments.store_id!r} was stopped")
    return 0


def _show(status: dict[str, Any], console: Console) -> None:
    console.print(
        f"store {status['store_id']!r}, epoch {status['epoch']}: "
        f"{status['finalized_sessions']:,} finalized and {status['open_sessions']:,} open sessions "
        f"of {status['processes']:,} processes",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None)
    for name in ("unit", "node", "state", "folder"):
        table.add_column(name, overflow="fold")
    for name in ("free", "on the way", "lanes"):
        table.add_column(name, justify="right")
    for unit in status["units"]:
        table.add_row(
            *(unit["name"], unit["node_name"], unit["state"], unit["folder"]),
            decimal(unit["free_bytes"]),
            decimal(unit.get("held_bytes", 0)),
            f"{unit.get('lanes', 0):,}",
        )
    console.print(table)


def _write_json(document: dict[str, Any], where: str) -> None:
    text = json.dumps(document, indent=2)
    if where == "-":
        print(text)
    else:
        Path(where).write_text(text + "\n")
