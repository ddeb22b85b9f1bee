"""Who uses the snapshots of a cache, and what repairs a damaged one."""

from __future__ import annotations

import contextlib
from pathlib import Path

from megablend.caches.base import GENERATIONS, CacheStore
from megablend.errors import REPAIR_REMEDY, CacheError
from megablend.index.cache_folders import external_references_dir
from megablend.index.list_snapshots import list_snapshots
from megablend.index.superseded import find_superseded
from megablend.plan.ledger_file import load_ledger, run_names
from megablend.system.limited_json import parse_json


def list_references(cache: CacheStore) -> dict[str, Path]:
    """Digests of the snapshots that others than runs use (Megatron's datasets): for each, a file that says so.

    Raises: CacheError if one of these files cannot be read.
    """
    found = {}
    for path in external_references_dir(cache.folder).glob("*.json"):
        try:
            pin = parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CacheError(
                f"{path}: cannot be read ({error}), so the index that it refers to is not known; remove the file if it is damaged"
            ) from error
        if isinstance(pin, dict) and isinstance(digest := pin.get("index"), str):
            found[digest] = path
    return found


def list_runs_by_index(cache: CacheStore) -> dict[str, list[str]]:
    """Digests of the snapshots that runs use, each with their names; without runs whose ledger is damaged."""
    found = dict[str, list[str]]()
    for name in run_names(cache):
        with contextlib.suppress(CacheError):
            ledger = load_ledger(cache, name)
            for index in () if ledger is None else ledger.indices:
                found.setdefault(index, []).append(name)
    return found


def find_remedies(cache: CacheStore, run: str | None = None) -> dict[str, str]:
    """What to do about damage of each snapshot of a cache, by its digest.

    Args:
        run: of the config that is known to the user.

    Raises: as list_references.
    """
    entries = {entry.name: entry for entry in cache.list_entries(GENERATIONS)}
    superseded = find_superseded(cache, entries, list_snapshots(cache))
    runs, references = list_runs_by_index(cache), list_references(cache)
    found = dict.fromkeys(entries, REPAIR_REMEDY)
    for digest in entries:
        if names := runs.get(digest):
            if run not in names:
                found[digest] = (
                    f"build again with the config of run {names[0]!r} to repair it (`megablend build CONFIG`)"
                )
        elif digest in references:
            found[digest] = (
                f"remove {references[digest]}, and open the dataset in Megatron again, which indexes it again"
            )
        elif digest in superseded:
            found[digest] = f"no run uses this index: `megablend gc {cache.location} --older-than 0` removes it"
    return found
