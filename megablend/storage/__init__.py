"""Where files lie: `storage_for` finds the storage of a path by its scheme."""

from __future__ import annotations

import re

from megablend.errors import ConfigError
from megablend.storage.base import FileStat, Storage
from megablend.storage.direct import DirectStorage
from megablend.storage.find import Found, Match
from megablend.storage.local import LocalStorage
from megablend.storage.separate import SeparateStorage

__all__ = [
    "DirectStorage",
    "FileStat",
    "Found",
    "LocalStorage",
    "Match",
    "SeparateStorage",
    "Storage",
    "storage_for",
]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def storage_for(path: str, *, direct: bool = False) -> Storage:
    """The storage that holds `path`, a plain path or a glob pattern of plain paths.

    Args:
        direct: read pages past the page cache.

    Raises: ConfigError for any `scheme://`.
    """
    found = _SCHEME.match(path)
    if found is None:
        return DirectStorage() if direct else LocalStorage()
    if found[1].lower() == "file":
        raise ConfigError(f"{path}: write a plain path, without file://")
    raise ConfigError(
        f"{path}: object stores ({found[1]}://) come in a later version; local and mounted paths work now: "
        "copy the data to one, or mount the store"
    )
