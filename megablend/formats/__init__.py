"""Files of tokens: `format_of` finds the format of a path, `get_format` that of a name, `FORMATS` has them by name."""

from __future__ import annotations

from megablend.formats.parquet.decoding.dictionaries import CACHE
from megablend.formats.registry import FORMATS, find_format, format_of, get_format

__all__ = ["FORMATS", "bound_caches", "find_format", "format_of", "get_format"]


def bound_caches(max_bytes: int) -> None:
    """Let what formats keep for a whole process take up to `max_bytes`."""
    CACHE.resize(max_bytes)
