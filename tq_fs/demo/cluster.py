"""``tq-fs demo --ray``: both paths on a Ray cluster, from Proxies on all nodes to trainers on all.

On the in-memory path the large fields travel in the Segments, through RolloutManager and Ray's
object stores. On the other one Ray carries references, and trainers read from the units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from tq_fs import cluster, rollout
from tq_fs.config import StoreConfig
from tq_fs.demo.compare import digests_differ
from tq_fs.demo.engine import TinyMoe
from tq_fs.demo.played import Replay, take_digests
from tq_fs.demo.replay import CONSUMER, copies_for
from tq_fs.demo.report import mib
from tq_fs.demo.scenario import Rollout, Scale, play
from tq_fs.rollout import Parallel, ProxyConfig, Trained, TrainerConfig, Trainers
from tq_fs.store import open_store

# As many recorded layers as large models have: what is resident of a token (its id, its mask) is
# then as small beside its routing as there, also where each shard lies on two nodes. Few experts,
# which take the time on a CPU.
SCALE = Scale(
    layers=60,
    experts=32,
    hidden=32,
    sessions=3,
    prompt_tokens=256,
    tool_tokens=160,
    new_tokens=8,
)
PARALLEL = Parallel(data=2, pipeline=2, context=2)
MOST_SHARE = 0.01  # of the payload, that Ray's object stores may hold
MOST_LINES = 20
ROLLOUT = 0  # its number


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """What one path did.

    Attributes
    ----------
    trained
        What each rank says.
    segments, deleted
        Segments trained on, and Steps deleted after the checkpoint.
    ray_bytes
        Growth of Ray's object stores, all nodes together, at its peak.
    ray_by_node
        The same of each node by itself.
    """

    trained: tuple[Trained, ...]
    segments: int
    deleted: int
    ray_bytes: int
    ray_by_node: Mapping[str, int]

    def total(self, what: str) -> int:
        """Return the sum of a figure over all ranks."""
        return sum(getattr(rank, what) for rank in self.trained)

    def digests(self) -> dict[str, str]:
        """Return the digest of each tensor by its name, and its rank's."""
        return {
            f"rank {rank.rank}, {name}": value
            for rank in self.trained
            for result in rank.results
            for name, value in result.items()
        }


class RayDemo:
    """One run of the demo on a Ray cluster.

    Parameters
    ----------
    scale
        How large it is.
    nodes
        Ids of the cluster's nodes.
    console
        Prints.
    parallel
        How training is spread over ranks.
    """

    def __init__(
        self, scale: Scale, nodes: Sequence[str], console: Console, parallel: Parallel = PARALLEL
    ) -> None:
        self._scale = scale
        self._nodes = list(nodes)
        self._console = console
        self._parallel = parallel

    def run(self, config: StoreConfig) -> int:
        """Take both paths and return the exit code; the last line printed is the verdict.

        Parameters
        ----------
        config
            Of the store, with its units.
        """
        rollouts = play(TinyMoe(**self._scale.model()), self._scale)
        copies = copies_for(rollouts, self._scale)
        sessions = [f"{r.session_id}.{copy}" for copy in range(copies) for r in rollouts]
        steps = copies * sum(len(r.turns) for r in rollouts)
        self._say(
            f"{len(rollouts)} sessions of a Qwen3MoeForCausalLM with random weights "
            f"({self._scale.layers} layers, top-{self._scale.topk} of {self._scale.experts} "
            f"experts), each replayed {copies} times: {steps:,} Steps. {len(self._nodes)} nodes, "
            f"with a Proxy on each; {self._parallel.size} trainers: data {self._parallel.data}, "
            f"pipeline {self._parallel.pipeline}, context {self._parallel.context}."
        )
        agent = Replay({r.session_id: r for r in rollouts})
        memory = self._take(agent, sessions, None)
        with cluster.start(config) as running:
            units = [f"{unit.name} on {unit.node_name}" for unit in running.layout().units]
            self._say(f"Units: {', '.join(units)}.")
            stored = self._take(agent, sessions, config.store_id)
        payload = self._payload(rollouts, copies)
        self._console.print(table(memory, stored, payload))
        self._say(
            "Payload: the large fields of all Segments, as in memory. Ray's object stores: growth "
            "at the peak, sampled every 20 ms, all nodes together; read: by all ranks."
        )
        return self._verdict(memory, stored, payload, steps)

    # ------------------------------------------------------------ one path

    def _take(self, agent: Replay, sessions: Sequence[str], store_id: str | None) -> Path:
        """Roll out, shard, train and release."""
        fields = tuple(self._scale.fields())
        proxies = rollout.start_proxies(
            ProxyConfig(store_id=store_id, fields=fields, consumers=(CONSUMER,)), agent, self._nodes
        )
        manager = rollout.start_manager(proxies, data=self._parallel.data, node=self._nodes[0])
        settings = TrainerConfig(
            store_id=store_id,
            fields=fields,
            parallel=self._parallel,
            consumer=CONSUMER,
            budget_bytes=self._scale.budget_bytes,
        )
        trainers = Trainers(settings, take_digests, self._nodes)
        rollout.gather([actor.passed.remote() for actor in proxies])  # they are there
        rollout.gather([rank.pid.remote() for rank in trainers.ranks])
        with rollout.ObjectStoreWatch() as watch:
            (made,) = rollout.gather([manager.generate.remote(ROLLOUT, sessions)])
            trained = trainers.train(made)
            deleted = trainers.checkpoint_saved(ROLLOUT)
        trainers.stop()
        rollout.stop(proxies)
        return Path(
            trained=tuple(trained),
            segments=sum(shard.count for shard in made.shards),
            deleted=deleted,
            ray_bytes=watch.growth_bytes,
            ray_by_node=watch.growth_by_node,
        )

    def _payload(self, rollouts: Sequence[Rollout], copies: int) -> int:
        """Return the bytes of the large fields of all Segments, as in memory."""
        nbytes = 0
        with open_store(None, fields=self._scale.fields()) as store:
            for played in rollouts:
                session = store.session(played.session_id)
                played.record(session)
                for segment in session.finalize():
                    nbytes += sum(array.nbytes for array in segment.arrays.values())
        return copies * nbytes

    # ------------------------------------------------------------ report

    def _verdict(self, memory: Path, stored: Path, payload: int, steps: int) -> int:
        broken = [f"NOT as promised: {line}" for line in self._broken(stored, payload, steps)]
        different = digests_differ(stored.digests(), memory.digests())
        broken += [f"NOT identical: {name}" for name in different]
        for line in broken[-MOST_LINES:]:
            self._say(line)
        if broken:
            return 1
        self._say(
            f"All {len(memory.digests()):,} tensors of {self._parallel.size} trainers, from "
            f"{memory.segments:,} Segments, are bit-identical to the in-memory path's."
        )
        return 0

    def _broken(self, stored: Path, payload: int, steps: int) -> Iterator[str]:
        if stored.total("channel_bytes") == 0 and len(self._nodes) > 1:
            yield "nothing was read from another node"
        for rank in stored.trained:
            if rank.foreign_units:
                yield f"rank {rank.rank} opened files of another node's {rank.foreign_units}"
        if stored.ray_bytes >= MOST_SHARE * payload:
            yield f"Ray's object stores grew by {stored.ray_bytes / payload:.1%} of the payload"
        if stored.deleted != steps:
            yield f"release deleted {stored.deleted} of {steps} Steps"

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def table(memory: Path, stored: Path, payload: int) -> Table:
    """Return both paths side by side."""
    found = Table(title="The same rollouts through both paths, on a Ray cluster")
    found.add_column("")
    found.add_column("in-memory path", justify="right")
    found.add_column("tq-fs", justify="right")
    paths = (memory, stored)
    found.add_row("Segments", *(f"{p.segments:,}" for p in paths))
    found.add_row("payload", *(mib(payload) for _ in paths))
    found.add_row(
        "growth of Ray's object stores",
        *(f"{mib(p.ray_bytes)} ({p.ray_bytes / payload:.2%})" for p in paths),
    )
    found.add_section()
    found.add_row("read over the channel", "", mib(stored.total("channel_bytes")))
    found.add_row("read from files of the own node", "", mib(stored.total("file_bytes")))
    foreign = sum(len(rank.foreign_units) for rank in stored.trained)
    found.add_row("files of another node's unit opened", "", str(foreign))
    found.add_row("tensors, as in memory", *(mib(p.total("tensor_bytes")) for p in paths))
    found.add_section()
    found.add_row("Steps deleted after the checkpoint", "", f"{stored.deleted:,}")
    return found
