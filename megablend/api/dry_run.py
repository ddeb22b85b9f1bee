"""build --dry-run: what indexing the config's files will request from object stores, without building anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megablend.api.result_base import Result
from megablend.api.source_specs import list_specs
from megablend.config import Config, load_config
from megablend.index.estimate_requests import estimate_indexing
from megablend.index.sources import list_source
from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage
from megablend.system.failures import translating


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DryRun(Result):
    """What indexing a source would take if nothing of it were indexed."""

    name: str
    files: int
    bytes: int
    """Total size of the data files."""
    requests: int
    """Estimated; 0 for files on a local disk."""
    source_bytes: int
    """Estimated bytes to request."""
    cost: float | None
    """Where the config gives prices."""


@translating("build")
def dry_run(
    config: str | Path | Mapping[str, Any] | Config, *, cache: str | None = None, storage: Storage | None = None
) -> list[DryRun]:
    """Find the files of a config's sources, and estimate the requests and bytes of indexing them: the smallest file of each
    source in an object store is indexed for that. Nothing is written.

    Raises: ConfigError, DataError.
    """
    checked = load_config(config, cache=cache)
    storage = storage.for_reading() if storage else make_storage(objects=checked.storage)
    found = []
    for spec in list_specs(checked):
        listing = list_source(spec, storage)
        estimate = estimate_indexing(listing, storage, checked.storage)
        found.append(
            DryRun(
                name=spec.name,
                files=len(listing.files),
                bytes=sum(file.size for file in listing.files),
                requests=estimate.requests,
                source_bytes=estimate.bytes,
                cost=estimate.cost,
            )
        )
    return found
