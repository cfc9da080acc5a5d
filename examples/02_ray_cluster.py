"""A rollout crosses a Ray cluster: references through Ray, the large fields past it.

Two nodes, each with a StorageUnit on its disk, a Proxy that records, and trainers. Every trainer is
a rank of a parallel layout and reads its own layers and tokens only: from files on its own node,
and over the channel from the other one. What it gets is compared with the in-memory path's.

    pip install 'tq-fs[torch,ray,cluster]'
    python examples/02_ray_cluster.py                   # starts two raylets on this machine
    python examples/02_ray_cluster.py --address auto    # on the Ray cluster that runs here
"""

from __future__ import annotations

import argparse
import sys
import uuid
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

import tq_fs
from tq_fs import cluster, rollout
from tq_fs.demo.compare import digest, digests_differ, name_of
from tq_fs.demo.raylets import folder_everywhere, joined

LAYERS, TOPK, EXPERTS = 40, 8, 128
FIELDS = (
    tq_fs.logprobs(),
    tq_fs.routed_experts(layers=LAYERS, topk=TOPK, experts=EXPERTS),
)
# Two shards of the samples; in each, two pipeline stages of twenty layers.
PARALLEL = rollout.Parallel(data=2, pipeline=2)
SESSIONS = [f"session-{number}" for number in range(16)]


class Agent:
    """Plays a session on an engine; here one that makes up its replies, the same for each id.

    It lives in the Proxy's process: replies come to it as SGLang's do, not through Ray.
    """

    def play(self, session: tq_fs.Session) -> None:
        """Record a prompt with its answer, then what follows three tool results."""
        engine = np.random.default_rng(zlib.crc32(session.session_id.encode()))
        last = None
        for context, response in [(256, 32), (128, 32), (64, 16), (128, 48)]:
            tokens = engine.integers(0, 32_000, context + response, dtype=np.int32)
            rows = context + response - (last is None)  # the last token of all has no routing
            values: dict[str, Any] = {
                "logprobs": -engine.random(response, dtype=np.float32),
                "routed_experts": engine.integers(0, EXPERTS, (rows, LAYERS, TOPK), dtype=np.int32),
            }
            parts = (tokens[:context], tokens[context:])
            if last is None:
                step = session.create(*parts, **values)
            else:
                step = session.append(last, *parts, **values)
            last = step.index


def learn(
    segments: Sequence[tq_fs.Segment], tensors: Mapping[str, Sequence[torch.Tensor]]
) -> dict[str, str]:
    """Stand in for the forward and backward pass: return what can be compared."""
    return {
        name_of(segment, field): digest(tensor)
        for field, values in tensors.items()
        for segment, tensor in zip(segments, values, strict=True)
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Tell the story; 0 if every rank got what the in-memory path gives."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--address", help="of a Ray cluster (default: two raylets of our own)")
    address = parser.parse_args(arguments).address
    with (
        joined(address) as nodes,
        # In earnest: a folder on each node's NVMe. {node} is for raylets that share a disk.
        folder_everywhere(nodes) as folder,
        cluster.start(
            tq_fs.StoreConfig(
                store_id=f"example-{uuid.uuid4().hex[:8]}",
                layer_groups=PARALLEL.pipeline,
                cluster=tq_fs.ClusterConfig(paths=(f"{folder}/{{node}}",)),
            )
        ) as running,
    ):
        return tell(running, nodes)


def tell(running: cluster.StoreCluster, nodes: Sequence[str]) -> int:
    """Roll out, train, and release."""
    print("1. A unit on each node.")
    for unit in running.layout().units:
        print(f"   {unit.name} on node {unit.node_name}, for others at {unit.remote}")

    print("\n2. Proxies on all nodes record; the RolloutManager shards what comes of it.")
    store_id = running.config.store_id
    proxies = rollout.start_proxies(
        rollout.ProxyConfig(store_id=store_id, fields=FIELDS), Agent(), nodes
    )
    manager = rollout.start_manager(proxies, data=PARALLEL.data, node=nodes[0])
    (made,) = rollout.gather([manager.generate.remote(0, SESSIONS)])
    for shard in made.shards:
        print(f"   shard {shard.data}: {shard.count} Segments, {shard.tokens:,} tokens")
    print(f"   Ray's object stores grew by {made.object_store_bytes:,} bytes.")

    print("\n3. Every rank trains on its layers and tokens of its shard.")
    trainers = rollout.Trainers(
        rollout.TrainerConfig(
            store_id=store_id, fields=FIELDS, parallel=PARALLEL, budget_bytes=8 * 1024**2
        ),
        learn,
        nodes,
    )
    trained = trainers.train(made)
    for rank, found in zip(PARALLEL.ranks(), trained, strict=True):
        first, last = rank.layers(LAYERS)
        print(
            f"   rank {found.rank} on node {nodes.index(found.node)}, shard {rank.data}, layers "
            f"{first} to {last}: {found.tensor_bytes:,} bytes of tensors from "
            f"{found.file_bytes:,} of files and {found.channel_bytes:,} over the channel; "
            f"{len(found.foreign_units)} files of another node's unit"
        )
    wrong = compare(trained)

    print("\n4. The checkpoint is saved: what it used is no longer needed.")
    print(f"   {trainers.checkpoint_saved(0)} Steps deleted.")
    trainers.stop()
    rollout.stop(proxies)
    if wrong:
        print(f"\nNOT identical: {wrong[0]}")
        return 1
    count = sum(len(result) for found in trained for result in found.results)
    print(f"\nAll {count} tensors are bit-identical to the in-memory path's.")
    return 0


def compare(trained: Sequence[rollout.Trained]) -> list[str]:
    """Return the names of tensors that differ from the in-memory path's, or are missing."""
    wrong: list[str] = []
    for rank in PARALLEL.ranks():
        if rank.data == 0:  # the same place in all shards: together they have every Segment
            place = [
                trained[other.number]
                for other in PARALLEL.ranks()
                if (other.pipeline, other.context, other.tensor)
                == (rank.pipeline, rank.context, rank.tensor)
            ]
            got = {name: d for found in place for part in found.results for name, d in part.items()}
            wrong += digests_differ(got, in_memory(rank))
    return wrong


def in_memory(rank: rollout.Rank) -> dict[str, str]:
    """Return what a rank's part of all sessions is, where everything stays in memory."""
    with tq_fs.open_store(None, fields=FIELDS) as memory:
        segments: list[tq_fs.Segment] = []
        for session_id in SESSIONS:
            session = memory.session(session_id)
            Agent().play(session)
            segments += session.finalize()
        tensors = memory.hydrate(
            segments,
            fields=rank.fields(FIELDS),
            layers=rank.layers(LAYERS),
            tokens=rank.tokens,
        )
        return learn(segments, tensors)


if __name__ == "__main__":
    sys.exit(main())
