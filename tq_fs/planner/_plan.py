"""The plan: everything at once, as values and as one JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tq_fs.planner._calibration import PUBLISHED, Calibration
from tq_fs.planner._checks import check_together
from tq_fs.planner._deployment import Deployment
from tq_fs.planner._fields import central_fields, shares, stored_fields
from tq_fs.planner._memory import PATHS, PathMemory, exceeding_batch
from tq_fs.planner._models import TYPE_BYTES
from tq_fs.planner._sizes import TiB
from tq_fs.planner._storage import Bandwidth, Requests, Space, bandwidth, requests, space
from tq_fs.planner._trainer import Hydration, hydration
from tq_fs.planner._workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a workload needs on some machines; sizes in bytes.

    Attributes
    ----------
    work, place, calibration
        What was asked.
    fields
        A batch in memory on the centralized path, by field.
    stored
        A batch's stored fields.
    r3
        Routed-expert ids by stored type; None where the experts do not fit.
    memory
        Peaks by path: ``central``, ``transfer_queue``, ``tq_fs``.
    exceeding
        By path, the smallest batch whose peak exceeds a node's memory; None where none does.
    trainer
        Memory of trainers while they hydrate.
    space, bandwidth, requests
        Of the store.
    """

    work: Workload
    place: Deployment
    calibration: Calibration
    fields: Mapping[str, float]
    stored: Mapping[str, float]
    r3: Mapping[str, float | None]
    memory: Mapping[str, PathMemory]
    exceeding: Mapping[str, int | None]
    trainer: Hydration
    space: Space
    bandwidth: Bandwidth
    requests: Requests

    def left(self, path: str) -> dict[str, float]:
        """Return what a path leaves of a node's memory to HiCache, and to all else [bytes].

        ``master`` and ``worker`` while rolling out; ``training`` on a worker that hydrates
        meanwhile, a whole shard at once without tq-fs. Below zero: it does not fit.
        """
        memory, host = self.memory[path], self.place.host_bytes
        hydrated = self.trainer.node if path == "tq_fs" else self.trainer.shard_node
        return {
            "master": host - memory.total,
            "worker": host - memory.worker,
            "training": host - memory.worker - hydrated,
        }

    def document(self) -> dict[str, Any]:
        """Return the plan as plain values, for JSON."""
        return {
            "settings": self._settings(),
            "calibration": self.calibration.name,
            "r3_tib": {t: None if n is None else n / TiB for t, n in self.r3.items()},
            "fields_bytes": dict(self.fields),
            "fields_share": shares(dict(self.fields)),
            "stored_bytes": dict(self.stored),
            "memory": {name: self._path(name) for name in self.memory},
            "trainer_bytes": asdict(self.trainer),
            "nvme_bytes": asdict(self.space),
            "bandwidth_bytes_per_s": asdict(self.bandwidth),
            "s3_requests": asdict(self.requests),
        }

    def _settings(self) -> dict[str, Any]:
        place = asdict(self.place) | {"units": self.place.all_units}
        place["ranks"]["data"] = self.place.data
        work = asdict(self.work) | {"stored": self.work.stored_type}
        return work | {"tokens": self.work.tokens, "steps": self.work.steps} | place

    def _path(self, name: str) -> dict[str, Any]:
        memory = self.memory[name]
        return {
            "master_bytes": memory.total,
            "worker_bytes": memory.worker,
            "components_bytes": dict(memory.master),
            "left_bytes": self.left(name),
            "exceeding_batch": self.exceeding[name],
        }


def plan(work: Workload, place: Deployment, calibration: Calibration = PUBLISHED) -> Plan:
    """Plan what `work` needs on the machines of `place`.

    Raises
    ------
    InvalidConfig
        The two contradict each other.
    """
    check_together(work, place)
    return Plan(
        work=work,
        place=place,
        calibration=calibration,
        fields=central_fields(work),
        stored=stored_fields(work),
        r3={t: work.r3_bytes(t) if work.model.fits(t) else None for t in reversed(TYPE_BYTES)},
        memory={name: make(work, place, calibration) for name, make in PATHS.items()},
        exceeding={name: exceeding_batch(name, work, place, calibration) for name in PATHS},
        trainer=hydration(work, place),
        space=space(work, place),
        bandwidth=bandwidth(work, place),
        requests=requests(work, place),
    )
