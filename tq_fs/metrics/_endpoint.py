"""Prometheus' text endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from tq_fs.errors import DependencyMissing, InvalidConfig
from tq_fs.metrics._metrics import Metrics
from tq_fs.metrics._values import Distribution, Family

if TYPE_CHECKING:
    from prometheus_client import Metric


class MetricsServer:
    """Serves ``/metrics`` from a thread of its own until it is closed.

    There is no password: let it listen where only those who may know can reach it.

    Parameters
    ----------
    metrics
        What it tells; looked at with each request.
    host
        Address to listen at; all of the host's with ``0.0.0.0``.
    port
        0 takes a free one.

    Attributes
    ----------
    url
        Of the page; the port is filled in.

    Raises
    ------
    DependencyMissing
        ``prometheus-client`` is not installed.
    InvalidConfig
        The address cannot be listened at.
    """

    def __init__(self, metrics: Metrics, host: str = "127.0.0.1", port: int = 0) -> None:
        try:
            import prometheus_client  # noqa: PLC0415  # optional
        except ImportError as error:
            raise DependencyMissing(
                "prometheus-client is not installed",
                subject="the metrics endpoint",
                remedy="pip install 'tq-fs[metrics]'",
            ) from error
        registry = prometheus_client.CollectorRegistry(auto_describe=False)
        registry.register(cast("Any", _Collector(metrics)))
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise InvalidConfig(
                f"cannot be listened at: {error}",
                subject=f"{host}:{port}, for metrics",
                remedy="choose another port, or 0 for a free one",
            ) from error
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop serving; idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Collector:
    """Metrics as prometheus-client reads them."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return map(_metric, self._metrics.collect())


def _metric(family: Family) -> Metric:
    from prometheus_client import core  # noqa: PLC0415  # optional

    kinds = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    spec = family.spec
    metric: Any = kinds[spec.kind](spec.name, spec.help, labels=family.labels)
    for labels, value in family.series.items():
        if isinstance(value, Distribution):
            metric.add_metric(labels, list(value.buckets()), value.total)
        else:
            metric.add_metric(labels, value)
    return cast("Metric", metric)
