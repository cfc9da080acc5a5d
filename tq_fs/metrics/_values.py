"""What is found when metrics are looked at."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tq_fs.metrics._table import MetricSpec

# Seconds. A Step of a small model is written in 0.3 ms; a deadline is a minute.
BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


class Sample(NamedTuple):
    """A value that lives elsewhere, as it is now.

    Attributes
    ----------
    name
        Of a counter or gauge in :data:`~tq_fs.metrics.METRICS`.
    value
        A counter's total, or a gauge's value.
    labels
        Those of the metric, by name.
    """

    name: str
    value: float
    labels: Mapping[str, str] = {}


class Distribution(NamedTuple):
    """What a histogram has seen.

    Attributes
    ----------
    counts
        Observations in each bucket, one more than there are bounds.
    total
        Sum of the observations.
    """

    counts: tuple[int, ...]
    total: float

    @property
    def observations(self) -> int:
        """Number of all of them."""
        return sum(self.counts)

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Yield each upper bound, as Prometheus spells it, and how many did not exceed it."""
        so_far = 0
        for bound, count in zip((*BOUNDS, math.inf), self.counts, strict=True):
            so_far += count
            yield ("+Inf" if bound == math.inf else str(bound)), so_far


class Family(NamedTuple):
    """A metric and its series.

    Attributes
    ----------
    spec
        What it is.
    labels
        Names of its labels, those of the process first.
    series
        Values by the labels' values; of a histogram, distributions.
    """

    spec: MetricSpec
    labels: tuple[str, ...]
    series: Mapping[tuple[str, ...], float | Distribution]
