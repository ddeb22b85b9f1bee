"""Folders of tables that are committed as a whole, with a manifest of their sizes and checksums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megablend.caches.base import CacheStore
from megablend.errors import CacheError
from megablend.index.tables.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    damaged_tables,
    dump_with_checksum,
    read_manifest,
)
from megablend.system.atomic_write import (
    checksum,
    flush_folder,
    replace_file,
    translate_os_errors,
    unfinished_folder,
    write_flushed,
)


def describe_tables(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the manifest entries for the files of a folder, by file name."""
    return {
        path.name: {"bytes": path.stat().st_size, "blake2b": checksum(path)}
        for path in sorted(folder.iterdir())
    }


def is_complete(folder: Path) -> bool:
    """Return whether a folder has a manifest, and all files in the manifest exist and are
    undamaged."""
    try:
        return not damaged_tables(folder, read_manifest(folder))
    except CacheError:
        return False


def commit_tables(store: CacheStore, kind: str, name: str, write: Callable[[Path], object]) -> None:
    """Write tables and a manifest, and commit them to the cache as the folder `name` of this kind.
    Raises: CacheError.

    Args:
        write: a function that writes the tables to an empty folder.
    """
    path = store.folder / kind / name
    with translate_os_errors(path), unfinished_folder(path) as folder:
        write(folder)
        manifest = {"format_version": FORMAT_VERSION, "tables": describe_tables(folder)}
        write_flushed(folder / MANIFEST, [dump_with_checksum(manifest)])
        store.commit_folder(kind, name, folder, {}, lambda earlier, _: is_complete(earlier))


def add_tables(folder: Path, write: Callable[[Path], object]) -> None:
    """Add tables to a committed folder. Its manifest is replaced last, atomically. Raises:
    CacheError.

    Args:
        write: a function that writes the new tables to an empty folder.
    """
    manifest = read_manifest(folder)
    with translate_os_errors(folder):
        with unfinished_folder(folder / "checks") as aside:
            write(aside)
            added = describe_tables(aside)
            for name in added:
                (aside / name).replace(folder / name)
        flush_folder(folder)
    tables = {**manifest["tables"], **added}
    replace_file(folder / MANIFEST, dump_with_checksum({**manifest, "tables": tables}))
