"""Commands and their options. Exit code 0: fine; 1: a finding or failure; 2: wrong usage."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tq_fs import __version__
from tq_fs.cli import _report as report
from tq_fs.cli._bench_memory import add_bench_memory
from tq_fs.cli._bench_proxy import add_bench_proxy
from tq_fs.cli._cluster import add_cluster
from tq_fs.cli._operate import INTERRUPTED, add_operate
from tq_fs.cli._plan import add_plan
from tq_fs.cli._proxy import add_proxy
from tq_fs.config import StoreConfig
from tq_fs.errors import InputError, InvalidConfig, TqFsError
from tq_fs.store import recover_store

_DEMO = """\
Runs the main job end to end on a real mixture-of-experts model with random weights, on the CPU:
multi-turn rollouts are recorded as Zarr Steps, finalized into Segments, hydrated and replayed, and
every tensor is compared with the in-memory path.

With --ray the same on a Ray cluster: Proxies and trainers on every node, units between them; told
is what crossed the channel, and what went through Ray's object stores.

example:
  tq-fs demo --figure memory.png
  tq-fs demo --ray
  tq-fs demo --ray --address auto --config cluster.yaml
"""

_RECOVER = """\
Rebuilds a store's catalog from its manifests and Steps, when every process and node is gone: says
what was recovered and what is incomplete, and removes Steps of sessions that were never finalized.
What a manifest refers to is never deleted. Takes the store for writing: a process that still has it
open can write no more. Exit code 1: something is incomplete or cannot be read.

example:
  tq-fs recover s3://bucket/runs --store-id run-7 --dry-run
"""

_SERVE = """\
Holds a store's folder on this node's disk and serves it to processes of this and of other nodes,
which open it by the URL that is printed. Beyond this host it speaks TLS, and every client needs the
same identity file, as storage_options: {identity: FILE}. Ends with SIGTERM or Ctrl-C.

example:
  tq-fs serve /nvme/tq-fs --listen tcp:0.0.0.0:7007 --identity store.pem
"""

_STEP = """\
Measures one Step, written and read, against the physical limit and against other libraries: the
same bytes in one run, interleaved, medians of paired ratios. Without --root it makes a journaled
file system of its own (a loop mount) where that is permitted.

example:
  tq-fs bench step --tokens 2048 --layers 40 --topk 8 --dtype uint8
  tq-fs bench step --tokens 16384 --json -
"""

_S3 = """\
Measures an object store through both drivers against http.client and s3fs: objects of 0.66 MB,
whole Steps and objects of 8 MiB, eight requests at once, interleaved, medians of paired ratios; and
the memory that recording through a write-back tier takes. Without --url it starts a server of its
own; with one it uses the environment's settings, and removes what it wrote.

example:
  tq-fs bench s3 --server minio
  tq-fs bench s3 --url s3://bucket/prefix --json -
"""

_CHANNEL = """\
Measures Steps on their way to a StorageUnit of another process and back, against files without one:
groups with 0.66 MB and with 8 MiB of routing, over a socket of the own host, over TCP and over TLS.
Interleaved, medians of paired ratios. Without --root it makes a journaled file system of its own.

example:
  tq-fs bench channel
  tq-fs bench channel --repeats 5 --json -
"""

_CONTROLLER = """\
Measures a Controller that holds many Steps: its memory, how fast references are resolved, whether
finalize and resolve stay as fast as with 10,000 Steps, and how long it takes to start again after a
kill and after a close. Manifests are real, the Steps they name are not written: what a start takes
to look for those is measured on a few, and told by itself.

example:
  tq-fs bench controller --steps 1000000 --json -
"""

_CLUSTER = """\
Measures a store on the nodes of a cluster, on two raylets of this machine, and says which targets
are met: puts and reads through a unit against raw files and against TransferQueue's kv_put (where
that is installed: extra bench-peers), reading on a unit's own node against the embedded store, the
memory of a unit, a Controller that holds many Steps, and what passes through Ray's object store.

example:
  tq-fs bench cluster --json figures.json
  tq-fs bench cluster --steps 50000 --bytes 1000000000 --repeats 5
"""

_TRANSFER_QUEUE = """\
Measures TransferQueue with our backend against its own SimpleStorage, in memory and with its SSD
offload, and says which targets are met: puts and gets of Steps of 0.66 MB, how long its event loop
stalls meanwhile, and the memory of the processes that store while many Steps are held. Each runs
alone, on a Ray of its own, in turn; medians of paired ratios. Needs the extra transfer-queue.

example:
  tq-fs bench transfer-queue --json figures.json
  tq-fs bench transfer-queue --repeats 2 --gib 1 --root /nvme/bench
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except InputError as error:
        print(f"tq-fs: {error}", file=sys.stderr)
        return 2
    except TqFsError as error:
        print(f"tq-fs: {error} [{error.code}]", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tq-fs: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output, head say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tq-fs",
        description="Storage for the large per-token fields of agentic-RL rollouts.",
    )
    parser.add_argument("--version", action="version", version=f"tq-fs {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_recover(commands)
    add_operate(commands)
    _add_serve(commands)
    add_cluster(commands)
    add_proxy(commands)
    add_plan(commands)
    bench = commands.add_parser("bench", help="measure", description="Measurements.")
    benches = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    _add_step(benches)
    _add_s3(benches)
    _add_channel(benches)
    _add_controller(benches)
    _add_cluster(benches)
    _add_transfer_queue(benches)
    add_bench_proxy(benches)
    add_bench_memory(benches)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="the whole way of the data, on a real model",
        description=_DEMO,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--folder", type=Path, help="keep the store in this folder (default: a temporary one)"
    )
    parser.add_argument(
        "--store",
        metavar="URL",
        help="keep the stores below this URL instead, s3://bucket/prefix say; what the demo wrote "
        "is removed at the end",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file with settings of the stores"
    )
    parser.add_argument(
        "--figure",
        type=Path,
        default=Path("demo-memory.png"),
        help="where to write the plot of memory over time (default: %(default)s)",
    )
    parser.add_argument(
        "--payload-mib",
        type=_positive,
        default=256,
        help="routing to take through each path while its memory is measured, in MiB of int32; "
        "less for a slow store (default: %(default)s)",
    )
    parser.add_argument(
        "--ray",
        action="store_true",
        help="on a Ray cluster; --folder is then a folder of every node, for its unit",
    )
    parser.add_argument(
        "--address",
        help="with --ray: the cluster, auto for the one of this machine (default: two raylets are "
        "started here, and ended)",
    )
    parser.set_defaults(run=_demo)


def _add_recover(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "recover",
        help="rebuild a store's catalog after a loss",
        description=_RECOVER,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("url", help="of the store: file:///absolute/folder, s3://bucket/prefix …")
    add("--store-id", help="the run (default: that of --config, or 'default')")
    add("--config", type=Path, metavar="FILE", help="YAML file with further settings")
    add("--dry-run", action="store_true", help="change nothing, tell what would be removed")
    add("--json", metavar="FILE", help="write the report as JSON; - is standard output")
    parser.set_defaults(run=_recover)


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="give other nodes a store of this one's disk",
        description=_SERVE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", type=Path, help="where stores lie")
    add("--store-id", default="default", help="the run (default: %(default)s)")
    add(
        "--listen",
        action="append",
        required=True,
        metavar="ENDPOINT",
        help="unix:/folder/socket for this host, tcp:host:port for others; may be repeated",
    )
    protection = parser.add_mutually_exclusive_group()
    protection.add_argument(
        "--identity",
        type=Path,
        metavar="FILE",
        help="key and certificate for TLS, which clients need too; made where there is none",
    )
    protection.add_argument(
        "--no-encryption",
        action="store_true",
        help="serve whoever reaches the port, without TLS: for private networks",
    )
    add("--durability", choices=("none", "batch", "step"), default="none")
    add(
        "--budget-mib",
        type=_positive,
        default=512,
        help="MiB of writes that are received and not stored yet (default: %(default)s)",
    )
    parser.set_defaults(run=_serve)


def _add_step(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "step",
        help="one Step, written and read",
        description=_STEP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--tokens", type=_positive, default=2048, help="tokens of a Step (default: %(default)s)")
    add("--layers", type=_positive, default=40, help="recorded layers (default: %(default)s)")
    add("--topk", type=_positive, default=8, help="experts per token (default: %(default)s)")
    add(
        "--dtype",
        choices=("uint8", "uint16", "int32"),
        default="uint8",
        help="stored type of the ids (default: %(default)s)",
    )
    add(
        "--layer-groups",
        type=_positive,
        default=4,
        help="groups of the layer axis, for reading a share of the layers (default: %(default)s)",
    )
    add("--repeats", type=_positive, default=15, help="counted rounds (default: %(default)s)")
    add("--root", type=Path, help="measure in this folder instead of on a loop mount")
    add("--json", metavar="FILE", help="write the ratios as one JSON object; - is standard output")
    parser.set_defaults(run=_step)


def _add_s3(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "s3",
        help="an object store, written and read",
        description=_S3,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="measure below this URL, s3://bucket/prefix")
    where.add_argument(
        "--server",
        choices=("auto", "moto", "minio"),
        default="auto",
        help="server to start; auto: MinIO's code where it is installed (default: %(default)s)",
    )
    add = parser.add_argument
    add("--repeats", type=_positive, default=15, help="counted rounds (default: %(default)s)")
    add(
        "--objects",
        type=_positive,
        default=64,
        help="objects of 0.66 MB in a timed run (default: %(default)s)",
    )
    add(
        "--write-back-bytes",
        type=_whole,
        default=8 * 1024**3,
        metavar="N",
        help="bytes recorded through a write-back tier; 0: leave it out (default: %(default)s)",
    )
    add("--json", metavar="FILE", help="write the figures as one JSON object; - is standard output")
    parser.set_defaults(run=_s3)


def _add_channel(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "channel",
        help="Steps to and from a unit of another process",
        description=_CHANNEL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--repeats", type=_positive, default=15, help="counted rounds (default: %(default)s)")
    add("--root", type=Path, help="measure in this folder instead of on a loop mount")
    add("--json", metavar="FILE", help="write the figures as one JSON object; - is standard output")
    parser.set_defaults(run=_channel)


def _add_controller(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "controller",
        help="a Controller that holds many Steps",
        description=_CONTROLLER,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=_positive, default=1_000_000, help="Steps to hold (default: %(default)s)")
    add("--root", type=Path, help="measure in this folder instead of on a loop mount")
    add("--json", metavar="FILE", help="write the figures as one JSON object; - is standard output")
    parser.set_defaults(run=_controller)


def _add_cluster(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "cluster",
        help="a store on the nodes of a cluster",
        description=_CLUSTER,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--repeats", type=_positive, default=15, help="counted rounds (default: %(default)s)")
    add(
        "--steps",
        type=_positive,
        default=1_000_000,
        help="Steps that the Controller holds (default: %(default)s)",
    )
    add(
        "--bytes",
        type=_positive,
        default=10 * 1024**3,
        metavar="N",
        help="bytes of Steps that pass through a unit (default: %(default)s)",
    )
    add(
        "--sessions",
        type=_positive,
        default=32,
        help="sessions that are rolled out and trained on (default: %(default)s)",
    )
    add("--root", type=Path, help="measure in this folder instead of on a loop mount")
    add("--json", metavar="FILE", help="write the figures as one JSON object; - is standard output")
    parser.set_defaults(run=_cluster)


def _add_transfer_queue(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "transfer-queue",
        help="TransferQueue with our backend and with its own",
        description=_TRANSFER_QUEUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--repeats", type=_positive, default=3, help="runs of each (default: %(default)s)")
    add(
        "--puts",
        type=_positive,
        default=200,
        help="Steps put in a round; a run has five (default: %(default)s)",
    )
    add(
        "--gib",
        type=_above_zero,
        default=4.0,
        metavar="N",
        help="GiB of Steps to hold while memory is measured (default: %(default)g)",
    )
    add(
        "--variants",
        nargs="+",
        choices=("simple", "ssd", "tq_fs"),
        default=("simple", "ssd", "tq_fs"),
        help="what to compare (default: all)",
    )
    add("--root", type=Path, help="measure in this folder instead of on a loop mount")
    add("--json", metavar="FILE", help="write the figures as one JSON object; - is standard output")
    parser.set_defaults(run=_transfer_queue)


def _demo(arguments: argparse.Namespace) -> int:
    if arguments.ray:
        return _demo_on_ray(arguments)
    if arguments.address is not None:
        raise InvalidConfig("is for --ray", subject="--address", remedy="give --ray too")
    from tq_fs.demo.run import run  # noqa: PLC0415  # needs torch
    from tq_fs.demo.scenario import DEFAULT  # noqa: PLC0415

    config = StoreConfig.from_yaml(arguments.config) if arguments.config else None
    return run(
        folder=arguments.folder,
        url=arguments.store,
        config=config,
        figure=arguments.figure,
        scale=replace(DEFAULT, payload_bytes=arguments.payload_mib * 2**20),
        console=Console(),
    )


def _demo_on_ray(arguments: argparse.Namespace) -> int:
    from tq_fs.demo.ray_run import run_on_ray  # noqa: PLC0415  # needs torch and Ray

    if arguments.store is not None:
        raise InvalidConfig(
            "is not for --ray", subject="--store", remedy="give a --config with the url and units"
        )
    return run_on_ray(
        address=arguments.address,
        folder=arguments.folder,
        config=StoreConfig.from_yaml(arguments.config) if arguments.config else None,
        payload_bytes=arguments.payload_mib * 2**20,
        console=Console(),
    )


def _recover(arguments: argparse.Namespace) -> int:
    config = StoreConfig.from_yaml(arguments.config) if arguments.config else StoreConfig()
    if arguments.store_id is not None:
        config = replace(config, store_id=arguments.store_id)
    found = recover_store(arguments.url, config, dry_run=arguments.dry_run)
    if arguments.json:
        _write_json(asdict(found), arguments.json)
    if arguments.json != "-":
        report.recovery(found, Console(), dry_run=arguments.dry_run)
    return 1 if found.incomplete or found.unreadable else 0


def _write_json(document: dict[str, Any], where: str) -> None:
    text = json.dumps(document, indent=2)
    if where == "-":
        print(text)
    else:
        Path(where).write_text(text + "\n")


def _serve(arguments: argparse.Namespace) -> int:
    from tq_fs.channel import Identity, Limits  # noqa: PLC0415  # only this command needs them
    from tq_fs.served import ServedStore  # noqa: PLC0415

    local = [e for e in arguments.listen if e.startswith("unix:")]
    remote = [e for e in arguments.listen if not e.startswith("unix:")]
    if remote and arguments.identity is None and not arguments.no_encryption:
        raise InvalidConfig(
            "would be served to everybody",
            subject=remote[0],
            remedy="give --identity, or --no-encryption in a private network",
        )
    identity = None
    if arguments.identity is not None:
        if not arguments.identity.exists():
            Identity.new(arguments.store_id).save(arguments.identity)
        identity = Identity.load(arguments.identity)
    ended = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: ended.set())
    with ServedStore(
        arguments.folder.absolute().as_uri(),
        store_id=arguments.store_id,
        local=local,
        remote=remote,
        identity=identity,
        durability=arguments.durability,
        limits=Limits(budget_bytes=arguments.budget_mib * 1024**2),
    ) as served:
        for url in served.urls:
            print(f"serving store {arguments.store_id!r} at {url}", flush=True)
        ended.wait()
    return 0


def _step(arguments: argparse.Namespace) -> int:
    from tq_fs.bench import step  # noqa: PLC0415  # only this command needs it

    to_stdout = arguments.json == "-"
    console = Console(stderr=to_stdout)
    bench = step.StepBench(
        shape=step.Shape(arguments.tokens, arguments.layers, arguments.topk, arguments.dtype),
        layer_groups=arguments.layer_groups,
        repeats=arguments.repeats,
        root=arguments.root,
    )
    measured = step.measure(bench, console)
    step.show(bench, measured, console)
    if arguments.json:
        text = json.dumps(step.document(bench, measured), indent=2)
        if to_stdout:
            print(text)
        else:
            Path(arguments.json).write_text(text + "\n")
    return 0


def _s3(arguments: argparse.Namespace) -> int:
    from tq_fs.bench import s3  # noqa: PLC0415  # only this command needs it

    console = Console(stderr=arguments.json == "-")
    bench = s3.S3Bench(
        url=arguments.url,
        server=arguments.server,
        repeats=arguments.repeats,
        objects=arguments.objects,
        write_back_bytes=arguments.write_back_bytes,
    )
    measured = s3.measure(bench, console)
    s3.show(bench, measured, console)
    if arguments.json:
        _write_json(s3.document(bench, measured), arguments.json)
    return 0


def _channel(arguments: argparse.Namespace) -> int:
    from tq_fs.bench import channel  # noqa: PLC0415  # only this command needs it

    console = Console(stderr=arguments.json == "-")
    bench = channel.ChannelBench(repeats=arguments.repeats, root=arguments.root)
    measured = channel.measure(bench, console)
    channel.show(bench, measured, console)
    if arguments.json:
        _write_json(channel.document(bench, measured), arguments.json)
    return 0


def _controller(arguments: argparse.Namespace) -> int:
    from tq_fs.bench import controller  # noqa: PLC0415  # only this command needs it

    console = Console(stderr=arguments.json == "-")
    bench = controller.ControllerBench(steps=arguments.steps, root=arguments.root)
    measured = controller.measure(bench, console)
    controller.show(bench, measured, console)
    if arguments.json:
        _write_json(controller.document(bench, measured), arguments.json)
    return 0


def _cluster(arguments: argparse.Namespace) -> int:
    from tq_fs.bench import cluster  # noqa: PLC0415  # only this command needs it

    console = Console(stderr=arguments.json == "-")
    bench = cluster.ClusterBench(
        repeats=arguments.repeats,
        steps=arguments.steps,
        nbytes=arguments.bytes,
        sessions=arguments.sessions,
        root=arguments.root,
    )
    measured = cluster.measure(bench, console)
    cluster.show(bench, measured, console)
    if arguments.json:
        _write_json(cluster.document(bench, measured), arguments.json)
    return 0


def _transfer_queue(arguments: argparse.Namespace) -> int:
    from tq_fs.bench import transfer_queue  # noqa: PLC0415  # only this command needs it

    console = Console(stderr=arguments.json == "-")
    bench = transfer_queue.TransferQueueBench(
        repeats=arguments.repeats,
        puts=arguments.puts,
        nbytes=round(arguments.gib * 1024**3),
        root=arguments.root,
        variants=tuple(arguments.variants),
    )
    measured = transfer_queue.measure(bench, console)
    transfer_queue.show(bench, measured, console)
    if arguments.json:
        _write_json(transfer_queue.document(bench, measured), arguments.json)
    return 0


def _above_zero(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value
