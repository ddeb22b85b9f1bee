"""Removing what a node has copied of caches in object stores and has not used for long.

A copy of a folder is used whenever a process asks for it, which is noted by the time of its receipt. Copies that are not used are
removed by the next download to the node (after UNUSED_SECONDS), and by `gc` on this node. Of a cache of which nothing was used,
everything is removed. Processes that have opened a file keep it; whoever needs a copy later downloads it again.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from megablend.caches.objects.node import try_lock_node
from megablend.fs.atomic_write import temp_sibling
from megablend.system.log import LOG

RECEIPTS = ".commits"
UNUSED_SECONDS = 30 * 86400.0
_NODE_FOLDER = re.compile(r"[0-9a-f]{24}")


class Removed(NamedTuple):
    """What was removed, or would be."""

    copies: int
    bytes: int


def note_use(receipt: Path) -> bool:
    """Note that a copy is used. Returns: False if it was just removed."""
    try:
        os.utime(receipt)
    except FileNotFoundError:
        return False
    except OSError:  # of another user: as old as its download
        pass
    return True


def remove_unused(node: Path, before: float, *, dry_run: bool = False) -> Removed:
    """Remove the copies of a node that were last used before a time (seconds since 1970), of all its caches.

    Args:
        node: the folder of one of them; the others are next to it.
    """
    copies = size = 0
    for folder in sorted(node.parent.iterdir()):
        if not (_NODE_FOLDER.fullmatch(folder.name) and (folder / RECEIPTS).is_dir()):
            continue
        with contextlib.suppress(OSError):  # another process removes it as well
            is_unused = folder != node and _last_change(folder) < before
            for receipt in _list_receipts(folder):
                if receipt.stat().st_mtime < before:
                    removed = _remove_copy(folder, receipt, before, dry_run=dry_run)
                    copies, size = copies + (removed > 0), size + removed
            if is_unused and not dry_run and not _list_receipts(folder):
                shutil.rmtree(folder, ignore_errors=True)
    if copies and not dry_run:
        LOG.info("%s: removed %d unused copies of parts of caches, %d bytes", node.parent, copies, size)
    return Removed(copies, size)


def _list_receipts(folder: Path) -> list[Path]:
    return sorted((folder / RECEIPTS).glob("*.json"))


def _remove_copy(folder: Path, receipt: Path, before: float, *, dry_run: bool) -> int:
    """Remove a copy unless it is used just now. Returns: its bytes."""
    kind, _, name = receipt.stem.partition("-")
    copy = folder / kind / name
    with try_lock_node(folder, receipt.stem) as is_locked:
        if not is_locked:
            return 0
        size = sum(path.stat().st_size for path in copy.glob("*") if path.is_file())
        if dry_run:
            return size
        aside = temp_sibling(receipt)
        receipt.rename(aside)  # from here on, whoever notes its use finds none, and waits for the lock
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
    """When a file of a folder was last written."""
    return max((path.lstat().st_mtime for path in folder.rglob("*")), default=folder.stat().st_mtime)
