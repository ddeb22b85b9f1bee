"""gc: remove from a cache what nothing needs any more."""

from __future__ import annotations

from pathlib import Path

from megablend.api.runs import ConfigLike, resolve_cache
from megablend.errors import CacheError, ConfigError
from megablend.index.cache_folders import external_references_dir
from megablend.index.gc import Collected, collect
from megablend.plan.ledger_file import list_runs
from megablend.system.failures import translating
from megablend.system.limited_json import parse_json

DEFAULT_DAYS = 7.0


@translating("gc")
def gc(cache: ConfigLike, *, older_than_days: float = DEFAULT_DAYS, dry_run: bool = False) -> Collected:
    """Remove generations of the index that no run stands on, and what belongs to them alone.

    The newest generation stays, those of runs, and those that Megatron's datasets were promised.

    Args:
        cache: its folder, or a config that names it.
        older_than_days: leave what was in use since: longer than any job runs that reads an index by itself (`open_index`).
        dry_run: only say what would go.

    Raises: ConfigError; CacheError where there is no cache, a build runs, or a ledger or an index that stays is damaged.
    """
    if not older_than_days >= 0:
        raise ConfigError(f"found older_than_days={older_than_days!r}, expected 0 or more days")

    folder = resolve_cache(cache)

    def needed() -> set[str]:
        return {ledger.index for ledger in list_runs(folder)} | _pinned(folder)

    return collect(folder, needed, min_age_seconds=older_than_days * 86400, dry_run=dry_run)


def _pinned(cache: str | Path) -> set[str]:
    found = set()
    for path in external_references_dir(cache).glob("*.json"):
        try:
            pin = parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CacheError(
                f"{path}: cannot be read ({error}), so the index that it refers to is not known; remove the file if it is damaged"
            ) from error
        found.add(pin.get("index") if isinstance(pin, dict) else None)
    return {digest for digest in found if isinstance(digest, str)}
