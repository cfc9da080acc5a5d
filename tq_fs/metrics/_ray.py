"""The same metrics through Ray's own export."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from tq_fs.errors import DependencyMissing
from tq_fs.metrics._metrics import Metrics
from tq_fs.metrics._values import Distribution, Family

_log = logging.getLogger(__name__)


class RayExporter:
    """Hands metrics to ``ray.util.metrics`` at intervals, from a thread, until it is closed.

    Belongs into a process that Ray runs, or that called ``ray.init``; elsewhere it waits until
    that is so. Ray shows the metrics at each node's metrics port with ``ray_`` before their names.
    Histograms go there as counters of their buckets (``…_bucket`` with the label ``le``),
    ``…_sum`` and ``…_count``: Ray's own Histogram wants a call for each observation, and shows a
    sum that is made up of the middles of buckets.

    Parameters
    ----------
    metrics
        What it hands on.
    interval_s
        Seconds between two looks at them. Ray forgets a gauge that it has not heard of for some
        20 s.

    Raises
    ------
    DependencyMissing
        Ray is not installed.
    """

    def __init__(self, metrics: Metrics, interval_s: float = 10.0) -> None:
        try:
            import ray  # noqa: PLC0415  # optional
            import ray.util.metrics  # noqa: PLC0415
        except ImportError as error:
            raise DependencyMissing(
                "ray is not installed",
                subject="metrics through Ray",
                remedy="pip install ray, or serve them with MetricsServer",
            ) from error
        self._ray: ModuleType = ray
        self._metrics = metrics
        self._interval_s = interval_s
        self._instruments: dict[str, Any] = {}
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}
        self._turn = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="tq-fs-ray-metrics", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Hand over what has changed; for those who do not want to wait for the interval."""
        with self._turn:
            if not self._ray.is_initialized():
                return  # Ray would drop it
            for family in self._metrics.collect():
                for value in _values(family):
                    self._give(value)

    def close(self) -> None:
        """Hand over what has changed last, and stop; idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()

    def _work(self) -> None:
        last = False
        while not last:
            last = self._closed.wait(self._interval_s)
            try:
                self.publish()
            except Exception:  # the thread's end; the next round may go better
                _log.exception("metrics could not be handed to Ray")

    def _give(self, value: _Value) -> None:
        instrument = self._instrument(value)
        tags = dict(zip(value.labels, value.series, strict=True))
        if not value.grows:
            instrument.set(value.value, tags)
            return
        more = value.value - self._told.get((value.name, value.series), 0)
        if more > 0:  # Ray refuses a 0
            instrument.inc(more, tags)
            self._told[value.name, value.series] = value.value

    def _instrument(self, value: _Value) -> Any:
        known = self._instruments.get(value.name)
        if known is None:
            kinds = self._ray.util.metrics
            kind = kinds.Counter if value.grows else kinds.Gauge
            known = self._instruments[value.name] = kind(value.name, value.help, value.labels)
        return known


class _Value(NamedTuple):
    """One number for Ray."""

    name: str
    help: str
    grows: bool
    labels: tuple[str, ...]
    series: tuple[str, ...]
    value: float


def _values(family: Family) -> Iterator[_Value]:
    name, text = family.spec.name, family.spec.help
    for series, value in family.series.items():
        if not isinstance(value, Distribution):
            grows = family.spec.kind == "counter"
            yield _Value(name, text, grows, family.labels, series, value)
            continue
        labels = (*family.labels, "le")
        for bound, count in value.buckets():
            yield _Value(f"{name}_bucket", text, True, labels, (*series, bound), count)
        yield _Value(f"{name}_sum", text, True, family.labels, series, value.total)
        yield _Value(f"{name}_count", text, True, family.labels, series, value.observations)
