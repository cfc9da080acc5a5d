"""What a Proxy tells of itself, for programs that adapt to it."""

from __future__ import annotations

import msgspec

import tq_fs
from tq_fs.proxy._headers import INSTANCE, SESSION, TURN
from tq_fs.proxy._settings import ProxySettings
from tq_fs.store import Store


class FieldAbout(msgspec.Struct, kw_only=True, frozen=True):
    """A recorded field; `stored` is its stored type, `transferred` whether it goes to the store."""

    name: str
    dtype: str
    inner: list[int] | None
    rows: str
    stored: str
    transferred: bool


class StoreAbout(msgspec.Struct, kw_only=True, frozen=True):
    """The store; `url` is None where it is off, and values travel in ``/trajectory/read``."""

    url: str | None
    store_id: str


class Capabilities(msgspec.Struct, kw_only=True, frozen=True):
    """``GET /integration/capabilities``.

    Attributes
    ----------
    name, version
        Of this program.
    api
        Of its HTTP interface; a number that grows where a client has to know.
    model, context_length
        As configured.
    headers
        What each header of a chat request is called.
    mode, views, consumers
        Of sessions and their Segments, where a finalize does not say.
    partial_rollout, max_version_span
        What a session may hold of weight versions.
    routing_check
        ``warn``, ``reject`` or ``off``.
    streaming
        ``computed``: one answer, sent as events once it is whole.
    tools
        Whether tool calls are parsed.
    read_types
        Media types of ``/trajectory/read``.
    fields, store
        What is recorded, and where it goes.
    """

    name: str
    version: str
    api: int
    model: str
    context_length: int | None
    headers: dict[str, str]
    mode: str
    views: list[str]
    consumers: list[str]
    partial_rollout: bool
    max_version_span: int | None
    routing_check: str
    streaming: str
    tools: bool
    read_types: list[str]
    fields: list[FieldAbout]
    store: StoreAbout


def capabilities(settings: ProxySettings, store: Store) -> Capabilities:
    """Return what a Proxy of these settings can do."""
    return Capabilities(
        name="tq-fs",
        version=tq_fs.__version__,
        api=1,
        model=settings.model,
        context_length=settings.context_length,
        headers={"session": SESSION, "instance": INSTANCE, "turn": TURN},
        mode=settings.mode,
        views=list(settings.views),
        consumers=list(settings.consumers),
        partial_rollout=settings.partial_rollout,
        max_version_span=settings.max_version_span,
        routing_check=settings.routing_check,
        streaming="computed",
        tools=True,
        read_types=["application/json", "application/msgpack"],
        fields=_fields(store),
        store=StoreAbout(url=store.url, store_id=store.config.store_id),
    )


def _fields(store: Store) -> list[FieldAbout]:
    chosen = store.config.transfer
    return [
        FieldAbout(
            name=spec.name,
            dtype=spec.dtype,
            inner=None if spec.inner is None else list(spec.inner),
            rows=spec.rows,
            stored=spec.stored,
            transferred=store.url is not None and (chosen is None or spec.name in chosen),
        )
        for spec in store.fields
    ]
