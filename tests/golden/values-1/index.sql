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
PRAGMA user_version = 1;
