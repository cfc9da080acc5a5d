"""Rows of routing that no router gives: counted, told of, or refused."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from tq_fs.errors import InvalidConfig, RoutingSuspect
from tq_fs.fields import ROUTED_EXPERTS, UNKNOWN, Array
from tq_fs.metrics import Metrics

RoutingPolicy: TypeAlias = Literal["warn", "reject", "off"]

_BLOCK_IDS = 1 << 18  # fewer calls count more than a smaller cache
_MANY_LAYERS = 8  # of top-1 routing: below, one expert in all of them can be chance
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingReport:
    """What was found in the rows of one reply; a row counts once, as the first that fits.

    Attributes
    ----------
    rows
        Rows that were looked at: one a token.
    unknown
        Rows of nothing but -1.
    constant
        Rows of one id in all layers.
    repeated
        Rows with an id (other than -1) twice in a layer.
    """

    rows: int = 0
    unknown: int = 0
    constant: int = 0
    repeated: int = 0

    @property
    def suspect(self) -> int:
        """Rows that no router gives. Those of -1 are none: they say that they know nothing."""
        return self.constant + self.repeated


class RoutingCheck:
    """Looks for what broken engines send: rows that are all one id, or have an id twice.

    A router chooses different experts in a layer, so that an id that is there twice is no routing.
    With top-1 there is nothing to compare in a layer; only rows of 8 or more layers are looked at,
    for one id in all of them.

    Parameters
    ----------
    policy
        ``warn`` logs a line for a reply with suspect rows, ``reject`` refuses it, ``off`` does not
        look.
    metrics
        Where rows are counted; None: nowhere.
    dense_layers
        Layers of the rows that do not route. Engines record whatever was in the buffer for them;
        they are not looked at.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        metrics: Metrics | None = None,
        *,
        dense_layers: Iterable[int] = (),
    ) -> None:
        if policy not in get_args(RoutingPolicy):
            raise InvalidConfig(
                f"{policy!r} is no way to treat suspect routing",
                subject="routing check",
                remedy=f"choose from {', '.join(get_args(RoutingPolicy))}",
            )
        self.policy = policy
        self._metrics = metrics
        self._dense = frozenset(dense_layers)

    def check(self, rows: npt.NDArray[np.int32], subject: str) -> RoutingReport:
        """Count suspect rows.

        Parameters
        ----------
        rows
            int32 ``[rows, layers, topk]``.
        subject
            What log line and error name.

        Raises
        ------
        RoutingSuspect
            There are some, and the policy is ``reject``.
        """
        if self.policy == "off":
            return RoutingReport()
        report = inspect_rows(self._routed(rows))
        self._count(report)
        if report.suspect:
            error = _error(report, subject)
            if self.policy == "reject":
                raise error
            _log.warning("%s", error)
        return report

    def _routed(self, rows: Array) -> Array:
        if not self._dense:
            return rows
        return rows[:, [i for i in range(rows.shape[1]) if i not in self._dense]]

    def _count(self, report: RoutingReport) -> None:
        if self._metrics is None:
            return
        self._metrics.counter("tqfs_routing_rows_total").add(report.rows)
        kinds = {
            "constant": report.constant,
            "repeated": report.repeated,
            "unknown": report.unknown,
        }
        for kind, rows in kinds.items():
            if rows:
                self._metrics.counter("tqfs_routing_suspect_rows_total", kind=kind).add(rows)


def _error(report: RoutingReport, subject: str) -> RoutingSuspect:
    return RoutingSuspect(
        f"of {report.rows} rows {report.constant} are one id in all layers, and "
        f"{report.repeated} have an id twice in a layer",
        subject=f"{subject}, {ROUTED_EXPERTS}",
        remedy="look for a known bug of the engine's version and its options (overlap, speculative "
        "decoding, disaggregation); give dense layers as such; --routing-check off records them "
        "all the same",
    )


# ---------------------------------------------------------------- how rows are looked at


def inspect_rows(rows: Array) -> RoutingReport:
    """Count suspect rows of int32 ``[rows, layers, topk]``, exactly.

    All pairs of columns are compared, in ids cut to 8 or 16 bits, which go many into a vector
    register. Whole ids are looked at only where the cut ones are equal.
    """
    total, layers, topk = rows.shape
    if not rows.size or (topk == 1 and layers < _MANY_LAYERS):
        return RoutingReport(rows=total, unknown=_all_unknown(rows))
    few = rows[:: max(1, total // 8)]
    narrow = np.uint8 if int(few.max()) < 256 else np.uint16  # a guess; any is right
    step = max(1, _BLOCK_IDS // (layers * topk))
    columns = np.empty((topk, min(step, total) * layers), narrow)
    counts = np.zeros(3, np.int64)
    for start in range(0, total, step):
        block = rows[start : start + step]
        doubtful = block[_doubtful(block, columns[:, : len(block) * layers])]
        if len(doubtful):
            counts += _exactly(doubtful)
    unknown, constant, repeated = counts.tolist()
    return RoutingReport(rows=total, unknown=unknown, constant=constant, repeated=repeated)


def _all_unknown(rows: Array) -> int:
    if not rows.size:
        return 0
    return int(np.count_nonzero((rows == UNKNOWN).all(axis=(1, 2))))


def _doubtful(block: Array, columns: Array) -> Array:
    """Tell which rows have two equal ids in a layer, after cutting; of top-1: all equal ones."""
    total, layers, topk = block.shape
    if topk == 1:
        return np.asarray(np.all(block[:, :, 0] == block[:, :1, 0], axis=1))
    flat = block.reshape(-1, topk)
    for k in range(topk):
        np.copyto(columns[k], flat[:, k], casting="unsafe")
    equal = np.zeros(columns.shape[1], bool)
    same = np.empty_like(equal)
    for k in range(1, topk):
        for other in range(topk - k):
            np.equal(columns[other], columns[other + k], out=same)
            np.logical_or(equal, same, out=equal)
    return np.asarray(np.any(equal.reshape(total, layers), axis=1))


def _exactly(rows: Array) -> list[np.intp]:
    """Count rows that are unknown, constant or repeat an id, by whole ids."""
    flat = rows.reshape(len(rows), -1)
    same = (flat == flat[:, :1]).all(axis=1)
    unknown = same & (flat[:, 0] == UNKNOWN)
    ordered = np.sort(rows, axis=2)
    twice = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] != UNKNOWN)
    repeated = twice.any(axis=(1, 2)) & ~same
    return [np.count_nonzero(found) for found in (unknown, same & ~unknown, repeated)]
