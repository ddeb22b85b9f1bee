"""`ObjectCacheStore`: a cache below a prefix of an object store."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from megablend.caches.base import (
    CHECKSUMS,
    DOCUMENTS,
    RUNS,
    SKIPS,
    SNAPSHOTS,
    Entry,
    OvertakenError,
    Record,
    copied_cache,
    place_below,
)
from megablend.caches.local import check_folders
from megablend.caches.objects.commits import Chain, find_last
from megablend.caches.objects.copies import remove_unused
from megablend.caches.objects.folders import Folders, is_own
from megablend.caches.objects.node import find_node_folder, remove_old_leftovers
from megablend.caches.objects.remembered import RememberedPrefix
from megablend.errors import CacheError
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects.prefix import ObjectPrefix
from megablend.storage.store_options import find_options
from megablend.system.atomic_write import list_committed, replace_file, translate_os_errors
from megablend.system.build_lock import LockInfo

_FOLDERS = (SNAPSHOTS, DOCUMENTS, CHECKSUMS)
"""The kinds of entries that are folders."""
_COPIED = ("packs", "splits", "idx")
"""Kinds of files that a node does not download again: their names identify their content, so that a
copy never gets out of date."""
_KEYS = {RUNS: "runs", SKIPS: "skips"}
"""The prefixes of the keys of records, by kind."""
_CLOCK = ".clock"
"""The prefix of the keys of objects that are written to find out the store's time."""
PROBES = ".probes"
"""The prefix of the keys of objects that `check_creates_once` creates."""
_ROUNDS = 2
"""The number of objects that `check_creates_once` creates."""
_RACERS = 8
"""The number of simultaneous requests to create each of these objects."""


class ObjectCacheStore:
    """A cache below a prefix of an object store; see CacheStore. There are no locks: each commit is
    an object that only one process can create, see `commits`.

    Args:
        location: the URL of the prefix, such as s3://bucket/caches/x.
        options: the settings for accessing the bucket.
        local_cache: the folder for this node's copies; None for the default, see `node`.
    """

    def __init__(
        self, location: str, options: ObjectOptions, local_cache: str | None = None
    ) -> None:
        self._options = options
        self._local_cache = local_cache
        self._prefix = RememberedPrefix(location, options, lambda: self.folder)
        self._is_checked = False
        """Whether the store is known to let only one process create an object."""
        self._clock_lead = 0.0
        """The number of seconds by which the store's clock was ahead of this node's clock in the
        last call of `now`."""

    def __reduce__(self) -> tuple[type[ObjectCacheStore], tuple[str, ObjectOptions, str | None]]:
        return ObjectCacheStore, (self.location, self._options, self._local_cache)

    def __repr__(self) -> str:
        return f"ObjectCacheStore({self.location!r})"

    def __str__(self) -> str:
        return self.location

    @property
    def location(self) -> str:
        """See CacheStore."""
        return self._prefix.location

    @cached_property
    def folder(self) -> Path:
        """The folder of this node's copy of the cache."""
        return find_node_folder(
            self.location, find_options(self._options, self.location).endpoint, self._local_cache
        )

    @cached_property
    def _folders(self) -> Folders:
        return Folders(self._prefix, self.folder)

    def exists(self) -> bool:
        """See CacheStore."""
        return bool(self._prefix.list_objects(SNAPSHOTS))

    @contextmanager
    def hold(
        self, *, wait_seconds: float | None = None, on_wait: Callable[[str], None] | None = None
    ) -> Iterator[LockInfo]:
        """See CacheStore. Other processes are not kept out. Raises: CacheError if the store or the
        node's folder cannot be written safely."""
        check_folders(self.folder)
        if not self._is_checked:
            check_creates_once(self._prefix)
            self._is_checked = True
        was_held = self._prefix.is_held
        self._prefix.is_held = True
        try:
            yield LockInfo(nonce=secrets.token_hex(8), exclusive=True)
        finally:
            self._prefix.is_held = was_held
            if self._prefix.is_mirrored:
                # Commits that were read while the cache was held are read again, to be remembered
                self.__dict__.pop("_folders", None)

    def verify_shared(self, nonce: str) -> None:
        """See CacheStore. There is nothing to check, since each node has a folder of its own."""

    def remove_leftovers(self) -> None:
        """Remove the unfinished files of other processes of this node that are too old to be in
        use."""
        remove_old_leftovers(self.folder)

    def now(self) -> float:
        """See CacheStore."""
        key = f"{_CLOCK}/{secrets.token_hex(8)}"
        self._prefix.write(key, b"")
        try:
            (entry,) = self._prefix.describe_all([key])
        finally:
            self._prefix.remove([key])
        if entry is None:
            raise CacheError(
                f"{self.location}/{key}: was removed while its modification time was being read; run the command again"
            )
        self._clock_lead = entry.modified - time.time()
        return entry.modified

    def list_files(self, kind: str) -> list[str]:
        """See CacheStore."""
        return [entry.name for entry in self.list_entries(kind)]

    def list_entries(self, kind: str) -> list[Entry]:
        """See CacheStore."""
        if kind in _FOLDERS:
            return self._folders.describe_all(kind)
        listed = (
            (listed_object.key.split("/", 1)[1], listed_object)
            for listed_object in self._prefix.list_objects(kind)
        )
        return [
            Entry(name, listed_object.bytes, listed_object.modified, listed_object.modified)
            for name, listed_object in listed
            if is_own(name)
        ]

    def fetch_file(self, kind: str, name: str, *, is_written: bool = False) -> Path:
        """See CacheStore."""
        path = self._path(kind, name)
        if kind in _COPIED and path.is_file():
            return path
        data = self._prefix.read(place_below(kind, name))
        if data is not None:
            replace_file(path, data)
        elif is_written:
            raise CacheError(
                f"{self.location}/{kind}/{name}: was written by a rank, but does not exist; build again"
            )
        else:
            path.unlink(missing_ok=True)
        return path

    def fetch_files(self, kind: str, owners: Collection[str] | None = None) -> None:
        """See CacheStore."""
        local_names = set(list_committed(self.folder / kind))
        names = [
            name
            for name in self.list_files(kind)
            if name not in local_names and _belongs(name, owners)
        ]
        contents = self._prefix.read_all([f"{kind}/{name}" for name in names])
        for name, data in zip(names, contents, strict=True):
            if data is not None:
                replace_file(self._path(kind, name), data)

    def publish_file(self, kind: str, name: str) -> None:
        """See CacheStore."""
        self._prefix.write(place_below(kind, name), self._path(kind, name))

    def publish_files(self, kind: str, owners: Collection[str]) -> None:
        """See CacheStore."""
        there = set(self.list_files(kind))
        local_names = list_committed(self.folder / kind)
        names = [name for name in local_names if name not in there and _belongs(name, owners)]
        self._prefix.write_all({f"{kind}/{name}": self.folder / kind / name for name in names})

    def list_folders(self, kind: str) -> list[str]:
        """See CacheStore."""
        return [entry.name for entry in self._folders.describe_all(kind)]

    def has_folder(self, kind: str, name: str) -> bool:
        """See CacheStore."""
        return self._folders.read(place_below(kind, name)) is not None

    def fetch_folder(self, kind: str, name: str, *, is_fresh: bool = False) -> Path:
        """See CacheStore."""
        return self._folders.fetch(place_below(kind, name), is_fresh=is_fresh)

    def read_member(self, kind: str, name: str, member: str) -> bytes:
        """See CacheStore."""
        return self._folders.read_member(place_below(kind, name), member)

    def commit_folder(
        self,
        kind: str,
        name: str,
        written: Path,
        replaced: Mapping[str, bytes],
        is_same: Callable[[Path, Path], bool],
    ) -> bool:
        """See CacheStore."""
        return self._folders.commit(place_below(kind, name), written, replaced, is_same)

    def list_upgradable(self, kind: str) -> list[Path]:
        """See CacheStore. No older version wrote to object stores."""
        return []

    def remove(self, kind: str, name: str) -> None:
        """See CacheStore."""
        if kind in _FOLDERS:
            self._folders.remove(place_below(kind, name))
        else:
            self._prefix.remove([place_below(kind, name)])
            with contextlib.suppress(FileNotFoundError):
                (self.folder / place_below(kind, name)).unlink()

    def collect_leftovers(self, before: float, *, dry_run: bool) -> tuple[int, int]:
        """Remove the uploads of killed builds, and files of earlier commits; see CacheStore. Unused
        copies on this node are removed as well, but not counted."""
        remove_unused(self.folder, before - self._clock_lead, dry_run=dry_run)
        leftovers = [
            leftover for kind in _FOLDERS for leftover in self._folders.find_leftovers(kind, before)
        ]
        leftovers += [
            leftover
            for kind in (PROBES, _CLOCK)
            for leftover in self._prefix.list_objects(kind)
            if leftover.modified < before
        ]
        if not dry_run:
            self._prefix.remove([leftover.key for leftover in leftovers])
        return len(leftovers), sum(leftover.bytes for leftover in leftovers)

    def list_records(self, kind: str) -> list[str]:
        """See CacheStore."""
        numbers: dict[str, int] = {}
        for entry in self._prefix.list_objects(_KEYS[kind]):
            parts = entry.key.split("/")
            if len(parts) == 3:
                name = parts[1]
                numbers[name] = max(numbers.get(name, -1), find_last([entry.key]))
            elif kind == RUNS and len(parts) == 2 and parts[1].endswith(".json"):
                raise copied_cache(f"{self.location}/{entry.key}")
        chains = {name: self._chain(kind, name) for name, number in numbers.items() if number >= 0}
        data = self._prefix.read_all(
            [chain.object_key(numbers[name]) for name, chain in chains.items()]
        )
        last_versions = zip(chains.items(), data, strict=True)
        return sorted(
            name
            for (name, chain), version in last_versions
            if version and chain.parse(numbers[name], version).data is not None
        )

    def describe_record(self, kind: str, name: str) -> str:
        """See CacheStore."""
        return f"{self.location}/{_KEYS[kind]}/{name}"

    def read_record(self, kind: str, name: str) -> Record | None:
        """See CacheStore."""
        last = self._read_version(kind, name)
        return None if last is None or last.data is None else Record(str(last.data), last.number)

    def write_record(self, kind: str, name: str, data: str, after: Record | None) -> None:
        """See CacheStore."""
        if after is not None:
            number = after.number
        else:
            last = self._read_version(kind, name)
            if last is not None and last.data not in (None, data):
                raise self._overtaken(kind, name)
            number = -1 if last is None else last.number
        if not self._chain(kind, name).append(data, number):
            raise self._overtaken(kind, name)

    def remove_record(self, kind: str, name: str, after: Record | None = None) -> None:
        """See CacheStore. The versions of the record are kept, and a new version marks the
        removal."""
        if after is None:
            self.set_aside_record(kind, name)
        elif not self._chain(kind, name).append(None, after.number):
            raise self._overtaken(kind, name)

    def set_aside_record(self, kind: str, name: str) -> str:
        """See CacheStore. A new version marks the removal; removing that version restores the
        record."""
        last = self._read_version(kind, name)
        chain = self._chain(kind, name)
        if last is None:
            return self.describe_record(kind, name)
        if last.data is None:  # another process was first
            return f"{self.location}/{chain.object_key(last.number - 1)}"
        if not chain.append(None, last.number):
            raise self._overtaken(kind, name)
        return f"{self.location}/{chain.object_key(last.number)}"

    def _read_version(self, kind: str, name: str) -> Record | None:
        last = self._chain(kind, name).read_last()
        if last is None and kind == RUNS:
            key = place_below(RUNS, f"{name}.json")
            if self._prefix.read(key) is not None:
                raise copied_cache(f"{self.location}/{key}")
        return last

    def _chain(self, kind: str, name: str) -> Chain:
        return Chain(self._prefix, place_below(_KEYS[kind], name))

    def _overtaken(self, kind: str, name: str) -> OvertakenError:
        """Return the error for a record that another process has changed."""
        return OvertakenError(
            f"{self.describe_record(kind, name)}: was changed by another process in the meantime; run the command again"
        )

    def _path(self, kind: str, name: str) -> Path:
        """Return the path of a file in this node's copy, and create its folder. Raises: CacheError
        if the folder cannot be created."""
        path = self.folder / place_below(kind, name)
        with translate_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _belongs(name: str, owners: Collection[str] | None) -> bool:
    """Return whether a file belongs to one of `owners`; True if `owners` is None."""
    return owners is None or name.partition("-")[0] in owners


def check_creates_once(prefix: ObjectPrefix) -> None:
    """Check that a store lets only one of several simultaneous requests create an object. Raises:
    CacheError if several requests succeed, or one replaces an existing object."""
    for _ in range(_ROUNDS):
        key = f"{PROBES}/{secrets.token_hex(8)}"
        try:
            winners = prefix.create_each(key, [b"%d" % number for number in range(_RACERS)])
            # If requests collided and none was carried out, there is nothing to replace
            is_replaced = winners > 0 and prefix.create(key, b"late")
        finally:
            prefix.remove([key])
        if winners > 1 or is_replaced:
            raise CacheError(
                f"{prefix.location}: this store ignores `If-None-Match: *` on a PUT, so builds could overwrite each other's "
                "commits; use a store that honours it, or keep the cache in a folder"
            )
