"""Repair a damaged index that a run uses but that is not the newest index of the config's files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megablend.config import Config
from megablend.distributed.base import Communicator
from megablend.errors import CacheError
from megablend.index.build.build import Progress, build_index
from megablend.index.build.source_spec import SourceSpec
from megablend.index.verify.repair import find_damage, list_indexed_files
from megablend.run.ledger import Ledger
from megablend.storage.base import Storage
from megablend.system.log import LOG


def repair_kept_index(
    config: Config,
    ledger: Ledger,
    newest: str,
    *,
    launch: Communicator,
    storage: Storage,
    progress: Callable[[Progress], None] | None,
) -> bool:
    """Index the files of a run's index again, if that index is damaged and is not the newest one.
    Called by all ranks.

    Returns: whether the index was repaired; it then counts as the newest one.
    Raises: CacheError if indexing the files does not result in the same index, or the damaged index
        no longer lists its files.
    """
    if ledger.index == newest:
        return False
    is_first = launch.rank == 0
    damage = launch.bcast(find_damage(config.cache_store, ledger.index) if is_first else None)
    if damage is None:
        return False
    specs: Sequence[SourceSpec] = ()
    try:
        if is_first:
            specs = list_indexed_files(
                config.cache_store,
                ledger.index,
                roots=config.roots,
                block_bytes=config.block_bytes,
            )
    except CacheError:
        raise lost_index(ledger, newest, damage) from None
    repaired = build_index(
        config.cache_store, launch.bcast(specs), launch=launch, storage=storage, progress=progress
    )
    if repaired.digest != ledger.index:
        raise lost_index(ledger, newest, damage)
    if is_first:
        LOG.info(
            "repaired index %s of run %r in %.1f s: %s",
            ledger.index,
            ledger.run,
            repaired.seconds,
            damage,
        )
    return True


def lost_index(ledger: Ledger, newest: str, problem: str) -> CacheError:
    """Return the error for an index that a run uses and that cannot be rebuilt."""
    return CacheError(
        f"{problem}\nrun {ledger.run!r} needs index {ledger.index}, but the files and config have changed and now give index "
        f"{newest}; restore the old index from a backup, or reset the run (`megablend runs reset CONFIG`), and build again"
    )
