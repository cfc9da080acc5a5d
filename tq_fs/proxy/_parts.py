"""What turns are made with."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

import numpy.typing as npt

from tq_fs import fields
from tq_fs.errors import InvalidConfig
from tq_fs.fields import FieldSpec
from tq_fs.ingest import RoutingCheck
from tq_fs.metrics import Metrics
from tq_fs.proxy._engine import SglangEngine
from tq_fs.proxy._gate import Gate
from tq_fs.trajectory import Renderer


class Template(Renderer, Protocol):
    """A renderer that knows how replies end."""

    @property
    def stop_ids(self) -> Sequence[int]:
        """Tokens that end a reply."""

    def text_of(self, output_ids: npt.ArrayLike) -> str:
        """Return the text of a reply without the stop token that ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What turns are made with; all stay their owner's.

    Attributes
    ----------
    engine, gate
        Generate, and hold up.
    template
        Renders, and reads replies.
    check
        Of routing rows.
    specs
        Declared fields.
    workers
        Threads that compute.
    recorders
        Threads that wait for Steps to be stored.
    metrics
        Counts seconds by stage.
    """

    engine: SglangEngine
    gate: Gate
    template: Template
    check: RoutingCheck
    specs: Sequence[FieldSpec]
    workers: Executor
    recorders: Executor
    metrics: Metrics


def check_specs(specs: Sequence[FieldSpec]) -> FieldSpec | None:
    """Return the declaration of routing, if there is one.

    Raises
    ------
    InvalidConfig
        A field is declared that no reply carries, or logprobs are not, or routing without the
        shape of its rows.
    """
    by_name = {spec.name: spec for spec in specs}
    routing = by_name.get(fields.ROUTED_EXPERTS)
    others = set(by_name) - {fields.LOGPROBS, fields.ROUTED_EXPERTS}
    if others or fields.LOGPROBS not in by_name:
        raise InvalidConfig(
            f"{sorted(by_name)} where logprobs, and routed_experts or nothing, belong",
            subject="fields of the Proxy's store",
        )
    if routing is not None and routing.inner is None:
        raise InvalidConfig(
            "layers and topk are not known",
            subject=fields.ROUTED_EXPERTS,
            remedy="declare them, or use tq_fs.routed_experts_of_model",
        )
    return routing
