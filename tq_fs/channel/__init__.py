"""The data channel: a unit's backend, from any process of the cluster. No pickle."""

from tq_fs.channel._backend import ChannelBackend
from tq_fs.channel._endpoint import private_socket
from tq_fs.channel._fence import Fence
from tq_fs.channel._identity import Identity
from tq_fs.channel._server import ChannelServer
from tq_fs.channel._wire import Limits

__all__ = ["ChannelBackend", "ChannelServer", "Fence", "Identity", "Limits", "private_socket"]
