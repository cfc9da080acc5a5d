"""A plan as tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tq_fs.planner import Plan, shares, size_text

_COMPONENTS = {
    "proxy": "Proxy",
    "rollout_manager": "RolloutManager",
    "object_store": "Ray object store",
    "storage_unit": "StorageUnits",
    "writer": "writer, of the Proxy",
    "controller": "Controller",
}
_FIELDS = {
    "routed_experts": "routed experts",
    "logprobs": "logprobs",
    "token_ids": "token ids",
    "messages": "messages",
    "others": "masks, versions, others",
}
_PATHS = {"central": "centralized", "transfer_queue": "queue in memory", "tq_fs": "tq-fs"}
_LEFT = {
    "master": "left for HiCache on the master",
    "worker": "on any other node",
    "training": "there, while trainers hydrate",
}


def show(planned: Plan, console: Console) -> None:
    """Print the plan."""
    work, place = planned.work, planned.place
    segments = "1 Segment" if work.segments == 1 else f"{work.segments:g} Segments"
    console.print(
        f"{work.trajectories:,} trajectories of {segments} with {work.context:,} "
        f"tokens, {work.turns} turns in {work.mode} mode: {work.tokens:,.0f} tokens in "
        f"{work.steps:,.0f} Steps;\n{work.model.layers} layers, top-{work.model.topk} of "
        f"{work.model.experts} experts; {place.nodes} nodes, {place.all_units} units. "
        f"Calibration: {planned.calibration.name}.",
        highlight=False,
        soft_wrap=True,
    )
    for table in (_fields(planned), _types(planned), _memory(planned), _rest(planned)):
        console.print()
        console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _fields(planned: Plan) -> Table:
    table = _table("A batch by field", "in memory", "share", "stored")
    parts = shares(dict(planned.fields))
    for name, size in planned.fields.items():
        kept = planned.stored.get(name)
        table.add_row(
            _FIELDS[name],
            size_text(size),
            f"{parts[name]:.1%}",
            "" if kept is None else size_text(kept),
        )
    totals = (sum(planned.fields.values()), sum(planned.stored.values()))
    table.add_row("all", size_text(totals[0]), "", size_text(totals[1]))
    return table


def _types(planned: Plan) -> Table:
    table = _table("Routed experts as", *planned.r3)
    sizes = ("does not fit" if n is None else size_text(n) for n in planned.r3.values())
    table.add_row("a batch", *sizes)
    return table


def _memory(planned: Plan) -> Table:
    table = _table("Peak on the master node", *(_PATHS[name] for name in planned.memory))
    paths = planned.memory.values()
    for name, label in _COMPONENTS.items():
        sizes = (size_text(p.master[name]) if name in p.master else "" for p in paths)
        table.add_row(label, *sizes)
    table.add_row("at one moment", *(size_text(p.total) for p in paths))
    table.add_row("peak on any other node", *(size_text(p.worker) for p in paths))
    for where, label in _LEFT.items():
        left = (planned.left(name)[where] for name in planned.memory)
        table.add_row(label, *(_room(size) for size in left))
    table.add_row(
        f"{size_text(planned.place.host_bytes)} are exceeded from batch",
        *("never" if n is None else f"{n:,}" for n in planned.exceeding.values()),
    )
    return table


def _room(nbytes: float) -> str:
    return size_text(nbytes) if nbytes >= 0 else f"{size_text(-nbytes)} short"


def _rest(planned: Plan) -> Table:
    table = _table("Trainers and store", "", "of a node")
    for row in (*_trainers(planned), *_space(planned), *_requests(planned)):
        table.add_row(*row)
    return table


def _trainers(planned: Plan) -> list[tuple[str, ...]]:
    trainer = planned.trainer
    whole = (size_text(trainer.shard), size_text(trainer.shard_node))
    return [
        ("hydrating a whole shard, a rank", *whole),
        ("hydrating by micro-batches, a rank", size_text(trainer.rank), size_text(trainer.node)),
        ("a rank's micro-batch", size_text(trainer.budget)),
        ("its part of one sample", size_text(trainer.sample)),
    ]


def _space(planned: Plan) -> list[tuple[str, ...]]:
    space, speed, place = planned.space, planned.bandwidth, planned.place
    kept = f"NVMe until a checkpoint, batches: {place.checkpoint_batches:,}"
    return [
        (kept, size_text(space.total), size_text(space.node)),
        ("the same in tito mode", size_text(space.tito)),
        ("the same in snapshot mode", size_text(space.snapshot)),
        (f"written in {place.rollout_s:g} s", _speed(speed.write), _speed(speed.write_node)),
        (f"read in {place.train_s:g} s", _speed(speed.read), _speed(speed.read_node)),
    ]


def _requests(planned: Plan) -> list[tuple[str, ...]]:
    s3 = planned.requests
    return [
        ("S3 requests of a batch: PUT", f"{s3.put:,}"),
        ("GET, without a cache", f"{s3.get:,}"),
        ("LIST", f"{s3.list:,}"),
        ("objects, deleted later", f"{s3.objects:,}"),
    ]


def _speed(per_second: float) -> str:
    return f"{size_text(per_second)}/s"
