"""Locations of data files, as strings: plain paths, and `scheme://` locations of other storages.

Plain paths are normalised as `pathlib` does it. What follows `scheme://` is not normalised, since
keys of object stores may have empty or dotted parts; `scheme://` itself is the root of all
locations with this scheme.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import PurePath

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_NORMAL = re.compile(r"(?:/(?!\.(?:/|\Z))[^/]+)+")
"""Absolute paths that `pathlib` would not change; it takes ten times as long."""


def find_scheme(location: str) -> str:
    """The scheme in lower case; "" for a plain path."""
    found = None if location.startswith("/") else _SCHEME.match(location)
    return "" if found is None else found[1].lower()


def lower_scheme(location: str) -> str:
    """The location with its scheme in lower case, as storages write the locations that they
    find."""
    scheme = find_scheme(location)
    return scheme + location[len(scheme) :] if scheme else location


def has_prefix(location: str, prefix: str) -> bool:
    """Whether a location is in `prefix`: only complete parts between slashes match;
    the case of the scheme does not matter."""
    location = lower_scheme(location)
    prefix = lower_scheme(prefix)
    return location == prefix or location.startswith(
        prefix if prefix.endswith("/") else f"{prefix}/"
    )


def join(folder: str, name: str) -> str:
    """The location of `name`, which is relative to a folder."""
    if not find_scheme(folder):
        path = f"{folder}/{name}" if folder and not name.startswith("/") else name
        return path if _NORMAL.fullmatch(path) else str(PurePath(folder, name))
    return f"{folder}{name}" if folder.endswith("/") else f"{folder}/{name}"


def get_parent(location: str) -> str:
    """The folder that contains a location; a root is its own parent."""
    if not find_scheme(location):
        if _NORMAL.fullmatch(location):
            return location.rpartition("/")[0] or "/"
        return str(PurePath(location).parent)
    root, parts = _split(location)
    return root + "/".join(parts[:-1])


def get_name(location: str) -> str:
    """The last part of a location; "" of a root."""
    if not find_scheme(location):
        return PurePath(location).name
    return (_split(location)[1] or [""])[-1]


def make_relative(location: str, folder: str) -> str:
    """The location relative to a folder; the inverse of `join`.
    Raises: ValueError if it is not in the folder."""
    if not find_scheme(folder):
        return _relative_path(location, folder)
    start = folder if folder.endswith("/") else f"{folder}/"
    if not location.startswith(start):
        raise ValueError(f"{location} is not in {folder}")
    return location[len(start) :]


def make_absolute(location: str, folder: str) -> str:
    """A location with a scheme, which is written in lower case; a plain path joined to a folder."""
    return lower_scheme(location) if find_scheme(location) else join(folder, location)


def has_wildcard(pattern: str) -> bool:
    """Whether a location is a pattern: it contains `*`, `?` or `[`."""
    return glob.has_magic(pattern)


def escape_wildcards(location: str) -> str:
    """A pattern that matches only this location."""
    root = _root_of(location)
    return root + glob.escape(location[len(root) :])


def check_schemes(locations: Sequence[str]) -> None:
    """Reject locations with different schemes. Raises: ValueError."""
    schemes = sorted({find_scheme(each) for each in locations})
    if len(schemes) > 1:
        listed = ", ".join(f"{scheme}://" if scheme else "plain paths" for scheme in schemes)
        raise ValueError(
            f"its paths are in different storage systems ({listed}); use a separate source for each"
        )


def find_root(patterns: Sequence[str]) -> str:
    """The folder that all patterns share before their first wildcard.
    Raises: ValueError if their schemes differ."""
    check_schemes(patterns)
    folders = [_folder_of(pattern) for pattern in patterns]
    if not find_scheme(patterns[0]):
        if len(folders) == 1 and _NORMAL.fullmatch(folders[0]):
            return folders[0]
        return os.path.commonpath(folders)
    shared = []
    for first, *others in zip(*(_split(folder)[1] for folder in folders), strict=False):
        if any(part != first for part in others):
            break
        shared.append(first)
    return _root_of(patterns[0]) + "/".join(shared)


def _folder_of(pattern: str) -> str:
    """The folder above the first part with a wildcard, or above the last part."""
    folder = get_parent(pattern)
    while has_wildcard(folder):
        folder = get_parent(folder)
    return folder


def _root_of(location: str) -> str:
    """`scheme://`, or "" of a plain path."""
    found = _SCHEME.match(location)
    return found[0] if found else ""


def _split(location: str) -> tuple[str, list[str]]:
    """The root, and the parts after it."""
    root = _root_of(location)
    rest = location[len(root) :]
    return root, rest.split("/") if rest else []


def _relative_path(path: str, folder: str) -> str:
    """The part of a plain path after the folder that contains it; much faster than relpath."""
    inside = path[len(folder) + 1 :]
    if (
        path.startswith(f"{folder}/")
        and os.path.normpath(inside) == inside
        and not inside.startswith(("..", "/"))
    ):
        return inside
    return os.path.relpath(path, folder)
