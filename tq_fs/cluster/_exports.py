"""Where the metrics of a cluster's own processes go: to a port of each, and through Ray."""

from __future__ import annotations

from contextlib import ExitStack

from tq_fs.config import ClusterConfig
from tq_fs.errors import InvalidConfig
from tq_fs.metrics import Metrics, MetricsServer, RayExporter

_PORTS = 64  # tried from the first one on


def export(metrics: Metrics, settings: ClusterConfig, host: str, opened: ExitStack) -> str:
    """Give metrics to whom the settings name, for as long as the stack is open.

    Returns
    -------
    str
        URL of the endpoint for Prometheus; empty without one.
    """
    if settings.ray_metrics:
        exporter = RayExporter(metrics)
        opened.callback(exporter.close)
    if settings.metrics_port is None:
        return ""
    first = settings.metrics_port
    failed: InvalidConfig | None = None
    for port in range(first, first + _PORTS) if first else (0,):
        try:
            server = MetricsServer(metrics, host, port)
        except InvalidConfig as error:  # another process of ours, perhaps
            failed = error
            continue
        opened.callback(server.close)
        return server.url
    assert failed is not None
    raise failed
