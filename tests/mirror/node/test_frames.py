"""Needs in batches are the needs."""

from __future__ import annotations

import numpy as np
import pytest

from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import Pages
from megablend.mirror.disk.room import Need
from megablend.mirror.node.frames import batch_needs, pack_needs, unpack_needs


def list_rows(needs: list[Need]) -> list[tuple[FileKey, int, int]]:
    return [
        (need.key, block, mask)
        for need in needs
        for block, mask in zip(need.pages.blocks.tolist(), need.pages.masks.tolist(), strict=True)
    ]


@pytest.mark.parametrize("most", [1, 100, 1000, 1 << 20])
def test_batches_are_the_needs_in_their_order(most: int) -> None:
    rng = np.random.default_rng(0)
    needs = [
        Need.of(
            FileKey(f"s3://bucket/{'x' * (i % 7)}{i}", "e", 1 << 40),
            Pages(np.arange(count, dtype=np.uint32), np.full(count, i + 1, np.uint64)),
            float("inf"),
        )
        for i, count in enumerate(rng.integers(1, 200, 40).tolist())
    ]
    batches = list(batch_needs(needs, most))
    found = [need for batch in batches for need in unpack_needs(pack_needs(batch))]
    assert list_rows(found) == list_rows(needs)
    assert all(batches[:-1])
    if most > 100:
        assert all(len(pack_needs(batch)) <= most + 100 for batch in batches)
    assert (len(batches) == 1) == (most == 1 << 20)


def test_no_needs_are_one_batch() -> None:
    assert list(batch_needs([])) == [[]]
