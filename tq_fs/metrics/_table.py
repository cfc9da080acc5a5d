"""Every metric there is. ``docs/metrics.md`` says the same to operators."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]


class MetricSpec(NamedTuple):
    """Name and meaning of a metric.

    Attributes
    ----------
    name
        As Prometheus wants it: with its unit, and ``_total`` where it only grows.
    kind
        Prometheus' type.
    labels
        What tells its series apart, beside ``store``, ``unit`` and ``role``.
    help
        One line.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


def _spec(name: str, kind: Kind, text: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, kind, labels, text)


METRICS = (
    # writing
    _spec("tqfs_steps_written_total", "counter", "Steps that were put and recorded", "target"),
    _spec(
        "tqfs_written_bytes_total", "counter", "Stored bytes of the fields of these Steps", "target"
    ),
    _spec(
        "tqfs_step_write_seconds",
        "histogram",
        "From a writer thread's taking up a Step to its being recorded",
    ),
    _spec(
        "tqfs_step_queue_seconds",
        "histogram",
        "From handing a Step over to a writer thread's taking it up: room, then a thread",
    ),
    _spec("tqfs_inflight_steps", "gauge", "Steps that were handed over and are not recorded yet"),
    _spec("tqfs_inflight_bytes", "gauge", "Bytes of the arrays of these Steps, in memory"),
    _spec("tqfs_inflight_peak_bytes", "gauge", "Most bytes in flight at once, since the start"),
    _spec("tqfs_inflight_limit_bytes", "gauge", "Bound of the bytes in flight, inflight_bytes"),
    _spec("tqfs_inflight_waiting", "gauge", "Callers that wait for room to hand a Step over"),
    # taking in replies of the engine
    _spec("tqfs_routing_rows_total", "counter", "Rows of routing that the check has looked at"),
    _spec(
        "tqfs_routing_suspect_rows_total",
        "counter",
        "Rows of them that are all one id, repeat an id in a layer, or are all -1: constant, "
        "repeated, unknown",
        "kind",
    ),
    # reading
    _spec("tqfs_read_bytes_total", "counter", "Stored bytes read from a unit", "source"),
    _spec("tqfs_read_spans_total", "counter", "Runs of chunks read from a unit", "source"),
    _spec("tqfs_read_seconds", "histogram", "One call that fills a batch of destinations"),
    _spec("tqfs_cache_hits_total", "counter", "Chunks found in the cache of decoded chunks"),
    _spec("tqfs_cache_misses_total", "counter", "Chunks that were looked for in it in vain"),
    _spec("tqfs_cache_bytes", "gauge", "Bytes of the chunks it holds"),
    _spec("tqfs_cache_limit_bytes", "gauge", "Bound of these bytes, cache_bytes"),
    # tiers
    _spec("tqfs_tier_front_bytes", "gauge", "Bytes that groups take of the front's disk"),
    _spec("tqfs_tier_front_limit_bytes", "gauge", "What the front can hold now"),
    _spec("tqfs_tier_queued_groups", "gauge", "Groups that are not uploaded yet"),
    _spec("tqfs_tier_queued_bytes", "gauge", "Bytes in front only, or promised room there"),
    _spec("tqfs_tier_queue_limit_bytes", "gauge", "Bound of the queued bytes"),
    _spec("tqfs_tier_evicted_groups_total", "counter", "Groups that left the front to make room"),
    _spec("tqfs_tier_spilled_groups_total", "counter", "Groups that went past the front"),
    _spec("tqfs_tier_promoted_objects_total", "counter", "Objects brought into the node's cache"),
    _spec("tqfs_tier_upload_failures_total", "counter", "Tries to upload a group that failed"),
    _spec("tqfs_tier_front_failures_total", "counter", "Writes that the front did not take"),
    # the channel, at the unit's end
    _spec("tqfs_channel_requests_total", "counter", "Messages that were received"),
    _spec("tqfs_channel_received_bytes_total", "counter", "Bytes of writes that were received"),
    _spec("tqfs_channel_sent_bytes_total", "counter", "Bytes that were read and sent"),
    _spec("tqfs_channel_refused_total", "counter", "Connections refused before the first message"),
    _spec("tqfs_channel_malformed_total", "counter", "Connections closed for what they sent"),
    _spec("tqfs_channel_lanes", "gauge", "Connections that are open"),
    _spec("tqfs_channel_held_bytes", "gauge", "Bytes of writes received and not stored yet"),
    # a cluster
    _spec("tqfs_unit_free_bytes", "gauge", "Room on a unit's device"),
    _spec("tqfs_units", "gauge", "Units, by their state", "state"),
    _spec("tqfs_processes", "gauge", "Processes that hold a lease"),
    _spec("tqfs_open_sessions", "gauge", "Sessions that are being recorded"),
    _spec("tqfs_finalized_sessions", "gauge", "Sessions of which something is still needed"),
    # the Proxy
    _spec("tqfs_proxy_requests_total", "counter", "Answers of an endpoint", "path", "status"),
    _spec("tqfs_proxy_stage_seconds", "histogram", "Stages of a chat request", "stage"),
    _spec("tqfs_proxy_running_requests", "gauge", "Chat requests that are under way"),
    _spec("tqfs_proxy_sessions", "gauge", "Sessions in the Proxy's table, by their state", "state"),
    _spec("tqfs_proxy_kept_bytes", "gauge", "Bytes of finalized sessions that are kept to be read"),
    # rollout engines, asked by the Proxy
    _spec("tqfs_upstream_requests_total", "counter", "Generations that were asked for", "engine"),
    _spec("tqfs_upstream_aborts_total", "counter", "Aborts that were sent", "engine"),
    _spec(
        "tqfs_upstream_seconds",
        "histogram",
        "From asking for a generation to its reply's being read and checked",
    ),
    _spec("tqfs_upstream_running", "gauge", "Generations that are asked for and not read yet"),
    _spec("tqfs_upstream_reply_bytes", "gauge", "Bytes of replies that are read or recorded now"),
    _spec("tqfs_upstream_reply_limit_bytes", "gauge", "Bound of these bytes, reply_bytes"),
    _spec("tqfs_upstream_reply_waiting", "gauge", "Replies that wait for room to be read"),
    # errors
    _spec(
        "tqfs_errors_total",
        "counter",
        "Errors by their code, and by who met them: write, read, serve, watch or upstream",
        "operation",
        "code",
    ),
)
