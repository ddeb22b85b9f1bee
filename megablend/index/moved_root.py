"""The folder of a source's files, which may have been moved since they were indexed."""

from __future__ import annotations

from megablend.index.snapshot import Snapshot
from megablend.storage.base import Storage


def choose_root(snapshot: Snapshot, name: str, root: str, storage: Storage) -> str:
    """The folder that a source's file names are relative to: `root`, the one of the config's paths, since data may have moved.

    Where paths were added to the config after the index was built, the config's root may differ and the names do not resolve
    under it; then the root stored in the index is used.
    """
    indexed = snapshot.roots[name]
    if root == indexed:
        return root
    entry = snapshot.sources[snapshot.sources.numbers[name]]
    if not entry.files:
        return root
    there, moved = (snapshot.path(entry.files.start, {name: folder}) for folder in (indexed, root))
    return indexed if storage.glob(there) and not storage.glob(moved) else root
