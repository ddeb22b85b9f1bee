"""Chains of versions in an object store. The versions of a folder are its commits, which list the
files of the folder with their checksums.

A chain is `0000.json`, `0001.json` ...: the last version is current. Each version is created once
and never changed. A process creates the version after the one that it has read; if another process
was first, the store refuses. Versions are not removed, so that a number is never used twice: a
removal is one more version, without content.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from megablend.caches.base import Record
from megablend.errors import CacheError
from megablend.storage.objects.prefix import ObjectPrefix
from megablend.system.atomic_write import checksum
from megablend.system.digest import hex_digest
from megablend.system.limited_json import missing_field, parse_json

FORMAT_VERSION = 1
_MAX_COLLISIONS = 50
"""The maximum number of attempts to create a version if requests collide."""
_COLLISION_SECONDS = 0.1
"""The time between two attempts to create a version."""
_NAME = re.compile(r"(\d{4,})\.json")


_CONTENT: dict[str, type | tuple[type, ...]] = {"files": dict, "replaced": list}
"""The types of the fields of a commit's content."""
_FILE: dict[str, type | tuple[type, ...]] = {"at": str, "bytes": int, "blake2b": str, "etag": str}
"""The types of the fields of each file in a commit; see StoredFile."""


class Chain:
    """The versions of a record or folder, which are objects below a key of a store."""

    def __init__(self, prefix: ObjectPrefix, key: str) -> None:
        self._prefix = prefix
        self.key = key

    def read_last(self) -> Record | None:
        """Return the last version; None if there is none. Raises: CacheError if it is damaged or of
        a newer format."""
        return self.read(self.find_end())

    def find_end(self) -> int:
        """Return the number of the last version, even if the store does not list it yet; -1 if
        there is none."""
        keys = (entry.key for entry in self._prefix.list_objects(self.key))
        number = find_last(key for key in keys if in_folder(key, self.key))
        while self._prefix.read(self.object_key(number + 1)) is not None:
            number += 1
        return number

    def read(self, number: int) -> Record | None:
        """Return a version by its number; None if there is none."""
        data = None if number < 0 else self._prefix.read(self.object_key(number))
        return None if data is None else self.parse(number, data)

    def object_key(self, number: int) -> str:
        """Return the key of a version."""
        return f"{self.key}/{number:04d}.json"

    def append(self, content: Any, after: int) -> bool:
        """Create the version that follows version number `after`, which is -1 for the first
        version.

        Returns: whether the version has this content; False if another process was first.
        """
        record = {
            "format_version": FORMAT_VERSION,
            "nonce": secrets.token_hex(8),
            "content": content,
        }
        key = self.object_key(after + 1)
        for _ in range(_MAX_COLLISIONS):
            if self._prefix.create(key, json.dumps(record, sort_keys=True).encode()):
                return True
            data = self._prefix.read(key)
            if data is not None:
                existing = _parse(self._place(key), data)
                # This call created the version if the response to an earlier attempt was lost; an
                # equal version from another process serves as well
                is_own = existing["nonce"] == record["nonce"]
                is_equal = content is not None and existing["content"] == content
                return is_own or is_equal
            time.sleep(_COLLISION_SECONDS)  # two requests collided, and neither was carried out
        raise CacheError(
            f"{self._place(key)}: the object store refused {_MAX_COLLISIONS} requests to create it, although it does not exist; "
            "run the command again"
        )

    def parse(self, number: int, data: bytes) -> Record:
        """Parse a version, given the bytes of its object. Raises: CacheError if it is damaged or of
        a newer format."""
        return Record(_parse(self._place(self.object_key(number)), data)["content"], number)

    def _place(self, key: str) -> str:
        return f"{self._prefix.location}/{key}"


def in_folder(key: str, folder: str) -> bool:
    """Return whether a key belongs to a version of the chain at `folder`."""
    return key.startswith(f"{folder}/") and _NAME.fullmatch(key[len(folder) + 1 :]) is not None


def find_last(keys: Iterable[str]) -> int:
    """Return the largest version number among the keys; -1 if there is none."""
    names = (_NAME.fullmatch(key.rpartition("/")[2]) for key in keys)
    return max((int(name[1]) for name in names if name), default=-1)


def _parse(location: str, data: bytes) -> dict[str, Any]:
    """Parse the object of a version. Raises: CacheError if it is damaged or of another format."""
    try:
        record = parse_json(data)
    except ValueError as error:
        raise CacheError(f"{location}: damaged ({error}); restore it from a backup") from None
    if not isinstance(record, dict) or not {"nonce", "content"} <= record.keys():
        raise CacheError(
            f'{location}: damaged (its JSON has no "nonce" or no "content"); restore it from a backup'
        )
    if record.get("format_version") != FORMAT_VERSION:
        raise CacheError(
            f"{location}: found format version {record.get('format_version')!r}, expected {FORMAT_VERSION}; use the version of "
            "megablend that wrote it"
        )
    return record


class StoredFile(NamedTuple):
    """A file of a commit."""

    at: str
    """The name of the upload to which the file belongs."""
    bytes: int
    blake2b: str
    etag: str
    """The etag of the file's object; "" if unknown."""


class Commit(NamedTuple):
    """One version of a folder."""

    number: int
    files: dict[str, StoredFile]
    """The files by name; empty if the folder was removed."""
    replaced: frozenset[str]
    """The names of files that do not count when folders are compared; see
    CacheStore.commit_folder."""

    def make_content(self) -> dict[str, Any]:
        """Return the commit as a JSON value, to store as a version of the folder's chain."""
        return {
            "files": {name: file._asdict() for name, file in self.files.items()},
            "replaced": sorted(self.replaced),
        }

    def list_keys(self, folder: str) -> dict[str, StoredFile]:
        """Return the files of the commit, by the keys of their objects."""
        return {f"{folder}/{file.at}/{name}": file for name, file in self.files.items()}


def parse_commit(place: str, version: Record) -> Commit:
    """Parse a version of a folder's chain as a commit. Raises: CacheError if it is damaged.

    Args:
        place: the location of the version, for messages.
    """
    content = version.data
    if content is None:
        return Commit(version.number, {}, frozenset())
    missing = _find_missing(content)
    if missing is not None:
        raise CacheError(f"{place}: damaged (it lacks {missing}); restore it from a backup")
    files = {
        name: StoredFile(*(file[field] for field in _FILE))
        for name, file in content["files"].items()
    }
    return Commit(version.number, files, frozenset(content["replaced"]))


def _find_missing(content: Any) -> str | None:
    """Return what is missing from the content of a commit, for a message; None if it is
    complete."""
    missing = missing_field(content, _CONTENT)
    if missing is not None:
        return missing
    for file in content["files"].values():
        missing = missing_field(file, _FILE)
        if missing is not None:
            return missing
    names = (*content["files"], *content["replaced"])
    return None if all(map(_is_file_name, names)) else "valid file names"


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name != "" and "/" not in name and not name.startswith(".")


def describe_file(at: str, data: bytes | Path, etag: str) -> StoredFile:
    """Describe a file of the upload `at`, given its content and the etag of its object."""
    if isinstance(data, Path):
        return StoredFile(at, data.stat().st_size, checksum(data), etag)
    return StoredFile(at, len(data), hex_digest(data), etag)
