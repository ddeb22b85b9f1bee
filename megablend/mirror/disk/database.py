"""A database of small values that the owner of a mirror keeps in addition to pages, such as the
states of source files and the times at which files were last used.

Each row has a checksum, and a damaged row counts as missing. Since most contents can be obtained
again, a database that SQLite cannot read is replaced by an empty one, and rows that cannot be
written are dropped (except if `is_lasting`).
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from megablend.errors import DataError
from megablend.system.limited_log import LimitedLog

_OPEN = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS rows
    (kind TEXT, name BLOB, value BLOB, checksum INTEGER, PRIMARY KEY (kind, name)) WITHOUT ROWID;
"""
_GET = "SELECT name, value, checksum FROM rows WHERE kind = ? AND name = ?"
_GET_ALL = "SELECT name, value, checksum FROM rows WHERE kind = ?"
_PUT = "REPLACE INTO rows VALUES (?, ?, ?, ?)"
_DELETE = "DELETE FROM rows WHERE kind = ? AND name = ?"
_RESTORE = "; restore this file, or remove it and request the datasets again"
_REMOVE = ", or remove the file, which is then created again"
_FAULTS_OF_DISK = ("full", "i/o", "unable to open", "locked", "readonly")
"""Parts of SQLite's messages that indicate a failing disk rather than a damaged database."""


class Database:
    """A store of values by kind and name, in an SQLite file. If the disk fails, a warning is
    logged, and the database is treated as empty.

    Args:
        is_lasting: whether the contents must last, since they cannot be obtained again. If so, a
            damaged database is not replaced, and methods raise DataError if the disk fails or the
            database is damaged (`get_all` also if a row is damaged).
    """

    def __init__(self, path: Path, *, is_lasting: bool = False) -> None:
        self._path = path
        self._is_lasting = is_lasting
        self._connection: sqlite3.Connection | None = None
        self._log = LimitedLog()

    def get(self, kind: str, name: str) -> bytes | None:
        """Return the value with this kind and name; None if there is none."""
        rows = self._run(_GET, [(kind, _encode(name))])
        return _select_sound(kind, rows).get(name)

    def get_all(self, kind: str) -> dict[str, bytes]:
        """Return all values of the given kind, by name."""
        rows = self._run(_GET_ALL, [(kind,)])
        values = _select_sound(kind, rows)
        if self._is_lasting and len(values) < len(rows):
            raise DataError(str(self._path), f"has a damaged row of kind {kind!r}{_RESTORE}")
        return values

    def put(self, kind: str, values: dict[str, bytes]) -> None:
        """Store values by name, either all of them or none. They replace earlier values with the
        same names."""
        rows = [(kind, _encode(name), value) for name, value in values.items()]
        self._run(_PUT, [(*row, _checksum(*row)) for row in rows])

    def delete(self, kind: str, names: Iterable[str]) -> None:
        """Delete the values of these names."""
        self._run(_DELETE, [(kind, _encode(name)) for name in names])

    def close(self) -> None:
        """Close the connection to the database. The next use opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __del__(self) -> None:
        """Close the connection: Python 3.13 warns of those that are dropped open."""
        self.close()

    def remove(self) -> None:
        """Close the connection, and delete the files of the database."""
        self.close()
        for end in ("", "-wal", "-shm", "-journal"):
            Path(f"{self._path}{end}").unlink(missing_ok=True)

    def _run(self, statement: str, rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Execute a statement. If the database is damaged, it is replaced. If it is lasting,
        DataError is raised instead."""
        try:
            try:
                return self._try(statement, rows)
            except (sqlite3.Error, UnicodeDecodeError) as error:
                if any(word in str(error).lower() for word in _FAULTS_OF_DISK):
                    raise
                if self._is_lasting:
                    raise DataError(str(self._path), f"is damaged ({error}){_RESTORE}") from error
                self.remove()
                return self._try(statement, rows)
        except (sqlite3.Error, OSError) as error:
            self.close()
            problem = f"cannot be used ({error}); free disk space, or check the disk"
            if self._is_lasting:
                raise DataError(str(self._path), problem) from error
            self._log.warn(str(self._path), f"{problem}{_REMOVE}")
            return []

    def _try(self, statement: str, rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Open the database if needed, and execute a statement for each of its parameter rows."""
        if self._connection is None:
            self._connection = sqlite3.connect(self._path, check_same_thread=False)
            self._connection.executescript(_OPEN)
            if self._is_lasting:
                self._connection.execute("PRAGMA synchronous = FULL")
            if self._connection.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("SQLite's integrity_check failed")
        with self._connection:
            if statement in (_PUT, _DELETE):
                self._connection.executemany(statement, rows)
                return []
            return self._connection.execute(statement, rows[0]).fetchall()


def _encode(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _checksum(kind: str, name: bytes, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(name + b"\0", zlib.crc32(kind.encode())))


def _select_sound(kind: str, rows: list[tuple[Any, ...]]) -> dict[str, bytes]:
    """Return the values of the rows whose checksums are right, by name."""
    return {
        name.decode("utf-8", "surrogateescape"): value
        for name, value, checksum in rows
        if isinstance(name, bytes)
        and isinstance(value, bytes)
        and checksum == _checksum(kind, name, value)
    }


class SourceState(NamedTuple):
    """The last known size and etag of a source file."""

    size: int
    etag: str
    checked_at: float
    """The time of the last request, in seconds since 1970; 0 if the state may be outdated."""


class SourceStates:
    """The last known states of source files, including files without held pages."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, location: str) -> SourceState | None:
        """Return the state of the file at a location; None if it is unknown."""
        value = self._database.get("state", location)
        return None if value is None else SourceState(*json.loads(value))

    def put(self, location: str, state: SourceState) -> None:
        """Store the state of the file at a location."""
        self._database.put("state", {location: json.dumps(state).encode()})
