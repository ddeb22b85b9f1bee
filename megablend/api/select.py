"""Which sources of a description to show, and in which order: of thousands, the few that matter."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from typing import Any

from megablend.config.numbers import whole_number
from megablend.errors import ConfigError

Described = dict[str, Any]

SORTS: dict[str, tuple[str, ...]] = {
    "name": ("name",),
    "tokens": ("tokens", "bytes"),
    "share": ("share_given",),
    "samples": ("samples",),
    "epochs": ("epochs",),
}
"""What each `sort` goes by, the first that a list has: names rise, numbers fall."""


def select_sources(
    found: Described, *, top: int | None = None, sort: str | None = None, match: str | None = None
) -> None:
    """Leave, in each list of sources of what `describe` gave, those to show; sums and splits stay of all.

    Each list that loses some gets a count beside it, `sources_left_out`.

    Args:
        top: the first so many; None or 0 for all.
        sort: a key of SORTS; the config's order where absent.
        match: a pattern such as `web-*` for sources' names.

    Raises: ConfigError for an unknown `sort`, a negative `top`, or a `match` that fits no source.
    """
    if sort is not None and sort not in SORTS:
        near = difflib.get_close_matches(sort, SORTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"found sort {sort!r}, expected one of {', '.join(SORTS)}{hint}")
    top = None if top is None else whole_number("top", top, least=0)
    tables = [(split, "sources") for split in found.get("splits", {}).values() if "sources" in split]
    tables += [(found["index"], "sources")] if "index" in found else []
    tables += [(found, "files")] if "files" in found else []
    if match is not None and not any(fnmatchcase(each["name"], match) for table, key in tables for each in table[key]):
        raise ConfigError(
            f"found match {match!r}, which fits the name of no source; patterns such as 'web-*' take * and ?"
        )
    for table, key in tables:
        sources = [each for each in table[key] if match is None or fnmatchcase(each["name"], match)]
        if sort is not None:
            field = next((name for name in SORTS[sort] if sources and name in sources[0]), "")
            sources.sort(key=lambda each: each[field] if field else 0, reverse=field != "name")
        sources = sources[: top or None]
        if len(sources) < len(table[key]):
            table["sources_left_out"] = len(table[key]) - len(sources)
        table[key] = sources
