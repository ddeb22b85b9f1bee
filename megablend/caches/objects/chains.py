"""A chain of versions `0000.json`, `0001.json` ...: the last one is current. Each is created once and never changed.

A process creates the version after the one that it has read; if another one was faster, the store refuses. Versions are not
removed, so that a number is never given twice: what is removed gets one more version, which says so.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from megablend.errors import CacheError
from megablend.storage.objects.prefix import ObjectPrefix
from megablend.system.limited_json import parse_json

FORMAT_VERSION = 1
_MOST_COLLISIONS, _COLLISION_SECONDS = 50, 0.1
_NAME = re.compile(r"(\d{4,})\.json")


class Version(NamedTuple):
    """A version of a chain."""

    number: int
    content: Any
    """JSON; None if what the chain stands for was removed."""


class Chain:
    """The versions below a key of a store."""

    def __init__(self, prefix: ObjectPrefix, key: str) -> None:
        self._prefix, self.key = prefix, key

    def read_last(self) -> Version | None:
        """The last version; None if there is none. Raises: CacheError if it is damaged or of a newer format."""
        return self.read(self.find_end())

    def find_end(self) -> int:
        """The number of the last version; -1 if there is none. Also of one that is not yet in the store's listings."""
        keys = (each.key for each in self._prefix.list_objects(self.key))
        number = find_last(key for key in keys if in_folder(key, self.key))
        while self._prefix.read(self.object_key(number + 1)) is not None:
            number += 1
        return number

    def read(self, number: int) -> Version | None:
        """A version by its number; None if there is none."""
        data = None if number < 0 else self._prefix.read(self.object_key(number))
        return None if data is None else self.parse(number, data)

    def object_key(self, number: int) -> str:
        """The key of a version."""
        return f"{self.key}/{number:04d}.json"

    def append(self, content: Any, after: int) -> bool:
        """Create the version after number `after` (-1 for the first).

        Returns: False if another process has created it, with another content.
        """
        record = {"format_version": FORMAT_VERSION, "nonce": secrets.token_hex(8), "content": content}
        key = self.object_key(after + 1)
        for _ in range(_MOST_COLLISIONS):
            if self._prefix.create(key, json.dumps(record, sort_keys=True).encode()):
                return True
            data = self._prefix.read(key)
            if data is not None:
                found = _parse(self._place(key), data)
                # Its own if the answer to the first attempt was lost; an equal one of another process serves as well.
                return found["nonce"] == record["nonce"] or (content is not None and found["content"] == content)
            time.sleep(_COLLISION_SECONDS)  # two requests collided, and neither was carried out
        raise CacheError(f"{self._place(key)}: cannot be created, although it does not exist: check the store")

    def parse(self, number: int, data: bytes) -> Version:
        """A version from its object. Raises: CacheError."""
        return Version(number, _parse(self._place(self.object_key(number)), data)["content"])

    def _place(self, key: str) -> str:
        return f"{self._prefix.location}/{key}"


def in_folder(key: str, folder: str) -> bool:
    """Whether a key is a version of the chain at `folder`."""
    return key.startswith(f"{folder}/") and _NAME.fullmatch(key[len(folder) + 1 :]) is not None


def find_last(keys: Iterable[str]) -> int:
    """The largest number of the versions with these keys; -1 if there are none."""
    names = (_NAME.fullmatch(key.rpartition("/")[2]) for key in keys)
    return max((int(name[1]) for name in names if name), default=-1)


def _parse(place: str, data: bytes) -> dict[str, Any]:
    try:
        record = parse_json(data)
    except ValueError as error:
        raise CacheError(f"{place}: damaged ({error}); restore it from a backup") from None
    if not isinstance(record, dict) or not {"nonce", "content"} <= record.keys():
        raise CacheError(f"{place}: damaged (not a version of a record); restore it from a backup")
    if record.get("format_version") != FORMAT_VERSION:
        raise CacheError(
            f"{place}: found format version {record.get('format_version')!r}, expected {FORMAT_VERSION}; use the version of "
            "megablend that wrote it"
        )
    return record
