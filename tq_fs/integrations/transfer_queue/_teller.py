"""What tells TransferQueue's controller of puts: one socket, used by one thread, that waits.

TransferQueue sends each notice from an event loop of its own, which costs as much again as all else
that the client does for a put.
"""

from __future__ import annotations

import logging
from uuid import uuid4

import zmq
from transfer_queue.utils.zmq_utils import (
    ZMQMessage,
    ZMQRequestType,
    ZMQServerInfo,
    create_zmq_socket,
)

from tq_fs.integrations.transfer_queue._puts import Notice

_ACK_S = 30.0  # as TransferQueue has it
_PORT = "request_handle_socket"
_log = logging.getLogger(__name__)


class Teller:
    """Tells TransferQueue's controller of puts. Used by one thread.

    Parameters
    ----------
    controller
        Where it is.
    sender
        The storage manager's id.
    """

    def __init__(self, controller: ZMQServerInfo, sender: str) -> None:
        self._controller = controller
        self._sender = sender
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None

    def __call__(self, notice: Notice | None) -> None:
        """Tell of puts, and wait for the acknowledgement; None closes the socket.

        Like TransferQueue's own managers this logs a controller that does not answer, and fails no
        put for it: the values are stored, and whoever asks for them waits for the controller.
        """
        if notice is None:
            self._close()
            self._context.term()
            return
        message = ZMQMessage.create(
            request_type=ZMQRequestType.NOTIFY_DATA_UPDATE,
            sender_id=self._sender,
            body={
                "partition_id": notice.partition,
                "global_indexes": notice.indexes,
                "field_schema": notice.schema,
                "custom_backend_meta": notice.known,
            },
        )
        try:
            self._ask(message.serialize())
        except (zmq.ZMQError, TimeoutError) as error:
            _log.error("the controller was not told of %s: %s", notice.indexes, error)
            self._close()  # a late answer would be taken for that to the next notice
        except BaseException:
            self._close()
            raise

    def _ask(self, frames: list[bytes]) -> None:
        socket = self._socket or self._connect()
        socket.send_multipart(frames)
        while True:
            if not socket.poll(int(_ACK_S * 1000)):
                raise TimeoutError(f"no answer within {_ACK_S:g} s")
            answer = ZMQMessage.deserialize(socket.recv_multipart(copy=False))
            if answer.request_type == ZMQRequestType.NOTIFY_DATA_UPDATE_ACK:
                return

    def _connect(self) -> zmq.Socket[bytes]:
        identity = f"{self._sender}-teller-{uuid4().hex[:8]}".encode()
        found: zmq.Socket[bytes] = create_zmq_socket(
            self._context, zmq.DEALER, self._controller.ip, identity=identity
        )
        found.connect(self._controller.to_addr(_PORT))
        self._socket = found
        return found

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
