"""tq-fs as a storage backend of TransferQueue 0.1.11.

Importing this module is all it takes, in the process that calls ``transfer_queue.init`` first::

    import tq_fs.integrations.transfer_queue  # noqa: F401

and, in its configuration::

    backend:
      storage_backend: TqFs
      TqFs:
        url: file:///nvme/tq-fs     # or s3://bucket/prefix, or cluster.paths for units on all nodes
        store_id: run-7

All others (Ray actors, tasks, processes that join later) find the backend through what the first
one leaves in TransferQueue's configuration.

Raises
------
DependencyMissing
    TransferQueue is not installed, or another version is.
"""

from tq_fs.integrations.transfer_queue import _version as _version  # first of all
from tq_fs.integrations.transfer_queue._bootstrap import NAME, bring_up
from tq_fs.integrations.transfer_queue._client import TqFsStorageClient
from tq_fs.integrations.transfer_queue._manager import TqFsStorageManager
from tq_fs.integrations.transfer_queue._ranges import async_read_range, read_range

__all__ = [
    "NAME",
    "TqFsStorageClient",
    "TqFsStorageManager",
    "async_read_range",
    "bring_up",
    "read_range",
]
