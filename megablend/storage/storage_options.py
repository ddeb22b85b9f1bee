"""The storage options of a config."""

from __future__ import annotations

from dataclasses import dataclass, field

from megablend.storage.object_options import ObjectOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """The storage options of a config; each storage uses those that apply to it."""

    direct: bool = False
    """Read blocks without the system's page cache."""
    max_open_files: int | None = None
    """Descriptors that the process keeps open; None for the storage's default."""
    objects: ObjectOptions = field(default_factory=ObjectOptions)
    """How object stores and web servers are accessed and read."""
