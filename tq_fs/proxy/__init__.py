"""The HTTP Proxy in front of rollout engines: records sessions, hands on references."""

from tq_fs.proxy._app import create_app
from tq_fs.proxy._client import ProxyClient
from tq_fs.proxy._serve import RunningProxy, serve
from tq_fs.proxy._settings import ProxySettings
from tq_fs.proxy._template import ChatTemplate
from tq_fs.proxy._tool_calls import parse_reply
from tq_fs.proxy._wire import DiscardAnswer, FinalizeAnswer, SegmentAnswer

__all__ = [
    "ChatTemplate",
    "DiscardAnswer",
    "FinalizeAnswer",
    "ProxyClient",
    "ProxySettings",
    "RunningProxy",
    "SegmentAnswer",
    "create_app",
    "parse_reply",
    "serve",
]
