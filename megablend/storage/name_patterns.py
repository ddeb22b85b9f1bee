"""Matching names with patterns, for storages that list names themselves. As on a local disk: see
`storage.find`."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

ANY_FOLDERS = "**"


def matches_pattern(name: str, pattern: str) -> bool:
    """Whether a name with `/` between its parts matches a pattern with `*`, `?`, `[]` and `**`."""
    return matches_parts(name.split("/"), tuple(pattern.split("/")))


def matches_parts(names: Sequence[str], parts: tuple[str, ...]) -> bool:
    """Whether the names of a path match the parts of a pattern that may have `**`."""
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
    """Whether the name of a file or folder matches a part of a pattern, or equals it."""
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
