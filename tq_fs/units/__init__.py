"""The StorageUnits of a store on many nodes, seen from one of its processes. Knows no Ray."""

from tq_fs.units._directory import Directory
from tq_fs.units._documents import HomeDocuments
from tq_fs.units._layout import Layout, State, UnitAddress
from tq_fs.units._readers import Passed, UnitReaders
from tq_fs.units._units import Access, RemoteUnits

__all__ = [
    "Access",
    "Directory",
    "HomeDocuments",
    "Layout",
    "Passed",
    "RemoteUnits",
    "State",
    "UnitAddress",
    "UnitReaders",
]
