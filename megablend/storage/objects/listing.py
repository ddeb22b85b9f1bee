"""Find the keys that match a pattern by LIST requests. For `*`, one request (and its further pages)
is sent for each folder; for `**`, one for everything below a folder.

Patterns have the same meaning as on a local disk: `*`, `?` and `[]` match within a name, `**`
matches any number of folders, and names that begin with a dot match only if the pattern has the
dot. A name also matches if it equals its part of the pattern, even if it has wildcard characters.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache

from megablend.storage.location import has_wildcard

ANY_FOLDERS = "**"
ListFolder = Callable[[str], Awaitable[Sequence[str]]]
"""A function that lists the direct content of a folder, given the folder's key ("" for the bucket).
It returns the keys of the subfolders, without a trailing slash."""
ListAll = Callable[[str], Awaitable[None]]
"""A function that lists the objects anywhere below a folder, given the folder's key."""
_TOKEN = re.compile(r"\*+|\?|\[(!|(?!!))(\][^\]]*|[^\]]+)\]|.", re.DOTALL)
"""Matches a wildcard or a character in a part of a pattern."""
_RANGE = re.compile(r"(.)(?:-(.))?", re.DOTALL)
_LETTER = r"[^/\x00]"
HIDDEN = "/\0."
"""The text that replaces a slash followed by a dot in keys before they are matched."""
_NOTHING = r"\x00\x00"
"""An expression that matches no marked key, since such a key never has two NULs in a row."""


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether a name matches a pattern with `*`, `?`, `[]` and `**`. The parts of both are
    separated by `/`."""
    return re.fullmatch(make_expression(pattern), mark_hidden(name)) is not None


def mark_hidden(key: str) -> str:
    """Mark the hidden names in a key, as the expressions of `make_expression` require. The result
    has a leading slash, and a NUL before each name that begins with a dot, since RE2 cannot look
    ahead."""
    return f"/{key}".replace("/.", HIDDEN)


@lru_cache(maxsize=256)
def make_expression(pattern: str) -> str:
    """Return a regular expression for the marked keys that match a pattern. It uses only syntax
    that RE2 and Python have in common."""
    *folders, last = pattern.split("/")
    any_name = f"(?:/{_LETTER}*)"
    parts = [f"{any_name}*" if each == ANY_FOLDERS else f"/{_translate(each)}" for each in folders]
    end = f"{any_name}+" if last == ANY_FOLDERS else f"/{_translate(last)}"
    return f"^{''.join(parts)}{end}$"


def _translate(part: str) -> str:
    """Return the expression for the names that match or equal a part of a pattern."""
    begin = r"\x00" if part.startswith(".") else ""
    found = "".join(_translate_token(each) for each in _TOKEN.finditer(part))
    return rf"{begin}(?:{found}|{re.escape(part)})" if has_wildcard(part) else begin + found


def _translate_token(token: re.Match[str]) -> str:
    letter = token[0][0]
    if letter == "*":
        return f"{_LETTER}*"
    if letter == "?":
        return _LETTER
    if token[2] is None:
        return re.escape(token[0])
    ranges = [(low, high or low) for low, high in _RANGE.findall(token[2])]
    is_inverse = bool(token[1])
    if not is_inverse:  # names have no slashes, so ranges are divided at the slash
        divided = [
            ((low, "."), ("0", high)) if low <= "/" <= high else ((low, high),)
            for low, high in ranges
        ]
        ranges = [each for pieces in divided for each in pieces]
    letters = "".join(f"{re.escape(low)}-{re.escape(high)}" for low, high in ranges if low <= high)
    if is_inverse:
        return rf"[^/\x00{letters}]"
    return f"[{letters}]" if letters else _NOTHING


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
    matching = [each for each in listed if matches_pattern(each.rpartition("/")[2], parts[0])]
    if len(parts) == 1:
        return matching
    found = await asyncio.gather(
        *(_search(each, parts[1:], list_folder, list_all) for each in matching)
    )
    return [key for keys in found for key in keys]
