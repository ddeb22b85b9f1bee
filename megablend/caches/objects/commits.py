"""What a commit of a folder says: which files it has, where their objects are, and their checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megablend.caches.objects.chains import Version
from megablend.errors import CacheError
from megablend.fs.atomic_write import checksum
from megablend.system.limited_json import missing_field

_CONTENT: dict[str, type | tuple[type, ...]] = {"files": dict, "replaced": list}
_FILE: dict[str, type | tuple[type, ...]] = {"at": str, "bytes": int, "blake2b": str, "etag": str}


class StoredFile(NamedTuple):
    """A file of a commit."""

    at: str
    """Name of the upload that it is part of."""
    bytes: int
    blake2b: str
    etag: str
    """Of its object; "" if unknown."""


class Commit(NamedTuple):
    """A version of a folder."""

    number: int
    files: dict[str, StoredFile]
    """Files by name; empty if the folder was removed."""
    replaced: frozenset[str]
    """Names of the files that do not belong to its identity."""

    def make_content(self) -> dict[str, Any]:
        """The content of its version in the chain."""
        return {
            "files": {name: file._asdict() for name, file in self.files.items()},
            "replaced": sorted(self.replaced),
        }

    def list_keys(self, folder: str) -> dict[str, StoredFile]:
        """Its files by the keys of their objects."""
        return {f"{folder}/{file.at}/{name}": file for name, file in self.files.items()}


def parse_commit(place: str, version: Version) -> Commit:
    """A commit from a version of its folder's chain. Raises: CacheError if it is damaged."""
    content: Any = version.content
    if content is None:
        return Commit(version.number, {}, frozenset())
    missing = missing_field(content, _CONTENT)
    if missing is None:
        fields = (missing_field(file, _FILE) for file in content["files"].values())
        missing = next((field for field in fields if field is not None), None)
    names = () if missing is not None else (*content["files"], *content["replaced"])
    if any(not isinstance(name, str) or not name or "/" in name or name.startswith(".") for name in names):
        missing = "valid names of files"
    if missing is not None:
        raise CacheError(f"{place}: damaged (it lacks {missing}); restore it from a backup")
    files = {name: StoredFile(*(file[field] for field in _FILE)) for name, file in content["files"].items()}
    return Commit(version.number, files, frozenset(content["replaced"]))


def describe_files(at: str, members: Mapping[str, bytes | Path], etags: Mapping[str, str]) -> dict[str, StoredFile]:
    """Files of an upload, by name, from their contents and the etags of their objects."""
    return {name: StoredFile(at, *_measure(data), etags[name]) for name, data in members.items()}


def _measure(data: bytes | Path) -> tuple[int, str]:
    """Size and checksum."""
    if isinstance(data, Path):
        return data.stat().st_size, checksum(data)
    return len(data), hashlib.blake2b(data, digest_size=16).hexdigest()
