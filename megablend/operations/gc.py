"""gc: remove from a cache what is no longer needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from megablend.errors import ConfigError
from megablend.index.verify.gc import collect
from megablend.operations.results import Record
from megablend.operations.session import ConfigLike, Session
from megablend.operations.snapshot_users import list_references
from megablend.run.ledger_file import list_runs
from megablend.system.failures import translating
from megablend.system.log import LOG

DEFAULT_DAYS = 7.0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GcResult(Record):
    """What `gc` removed, or with `dry_run` would remove."""

    OLD_KEYS: ClassVar[Mapping[str, str]] = {"generations": "removed", "others": "other_files"}
    cache: str
    """The cache's absolute path."""
    dry_run: bool
    removed: tuple[str, ...]
    """Digests of the removed indexes, the oldest first."""
    kept: tuple[str, ...]
    """Digests of the indexes that are kept."""
    other_files: int
    """Number of fragments, document tables and other files removed."""
    bytes: int
    """Disk space of all that is removed."""


@translating("gc")
def gc(
    cache: ConfigLike, *, older_than_days: float = DEFAULT_DAYS, dry_run: bool = False
) -> GcResult:
    """Remove index snapshots that no run uses, and what belongs only to them.

    The newest snapshot is kept, and those that runs and Megatron's datasets use.

    Args:
        cache: its folder or URL, or a config that names it.
        older_than_days: keep anything used within so many days; set this longer than your longest
            job that reads an index directly (`open_index`).
        dry_run: remove nothing, only report what would be removed.

    Raises: ConfigError; CacheError if there is no cache, a build is running, or a ledger or an
        index to keep is damaged.
    """
    if not older_than_days >= 0:
        raise ConfigError(f"found older_than_days={older_than_days!r}, expected 0 or more days")

    store = Session(cache).cache

    def needed() -> set[str]:
        return {index for ledger in list_runs(store) for index in ledger.indices} | set(
            list_references(store)
        )

    collected = collect(store, needed, min_age_seconds=older_than_days * 86400, dry_run=dry_run)
    if not dry_run:
        for digest in collected.snapshots:
            LOG.info("%s: removed index %s, which no run uses", store.location, digest)
    return GcResult(
        cache=store.location,
        dry_run=dry_run,
        removed=collected.snapshots,
        kept=collected.kept,
        other_files=collected.others,
        bytes=collected.bytes,
    )
