"""A cache in a folder: on a local disk, or on a file system that all ranks share."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from megablend.caches.base import (
    RUNS,
    SKIPS,
    SNAPSHOTS,
    Entry,
    Record,
    copied_cache,
    place_below,
)
from megablend.system.atomic_write import (
    flush_folder,
    list_committed,
    reading,
    remove_leftovers,
    replace_file,
    replace_folder,
    temp_sibling,
    translate_os_errors,
    write_flushed,
)
from megablend.system.build_lock import LockInfo, build_lock, lock_time, verify_shared_filesystem
from megablend.system.safe_open import check_folder, get_file_size, read_regular
from megablend.system.waits import await_file, log_slow_wait

MANIFEST = "manifest.json"
"""The name of the file that is written last when a folder is created."""
ROOTS = "roots.json"
"""The name of the file that each commit of a snapshot replaces."""
FOLDERS = (
    "fragments",
    "packs",
    "generations",
    "lengths",
    "documents",
    "splits",
    "idx",
    "checksums",
    "runs",
    "runs/skips",
)
"""The folders of a cache."""
MAX_RECORD_BYTES = 1 << 30
"""The maximum size of a ledger that is read. A stage with a million sources takes about 50 MB."""
SET_ASIDE = "reset"
"""The folder below `runs` for the ledgers of runs that were reset. It has a folder for each run."""


def check_folders(cache: Path) -> None:
    """Check that no other user has replaced a folder of a cache with a symbolic link, which would
    redirect writes and removals.

    Raises: CacheError.
    """
    with translate_os_errors(cache):
        aside = cache / RUNS / SET_ASIDE
        for name in FOLDERS:
            check_folder(cache / name)
        check_folder(aside)
        if aside.is_dir():
            for folder in aside.iterdir():
                check_folder(folder)


class LocalCacheStore:
    """A cache in a folder; see CacheStore."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()

    def __repr__(self) -> str:
        return f"LocalCacheStore({str(self.folder)!r})"

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def location(self) -> str:
        """See CacheStore."""
        return str(self.folder)

    def exists(self) -> bool:
        """See CacheStore."""
        return (self.folder / SNAPSHOTS).is_dir()

    @contextmanager
    def hold(
        self, *, wait_seconds: float | None = None, on_wait: Callable[[str], None] | None = None
    ) -> Iterator[LockInfo]:
        """See CacheStore. Raises: CacheError if a folder is a link that another user created."""
        check_folders(self.folder)
        with build_lock(self.folder, wait_seconds, on_wait=on_wait) as lock:
            yield lock

    def verify_shared(self, nonce: str) -> None:
        """See CacheStore."""
        with log_slow_wait(f"rank 0's lock file in {self.folder} to become visible"):
            verify_shared_filesystem(self.folder, nonce)

    def remove_leftovers(self) -> None:
        """See CacheStore."""
        listed = (self.folder / name for name in FOLDERS)
        for folder in (*listed, *(self.folder / SNAPSHOTS).iterdir()):
            if folder.is_dir():
                remove_leftovers(folder)

    def now(self) -> float:
        """Return the time at which the lock was acquired; see CacheStore."""
        return lock_time(self.folder)

    def list_files(self, kind: str) -> list[str]:
        """See CacheStore."""
        return list_committed(self.folder / kind)

    def list_entries(self, kind: str) -> list[Entry]:
        """See CacheStore."""
        describe = _describe_snapshot if kind == SNAPSHOTS else _describe
        entries = list[Entry]()
        for name in list_committed(self.folder / kind):
            with suppress(FileNotFoundError):  # another process has just removed it
                entries.append(describe(self.folder / kind / name))
        return entries

    def fetch_file(self, kind: str, name: str, *, is_written: bool = False) -> Path:
        """See CacheStore."""
        path = self._path(kind, name)
        if is_written:
            with log_slow_wait(f"{path} to become visible"):
                await_file(path)
        return path

    def fetch_files(self, kind: str, owners: Collection[str] | None = None) -> None:
        """See CacheStore."""

    def publish_file(self, kind: str, name: str) -> None:
        """See CacheStore."""

    def publish_files(self, kind: str, owners: Collection[str]) -> None:
        """See CacheStore."""

    def list_folders(self, kind: str) -> list[str]:
        """See CacheStore."""
        return [
            name
            for name in list_committed(self.folder / kind)
            if _is_committed(f"{self.folder}/{kind}/{name}")
        ]

    def has_folder(self, kind: str, name: str) -> bool:
        """See CacheStore; also True if the folder cannot be inspected."""
        return _is_committed(str(self._path(kind, name)))

    def fetch_folder(self, kind: str, name: str, *, is_fresh: bool = False) -> Path:
        """See CacheStore."""
        return self._path(kind, name)

    def read_member(self, kind: str, name: str, member: str) -> bytes:
        """See CacheStore."""
        path = self._path(kind, name, member)
        with reading(path, apart_from=(FileNotFoundError,)):
            return read_regular(path)

    def commit_folder(
        self,
        kind: str,
        name: str,
        written: Path,
        replaced: Mapping[str, bytes],
        is_same: Callable[[Path, Path], bool],
    ) -> bool:
        """See CacheStore. The folder gets its final name after its content is on the disk."""
        final = self._path(kind, name)
        if final.exists() and is_same(final, written):
            for member, data in replaced.items():
                replace_file(final / member, data)
            return False
        for member, data in replaced.items():
            write_flushed(written / member, [data])
        flush_folder(written)
        replace_folder(final, written)
        flush_folder(final.parent)
        return True

    def list_upgradable(self, kind: str) -> list[Path]:
        """Return all committed folders."""
        return [self._path(kind, name) for name in self.list_folders(kind)]

    def remove(self, kind: str, name: str) -> None:
        """See CacheStore. A folder is renamed first, so that it is either complete or absent."""
        path = self._path(kind, name)
        if path.is_dir() and not path.is_symlink():
            aside = temp_sibling(path)
            path.rename(aside)
            shutil.rmtree(aside)
        else:
            path.unlink(missing_ok=True)

    def collect_leftovers(self, before: float, *, dry_run: bool) -> tuple[int, int]:
        """Remove leftovers of any age, since no other process writes while the caller holds the
        lock."""
        if not dry_run:
            for folder in (self.folder / name for name in FOLDERS):
                if folder.is_dir():
                    flush_folder(folder)
                    remove_leftovers(folder)
        return 0, 0

    def list_records(self, kind: str) -> list[str]:
        """See CacheStore."""
        folder = self.folder / kind
        with reading(folder):
            if kind == RUNS:
                for first in sorted(folder.glob("*/0000.json")):
                    # `skips/0000.json` is not a ledger: it has the skips of a run named 0000
                    if first.parent != self.folder / SKIPS:
                        raise copied_cache(str(first))
            return [
                name.removesuffix(".json")
                for name in list_committed(folder)
                if name.endswith(".json")
            ]

    def describe_record(self, kind: str, name: str) -> str:
        """See CacheStore."""
        return str(self._path(kind, f"{name}.json"))

    def read_record(self, kind: str, name: str) -> Record | None:
        """See CacheStore."""
        path = self._path(kind, f"{name}.json")
        try:
            text = read_regular(path, MAX_RECORD_BYTES).decode()
        except FileNotFoundError:
            first = self._path(kind, name, "0000.json")
            if kind == RUNS and first.is_file():
                raise copied_cache(str(first)) from None
            return None
        return Record(text, -1)

    def write_record(self, kind: str, name: str, data: str, after: Record | None) -> None:
        """See CacheStore. The caller must hold the lock of the cache, so that `after` is the
        current version."""
        path = self._path(kind, f"{name}.json")
        with translate_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data.encode())
        flush_folder(path.parent)  # a committed ledger must survive a power failure

    def remove_record(self, kind: str, name: str, after: Record | None = None) -> None:
        """See CacheStore. The caller must hold the lock of the cache."""
        path = self._path(kind, f"{name}.json")
        with translate_os_errors(path):
            path.unlink(missing_ok=True)
            if kind == RUNS:
                shutil.rmtree(self._path(f"{kind}/{SET_ASIDE}", name), ignore_errors=True)
            if path.parent.exists():
                flush_folder(path.parent)

    def set_aside_record(self, kind: str, name: str) -> str:
        """See CacheStore."""
        path = self._path(kind, f"{name}.json")
        stamp = f"{time.strftime('%Y-%m-%dT%H.%M.%SZ', time.gmtime())}-{time.time_ns()}.json"
        aside = self._path(f"{kind}/{SET_ASIDE}", name, stamp)
        with translate_os_errors(path):
            aside.parent.mkdir(parents=True, exist_ok=True)
            path.replace(aside)
            flush_folder(aside.parent)
            flush_folder(path.parent)
        return str(aside)

    def _path(self, kind: str, *names: str) -> Path:
        return self.folder / place_below(kind, *names)


def _is_committed(folder: str) -> bool:
    """Return whether a folder has a manifest, or cannot be inspected."""
    try:
        return get_file_size(f"{folder}/{MANIFEST}") is not None
    except OSError:
        return True


def _describe(path: Path) -> Entry:
    """Return the entry of a file or folder of a cache."""
    state = path.lstat()
    is_folder = path.is_dir() and not path.is_symlink()
    size = sum(file.lstat().st_size for file in path.iterdir()) if is_folder else state.st_size
    return Entry(path.name, size, state.st_mtime, state.st_mtime)


def _describe_snapshot(path: Path) -> Entry:
    """Return the entry of a snapshot. Its manifest is written when the snapshot is created, and its
    roots by every build that results in the same snapshot."""
    entry = _describe(path)
    times = {
        name: (path / name).stat().st_mtime for name in (MANIFEST, ROOTS) if (path / name).exists()
    }
    created = times.get(MANIFEST, entry.created)
    return Entry(path.name, entry.bytes, created, times.get(ROOTS, created))
