"""Rollout and training on a Ray cluster, as a small reference: copy from it what you need.

Proxy → Segments → RolloutManager → shards → trainers. Large fields go from the Proxy to a
StorageUnit and from there to the trainers; through Ray go references.
"""

from tq_fs.rollout._actors import Trainers, start_manager, start_proxies, stop
from tq_fs.rollout._calls import gather
from tq_fs.rollout._manager import Keep, Rollout, RolloutManager
from tq_fs.rollout._object_store import ObjectStoreWatch, object_store_bytes
from tq_fs.rollout._proxy import Agent, Proxy, ProxyConfig
from tq_fs.rollout._ranks import Parallel, Rank
from tq_fs.rollout._shards import Shard, balance
from tq_fs.rollout._trainer import Step, Trained, Trainer, TrainerConfig

__all__ = [
    "Agent",
    "Keep",
    "ObjectStoreWatch",
    "Parallel",
    "Proxy",
    "ProxyConfig",
    "Rank",
    "Rollout",
    "RolloutManager",
    "Shard",
    "Step",
    "Trained",
    "Trainer",
    "TrainerConfig",
    "Trainers",
    "balance",
    "gather",
    "object_store_bytes",
    "start_manager",
    "start_proxies",
    "stop",
]
