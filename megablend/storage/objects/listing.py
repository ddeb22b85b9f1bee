"""Finding the keys that match a pattern by LIST: for `*` one request (and its further pages) for each
folder, for `**` one for everything below a folder.

Patterns have the same meaning as on a local disk: `*`, `?` and `[]` within a name, `**` for any number
of folders, names that begin with a dot only if the pattern has one. A name that equals its part
of the pattern matches, whatever characters it has.
"""

from __future__ import annotations

import asyncio
import fnmatch
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from megablend.storage.location import has_wildcard

ANY_FOLDERS = "**"


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether a name with `/` between its parts matches a pattern with `*`, `?`, `[]` and
    `**`."""
    return matches_parts(name.split("/"), tuple(pattern.split("/")))


def matches_parts(names: Sequence[str], parts: tuple[str, ...]) -> bool:
    """Return whether the names of a path match the parts of a pattern that may have `**`."""
    if not parts:
        return not names
    if parts[0] != ANY_FOLDERS:
        return (
            bool(names) and matches_part(names[0], parts[0]) and matches_parts(names[1:], parts[1:])
        )
    if len(parts) == 1:
        return bool(names) and not _any_hidden(names)
    return any(
        matches_parts(names[i:], parts[1:]) and not _any_hidden(names[:i])
        for i in range(len(names))
    )


def matches_part(name: str, part: str) -> bool:
    """Return whether the name of a file or folder matches a part of a pattern, or equals it."""
    if name == part:
        return True
    if name.startswith(".") and not part.startswith("."):
        return False
    return _expression(part).match(name) is not None


def _any_hidden(names: Iterable[str]) -> bool:
    return any(name.startswith(".") for name in names)


@lru_cache(maxsize=256)
def _expression(part: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(part))


Object: TypeAlias = Mapping[str, Any]
"""obstore's metadata of an object: path (its key), size, e_tag, last_modified."""


class Listed(NamedTuple):
    """The folders and objects in a folder of a bucket, or those that a pattern matches."""

    folders: Sequence[str]
    """Keys without a trailing slash."""
    objects: Sequence[Object]


ListFolder = Callable[[str], Awaitable[Listed]]
"""Lists the content of a folder without its subfolders', given the folder's key; "" for the bucket."""
ListAll = Callable[[str], Awaitable[Sequence[Object]]]
"""Lists the objects anywhere below a folder, given the folder's key."""


async def find_objects(pattern: str, list_folder: ListFolder, list_all: ListAll) -> Listed:
    """Return the objects whose key matches `pattern`, sorted by key, and the folders whose own key
    matches.

    The pattern must have a wildcard. Raises: the errors of the two callbacks.
    """
    parts = pattern.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return Listed([], [])  # no key that the client can address
    first = next(i for i, part in enumerate(parts) if has_wildcard(part))
    found = await _search("/".join(parts[:first]), parts[first:], list_folder, list_all)
    by_key = {each["path"]: each for each in found.objects}
    exact = by_key.get(pattern)
    if exact is not None:
        return Listed([], [exact])
    return Listed(found.folders, [by_key[key] for key in sorted(by_key)])


async def _search(
    folder: str, parts: Sequence[str], list_folder: ListFolder, list_all: ListAll
) -> Listed:
    """Return the objects and folders below a folder that match the parts of a pattern."""
    first_wild = next((i for i, part in enumerate(parts) if has_wildcard(part)), len(parts) - 1)
    folder = _join(folder, parts[:first_wild])
    parts = parts[first_wild:]
    if parts[0] == ANY_FOLDERS:
        skip = len(folder) + 1 if folder else 0
        objects = await list_all(folder)
        wanted = tuple(parts)
        return Listed(
            [],
            [each for each in objects if matches_parts(each["path"][skip:].split("/"), wanted)],
        )
    listed = await list_folder(folder)
    folders = [each for each in listed.folders if matches_part(_name(each), parts[0])]
    if len(parts) == 1:
        return Listed(
            folders,
            [each for each in listed.objects if matches_part(_name(each["path"]), parts[0])],
        )
    found = await asyncio.gather(
        *(_search(subfolder, parts[1:], list_folder, list_all) for subfolder in folders)
    )
    return Listed(
        [key for listed in found for key in listed.folders],
        [obj for listed in found for obj in listed.objects],
    )


def _join(folder: str, parts: Sequence[str]) -> str:
    return "/".join([folder, *parts] if folder else parts)


def _name(key: str) -> str:
    return key.rpartition("/")[2]
