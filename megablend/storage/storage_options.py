"""What a config asks of its storages."""

from __future__ import annotations

from dataclasses import dataclass, field

from megablend.storage.object_options import ObjectOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """What a config asks of its storages; each takes what it has a use for."""

    direct: bool = False
    """Read blocks past the system's page cache."""
    max_open_files: int | None = None
    """Descriptors of files that the process keeps; None for the storage's own choice."""
    objects: ObjectOptions = field(default_factory=ObjectOptions)
    """How object stores and web servers are reached and read."""
