"""A node's copies of folders of a cache in an object store: downloaded once, by one process, with their checksums compared."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from pathlib import Path

from megablend.caches.objects.chains import Version
from megablend.caches.objects.commits import Commit, parse_commit
from megablend.caches.objects.unused_copies import RECEIPTS, UNUSED_SECONDS, note_use, remove_unused
from megablend.errors import CacheError
from megablend.fs.atomic_write import checksum, flush_folder, replace_file, temp_sibling
from megablend.fs.log_waits import log_slow_wait
from megablend.fs.safe_open import read_regular
from megablend.storage.objects.prefix import ObjectPrefix


class Copies:
    """Copies of the folders below a prefix.

    Args:
        node: this node's folder.
    """

    def __init__(self, prefix: ObjectPrefix, node: Path) -> None:
        self._prefix, self._node = prefix, node

    def find_complete(self, folder: str) -> Commit | None:
        """The commit that this node has a complete copy of, which then counts as used."""
        with suppress(OSError, ValueError, KeyError, TypeError, CacheError):
            record = json.loads(read_regular(self._receipt(folder)))
            commit = parse_commit(folder, Version(record["number"], record["content"]))
            sizes = {name: (self._node / folder / name).stat().st_size for name in commit.files}
            if commit.files and sizes == {name: file.bytes for name, file in commit.files.items()}:
                return commit if note_use(self._receipt(folder)) else None
        return None

    def update(self, folder: str, commit: Commit, present: Commit | None) -> None:
        """Bring a copy up to date; the caller keeps other processes of the node out.

        Args:
            present: the commit that the copy is of; None to download all of it.

        Raises: FileNotFoundError if an object does not exist; CacheError if one is damaged.
        """
        if present is not None:
            changed = {name for name, file in commit.files.items() if present.files.get(name) != file}
            if changed <= commit.replaced and present.files.keys() <= commit.files.keys():
                for name in sorted(changed):
                    self._replace(folder, commit, name)
                self._write_receipt(folder, commit)
                return
        self._download_all(folder, commit)
        self._write_receipt(folder, commit)
        remove_unused(self._node, time.time() - UNUSED_SECONDS)

    def read_member(self, folder: str, commit: Commit, name: str) -> bytes:
        """A small file of a commit. Raises: as `update`."""
        path = self._node / folder / name
        if self.find_complete(folder) == commit:
            return read_regular(path)
        temporary = temp_sibling(self._node / RECEIPTS / name)
        temporary.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._download(folder, commit, name, temporary)
            return read_regular(temporary)
        finally:
            temporary.unlink(missing_ok=True)

    def _replace(self, folder: str, commit: Commit, name: str) -> None:
        path = self._node / folder / name
        temporary = temp_sibling(path)
        self._download(folder, commit, name, temporary)
        temporary.replace(path)

    def _download_all(self, folder: str, commit: Commit) -> None:
        path = self._node / folder
        path.parent.mkdir(parents=True, exist_ok=True)
        written = temp_sibling(path)
        written.mkdir()
        try:
            with log_slow_wait(f"the download of {self._prefix.location}/{folder}"):
                for name in commit.files:
                    self._download(folder, commit, name, written / name)
            flush_folder(written)
            if path.exists():  # readers keep the files that they have opened
                aside = temp_sibling(path)
                path.rename(aside)
                shutil.rmtree(aside, ignore_errors=True)
            written.rename(path)
        finally:
            shutil.rmtree(written, ignore_errors=True)

    def _download(self, folder: str, commit: Commit, name: str, path: Path) -> None:
        """Copy a file to a new one, and compare its checksum."""
        file = commit.files[name]
        key = f"{folder}/{file.at}/{name}"
        try:
            self._prefix.download(key, file.bytes, path)
            if (found := checksum(path)) != file.blake2b:
                raise CacheError(
                    f"{self._prefix.location}/{key}: damaged: its blake2b is {found}, {file.blake2b} was committed; rebuild "
                    "the index to repair it"
                )
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _receipt(self, folder: str) -> Path:
        return self._node / RECEIPTS / f"{folder.replace('/', '-')}.json"

    def _write_receipt(self, folder: str, commit: Commit) -> None:
        path = self._receipt(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({"number": commit.number, "content": commit.make_content()}).encode())
