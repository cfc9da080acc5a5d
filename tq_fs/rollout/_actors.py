"""Starting the actors, each on its node."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tq_fs.errors import ActorLost
from tq_fs.rollout._barrier import Barrier
from tq_fs.rollout._calls import gather
from tq_fs.rollout._manager import Keep, Rollout, RolloutManager
from tq_fs.rollout._proxy import Agent, Proxy, ProxyConfig
from tq_fs.rollout._trainer import Step, Trained, Trainer, TrainerConfig

_SESSIONS_AT_ONCE = 4


def start_proxies(config: ProxyConfig, agent: Agent, nodes: Sequence[str]) -> list[Any]:
    """Start a Proxy on each of some nodes, given by their ids."""
    return [
        _on(node, Proxy, num_cpus=config.cpus, max_concurrency=_SESSIONS_AT_ONCE).remote(
            config, agent
        )
        for node in nodes
    ]


def start_manager(proxies: Sequence[Any], *, data: int, node: str, keep: Keep | None = None) -> Any:
    """Start a RolloutManager."""
    return _on(node, RolloutManager, num_cpus=0).remote(proxies, data=data, keep=keep)


class Trainers:
    """All ranks, on some nodes; ranks that follow each other are on the same.

    Parameters
    ----------
    config
        Settings.
    step
        Is called by each rank with each of its micro-batches.
    nodes
        Ids of nodes.

    Attributes
    ----------
    ranks
        The actors, by their number.
    """

    def __init__(self, config: TrainerConfig, step: Step, nodes: Sequence[str]) -> None:
        self._config = config
        self._barrier = _on(
            nodes[0], Barrier, num_cpus=0, max_concurrency=2 * config.parallel.size
        ).remote(config.barrier_s)
        options = {
            "num_cpus": config.cpus,
            "max_restarts": config.restarts,
            "max_task_retries": config.restarts,
        }
        size = config.parallel.size
        self.ranks = [
            _on(nodes[number * len(nodes) // size], Trainer, **options).remote(config, number, step)
            for number in range(size)
        ]

    def train(self, rollout: Rollout) -> list[Trained]:
        """Train on a rollout; return what each rank says, once all have.

        Raises
        ------
        ActorLost
            A rank ended more often than it may be started again.
        TqFsError
            What a rank raised.
        """
        places = zip(self.ranks, self._config.parallel.ranks(), strict=True)
        return gather(
            [t.train.remote(rollout.shards[rank.data], self._barrier) for t, rank in places]
        )

    def checkpoint_saved(self, rollout_id: int) -> int:
        """Let go of what the model's checkpoint has used; return how many Steps that deleted."""
        (count,) = gather([self.ranks[0].checkpoint_saved.remote(rollout_id)])
        return int(count)

    def stop(self) -> None:
        """Close every rank's store, and end the ranks; also those that wait for others."""
        ray.kill(self._barrier)
        stop(self.ranks)


def stop(actors: Sequence[Any]) -> None:
    """Close the stores of Proxies or trainers, and end them; also those that have ended already."""
    for closing in [actor.close.remote() for actor in actors]:
        with suppress(ActorLost):
            gather([closing])
    for actor in actors:
        ray.kill(actor)


def _on(node: str, kind: type, **options: Any) -> Any:
    return ray.remote(kind).options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False), **options
    )
