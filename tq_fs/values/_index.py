"""The index of values: which one a name stands for now, and which groups nobody needs any more.

Kept in SQLite, on disk: its memory is bounded, and a process that is killed finds it as it was.
One process has it, the keeper, and serves the others.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tq_fs.errors import (
    CheckpointMissing,
    FormatTooNew,
    ManifestCorrupt,
    ObjectMissing,
    StorageFailed,
    StorageFull,
    TqFsError,
    WrongStore,
)
from tq_fs.values._entry import Found, Place, StoredGroup, ValueEntry, group_path

VERSION = 1
_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE partitions (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE samples (part INTEGER, sample INTEGER, birth INTEGER NOT NULL,
    PRIMARY KEY (part, sample)) WITHOUT ROWID;
CREATE TABLE found (part INTEGER, sample INTEGER, field TEXT, generation INTEGER NOT NULL,
    grp INTEGER NOT NULL, entry BLOB NOT NULL,
    PRIMARY KEY (part, sample, field)) WITHOUT ROWID;
CREATE TABLE groups (id INTEGER PRIMARY KEY, unit TEXT NOT NULL, path TEXT NOT NULL,
    nbytes INTEGER NOT NULL, live INTEGER NOT NULL, pins INTEGER NOT NULL DEFAULT 0,
    UNIQUE (path, unit));
CREATE TABLE pins (checkpoint TEXT, grp INTEGER, PRIMARY KEY (checkpoint, grp)) WITHOUT ROWID;
CREATE INDEX needed ON groups (live, pins);
CREATE INDEX pinned ON pins (grp);
"""
_STATEMENTS = dict.fromkeys(part.strip() for part in _SCHEMA.split(";")[:-1]).keys()
_FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE}  # the latter of a file beside ours
_REMEMBERED = 16_384  # groups that were put, so that a call that comes twice is known
_FIND = """
SELECT entry, unit, path, generation FROM found JOIN groups ON groups.id = grp
WHERE part = ? AND sample = ? AND field = ?
"""
_PUT = """
INSERT INTO found VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE
SET generation = excluded.generation, grp = excluded.grp, entry = excluded.entry
"""
_REPLACED = """
UPDATE groups SET live = live - 1
WHERE id = (SELECT grp FROM found WHERE part = ? AND sample = ? AND field = ?)
RETURNING unit, path, live, pins
"""
_CLEARED = """
UPDATE groups SET live = live -
    (SELECT count(*) FROM found WHERE part = ?1 AND sample = ?2 AND grp = id)
WHERE id IN (SELECT grp FROM found WHERE part = ?1 AND sample = ?2)
RETURNING unit, path, live, pins
"""
_UNNEEDED = "SELECT unit, path FROM groups WHERE live = 0 AND pins = 0"

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(ValueEntry).decode


class ValueIndex:
    """What names stand for. Safe to call from many threads.

    Each put is a *generation*, and each index, from its first value until it is cleared, a
    *sample*. A clear says up to which generation it means samples: one that comes late does not
    touch a sample that was born after.

    Parameters
    ----------
    path
        Of the file; made where there is none.
    store_id
        The store; another one's file is refused.

    Raises
    ------
    ManifestCorrupt, FormatTooNew, WrongStore
        The file is no index, or a later version's, or another store's.
    """

    def __init__(self, path: Path, store_id: str) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._partitions: dict[str, int] = {}
        self._put: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._barred: OrderedDict[str, None] = OrderedDict()
        with self._mapped():
            self._db = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, uri=True
            )
            self._open(store_id)

    def _open(self, store_id: str) -> None:
        try:
            check_version(self._db, self.path, make=store_id)
            if (found := self.meta("store_id")) != store_id:
                raise WrongStore(
                    f"is store {found!r}'s, not {store_id!r}'s", subject=str(self.path)
                )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = OFF")  # as durable as what it speaks of
            self._generation = self._number("SELECT max(generation) FROM found")
            self._generation = max(self._generation, int(self.meta("generation") or 0))
            self._partitions.update(self._db.execute("SELECT name, id FROM partitions"))
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Close the file; idempotent."""
        with self._lock:
            self._db.close()

    # ------------------------------------------------------------ values

    def put(self, partition: str, groups: Sequence[StoredGroup]) -> tuple[int, list[Place]]:
        """Let names stand for the values of new groups; all of them at once.

        Returns
        -------
        int
            The generation. That of a repeated call is the first one's.
        list of Place
            Groups that nobody needs any more since this call.

        Raises
        ------
        ObjectMissing
            A group was swept meanwhile; nothing has changed.
        """
        if not groups:
            return self._generation, []
        with self._lock:
            for group in groups:
                if group_path(group.path) in self._barred:
                    raise ObjectMissing(
                        "was swept before its names were told",
                        subject=group.path,
                        remedy="put it again",
                    )
            return self._put_new(partition, groups)

    def _put_new(self, partition: str, groups: Sequence[StoredGroup]) -> tuple[int, list[Place]]:
        with self._changed() as db:
            if known := self._known(groups):
                return known, []
            self._generation += 1
            part = self._partition(partition)
            unneeded = [place for group in groups for place in self._add(part, group)]
            self._note_generation(db)
        self._remember(groups)
        return self._generation, unneeded

    def _known(self, groups: Sequence[StoredGroup]) -> int:
        """Return the generation that a call has made already; 0 where it is the first."""
        first = groups[0]
        found = self._put.get((first.unit, first.path), 0)
        query = "SELECT max(id) FROM groups WHERE unit = ? AND path = ?"
        if not found and (grp := self._number(query, first.unit, first.path)):
            # Put before this process began; of values that are all replaced, any will do.
            query = "SELECT max(generation) FROM found WHERE grp = ?"
            found = self._number(query, grp) or self._generation
        return found

    def _remember(self, groups: Sequence[StoredGroup]) -> None:
        self._put[groups[0].unit, groups[0].path] = self._generation
        if len(self._put) > _REMEMBERED:
            self._put.popitem(last=False)

    def _add(self, part: int, group: StoredGroup) -> Iterator[Place]:
        """Let names stand for a group's values; yield groups that are unneeded then."""
        db, generation = self._db, self._generation
        grp = db.execute(
            "INSERT INTO groups (unit, path, nbytes, live) VALUES (?, ?, ?, ?)",
            (group.unit, group.path, group.nbytes, len(group.values)),
        ).lastrowid
        for index, field, entry in (msgspec.structs.astuple(v) for v in group.values):
            db.execute("INSERT OR IGNORE INTO samples VALUES (?, ?, ?)", (part, index, generation))
            rows = db.execute(_REPLACED, (part, index, field)).fetchall()
            yield from _unneeded_of(rows)
            db.execute(_PUT, (part, index, field, generation, grp, _pack(entry)))

    def find(
        self, samples: Sequence[tuple[str, int]], fields: Sequence[str]
    ) -> list[list[Found | None]]:
        """Return what names stand for; for each field, in the order of the samples.

        Parameters
        ----------
        samples
            Partition and index of each.
        """
        with self._lock, self._mapped():
            parts = [self._partitions.get(partition, -1) for partition, _ in samples]
            return [
                [
                    self._find(part, index, field)
                    for part, (_, index) in zip(parts, samples, strict=True)
                ]
                for field in fields
            ]

    def _find(self, part: int, index: int, field: str) -> Found | None:
        row = self._db.execute(_FIND, (part, index, field)).fetchone()
        if row is None:
            return None
        entry, unit, path, generation = row
        return Found(_unpack(entry), Place(unit, path), generation)

    def fields(self, partition: str, index: int) -> list[str]:
        """Return the fields of a sample, sorted."""
        with self._lock, self._mapped():
            part = self._partitions.get(partition, -1)
            query = "SELECT field FROM found WHERE part = ? AND sample = ? ORDER BY field"
            return [field for (field,) in self._db.execute(query, (part, index))]

    def clear(self, samples: Iterable[tuple[str, int, int]]) -> list[Place]:
        """Forget samples, whatever fields they have; idempotent.

        Parameters
        ----------
        samples
            Partition, index, and the generation up to which a sample of that index is meant.

        Returns
        -------
        list of Place
            Groups that nobody needs any more since this call.
        """
        unneeded: list[Place] = []
        with self._changed() as db:
            for partition, index, until in samples:
                part = self._partitions.get(partition, -1)
                query = "DELETE FROM samples WHERE part = ? AND sample = ? AND birth <= ?"
                if not db.execute(query, (part, index, until)).rowcount:
                    continue
                unneeded += _unneeded_of(db.execute(_CLEARED, (part, index)).fetchall())
                db.execute("DELETE FROM found WHERE part = ? AND sample = ?", (part, index))
        return unneeded

    @property
    def generation(self) -> int:
        """Of the last put."""
        with self._lock:  # that of one under way may come to nothing
            return self._generation

    # ------------------------------------------------------------ groups

    def unneeded(self) -> list[Place]:
        """Return the groups that nobody needs any more."""
        with self._lock, self._mapped():
            return self._unneeded(self._db)

    @staticmethod
    def _unneeded(db: sqlite3.Connection) -> list[Place]:
        return [Place(*row) for row in db.execute(_UNNEEDED)]

    def forget(self, places: Iterable[Place]) -> None:
        """Hear that groups are deleted that nobody needed; idempotent."""
        with self._changed() as db:
            db.executemany(
                "DELETE FROM groups WHERE unit = ? AND path = ? AND live = 0 AND pins = 0", places
            )

    def knows(self, paths: Sequence[str]) -> list[bool]:
        """Tell of each group, by its path without an attempt's, whether the index speaks of it."""
        query = "SELECT count(*) FROM groups WHERE path = ?1 OR path > ?2 AND path < ?3"
        with self._lock, self._mapped():
            return [bool(self._number(query, p, f"{p}/", f"{p}0")) for p in paths]

    def bar(self, path: str) -> bool:
        """Let no name stand for a group from now on, by its path without an attempt's.

        Returns
        -------
        bool
            Whether that is so: False where the index speaks of it already.
        """
        with self._lock:
            if self.knows([path])[0]:
                return False
            self._barred[path] = None
            if len(self._barred) > _REMEMBERED:
                self._barred.popitem(last=False)
            return True

    def totals(self) -> dict[str, int]:
        """Return how much there is: values, samples, groups, their bytes, and pinned bytes."""
        with self._lock, self._mapped():
            return {
                "values": self._number("SELECT count(*) FROM found"),
                "samples": self._number("SELECT count(*) FROM samples"),
                "groups": self._number("SELECT count(*) FROM groups"),
                "bytes": self._number("SELECT sum(nbytes) FROM groups"),
                "pinned_bytes": self._number(
                    "SELECT sum(nbytes) FROM groups WHERE live = 0 AND pins > 0"
                ),
            }

    # ------------------------------------------------------------ checkpoints

    def pin_and_copy(self, checkpoint: str, copy: Path) -> dict[str, list[str]]:
        """Keep all that there is now for a checkpoint, and write just that into a new file.

        Returns
        -------
        dict
            The paths of its groups by unit.
        """
        with self._lock:  # nothing may be put in between
            self.note("checkpoint", checkpoint)
            pinned = self.pin(checkpoint)
            self.copy_to(copy)
            return pinned

    def pin(self, checkpoint: str) -> dict[str, list[str]]:
        """Keep all that there is now for a checkpoint; return the paths of its groups by unit."""
        with self._changed() as db:
            db.execute(
                "INSERT OR IGNORE INTO pins SELECT ?, id FROM groups WHERE live > 0", (checkpoint,)
            )
            self._count_pins(db, checkpoint)
            return self._pinned(db, checkpoint)

    def add_pins(self, checkpoint: str, unit: str, paths: Iterable[str]) -> None:
        """Hear of the groups that an earlier run's checkpoint keeps."""
        with self._changed() as db:
            for path in paths:
                db.execute(
                    "INSERT OR IGNORE INTO groups (unit, path, nbytes, live) VALUES (?, ?, 0, 0)",
                    (unit, path),
                )
                db.execute(
                    "INSERT OR IGNORE INTO pins SELECT ?, id FROM groups "
                    "WHERE unit = ? AND path = ?",
                    (checkpoint, unit, path),
                )
            self._count_pins(db, checkpoint)

    def checkpoints(self) -> list[str]:
        """Return the checkpoints that keep groups, oldest first."""
        with self._lock, self._mapped():
            query = "SELECT DISTINCT checkpoint FROM pins ORDER BY checkpoint"
            return [name for (name,) in self._db.execute(query)]

    def confirm(self, checkpoint: str) -> None:
        """Hear that a checkpoint was saved."""
        self.note(f"saved/{checkpoint}", checkpoint)

    def saved(self) -> list[str]:
        """Return the checkpoints that keep groups and were saved, oldest first."""
        return [name for name in self.checkpoints() if self.meta(f"saved/{name}")]

    def pinned(self, checkpoint: str) -> dict[str, list[str]]:
        """Return the paths of the groups that a checkpoint keeps, by unit."""
        with self._lock, self._mapped():
            return self._pinned(self._db, checkpoint)

    @staticmethod
    def _pinned(db: sqlite3.Connection, checkpoint: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        query = (
            "SELECT unit, path FROM pins JOIN groups ON grp = id WHERE checkpoint = ? "
            "ORDER BY unit, path"
        )
        for unit, path in db.execute(query, (checkpoint,)):
            found.setdefault(unit, []).append(path)
        return found

    def unpin(self, checkpoint: str) -> list[Place]:
        """Let go of what a checkpoint keeps; return the groups that nobody needs any more."""
        with self._changed() as db:
            self._count_pins(db, checkpoint, less=1)
            db.execute("DELETE FROM pins WHERE checkpoint = ?", (checkpoint,))
            db.execute("DELETE FROM meta WHERE name = ?", (f"saved/{checkpoint}",))
            return self._unneeded(db)

    @staticmethod
    def _count_pins(db: sqlite3.Connection, checkpoint: str, *, less: int = 0) -> None:
        db.execute(
            "UPDATE groups SET pins = (SELECT count(*) FROM pins WHERE grp = id) - ? "
            "WHERE id IN (SELECT grp FROM pins WHERE checkpoint = ?)",
            (less, checkpoint),
        )

    def copy_to(self, path: Path) -> None:
        """Write the index, as it is now, into a new file."""
        with self._lock, self._mapped():
            self._db.execute("VACUUM INTO ?", (str(path),))

    def replace(self, path: Path, checkpoint: str) -> list[Place]:
        """Become what a copy says, whose groups `checkpoint` keeps.

        Returns
        -------
        list of Place
            Groups that nobody needs any more.

        Raises
        ------
        CheckpointMissing
            The store does not keep some of its groups; nothing has changed.
        """
        with self._lock, self._mapped():
            self._db.execute("ATTACH ? AS other", (path.as_uri() + "?immutable=1",))
            try:
                with self._changed() as db:
                    self._take_over(db, checkpoint)
                    return self._unneeded(db)
            finally:
                self._db.execute("DETACH other")

    def _take_over(self, db: sqlite3.Connection, checkpoint: str) -> None:
        for table in ("found", "samples", "partitions"):
            db.execute(f"DELETE FROM main.{table}")
        db.execute("UPDATE main.groups SET live = 0")
        db.execute("INSERT INTO main.partitions SELECT * FROM other.partitions")
        db.execute("INSERT INTO main.samples SELECT * FROM other.samples")
        db.execute(
            "INSERT INTO main.found SELECT part, sample, field, generation, mine.id, entry "
            "FROM other.found AS had JOIN other.groups AS old ON old.id = had.grp "
            "JOIN main.groups AS mine ON mine.unit = old.unit AND mine.path = old.path "
            "JOIN main.pins AS kept ON kept.grp = mine.id AND kept.checkpoint = ?",
            (checkpoint,),  # others may be on their way out
        )
        db.execute(
            "UPDATE main.groups SET live = n FROM "
            "(SELECT grp, count(*) AS n FROM main.found GROUP BY grp) WHERE id = grp"
        )
        db.execute(
            "UPDATE main.groups SET nbytes = old.nbytes FROM other.groups AS old "
            "WHERE old.unit = main.groups.unit AND old.path = main.groups.path"
        )
        lost = self._number("SELECT count(*) FROM other.found") - self._number(
            "SELECT count(*) FROM main.found"
        )
        if lost:
            raise CheckpointMissing(
                f"{lost} value{'s' if lost > 1 else ''} of it lie in groups that are not kept",
                subject=f"checkpoint {checkpoint}",
                remedy="load a later checkpoint: the store keeps the last ones only",
            )
        self._partitions = dict(db.execute("SELECT name, id FROM main.partitions"))
        newest = self._number("SELECT max(generation) FROM main.found")
        self._generation = max(self._generation, newest) + 1
        self._note_generation(db)

    # ------------------------------------------------------------ inside

    def meta(self, name: str) -> str:
        """Return something that was noted; empty where it was not."""
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return str(row[0]) if row else ""

    def note(self, name: str, value: str) -> None:
        """Note something."""
        with self._changed() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def _note_generation(self, db: sqlite3.Connection) -> None:
        text = str(self._generation)  # that of a value that is gone is not used again
        db.execute("INSERT OR REPLACE INTO meta VALUES ('generation', ?)", (text,))

    def _partition(self, name: str) -> int:
        found = self._partitions.get(name)
        if found is None:
            row = self._db.execute("INSERT INTO partitions (name) VALUES (?)", (name,)).lastrowid
            assert row is not None
            found = self._partitions[name] = row
        return found

    def _number(self, query: str, *arguments: str | int) -> int:
        (found,) = self._db.execute(query, arguments).fetchone()
        return found or 0

    @contextmanager
    def _changed(self) -> Iterator[sqlite3.Connection]:
        """Change the index, as a whole or not at all."""
        with self._lock, self._mapped():
            before = self._generation, dict(self._partitions)
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                self._generation, self._partitions = before
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        """Let SQLite's errors be ours."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise _mapped(error, self.path) from error


def _mapped(error: sqlite3.DatabaseError, path: Path) -> TqFsError:
    if isinstance(error, sqlite3.ProgrammingError):  # which says of a file nothing at all
        return StorageFailed(f"{error}", subject=str(path))
    code, name = error.sqlite_errorcode, error.sqlite_errorname
    if code in _FULL:
        return StorageFull(f"{name}: {error}", subject=str(path), remedy="make room there")
    if isinstance(error, sqlite3.OperationalError) and code != sqlite3.SQLITE_ERROR:
        return StorageFailed(f"{name}: {error}", subject=str(path))
    return ManifestCorrupt(f"{error}", subject=str(path), remedy="load the last checkpoint")


def _unneeded_of(rows: Iterable[tuple[str, str, int, int]]) -> list[Place]:
    """Return, of groups that have lost values, those that nobody needs."""
    return [Place(unit, path) for unit, path, live, pins in rows if not live and not pins]


def check_copy(path: Path, subject: Path) -> dict[str, str]:
    """Return what a copy of an index says of itself.

    Raises
    ------
    ManifestCorrupt, FormatTooNew
        It is damaged or no index; or a later version's.
    """
    db = sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)
    try:
        check_version(db, subject)
        made = {sql for (sql,) in db.execute("SELECT sql FROM sqlite_master")}
        if not made >= _STATEMENTS:
            raise ManifestCorrupt("is no index of values", subject=str(subject))
        (found,) = db.execute("PRAGMA quick_check").fetchone()
        if found != "ok":
            raise ManifestCorrupt(f"is damaged: {found}", subject=str(subject))
        (values,) = db.execute("SELECT count(*) FROM found").fetchone()
        return {**dict(db.execute("SELECT name, value FROM meta")), "values": str(values)}
    except sqlite3.DatabaseError as error:
        raise ManifestCorrupt(f"is no checkpoint: {error}", subject=str(subject)) from error
    finally:
        db.close()


def check_version(db: sqlite3.Connection, path: Path, *, make: str = "") -> None:
    """Refuse what is no index of values of this version.

    Parameters
    ----------
    make
        The store that a new file is made for; empty where it has to be there.

    Raises
    ------
    ManifestCorrupt, FormatTooNew
    """
    (version,) = db.execute("PRAGMA user_version").fetchone()
    tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if make and not version and not tables:
        db.execute("BEGIN")
        for statement in _STATEMENTS:
            db.execute(statement)
        db.execute("INSERT INTO meta VALUES ('store_id', ?)", (make,))
        db.execute(f"PRAGMA user_version = {VERSION}")
        db.execute("COMMIT")
    elif version > VERSION:
        raise FormatTooNew(
            f"is an index of version {version}, this program reads {VERSION}",
            subject=str(path),
            remedy="upgrade tq-fs",
        )
    elif version != VERSION:
        raise ManifestCorrupt("is no index of values", subject=str(path))
