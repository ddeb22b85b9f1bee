"""File formats that store tokens: `format_of` detects the format of a path, `get_format` returns a
format by name, and `FORMATS` lists them."""

from __future__ import annotations

from megablend.formats.parquet.decoding.dictionaries import CACHE
from megablend.formats.registry import FORMATS, find_format, format_of, get_format

__all__ = ["FORMATS", "bound_caches", "find_format", "format_of", "get_format"]


def bound_caches(max_bytes: int) -> None:
    """Limit the cache that all formats of a process share to `max_bytes`."""
    CACHE.resize(max_bytes)
