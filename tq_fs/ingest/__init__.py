"""Replies of the rollout engine: taken in piece by piece, and checked before they are recorded."""

from tq_fs.ingest._parser import ReplyParser, parse_reply
from tq_fs.ingest._reply import Asked, GenerateReply
from tq_fs.ingest._routing import RoutingCheck, RoutingPolicy, RoutingReport

__all__ = [
    "Asked",
    "GenerateReply",
    "ReplyParser",
    "RoutingCheck",
    "RoutingPolicy",
    "RoutingReport",
    "parse_reply",
]
