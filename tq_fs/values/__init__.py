"""Values by name: what programs of a TransferQueue put, get and clear.

From a value to its bytes: :mod:`tq_fs.values.codec`; to groups of Zarr arrays (``_group``), to the
index that says what a name stands for now (``_index``), and back (``_fetch``).
"""

from tq_fs.values._calls import ValueCalls, ValueClient, serve, serve_notes
from tq_fs.values._entry import ROOT, Found, Place, StoredGroup, ValueEntry, group_path
from tq_fs.values._fetch import Column, Joined, Plan, ValueRead, Wanted
from tq_fs.values._index import ValueIndex
from tq_fs.values._keeper import Keeper
from tq_fs.values._places import KeeperPlaces, OnePlace, UnitPlaces, ValuePlaces
from tq_fs.values._ranges import read_range
from tq_fs.values._rows import Rows, Run, look
from tq_fs.values._store import CHECKPOINT_FILE, Prepared, ValueStore

__all__ = [
    "CHECKPOINT_FILE",
    "ROOT",
    "Column",
    "Found",
    "Joined",
    "Keeper",
    "KeeperPlaces",
    "OnePlace",
    "Place",
    "Plan",
    "Prepared",
    "Rows",
    "Run",
    "StoredGroup",
    "UnitPlaces",
    "ValueCalls",
    "ValueClient",
    "ValueEntry",
    "ValueIndex",
    "ValuePlaces",
    "ValueRead",
    "ValueStore",
    "Wanted",
    "group_path",
    "look",
    "read_range",
    "serve",
    "serve_notes",
]
