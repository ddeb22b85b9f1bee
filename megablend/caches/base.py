"""`CacheStore`: the interface of the place where a cache is kept.

Files are read and written in `folder`, a folder of this node with the layout of
`index.tables.cache_folders`. For a cache on a shared file system, this folder is the cache itself.
For a cache in an object store, it is this node's copy of the cache: files that are written there
are published, and files that others have published are fetched.

    files     written once, never changed: fragments, packs, splits ... A damaged file may be replaced by an intact one
    folders   of files, committed as a whole: snapshots, documents
    records   small texts that can be replaced: the ledgers of runs, and lists of the samples that runs skip
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megablend.errors import CacheError
from megablend.system.build_lock import LockInfo

SNAPSHOTS = "generations"
DOCUMENTS = "documents"
CHECKSUMS = "checksums"
"""Kinds of folders."""
RUNS = "runs"
SKIPS = "runs/skips"
"""Kinds of records."""
_NAME = re.compile(r"[^/\x00-\x1f\x7f]+")


def place_below(kind: str, *names: str) -> str:
    """Return the path or key of a file, folder or record of a cache, relative to the cache's folder
    or prefix. All such paths are made by this function.

    Names come from ledgers, manifests and states, which others may have written, so this function
    checks that no name leads out of the cache.

    Raises: CacheError for a name that is a path, or has control characters.
    """
    for name in names:
        if name in (".", "..") or _NAME.fullmatch(name) is None:
            raise CacheError(
                f"{name!r} is not a valid file name in `{kind}` of a cache (slashes and control characters are not allowed): "
                "the cache or the checkpoint's state was edited or damaged; restore it"
            )
    return "/".join((kind, *names))


def copied_cache(ledger: str) -> CacheError:
    """Return the error for a cache that was copied between a folder and an object store.

    Args:
        ledger: a ledger that was found where the other kind of cache stores its ledgers. If it were
            ignored, the run would start again from its first sample.
    """
    return CacheError(
        f"{ledger}: this cache was copied between a folder and an object store, which is not supported; use it where it was "
        "built, or build in an empty folder or prefix"
    )


class OvertakenError(CacheError):
    """Raised if another process has replaced a record first. Reading the record again and repeating
    the change may succeed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or a folder in a cache."""

    name: str
    bytes: int
    created: float
    """Seconds since 1970, by the clock of the store."""
    committed: float
    """The time of the last commit, by the same clock; for a file, the same as `created`."""


@dataclass(frozen=True, slots=True)
class Record:
    """One version of a record. It is also used for one version of a folder in an object store; see
    `caches.objects.commits`."""

    data: Any
    """The content of the version: the text of a record, or a JSON value for a folder; None for a
    version that marks a removal."""
    number: int
    """The number of the version; -1 if versions are not kept."""


class CacheStore(Protocol):
    """The place where a cache is kept. A store can be pickled and is thread-safe.

    Raises, from any call: CacheError if the cache cannot be read or written.
    """

    @property
    def location(self) -> str:
        """The absolute path of the cache, or its URL without a trailing slash."""

    @property
    def folder(self) -> Path:
        """The absolute path of this node's folder with the cache's files."""

    def exists(self) -> bool:
        """Return whether an index was ever built in this cache."""

    def hold(
        self, *, wait_seconds: float | None = None, on_wait: Callable[[str], None] | None = None
    ) -> AbstractContextManager[LockInfo]:
        """Hold the lock of the cache, so that no other build runs at the same time. In a store
        without locks, several builds may run at the same time, and do not disturb each other. See
        `system.build_lock`."""

    def verify_shared(self, nonce: str) -> None:
        """Check that this rank sees the same cache as the rank that holds its lock. Raises:
        CacheError if not.

        Args:
            nonce: the nonce from the other rank's LockInfo.
        """

    def remove_leftovers(self) -> None:
        """Remove the unfinished files of killed processes from `folder`. The caller must hold the
        lock of the cache."""

    def now(self) -> float:
        """Return the time in seconds since 1970, by the clock that sets the times of entries. The
        caller must hold the lock of the cache."""

    def list_files(self, kind: str) -> list[str]:
        """Return the sorted names of the files of a kind."""

    def list_entries(self, kind: str) -> list[Entry]:
        """Return the files or folders of a kind, sorted by name, including damaged ones."""

    def fetch_file(self, kind: str, name: str, *, is_written: bool = False) -> Path:
        """Return the path of a file on this node.

        Args:
            is_written: whether another rank has just written the file; if so, wait until the file
                system shows it.

        Raises: CacheError if the file does not appear although `is_written` is true. Otherwise a
            missing file is not an error: the path then does not exist.
        """

    def fetch_files(self, kind: str, owners: Collection[str] | None = None) -> None:
        """Make files of a kind available on this node.

        Args:
            owners: the owners whose files, named `<owner>-...`, are fetched; None for all files.
        """

    def publish_file(self, kind: str, name: str) -> None:
        """Make a file that was written in `folder` available to all ranks."""

    def publish_files(self, kind: str, owners: Collection[str]) -> None:
        """Publish all files in `folder` that are named `<owner>-...`; see `publish_file`."""

    def list_folders(self, kind: str) -> list[str]:
        """Return the sorted names of the committed folders of a kind."""

    def has_folder(self, kind: str, name: str) -> bool:
        """Return whether a folder is committed."""

    def fetch_folder(self, kind: str, name: str, *, is_fresh: bool = False) -> Path:
        """Return the path of a committed folder on this node; the path does not exist if there is
        no such folder.

        Args:
            is_fresh: whether to fetch the folder even if this node has a copy of it.
        """

    def read_member(self, kind: str, name: str, member: str) -> bytes:
        """Return the content of a small file of a committed folder. Raises: FileNotFoundError if
        there is no such file."""

    def commit_folder(
        self,
        kind: str,
        name: str,
        written: Path,
        replaced: Mapping[str, bytes],
        is_same: Callable[[Path, Path], bool],
    ) -> bool:
        """Commit a folder: other processes see all of it, or nothing.

        Args:
            written: the folder to commit, which has a temporary name inside `folder`. The call may
                move it.
            replaced: the contents of further files by name. They do not count when folders are
                compared: if the folder was committed before, only these files are replaced.
            is_same: returns whether an earlier commit (first argument) is undamaged and has the
                content of the written folder (second argument); if not, the commit is replaced.

        Returns: whether the content is new, or replaces damaged content.
        """

    def list_upgradable(self, kind: str) -> list[Path]:
        """Return the committed folders that an older version of megablend may have written and to
        which files may be added."""

    def remove(self, kind: str, name: str) -> None:
        """Remove a file or a folder; a folder that was committed again in the meantime is kept."""

    def collect_leftovers(self, before: float, *, dry_run: bool) -> tuple[int, int]:
        """Remove the files that killed processes left unfinished before a given time. The caller
        must hold the lock of the cache.

        Returns: the number and the total size in bytes of the leftovers that are reported to users.
        """

    def list_records(self, kind: str) -> list[str]:
        """Return the sorted names of the records of a kind."""

    def describe_record(self, kind: str, name: str) -> str:
        """Return the place where a record is stored, for messages."""

    def read_record(self, kind: str, name: str) -> Record | None:
        """Return the current version of a record; None if there is none. Raises: OSError or
        UnicodeDecodeError if the record cannot be read."""

    def write_record(self, kind: str, name: str, data: str, after: Record | None) -> None:
        """Replace a record, or create it if `after` is None. Raises: OvertakenError if `after` is
        not the current version."""

    def remove_record(self, kind: str, name: str, after: Record | None = None) -> None:
        """Remove a record, including versions of it that were set aside. Raises: OvertakenError if
        `after` is given and is not the current version."""

    def set_aside_record(self, kind: str, name: str) -> str:
        """Remove a record in such a way that it can be restored. Returns: the place where its
        content is kept."""
