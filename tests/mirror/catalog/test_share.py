"""Columns of files and pages, against objects for each file."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from megablend.mirror.catalog.manifest import DataFile
from megablend.mirror.catalog.share import NO_SHARE, Kept, Share, make_share
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import (
    BLOCK_BYTES,
    PAGE_BYTES,
    PIECE_BLOCKS,
    Pages,
    count_pages,
    pages_of_file,
)
from megablend.mirror.disk.room import NEVER, PINNED, WANTED
from megablend.mirror.members import homes as homes_module
from megablend.mirror.members.homes import Homes
from tests.mirror.manifests import make_manifest

PIECE_BYTES = PIECE_BLOCKS * BLOCK_BYTES


def draw_files(draw: random.Random, count: int) -> list[DataFile]:
    """Files of up to four pieces, some of them empty."""
    sizes = [
        draw.choice([0, 1, draw.randrange(3 * BLOCK_BYTES), draw.randrange(4 * PIECE_BYTES)])
        for _ in range(count)
    ]
    return [
        DataFile(f"{i:03d}", FileKey(f"s3://b/{draw.random()}", "e", size))
        for i, size in enumerate(sizes)
    ]


def make(files: list[DataFile]) -> Share:
    return make_share(make_manifest(files))


def pages_by_file(share: Share) -> list[tuple[list[int], list[int]]]:
    found = [share.pages_of(i) for i in range(len(share))]
    return [(pages.blocks.tolist(), pages.masks.tolist()) for pages in found]


@pytest.mark.parametrize("seed", range(5))
def test_a_share_has_the_pages_of_its_files(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes_module, "_PIECES_AT_A_TIME", 5)
    draw = random.Random(seed)
    files = draw_files(draw, 30)
    share = make(files)
    every = [pages_of_file(file.key.size) for file in files]
    assert pages_by_file(share) == [(each.blocks.tolist(), each.masks.tolist()) for each in every]
    assert share.list_digests(3, 7) == [file.key.digest for file in files[3:7]]
    homes = Homes(("a", "b", "c"))
    part = share.select(homes.find_own("b", share.row_ids, share.pieces, 2))
    expected = list[Pages]()
    for file, (blocks, masks) in zip(files, every, strict=True):
        is_own = (homes.order_blocks(file.key.digest, blocks, 2) == 1).any(axis=1)
        expected.append(Pages(blocks[is_own], masks[is_own]))
    assert pages_by_file(part) == [(each.blocks.tolist(), each.masks.tolist()) for each in expected]
    counts = [count_pages(pages) for pages in expected]
    assert part.num_pages.tolist() == counts
    assert part.num_bytes == sum(counts) * PAGE_BYTES == part.find_sizes().num_bytes


@pytest.mark.parametrize("seed", range(5))
def test_what_is_kept_is_found_by_digest(seed: int) -> None:
    """Pinned before wanted, where two shares have a file."""
    draw = random.Random(seed)
    files = draw_files(draw, 40)
    shares = list[tuple[Share, int]]()
    expected: dict[str, list[int]] = {}
    for level in (WANTED, PINNED, WANTED):
        some = sorted(draw.sample(files, 20))
        share = make(some)
        share = share.select(np.array(draw.choices([True, False], k=len(share.file_index)), bool))
        shares.append((share, level))
        for i, file in enumerate(some):
            num_blocks = -(-file.key.size // BLOCK_BYTES)
            levels = expected.setdefault(file.key.digest, [-NEVER] * num_blocks)
            for block in share.pages_of(i).blocks.tolist():
                levels[block] = max(levels[block], level)
    kept = Kept(shares)
    for file in files:
        found = kept.get(file.key.digest)
        assert (None if found is None else found.tolist()) == expected.get(file.key.digest)
        assert (file.key.digest in kept) == (file.key.digest in expected)
    assert kept.get("0" * 32) is None


def test_a_share_of_terabytes_takes_little_memory() -> None:
    files = [DataFile(f"{i}", FileKey(f"s3://b/{i}", "e", 10**11 + i)) for i in range(40)]
    manifest = make_manifest(files)
    tracemalloc.start()
    share = make_share(manifest)
    own = share.select(Homes(("a", "b", "c")).find_own("b", share.row_ids, share.pieces, 2))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert share.num_bytes == sum(-(-file.key.size // PAGE_BYTES) * PAGE_BYTES for file in files)
    assert own.num_bytes == pytest.approx(share.num_bytes * 2 / 3, rel=0.01)
    assert most < 64 << 20


def test_nothing() -> None:
    assert len(NO_SHARE) == NO_SHARE.num_bytes == NO_SHARE.find_sizes().num_bytes == 0
    assert "0" * 32 not in Kept([(NO_SHARE, WANTED)])
