"""Expand lists of URLs, which are written as braces or text files since web servers do not list
their files. Also separate the queries of URLs, which are secrets."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from pathlib import Path

from megablend.errors import ConfigError

LIST_ENDING = ".urls"
"""The suffix of a local text file with one URL per line."""
MAX_URLS = 1_000_000
"""The maximum number of URLs that braces may expand to. A larger number is probably a typing
error."""
_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBERS = re.compile(r"(\d+)\.\.(\d+)")
_WEB = re.compile(r"https?://", re.IGNORECASE)


def is_web(location: str) -> bool:
    """Return whether a location is a URL of a web server."""
    return _WEB.match(location) is not None


def expand_location(location: str) -> list[str]:
    """Return the URLs that a location expands to, if it is a URL with braces or a text file of
    URLs. For any other location, return only the location itself.

    Raises: ConfigError if the file cannot be read or contains anything but URLs, or if braces
        expand to too many URLs.
    """
    if is_web(location):
        return expand_braces(location)
    if location.endswith(LIST_ENDING) and "://" not in location:
        return [url for line in _read_lines(location) for url in expand_braces(line)]
    return [location]


def split_query(location: str) -> tuple[str, str]:
    """Split a URL into two parts: the URL without query and fragment, and the query."""
    if not is_web(location):
        return location, ""
    plain, _, query = location.partition("#")[0].partition("?")
    return plain, query


def expand_braces(url: str) -> list[str]:
    """Return the URLs that a URL with braces expands to. `{a,b}` and `{00..12}` are expanded as by
    a shell, except in the query. Raises: ConfigError if there are too many URLs."""
    plain, mark, query = url.partition("?")
    pieces = _BRACES.split(plain)
    choices = [[piece] if i % 2 == 0 else _choices(piece) for i, piece in enumerate(pieces)]
    count = math.prod(map(len, choices))
    if count > MAX_URLS:
        raise ConfigError(
            f"{plain}: its braces stand for {count:,} URLs, expected at most {MAX_URLS:,}"
        )
    return ["".join(chosen) + mark + query for chosen in itertools.product(*choices)]


def _choices(inside: str) -> list[str]:
    """Return the texts that a pair of braces expands to, given the text inside."""
    numbers = _NUMBERS.fullmatch(inside)
    if numbers is None:
        return inside.split(",") if "," in inside else [f"{{{inside}}}"]
    first, last = numbers.groups()
    if abs(int(last) - int(first)) >= MAX_URLS:
        raise ConfigError(f"{{{inside}}}: stands for more than {MAX_URLS:,} numbers")
    step = 1 if int(first) <= int(last) else -1
    is_padded = first.startswith("0") or last.startswith("0")
    width = max(len(first), len(last)) if is_padded else 0
    return [f"{number:0{width}d}" for number in range(int(first), int(last) + step, step)]


def _read_lines(path: str) -> Iterable[str]:
    """Return the URLs in a text file. Raises: ConfigError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read as a list of URLs ({reason})") from None
    urls = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    for number, url in enumerate(urls):
        if not is_web(url):
            raise ConfigError(
                f"{path}: entry {number + 1} is {url[:80]!r}, expected a URL (http:// or https://)"
            )
    if not urls:
        raise ConfigError(f"{path}: contains no URLs; expected one per line")
    return urls
