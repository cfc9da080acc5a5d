"""Where values of a TransferQueue lie in tests, and the Ray that they are reached from.

Run by other interpreters too, so it imports Ray only where it starts it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

Place = Literal["local", "units", "s3"]
PLACES: tuple[Place, ...] = get_args(Place)
# On the first node there is room for TransferQueue's controller, so that what a test starts besides
# runs on the second one.
CPUS = {"local": (8,), "units": (1, 8), "s3": (1, 8)}


def settings(place: Place, root: str, store_id: str, **more: Any) -> dict[str, Any]:
    """Return ``backend.TqFs``.

    Parameters
    ----------
    root
        A folder; or ``s3://bucket/prefix``.
    """
    where: dict[str, Any] = {"url": root if place == "s3" else f"file://{root}"}
    if place == "units":
        where = {"cluster": {"paths": [f"{root}/{{node}}"], "sweep_s": 0.0}}
    return {"store_id": store_id, **where, **more}


def configuration(place: Place, root: str, store_id: str, **more: Any) -> dict[str, Any]:
    """Return what ``transfer_queue.init`` is given."""
    return {
        "controller": {"polling_mode": True},
        "backend": {"storage_backend": "TqFs", "TqFs": settings(place, root, store_id, **more)},
    }


@contextmanager
def raylets(place: Place) -> Iterator[str]:
    """Start nodes of Ray on this machine, on loopback, and end them; yields their address."""
    from ray.cluster_utils import Cluster

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        cluster = Cluster()
        try:
            for name, cpus in zip("ab", CPUS[place], strict=False):
                cluster.add_node(node_name=name, num_cpus=cpus, include_dashboard=False)
            yield cluster.address
        finally:
            cluster.shutdown()  # type: ignore[no-untyped-call]
