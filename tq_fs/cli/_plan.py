"""``tq-fs plan``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from tq_fs.cli._plan_tables import show
from tq_fs.errors import InvalidConfig
from tq_fs.planner import (
    PRESETS,
    PUBLISHED,
    Deployment,
    Plan,
    Ranks,
    RoutedModel,
    Workload,
    draw_plan,
    parse_count,
    parse_size,
    plan,
    preset,
    read_calibration,
)

_PLAN = """\
Plans capacity: what a model, context and batch take in memory on the master node and on the others,
on the centralized path, with a queue in memory and with tq-fs; what is left for HiCache; what
trainers take while they hydrate; space and bandwidth of NVMe, and requests to an object store.
Peaks are measured ones, scaled: by default those that were published for Qwen3.6-35B-A3B.
docs/planning.md says what is behind each number.

example:
  tq-fs plan --preset glm-5.2 --context 256k --batch 512
  tq-fs plan --layers 48 --topk 8 --experts 128 --context 64k --nodes 4 --json -
"""
_WIDTH = 80
_SHAPE = ("layers", "topk", "experts")
_COUNTS: dict[str, tuple[str, int, str]] = {
    # option: where it goes, default, what it says
    "batch": ("work", 512, "prompts of a batch"),
    "samples": ("work", 8, "trajectories for each prompt"),
    "turns": ("work", 16, "model invocations of a Segment"),
    "units": ("place", 0, "StorageUnits over all nodes, 0 for one a node"),
    "gpus": ("place", 8, "GPUs of a node"),
    "checkpoint-batches": ("place", 1, "batches that are kept until a model checkpoint is saved"),
    "data": ("ranks", 0, "data-parallel shards, 0 for as many as the GPUs allow"),
    "tensor": ("ranks", 1, "tensor-parallel ranks"),
    "pipeline": ("ranks", 1, "pipeline stages"),
    "context-parallel": ("ranks", 1, "ranks that share a sample's tokens"),
}
_SIZES = {
    "host-memory": ("2TB", "memory of a node"),
    "micro-batch": ("0", "budget of a rank's micro-batch; 0 for one sample, and 256MiB at least"),
    "unit-budget": ("512MiB", "budget of a StorageUnit"),
    "writer-budget": ("1GiB", "budget of the Proxy's writer"),
}


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "plan",
        help="what a model, context and batch need",
        description=_PLAN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_workload(parser)
    for name, (_, default, text) in _COUNTS.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{text} (default: {default})"
        )
    for name, (size, text) in _SIZES.items():
        parser.add_argument(
            f"--{name}", metavar="SIZE", default=size, help=f"{text} (default: {size})"
        )
    _add_output(parser)
    parser.set_defaults(run=_plan)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--preset", metavar="MODEL", help=f"a model by name: {', '.join(PRESETS)}")
    add("--layers", type=int, help="layers whose routing is recorded")
    add("--topk", type=int, help="experts of a token in a layer")
    add("--experts", type=int, help="experts that a layer has")
    add("--context", default="64k", help="tokens of a Segment; k is 1024 (default: 64k)")
    add("--segments", type=float, default=1.0, help="mean Segments of a trajectory (default: 1)")
    add("--mode", default="tito", help="tito or snapshot: what a Step stores (default: tito)")
    add(
        "--stored",
        default="auto",
        help="type of the stored ids: uint8, uint16, int32, or auto for the narrowest",
    )
    add("--central", default="int32", help="their type on the centralized path (default: int32)")
    add("--nodes", type=int, help="nodes of the cluster (default: the preset's, or 8)")
    for name, seconds in (("rollout-s", 1800.0), ("train-s", 600.0)):
        what = "the rollout of" if name == "rollout-s" else "training on"
        text = f"seconds for {what} a batch (default: {seconds:g})"
        add(f"--{name}", type=float, default=seconds, help=text)


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="scale the peaks of this JSON of tq-fs bench memory, not the published ones",
    )
    add(
        "--figure",
        type=Path,
        metavar="FILE",
        help="draw the master node's peak over the batch as PNG (extra demo)",
    )
    add("--json", metavar="FILE", help="write the plan as one JSON object; - is standard output")


def _plan(arguments: argparse.Namespace) -> int:
    console = Console(stderr=arguments.json == "-")
    console.width = max(console.width, _WIDTH)  # a number that is cut off is worse than a long line
    known = read_calibration(arguments.calibrate) if arguments.calibrate else PUBLISHED
    planned = plan(_workload(arguments), _deployment(arguments), known)
    show(planned, console)
    try:
        _write(planned, arguments)
    except OSError as error:
        raise InvalidConfig(f"cannot be written: {error}", subject=error.filename or "-") from error
    return 0


def _write(planned: Plan, arguments: argparse.Namespace) -> None:
    if arguments.figure:
        draw_plan(planned, arguments.figure)
    if not arguments.json:
        return
    text = json.dumps(planned.document(), indent=2)
    if arguments.json == "-":
        print(text)
    else:
        Path(arguments.json).write_text(text + "\n")


def _workload(arguments: argparse.Namespace) -> Workload:
    return Workload(
        model=_model(arguments),
        context=parse_count(arguments.context, "context"),
        segments=arguments.segments,
        mode=arguments.mode,
        stored=arguments.stored,
        central=arguments.central,
        **_counts(arguments, "work"),
    )


def _model(arguments: argparse.Namespace) -> RoutedModel:
    """Return the preset with the numbers that were given in the place of its own."""
    shape = {name: getattr(arguments, name) for name in _SHAPE}
    if arguments.preset:
        known = preset(arguments.preset).model
        shape = {n: getattr(known, n) if v is None else v for n, v in shape.items()}
    missing = [name for name, value in shape.items() if value is None]
    if missing:
        raise InvalidConfig(
            f"{', '.join(missing)} of the model are not known",
            subject="plan",
            remedy="give --preset, or --layers, --topk and --experts",
        )
    return RoutedModel(**shape)


def _deployment(arguments: argparse.Namespace) -> Deployment:
    nodes = preset(arguments.preset).nodes if arguments.preset else 8
    ranks = _counts(arguments, "ranks")
    return Deployment(
        nodes=nodes if arguments.nodes is None else arguments.nodes,
        ranks=Ranks(context=ranks.pop("context_parallel"), **ranks),
        host_bytes=parse_size(arguments.host_memory, "host memory"),
        micro_batch_bytes=parse_size(arguments.micro_batch, "micro batch"),
        unit_bytes=parse_size(arguments.unit_budget, "unit budget"),
        writer_bytes=parse_size(arguments.writer_budget, "writer budget"),
        rollout_s=arguments.rollout_s,
        train_s=arguments.train_s,
        **_counts(arguments, "place"),
    )


def _counts(arguments: argparse.Namespace, owner: str) -> dict[str, int]:
    names = [name.replace("-", "_") for name, (of, _, _) in _COUNTS.items() if of == owner]
    return {name: getattr(arguments, name) for name in names}
