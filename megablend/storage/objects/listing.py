"""Find the keys that match a pattern by LIST requests. For `*`, one request (and its further pages)
is sent for each folder; for `**`, one for everything below a folder.

Patterns have the same meaning as on a local disk: `*`, `?` and `[]` match within a name, `**`
matches any number of folders, and names that begin with a dot match only if the pattern has the
dot. A name also matches if it equals its part of the pattern, even if it has wildcard characters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

from megablend.storage.location import has_wildcard

ANY_FOLDERS = "**"
ListFolder = Callable[[str], Awaitable[Sequence[str]]]
"""A function that lists the direct content of a folder, given the folder's key ("" for the bucket).
It returns the keys of the subfolders, without a trailing slash."""
ListAll = Callable[[str], Awaitable[None]]
"""A function that lists the objects anywhere below a folder, given the folder's key."""


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether a name matches a pattern with `*`, `?`, `[]` and `**`. The parts of both are
    separated by `/`."""
    folder, _, last = f"/{name}".rpartition("/")
    folders, _, part = f"/{pattern}".rpartition("/")
    if part == ANY_FOLDERS:
        return not last.startswith(".") and _matches_folders(folder, f"/{pattern}")
    return _matches_part(last, part) and _matches_folders(folder, folders)


@lru_cache(maxsize=1 << 12)
def _matches_folders(folder: str, pattern: str) -> bool:
    """Return whether a folder matches the parts of a pattern that stand for folders, of which `**`
    stands for any number. Both are empty or begin with a slash. The results are kept, since most
    folders have many names."""
    if not pattern:
        return not folder
    above, _, name = folder.rpartition("/")
    rest, _, part = pattern.rpartition("/")
    if part != ANY_FOLDERS:
        return bool(folder) and _matches_part(name, part) and _matches_folders(above, rest)
    if _matches_folders(folder, rest):
        return True
    return bool(folder) and not name.startswith(".") and _matches_folders(above, pattern)


def _matches_part(name: str, part: str) -> bool:
    """Return whether a name without slashes matches a part of a pattern other than `**`."""
    is_hidden = name.startswith(".") and not part.startswith(".")
    return name == part or (not is_hidden and fnmatchcase(name, part))


async def find_objects(pattern: str, list_folder: ListFolder, list_all: ListAll) -> Sequence[str]:
    """List the folders in which objects can match a pattern with a wildcard. Returns: the keys of
    the folders that match the pattern themselves.

    Raises: the errors of the two callbacks.
    """
    parts = pattern.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return []  # no key that the client can address
    return await _search("", parts, list_folder, list_all)


async def _search(
    folder: str, parts: Sequence[str], list_folder: ListFolder, list_all: ListAll
) -> Sequence[str]:
    """List the content of a folder as far as the remaining parts of a pattern require."""
    first_wild = next((i for i, part in enumerate(parts) if has_wildcard(part)), len(parts) - 1)
    folder = "/".join([folder, *parts[:first_wild]] if folder else parts[:first_wild])
    parts = parts[first_wild:]
    if parts[0] == ANY_FOLDERS:
        await list_all(folder)
        return []
    listed = await list_folder(folder)
    matching = [name for name in listed if matches_pattern(name.rpartition("/")[2], parts[0])]
    if len(parts) == 1:
        return matching
    listings = await asyncio.gather(
        *(_search(name, parts[1:], list_folder, list_all) for name in matching)
    )
    return [key for keys in listings for key in keys]
