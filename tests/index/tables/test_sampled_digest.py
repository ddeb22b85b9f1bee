from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from megablend.index.tables.file_versions import (
    NUM_RANGES,
    RANGE_BYTES,
    body_ranges,
    sampled_content_digest,
)
from tests.storages import STORAGE

WHOLE = NUM_RANGES * RANGE_BYTES


@pytest.mark.parametrize("size", [0, 1, WHOLE])
def test_a_small_file_is_sampled_whole(size: int) -> None:
    assert body_ranges(size) == [(0, size)]


@pytest.mark.parametrize("size", [WHOLE + 1, 10**7 + 3, 10**13])
def test_ranges_are_spread_from_the_first_byte_to_the_last(size: int) -> None:
    ranges = body_ranges(size)
    offsets = [offset for offset, _ in ranges]
    gaps = {after - before for before, after in pairwise(offsets)}
    assert len(ranges) == NUM_RANGES
    assert (offsets[0], ranges[-1][0] + ranges[-1][1]) == (0, size)
    assert max(gaps) - min(gaps) <= 1


def test_a_change_in_a_sampled_range_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "body"
    content = bytearray(WHOLE * 3)
    digests = set()
    for at in (None, 0, body_ranges(len(content))[5][0] + 7, len(content) - 1):
        changed = content.copy()
        if at is not None:
            changed[at] = 1
        path.write_bytes(changed)
        digests.add(sampled_content_digest(str(path), len(content), STORAGE))
    assert len(digests) == 4
