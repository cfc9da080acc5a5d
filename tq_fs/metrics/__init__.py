"""What a process counts: for Prometheus, for Ray, or for whoever asks."""

from tq_fs.metrics._endpoint import MetricsServer
from tq_fs.metrics._metrics import Counter, Histogram, Metrics, Source
from tq_fs.metrics._ray import RayExporter
from tq_fs.metrics._table import METRICS, MetricSpec
from tq_fs.metrics._text import TEXT_TYPE, exposition
from tq_fs.metrics._values import Distribution, Family, Sample

__all__ = [
    "METRICS",
    "TEXT_TYPE",
    "Counter",
    "Distribution",
    "Family",
    "Histogram",
    "MetricSpec",
    "Metrics",
    "MetricsServer",
    "RayExporter",
    "Sample",
    "Source",
    "exposition",
]
