"""Folders of a cache in an object store: each commit lists the files of a folder with their
checksums.

Each upload of files has a unique name (a nonce), which is part of the files' keys, so that no other
upload overwrites them. Creating the next version of the folder's chain is the commit. Files that a
killed build has uploaded belong to no commit.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from megablend.caches.base import Entry
from megablend.caches.objects.commits import (
    Chain,
    Commit,
    StoredFile,
    describe_file,
    find_last,
    parse_commit,
)
from megablend.caches.objects.copies import Copies
from megablend.caches.objects.node import lock_node
from megablend.errors import CacheError, DamagedCacheError
from megablend.storage.objects.prefix import ObjectEntry, ObjectPrefix
from megablend.system.atomic_write import translate_os_errors
from megablend.system.waits import log_slow_wait

_OWN = re.compile(r"[0-9a-f]{16,}(-.+)?")
"""Matches the names of files and folders of a cache: a digest, and a dash if more follows."""
COMMITS = "commits"
"""A part of the key of a commit. The key of a file has the name of its upload in this position."""
MANIFEST = "manifest.json"
"""The name of the file whose time is used as the creation time of its folder."""
_SLASHES = 3
"""The number of slashes in the key of an object: kind/folder/upload/file for files, and
kind/folder/commits/number for commits."""


def is_own(name: str) -> bool:
    """Return whether a name can be that of a file or a folder of a cache."""
    return _OWN.fullmatch(name) is not None


class Folders:
    """The folders of a cache in an object store, by keys such as `generations/<digest>`.

    Args:
        node: this node's folder of the cache.
    """

    def __init__(self, prefix: ObjectPrefix, node: Path) -> None:
        self._prefix = prefix
        self._node = node
        self._copies = Copies(prefix, node)
        self._commits: dict[str, Commit] = {}
        """The commits that were read, by the keys of their objects. These objects never change."""

    def describe_all(self, kind: str) -> list[Entry]:
        """Return the entries of the committed folders of a kind, sorted by name."""
        by_folder: dict[str, dict[str, ObjectEntry]] = {}
        for member in self._list_members(kind):
            by_folder.setdefault(_folder_of(member.key), {})[member.key] = member
        last_numbers = {
            folder: find_last(filter(_is_commit, objects)) for folder, objects in by_folder.items()
        }
        commits = self._read_commits(
            {folder: number for folder, number in last_numbers.items() if number >= 0}
        )
        entries = []
        for folder, commit in sorted(commits.items()):
            if not commit.files:  # the folder was removed
                continue
            objects = by_folder[folder]
            committed = objects[self._chain(folder).object_key(commit.number)].modified
            file = commit.files.get(MANIFEST)
            manifest = objects.get(f"{folder}/{file.at}/{MANIFEST}") if file else None
            created = manifest.modified if manifest else committed
            size = sum(member.bytes for member in objects.values())
            entries.append(Entry(folder.rpartition("/")[2], size, created, committed))
        return entries

    def read(self, folder: str) -> Commit | None:
        """Return the last commit of a folder; None if there is none, or the folder was removed."""
        commit = self._read_last(folder)
        return commit if commit is not None and commit.files else None

    def read_member(self, folder: str, name: str) -> bytes:
        """Read a small file of a folder. Raises: FileNotFoundError if it does not exist; CacheError
        if it is damaged."""
        commit = self.read(folder)
        if commit is None or name not in commit.files:
            raise FileNotFoundError(f"{self._prefix.location}/{folder}/{name}")
        return self._copies.read_member(folder, commit, name)

    def fetch(self, folder: str, *, is_fresh: bool) -> Path:
        """Bring this node's copy of a folder up to date. Returns: the path of the copy, which does
        not exist if there is no such folder.

        Args:
            is_fresh: whether to download the whole folder, even if there is a copy.
        """
        path = self._node / folder
        present = None if is_fresh else self._copies.find_complete(folder)
        if present is not None and not present.replaced:
            return path
        with translate_os_errors(path), lock_node(self._node, folder.replace("/", "-")):
            try:
                self._update_copy(folder, is_fresh=is_fresh)
            except FileNotFoundError:
                # The folder may have been committed again meanwhile, and its previous files removed
                try:
                    self._update_copy(folder, is_fresh=is_fresh)
                except FileNotFoundError as error:
                    raise DamagedCacheError.of(f"{error}") from None
        return path

    def _update_copy(self, folder: str, *, is_fresh: bool) -> None:
        """Bring this node's copy of a folder up to date; do nothing if there is no such folder.
        Raises: FileNotFoundError if an object does not exist."""
        commit = self.read(folder)
        if commit is None:
            return
        present = None if is_fresh else self._copies.find_complete(folder)
        self._copies.update(folder, commit, present)

    def commit(
        self,
        folder: str,
        written: Path,
        replaced: Mapping[str, bytes],
        is_same: Callable[[Path, Path], bool],
    ) -> bool:
        """See CacheStore.commit_folder."""
        upload = secrets.token_hex(8)
        uploaded = dict[str, StoredFile]()
        uploaded_replaced = self._upload(folder, upload, replaced)
        while True:
            last = self._read_last(folder)
            number = -1 if last is None else last.number
            reused = None if last is None else self._find_reusable(folder, last, written, is_same)
            if reused is None and not uploaded:
                uploaded = self._upload_folder(folder, upload, written)
            files = uploaded if reused is None else reused
            commit = Commit(number + 1, {**files, **uploaded_replaced}, frozenset(replaced))
            is_created = self._chain(folder).append(commit.make_content(), number)
            if is_created and self._has_all(folder, commit):
                break
            if is_created:
                # Another process removed some objects before they were committed: upload all again
                uploaded = {}
                uploaded_replaced = self._upload(folder, upload, replaced)
            # Otherwise another build was first: its commit may have files that can be reused
        # A damaged copy of an earlier commit may have the sizes of this one
        self.fetch(folder, is_fresh=reused is None)
        return reused is None

    def remove(self, folder: str) -> None:
        """Remove a folder with the files of its last commit, unless it has been committed again in
        the meantime."""
        last = self._read_last(folder)
        if last is not None and last.files and self._chain(folder).append(None, last.number):
            self._prefix.remove(list(last.list_keys(folder)))

    def find_leftovers(self, kind: str, before: float) -> Iterator[ObjectEntry]:
        """Return the objects that were written before a given time and do not belong to a current
        commit."""
        members = [member for member in self._list_members(kind) if not _is_commit(member.key)]
        used = set[str]()
        for folder in {_folder_of(member.key) for member in members}:
            commit = self.read(folder)
            if commit is not None:
                used.update(commit.list_keys(folder))
        return (member for member in members if member.modified < before and member.key not in used)

    def _list_members(self, kind: str) -> list[ObjectEntry]:
        """Return the objects of all folders of a kind, without foreign objects such as the folder
        markers that web consoles create."""
        listed = (
            entry for entry in self._prefix.list_objects(kind) if entry.key.count("/") == _SLASHES
        )
        return [entry for entry in listed if is_own(entry.key.split("/")[1])]

    def _chain(self, folder: str) -> Chain:
        return Chain(self._prefix, f"{folder}/{COMMITS}")

    def _read_last(self, folder: str) -> Commit | None:
        """Return the last commit of a folder, which may mark its removal; None if there is none."""
        number = self._chain(folder).find_end()
        return None if number < 0 else self._read_commits({folder: number})[folder]

    def _read_commits(self, numbers: Mapping[str, int]) -> dict[str, Commit]:
        """Return a commit of each folder, given the numbers of the commits by folder. Raises:
        CacheError if one is damaged."""
        chains = {folder: self._chain(folder) for folder in numbers}
        keys = {folder: chains[folder].object_key(number) for folder, number in numbers.items()}
        missing = [folder for folder, key in keys.items() if key not in self._commits]
        objects = self._prefix.read_all([keys[folder] for folder in missing])
        for folder, data in zip(missing, objects, strict=True):
            location = f"{self._prefix.location}/{keys[folder]}"
            if data is None:
                raise CacheError(
                    f"{location}: was removed while it was being read; run the command again"
                )
            self._commits[keys[folder]] = parse_commit(
                location, chains[folder].parse(numbers[folder], data)
            )
        return {folder: self._commits[key] for folder, key in keys.items()}

    def _find_reusable(
        self, folder: str, last: Commit, written: Path, is_same: Callable[[Path, Path], bool]
    ) -> dict[str, StoredFile] | None:
        """Return the files of the last commit that need not be uploaded again; None if the commit
        has other content, or is damaged."""
        if last.files and self._has_all(folder, last):
            with suppress(CacheError):
                # This node's copy may be damaged, while the store's objects are intact
                if any(
                    is_same(self.fetch(folder, is_fresh=is_fresh), written)
                    for is_fresh in (False, True)
                ):
                    return {
                        name: file for name, file in last.files.items() if name not in last.replaced
                    }
        return None

    def _has_all(self, folder: str, commit: Commit) -> bool:
        """Return whether all objects of a commit exist and are unchanged."""
        files = commit.list_keys(folder)
        for entry, file in zip(self._prefix.describe_all(list(files)), files.values(), strict=True):
            if entry is None or entry.bytes != file.bytes:
                return False
            if file.etag and entry.etag and entry.etag != file.etag:
                return False
        return True

    def _upload_folder(self, folder: str, upload: str, written: Path) -> dict[str, StoredFile]:
        """Upload all files of a folder, the manifest last."""
        paths = {path.name: path for path in sorted(written.iterdir())}
        manifest = {MANIFEST: paths.pop(MANIFEST)} if MANIFEST in paths else {}
        with log_slow_wait(f"the upload of {self._prefix.location}/{folder}"):
            return self._upload(folder, upload, paths) | self._upload(folder, upload, manifest)

    def _upload(
        self, folder: str, upload: str, members: Mapping[str, bytes | Path]
    ) -> dict[str, StoredFile]:
        """Upload files of a folder. Their keys contain the name of the upload."""
        etags = self._prefix.write_all(
            {f"{folder}/{upload}/{name}": data for name, data in members.items()}
        )
        return {
            name: describe_file(upload, data, etag)
            for (name, data), etag in zip(members.items(), etags.values(), strict=True)
        }


def _is_commit(key: str) -> bool:
    return key.split("/")[2] == COMMITS


def _folder_of(key: str) -> str:
    """Return the folder, as kind/name, that an object's key belongs to."""
    return "/".join(key.split("/")[:2])
