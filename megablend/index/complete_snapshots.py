"""Adding the files that later versions store with a snapshot to snapshots built by an older version."""

from __future__ import annotations

import numpy as np

from megablend.caches.base import SNAPSHOTS, CacheStore
from megablend.errors import CacheError
from megablend.fs.atomic_write import replace_file
from megablend.index.file_versions import Numbers, seen_bytes
from megablend.index.manifest import SEEN
from megablend.index.row_checks import complete_checks
from megablend.index.snapshot import Snapshot, open_snapshot


def complete_snapshots(store: CacheStore, newest: str) -> list[str]:
    """Complete all snapshots, since runs may use them. Returns: a note for each damaged one.

    Args:
        newest: the one just built.

    Raises: CacheError if the cache cannot be written.
    """
    notes, built = [], None
    for folder in store.list_upgradable(SNAPSHOTS):
        lacks_seen = not (folder / SEEN).exists()
        if lacks_seen and built is None:
            built = open_snapshot(store, newest)
        try:
            complete_checks(folder)
            if lacks_seen and built is not None:
                seen = _seen_of(open_snapshot(store, folder.name), built)
                replace_file(folder / SEEN, seen_bytes(folder.name, seen))
        except CacheError as error:
            notes.append(str(error))
    return notes


def _seen_of(older: Snapshot, built: Snapshot) -> Numbers:
    """Versions of an older snapshot's files, uint64 [num_files]; 0 for files that this build did not find unchanged."""
    known = dict(zip(_identities(built), built.seen.tolist(), strict=True))
    return np.array([known.get(identity, 0) for identity in _identities(older)], np.uint64)


def _identities(snapshot: Snapshot) -> list[tuple[str, ...]]:
    """Location and content of each file."""
    roots = [snapshot.columns[column].root for column in snapshot.file_columns.tolist()]
    rows = zip(roots, snapshot.file_names(), snapshot.file_contents(), strict=True)
    return [(root, name, *contents) for root, name, contents in rows]
