"""Find out which runs and Megatron datasets use each snapshot of a cache. The advice of `verify`
depends on this."""

from __future__ import annotations

import shlex
from pathlib import Path

from megablend.caches.base import SNAPSHOTS, CacheStore
from megablend.config import Config
from megablend.errors import REPAIR_REMEDY, CacheError
from megablend.index.tables.cache_folders import external_references_dir
from megablend.index.tables.list_snapshots import find_superseded, list_snapshots
from megablend.index.verify.verify_data import SnapshotUse
from megablend.run.ledger_file import load_ledger, run_names
from megablend.system.limited_json import missing_field, parse_json
from megablend.system.safe_open import read_regular


def list_references(cache: CacheStore) -> dict[str, Path]:
    """Return the snapshots that Megatron's datasets use, as a dict from digest to the path of the
    file that records the use.

    Raises: CacheError if one of these files cannot be read.
    """
    paths = dict[str, Path]()
    for path in external_references_dir(cache.folder).glob("*.json"):
        try:
            reference = parse_json(read_regular(path, 1 << 20))
            missing = missing_field(reference, {"index": str})
            if missing is not None:
                raise ValueError(f"it lacks {missing}")
        except (OSError, ValueError) as error:
            raise CacheError(
                f"{path}: cannot be read ({error}), so the index that it refers to is not known; remove the file if it is damaged"
            ) from error
        paths[reference["index"]] = path
    return paths


def list_runs_by_index(cache: CacheStore) -> tuple[dict[str, list[str]], bool]:
    """Return the names of the runs that use each snapshot, by digest. Also return whether all runs
    were considered, which is not the case if a ledger is damaged."""
    names_by_index = dict[str, list[str]]()
    is_complete = True
    for name in run_names(cache):
        try:
            ledger = load_ledger(cache, name)
        except CacheError:
            is_complete = False
            continue
        for index in () if ledger is None else ledger.indices:
            names_by_index.setdefault(index, []).append(name)
    return names_by_index, is_complete


def find_uses(cache: CacheStore, config: Config | None) -> dict[str, SnapshotUse]:
    """Return how each snapshot of a cache is used, by digest.

    Args:
        config: the user's config, if one was given. Its paths apply to the snapshots that its run
            reads, and to the newest snapshot unless only other runs use it.

    Raises: see list_references.
    """
    entries = {entry.name: entry for entry in cache.list_entries(SNAPSHOTS)}
    superseded = find_superseded(cache, entries, list_snapshots(cache))
    runs, is_complete = list_runs_by_index(cache)
    references = list_references(cache)
    uses = dict[str, SnapshotUse]()
    for digest in entries:
        names = runs.get(digest, [])
        whose = "the config"
        if config is not None and (
            config.run in names or not (names or digest in references or digest in superseded)
        ):
            uses[digest] = SnapshotUse(roots=config.roots)
            continue
        repair = REPAIR_REMEDY
        if names:
            whose = f"the config of run {names[0]!r}"
            repair = f"build again with {whose} to repair it (`megablend build CONFIG`)"
        elif digest in references:
            repair = f"remove {references[digest]}, and open the dataset in Megatron again, which indexes it again"
        elif digest in superseded and is_complete:
            repair = (
                f"no run uses this index: `megablend gc {shlex.quote(cache.location)} --older-than 0` removes it, with all "
                "others that no run uses; checkpoints of runs that were reset may need them"
            )
        missing = (
            f"restore the file; or, if the data was moved, set the new `path` in {whose}, build (`megablend build CONFIG`), and "
            "verify with that config (`megablend verify --data CONFIG`)"
        )
        is_needed = bool(names) or digest in references or digest not in superseded
        uses[digest] = SnapshotUse(repair=repair, missing=missing, is_needed=is_needed)
    return uses
