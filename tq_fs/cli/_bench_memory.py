"""``tq-fs bench memory``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from tq_fs.cli._json import STDOUT, check_json, write_json
from tq_fs.errors import InvalidConfig
from tq_fs.planner import parse_size

if TYPE_CHECKING:
    from tq_fs.bench.memory import MemoryBench

_MEMORY = """\
Measures what trajectories take in memory on the master node, by component and over time, and says
which targets are met. The same rollouts go from agents to trainers on each path, alone: central
(large fields pass through the Proxy, the RolloutManager and Ray's object store), transfer_queue
(they lie in TransferQueue's units, in memory), nvme and s3 (tq-fs, with a store on a disk and in an
object store). Rollouts outrun training, so that data waits. Processes are counted by PSS, Ray's
object store by its used bytes; trainers and page cache are told beside. What trainers get is
compared between the paths. Exit code 1: it is not the same to the bit.

Needs the extras ray and cluster; paths whose needs are not there are left out, and said: s3 needs
the extra fast-s3 and a server that can be started, transfer_queue the extra transfer-queue.
--figures needs matplotlib (extra demo). tq-fs plan --calibrate reads the JSON.

example:
  tq-fs bench memory --json memory.json --figures figures
  tq-fs bench memory --payload 256MiB --paths central,nvme --root /nvme/bench
"""
_WIDTH = 110


def add_bench_memory(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = benches.add_parser(
        "memory",
        help="memory of the data plane on the master node, by path",
        description=_MEMORY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--payload",
        metavar="SIZES",
        default="1GiB,2GiB,4GiB",
        help="stored bytes of the large fields that pass, one run each with tq-fs; all paths are "
        "compared at the smallest (default: %(default)s)",
    )
    add(
        "--paths",
        default="central,transfer_queue,nvme,s3",
        help="which to take, comma-separated (default: all, %(default)s)",
    )
    add(
        "--rollouts",
        type=int,
        default=8,
        help="that follow each other, and share the payload (default: %(default)s)",
    )
    add("--trainers", type=int, default=2, help="data-parallel ranks (default: %(default)s)")
    add(
        "--dtype",
        choices=("uint8", "uint16"),
        default="uint16",
        help="type of the ids, on all paths (default: %(default)s)",
    )
    add("--root", type=Path, help="measure in this folder instead of a temporary one")
    add("--json", metavar="FILE", help="write the figures as one JSON object; - is standard output")
    add(
        "--figures",
        type=Path,
        metavar="FOLDER",
        help="draw memory-peaks.png and memory-over-time.png into it",
    )
    parser.set_defaults(run=_bench_memory)


def _bench_memory(arguments: argparse.Namespace) -> int:
    from tq_fs.bench import memory  # noqa: PLC0415  # only this command needs it

    bench = _settings(arguments)
    check_json(arguments.json)
    if arguments.figures:
        memory.prepare_pictures(arguments.figures)
    console = Console(stderr=arguments.json == STDOUT)
    console.width = max(console.width, _WIDTH)  # a number that is cut off is worse than a long line
    measured = memory.measure(bench, console)
    memory.show(bench, measured, console)
    document = memory.document(bench, measured)
    if arguments.json:
        write_json(document, arguments.json)
    if arguments.figures:
        memory.draw_pictures(measured, arguments.figures)
    return 0 if document.get("identical", True) else 1


def _settings(arguments: argparse.Namespace) -> MemoryBench:
    from tq_fs.bench.memory import MemoryBench  # noqa: PLC0415

    return MemoryBench(
        payloads=_payloads(arguments.payload),
        paths=_paths(arguments.paths),
        rollouts=_at_least_one("--rollouts", arguments.rollouts),
        trainers=_at_least_one("--trainers", arguments.trainers),
        dtype=arguments.dtype,
        root=arguments.root,
    )


def _payloads(text: str) -> tuple[int, ...]:
    """Return the sizes, ascending."""
    sizes = sorted(_at_least_one("--payload", parse_size(s, "--payload")) for s in text.split(","))
    if len(set(sizes)) < len(sizes):
        raise InvalidConfig(f"{text!r} has a size twice", subject="--payload")
    return tuple(sizes)


def _paths(text: str) -> tuple[str, ...]:
    """Return the paths in the order in which they are always told."""
    from tq_fs.bench.memory import PATHS  # noqa: PLC0415

    wanted = {name.strip() for name in text.split(",")}
    unknown = sorted(wanted - set(PATHS))
    if unknown:
        raise InvalidConfig(
            f"{', '.join(map(repr, unknown))} is no path",
            subject="--paths",
            remedy=f"give some of {', '.join(PATHS)}",
        )
    return tuple(path for path in PATHS if path in wanted)


def _at_least_one(option: str, value: int) -> int:
    if value < 1:
        raise InvalidConfig(f"{value} is not at least 1", subject=option)
    return value
