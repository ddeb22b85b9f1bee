"""gc: remove unneeded files from a cache."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from megablend.caches.base import SNAPSHOTS
from megablend.errors import ConfigError
from megablend.index.read.snapshot import open_snapshot
from megablend.index.verify.gc import collect
from megablend.operations.results import Record
from megablend.operations.session import ConfigLike, Session
from megablend.operations.snapshot_users import list_references
from megablend.operations.source_specs import has_text
from megablend.run.ledger_file import list_runs
from megablend.system.failures import translating
from megablend.system.log import LOG

DEFAULT_DAYS = 7.0
"""Default of `older_than_days`: everything that was used within the last week is kept."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GcResult(Record):
    """The indexes and files that `gc` removed, or with `dry_run` would remove."""

    OLD_KEYS: ClassVar[Mapping[str, str]] = {"generations": "removed", "others": "other_files"}
    cache: str
    """The cache's absolute path."""
    dry_run: bool
    removed: tuple[str, ...]
    """Digests of the removed indexes, the oldest first."""
    kept: tuple[str, ...]
    """Digests of the indexes that are kept."""
    other_files: int
    """Number of removed fragments, document tables and other files."""
    bytes: int
    """Total disk space, in bytes, of everything that was removed."""
    token_files: tuple[str, ...] = ()
    """Paths of the removed token files, which were made from text."""


@translating("gc")
def gc(
    cache: ConfigLike,
    *,
    older_than_days: float = DEFAULT_DAYS,
    dry_run: bool = False,
    tokens: bool = False,
) -> GcResult:
    """Remove the index snapshots of a cache that no run uses, and files that belong only to them.

    The newest snapshot is kept, and so are the snapshots that runs and Megatron's datasets use.

    Args:
        cache: folder or URL of the cache, or a config that names it.
        older_than_days: keep everything that was used within this number of days; set it longer
            than your longest job that reads an index directly (`open_index`).
        dry_run: remove nothing, only report what would be removed.
        tokens: also remove token files that `build` made from text, if no kept index names them. A
            build makes them again if it needs them. Other caches that share the folder are not
            considered.

    Raises: ConfigError; CacheError if there is no cache, a build is running, or a ledger or an
        index that must be kept is damaged.
    """
    if not older_than_days >= 0:
        raise ConfigError(f"found older_than_days={older_than_days!r}, expected 0 or more days")

    session = Session(cache)
    store = session.cache
    if tokens and not (session.is_config and has_text(session.config)):
        raise ConfigError(
            f"{cache}: unused tokens can be found only with a config that has a text source; pass that config, or "
            "omit `tokens`"
        )

    def list_needed() -> set[str]:
        of_runs = {index for ledger in list_runs(store) for index in ledger.indices}
        return of_runs | set(list_references(store))

    collected = collect(
        store, list_needed, min_age_seconds=older_than_days * 86400, dry_run=dry_run
    )
    if not dry_run:
        for digest in collected.snapshots:
            LOG.info("%s: removed index %s, which no run uses", store.location, digest)
    removed = dict[str, int]()
    if tokens and dry_run:
        removed = _collect_tokens(session, collected.kept, older_than_days * 86400, dry_run)
    elif tokens:
        with store.hold():
            # The kept indexes, and those that builds have committed since
            kept = store.list_folders(SNAPSHOTS)
            removed = _collect_tokens(session, kept, older_than_days * 86400, dry_run)
    return GcResult(
        cache=store.location,
        dry_run=dry_run,
        removed=collected.snapshots,
        kept=collected.kept,
        other_files=collected.others,
        bytes=collected.bytes + sum(removed.values()),
        token_files=tuple(removed),
    )


def _collect_tokens(
    session: Session, kept: Sequence[str], min_age_seconds: float, dry_run: bool
) -> dict[str, int]:
    """Remove the token files that no kept index names.

    Args:
        kept: digests of the kept indexes.

    Returns: the sizes of the removed files in bytes, by their paths.
    """
    from megablend.text.token_folder import TokenFolder
    from megablend.text.token_names import parse_path

    config = session.config
    source = next(
        configured for configured in config.all_sources.values() if configured.text is not None
    )
    folder = TokenFolder(source.token_folder, config.storage)
    named = set[str]()
    for digest in kept:
        snapshot = open_snapshot(session.cache, digest)
        named |= {snapshot.path(i) for i in range(len(snapshot.file_names()))}
    before = time.time() - min_age_seconds
    sizes = dict[str, int]()
    for name, entry in folder.list_files().items():
        path = folder.path(name)
        is_old = entry.modified <= before
        if is_old and path not in named and parse_path(path) is not None:
            sizes[path] = entry.bytes
            if not dry_run:
                folder.remove(name)
    return sizes
