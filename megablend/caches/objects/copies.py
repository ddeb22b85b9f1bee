"""A node's copies of folders of a cache in an object store. A copy is downloaded once, by one
process, which verifies its checksums.

The modification time of a copy's receipt is the time at which a process last used the copy. Copies
that were not used for UNUSED_SECONDS are removed by the next download to the node, and by `gc` on
the node. If no copy of a cache was used, the cache's whole folder on the node is removed. Processes
that have opened a file can still read it; a process that needs a removed copy downloads it again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from megablend.caches.base import Record
from megablend.caches.objects.commits import Commit, StoredFile, parse_commit
from megablend.caches.objects.node import try_lock_node
from megablend.errors import CacheError
from megablend.storage.objects.prefix import ObjectPrefix
from megablend.system.atomic_write import (
    checksum,
    flush_folder,
    replace_file,
    replace_folder,
    replacing,
    temp_sibling,
    unfinished_folder,
)
from megablend.system.digest import hex_digest
from megablend.system.log import LOG
from megablend.system.safe_open import read_regular
from megablend.system.waits import log_slow_wait

RECEIPTS = ".commits"
"""The folder for the receipts of a cache. Each receipt records the commit that a copy was made
from."""
UNUSED_SECONDS = 30 * 86400.0
"""A copy counts as unused if it was last used more than this number of seconds ago."""
_NODE_FOLDER = re.compile(r"[0-9a-f]{24}")
"""Matches the folder names of caches, which `find_node_folder` makes."""


def note_use(receipt: Path) -> bool:
    """Record that a copy is used now. Returns: False if the copy was just removed."""
    try:
        os.utime(receipt)
    except FileNotFoundError:
        return False
    except OSError:  # another user's copy keeps the time of its download
        pass
    return True


def remove_unused(node: Path, before: float, *, dry_run: bool = False) -> tuple[int, int]:
    """Remove the copies of all caches on a node that were last used before a given time (seconds
    since 1970).

    Args:
        node: the folder of one of the caches; the folders of the others are next to it.

    Returns: the number and the total size in bytes of the copies that were removed, or would be.
    """
    num_copies = 0
    size = 0
    for folder in sorted(node.parent.iterdir()):
        if not (_NODE_FOLDER.fullmatch(folder.name) and (folder / RECEIPTS).is_dir()):
            continue
        with contextlib.suppress(OSError):  # another process removes it as well
            is_unused = folder != node and _last_change(folder) < before
            for receipt in _list_receipts(folder):
                if receipt.stat().st_mtime < before:
                    removed = _remove_copy(folder, receipt, before, dry_run=dry_run)
                    num_copies += removed > 0
                    size += removed
            if is_unused and not dry_run and not _list_receipts(folder):
                shutil.rmtree(folder, ignore_errors=True)
    if num_copies and not dry_run:
        LOG.info(
            "%s: removed %d unused copies of cache folders (%d bytes)",
            node.parent,
            num_copies,
            size,
        )
    return num_copies, size


def _list_receipts(folder: Path) -> list[Path]:
    return sorted((folder / RECEIPTS).glob("*.json"))


def _remove_copy(folder: Path, receipt: Path, before: float, *, dry_run: bool) -> int:
    """Remove a copy unless a process uses it now. Returns: the size of the copy in bytes; 0 if it
    is kept."""
    kind, _, name = receipt.stem.partition("-")
    copy = folder / kind / name
    with try_lock_node(folder, receipt.stem) as is_locked:
        if not is_locked:
            return 0
        size = sum(path.stat().st_size for path in copy.glob("*") if path.is_file())
        if dry_run:
            return size
        aside = temp_sibling(receipt)
        # From here on, a process that needs the copy finds no receipt, and waits for the lock
        receipt.rename(aside)
        if aside.stat().st_mtime >= before:
            aside.rename(receipt)
            return 0
        aside.unlink()
        if copy.exists():
            removed = temp_sibling(copy)
            copy.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
        return size


def _last_change(folder: Path) -> float:
    """Return the time at which a file of a folder was last written."""
    return max(
        (path.lstat().st_mtime for path in folder.rglob("*")), default=folder.stat().st_mtime
    )


class Copies:
    """This node's copies of the folders below a prefix.

    Args:
        node: this node's folder of the cache.
    """

    def __init__(self, prefix: ObjectPrefix, node: Path) -> None:
        self._prefix = prefix
        self._node = node

    def find_complete(self, folder: str) -> Commit | None:
        """Return the commit of which this node has a complete copy; None if there is no complete
        copy. Record that the copy is used."""
        with suppress(OSError, ValueError, KeyError, TypeError, CacheError):
            record = json.loads(read_regular(self._receipt(folder)))
            commit = parse_commit(folder, Record(record["content"], record["number"]))
            sizes = {name: (self._node / folder / name).stat().st_size for name in commit.files}
            if commit.files and sizes == {name: file.bytes for name, file in commit.files.items()}:
                return commit if note_use(self._receipt(folder)) else None
        return None

    def update(self, folder: str, commit: Commit, present: Commit | None) -> None:
        """Bring a copy up to date. The caller must keep out other processes of the node.

        Args:
            present: the commit that the copy was made from; None to download the whole folder.

        Raises: FileNotFoundError if an object does not exist; CacheError if an object is damaged.
        """
        if present is not None:
            changed = {
                name for name, file in commit.files.items() if present.files.get(name) != file
            }
            if changed <= commit.replaced and present.files.keys() <= commit.files.keys():
                for name in sorted(changed):
                    self._replace(folder, commit, name)
                self._write_receipt(folder, commit)
                return
        self._download_all(folder, commit)
        self._write_receipt(folder, commit)
        remove_unused(self._node, time.time() - UNUSED_SECONDS)

    def read_member(self, folder: str, commit: Commit, name: str) -> bytes:
        """Read a small file of a commit. Raises: the same errors as `update`."""
        if self.find_complete(folder) == commit:
            return read_regular(self._node / folder / name)
        # Read into memory, since the disk may be full or read-only
        key = f"{folder}/{commit.files[name].at}/{name}"
        data = self._prefix.read(key)
        if data is None:
            raise FileNotFoundError(f"{self._prefix.location}/{key}: the object is missing")
        self._verify(key, hex_digest(data), commit.files[name])
        return data

    def _replace(self, folder: str, commit: Commit, name: str) -> None:
        """Download one file of a commit, and replace the file in the copy with it."""
        with replacing(self._node / folder / name) as temporary:
            self._download(folder, commit, name, temporary)

    def _download_all(self, folder: str, commit: Commit) -> None:
        """Download all files of a commit to a new copy, which replaces the old one."""
        path = self._node / folder
        with unfinished_folder(path) as written:
            with log_slow_wait(f"the download of {self._prefix.location}/{folder}"):
                for name in commit.files:
                    self._download(folder, commit, name, written / name)
            flush_folder(written)
            replace_folder(path, written)

    def _download(self, folder: str, commit: Commit, name: str, path: Path) -> None:
        """Download a file of a commit to a new file, `path`, and verify its checksum."""
        file = commit.files[name]
        key = f"{folder}/{file.at}/{name}"
        self._prefix.download(key, file.bytes, path)
        self._verify(key, checksum(path), file)

    def _verify(self, key: str, digest: str, file: StoredFile) -> None:
        """Compare the checksum of an object with the committed one. Raises: CacheError if they
        differ."""
        if digest != file.blake2b:
            raise CacheError(
                f"{self._prefix.location}/{key}: damaged (its BLAKE2b digest is {digest}, but {file.blake2b} was committed); "
                "build again to repair it (`megablend build CONFIG`)"
            )

    def _receipt(self, folder: str) -> Path:
        return self._node / RECEIPTS / f"{folder.replace('/', '-')}.json"

    def _write_receipt(self, folder: str, commit: Commit) -> None:
        path = self._receipt(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(
            path, json.dumps({"number": commit.number, "content": commit.make_content()}).encode()
        )
