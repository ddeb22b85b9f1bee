"""Files of tokens: `format_of` finds the format of a path, `FORMATS` has them by name."""

from __future__ import annotations

from megablend.errors import ConfigError
from megablend.formats.arrow import ARROW
from megablend.formats.base import DivisibleFormat, Format
from megablend.formats.megatron import MEGATRON
from megablend.formats.parquet import PARQUET
from megablend.formats.parquet.decoding.dictionaries import CACHE
from megablend.storage.base import Storage

FORMATS: dict[str, Format] = {each.name: each for each in (PARQUET, ARROW, MEGATRON)}
"""Formats by name."""
DIVISIBLE: dict[str, DivisibleFormat] = {PARQUET.name: PARQUET}
"""Those of which several processes may index one file together."""


def bound_caches(max_bytes: int) -> None:
    """Let what formats keep for a whole process take up to `max_bytes`."""
    CACHE.resize(max_bytes)


def format_of(path: str, storage: Storage) -> Format:
    """The format of a path or glob pattern: by its ending, or as the prefix of a `.bin` and an `.idx`.

    Raises: ConfigError where it is neither, with the endings that are known.
    """
    for each in FORMATS.values():
        if path.lower().endswith(tuple(each.suffixes)):
            return each
    missing = [name for name in MEGATRON.files(path) if not storage.glob(name)]
    if not missing:
        return MEGATRON
    known = ", ".join(suffix for each in FORMATS.values() for suffix in each.suffixes)
    pair = f"; {missing[0]} is missing beside its other half" if len(missing) == 1 else ""
    raise ConfigError(f"{path}: unknown kind of file{pair}; known: {known}, or the prefix of a .bin and an .idx")
