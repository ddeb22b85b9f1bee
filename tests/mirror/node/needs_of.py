"""Needs from rows, for tests."""

from __future__ import annotations

import numpy as np

from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import Pages
from megablend.mirror.disk.room import Need


def make_need(key: FileKey, rows: list[tuple[int, int, float]]) -> Need:
    blocks, masks, due = zip(*rows, strict=True)
    return Need(key, Pages(np.array(blocks, np.uint32), np.array(masks, np.uint64)), np.array(due))
