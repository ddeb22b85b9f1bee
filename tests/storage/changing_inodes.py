"""Local files whose inodes change, as on sshfs and s3fs where memory is short, and on each node."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest

from megablend.storage import local
from megablend.storage.base import FileStat


def change_inodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """From now on each look at a local file finds another inode. Returns: those to come, from 1."""
    inodes = itertools.count(1)
    file_stat = local.file_stat

    def find_other_inode(state: os.stat_result) -> FileStat:
        times = file_stat(state).etag.rpartition("-")[0]
        return FileStat(size=state.st_size, etag=f"{times}-{next(inodes):x}")

    monkeypatch.setattr(local, "file_stat", find_other_inode)
    return inodes
