"""Samples of Dressage, whose large fields are references into TransferQueue, into tensors.

A sample carries *layouts* in its meta data: for each field the values that it is made of, by
reference, and which of their rows go where. :func:`hydrate` reads those rows, and no others::

    samples = [
        LayoutSample.of(layouts, tokens=len(tokens), response_length=length)
        for layouts, tokens, length in zip(batch["layouts"], batch["tokens"], ...)
    ]
    for batch in hydrate(samples, budget_bytes=4 << 30, select=Selection(layers=(10, 20))):
        batch.tensors["rollout_routed_experts"]

Importing it needs neither TransferQueue nor torch.
"""

from tq_fs.integrations.dressage._hydrate import Source, hydrate, refs_of
from tq_fs.integrations.dressage._models import Fragment, Layout, LayoutSample, Ref, layout_of

__all__ = [
    "Fragment",
    "Layout",
    "LayoutSample",
    "Ref",
    "Source",
    "hydrate",
    "layout_of",
    "refs_of",
]
