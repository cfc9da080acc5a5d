"""A session's messages as a trie: each is kept once, and found by what came before it.

A node stands for a message and all before it; a conversation is the way from the root to a node.
Nodes are found by a digest of that way, so that a request is looked up message by message, however
many conversations there are. A reply is found also where a client sends it back without its
reasoning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

from tq_fs.trajectory._messages import DIGEST_BYTES, Message


class Node:
    """A message in its place.

    Attributes
    ----------
    number
        Its place among the nodes.
    key
        Digest of it and all before it.
    message, parent
        The message, and the node before it; None before the root alone.
    by
        The latest Step that generated it; None for what a client wrote.
    latest
        The latest Step whose conversation goes through it.
    """

    __slots__ = ("by", "key", "latest", "message", "number", "parent")

    def __init__(self, number: int, key: bytes, message: Message, parent: Node | None) -> None:
        self.number = number
        self.key = key
        self.message = message
        self.parent = parent
        self.by: int | None = None
        self.latest = -1


class Trie:
    """Nodes under a root that is no message. Not thread-safe; messages are not copied.

    Attributes
    ----------
    root
        What all conversations begin with.
    nodes
        All messages, by number.
    """

    def __init__(self) -> None:
        self.root = Node(-1, b"", {}, None)
        self.nodes: list[Node] = []
        self._index: dict[bytes, tuple[Node, ...]] = {}

    def deepest(self, digests: Sequence[bytes]) -> tuple[Node, int]:
        """Return the last message that a request shares with what is kept, and how many it shares.

        Replies that differ in their reasoning alone are all followed: one of them goes on further.
        Of several nodes it is one that a Step generated, and the latest.
        """
        reached, shared = [self.root], 0
        for one in digests:
            further = [n for node in reached for n in self._index.get(_key(node, one), ())]
            if not further:
                break
            reached, shared = further, shared + 1
        return max(reached, key=lambda n: (-1 if n.by is None else n.by, n.latest)), shared

    def child(self, parent: Node, digest: bytes, message: Message) -> Node:
        """Return the node of a message after `parent`; made where it is new."""
        key = _key(parent, digest)
        for node in self._index.get(key, ()):
            if node.key == key:
                return node
        node = Node(len(self.nodes), key, message, parent)
        self.nodes.append(node)
        self._enter(key, node)
        return node

    def find_also(self, node: Node, digest: bytes) -> None:
        """Let a message be found by another digest too, in the same place."""
        assert node.parent is not None
        self._enter(_key(node.parent, digest), node)

    def _enter(self, key: bytes, node: Node) -> None:
        known = self._index.get(key, ())
        if node not in known:
            self._index[key] = (*known, node)


def way_up(node: Node) -> Iterator[Node]:
    """Yield a message's node and those before it, the last one first, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def messages_to(node: Node) -> list[Message]:
    """Return a message and all before it."""
    return [n.message for n in way_up(node)][::-1]


def _key(parent: Node, digest: bytes) -> bytes:
    return blake2b(parent.key + digest, digest_size=DIGEST_BYTES).digest()
