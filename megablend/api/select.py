"""Select which sources of a description to show, and sort them: the few that matter out of thousands."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from megablend.config.numbers import whole_number
from megablend.errors import ConfigError, did_you_mean

Described = dict[str, Any]

SORTS: dict[str, tuple[str, ...]] = {
    "name": ("name",),
    "tokens": ("tokens", "bytes"),
    "share": ("actual_share",),
    "samples": ("samples",),
    "epochs": ("epochs",),
}
"""Keys that each `sort` uses, the first that a list has: names ascending, numbers descending."""


def select_sources(
    found: Described, *, top: int | None = None, sort: str | None = None, match: str | None = None
) -> None:
    """Keep in each list of sources of a description, as a dict, only those to show; totals still cover all sources.

    Where a list loses sources, a count is added next to it: `sources_left_out`.

    Args:
        top: number of sources to keep; None or 0 for all.
        sort: a key of SORTS; by default the config's order.
        match: a pattern for names of sources, such as `web-*`.

    Raises: ConfigError for an unknown `sort`, a negative `top`, or a `match` that matches no source.
    """
    if sort is not None and sort not in SORTS:
        hint = did_you_mean(sort, SORTS, before="; ")
        raise ConfigError(f"found sort {sort!r}, expected one of {', '.join(SORTS)}{hint}")
    top = None if top is None else whole_number("top", top, least=0)
    tables = [(split, "sources") for split in found.get("splits", {}).values() if "sources" in split]
    tables += [(found["index"], "sources")] if "index" in found else []
    tables += [(found, "files")] if "files" in found else []
    if match is not None and not any(fnmatchcase(each["name"], match) for table, key in tables for each in table[key]):
        raise ConfigError(
            f"found match {match!r}, which matches no source; patterns such as 'web-*' may contain * and ?"
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
