"""Check the output file that a user names: a file that the run needs is refused."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np

from megablend.errors import CacheError, ConfigError
from megablend.index.read.snapshot import Snapshot, open_snapshot
from megablend.operations.session import Session
from megablend.system.atomic_write import check_target

_EXPECTED = "expected a file that may be replaced; write to another file"


def check_output(target: str | Path, session: Session) -> Path:
    """Check the file that a result about a session's run is written to.

    Returns: the file's absolute path.
    Raises: the errors of `check_target`; ConfigError if the file is the config, a data file of the
        run or of the newest index, or inside the cache.
    """
    path = Path(target).absolute()
    check_target(path)
    store = session.cache
    if path.parent.resolve().is_relative_to(store.folder.resolve()):
        raise ConfigError(
            f"{path}: found a path inside the cache {store.folder}, expected one outside it; write to another folder"
        )
    if not path.exists():
        return path
    if isinstance(session.what, str | Path) and _is_same(path, session.what):
        raise ConfigError(f"{path}: found the config, {_EXPECTED}")
    roots = session.config.roots if session.is_config else {}
    needed = session.ledger.indices if session.ledger else ()
    for digest in {*needed, *session.snapshots[-1:]}:
        try:
            snapshot = open_snapshot(store, digest)
            source = _find_source(path, snapshot, roots) or _find_source(path, snapshot, {})
        except CacheError:
            if digest in needed:
                raise
            continue
        if source is not None:
            raise ConfigError(f"{path}: found a data file of source {source!r}, {_EXPECTED}")
    return path


def _find_source(path: Path, snapshot: Snapshot, roots: dict[str, str]) -> str | None:
    """Return the name of the source that a file belongs to; None if there is none. The file is
    compared only with files of the same size, or of the same name without suffixes."""
    stem = path.name.partition(".")[0]
    names = snapshot.file_names()
    likely = snapshot.files.sizes == path.stat().st_size
    likely |= np.array([name.rpartition("/")[2].partition(".")[0] == stem for name in names], bool)
    for number in np.flatnonzero(likely).tolist():
        column = snapshot.column_of(number)
        if any(_is_same(path, file) for file in column.kind.files(snapshot.path(number, roots))):
            return column.source_name
    return None


def _is_same(path: Path, other: str | Path) -> bool:
    """Return whether two paths lead to the same file."""
    with contextlib.suppress(OSError):  # `other` does not exist, or is a URL
        return os.path.samefile(path, other)  # noqa: PTH121
    return False
