"""check: are all data files of a run there, and are they those that were indexed?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megablend.api.runs import ConfigLike, newest_snapshot
from megablend.blocks.block_store import BlockStore
from megablend.config import Config, load_config
from megablend.index.build import Progress
from megablend.index.check_files import FileChecker, check_files, files_of
from megablend.index.snapshot import open_snapshot
from megablend.plan.ledger_file import load_ledger
from megablend.plan.open_store import open_block_store
from megablend.storage.by_scheme import make_storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a check of files found."""

    index: str
    """Digest of the index that the files were compared with."""
    files: int
    """That were looked at."""
    problems: tuple[str, ...]
    """A line for each file that is missing or not the one that was indexed."""


def check(
    config: ConfigLike, *, cache: str | None = None, progress: Callable[[Progress], None] | None = None
) -> Checked:
    """Look at every file that a run may read, in parallel: is it there, with the size and times that the build saw?

    Of a file that was moved, copied or touched since, 64 KiB are compared; `verify(data=True)` compares all. Without a run of
    that name, the files of the newest index are looked at.

    Args:
        config: path of a YAML or JSON file, or the same as a dict.
        cache: in place of the config's `cache`.

    Raises: ConfigError, PlanError where config and index disagree; CacheError where nothing was built, or the cache is damaged.
    """
    checked = load_config(config, cache=cache)
    ledger = load_ledger(checked.cache, checked.run)
    generation = open_snapshot(checked.cache, ledger.index) if ledger else newest_snapshot(checked.cache)
    return check_store(
        checked, open_block_store(checked, generation, make_storage(objects=checked.storage)), progress=progress
    )


def check_store(config: Config, store: BlockStore, *, progress: Callable[[Progress], None] | None = None) -> Checked:
    """The same of the files of an opened index. Raises: CacheError."""
    numbers = files_of(store.generation, list(config.all_sources))
    found = check_files(FileChecker(store.generation, store.roots, store.storage), numbers, progress=progress)
    return Checked(index=store.generation.digest, files=len(numbers), problems=tuple(map(str, found)))
