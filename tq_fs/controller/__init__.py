"""The catalog's owner: sessions, references, releases, and what is swept when."""

from tq_fs.controller._calls import ControllerCalls
from tq_fs.controller._controller import Controller
from tq_fs.controller._finish import draft_manifest, finish
from tq_fs.controller._leases import Leases
from tq_fs.controller._tombstones import Tombstones

__all__ = ["Controller", "ControllerCalls", "Leases", "Tombstones", "draft_manifest", "finish"]
