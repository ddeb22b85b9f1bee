"""Pages of many chunks at once: sums, joining what was found in several ways, ranges read together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.arrays import running_totals
from megablend.formats.parquet.decoding.headers import NO_DICTIONARY
from megablend.formats.parquet.indexing.chunk_pages import ChunkPages, join_parts, without_empty
from megablend.formats.parquet.indexing.count import PAGE_DTYPE
from megablend.formats.parquet.metadata.checks import (
    chunk_of,
    refuse,
    refuse_pages,
    sum_by_chunk,
)
from megablend.formats.parquet.metadata.thrift import MalformedError
from tests.examples import examples

SETTINGS = examples(100)
COUNTS = st.lists(st.integers(0, 4), min_size=1, max_size=9)

GAP_BYTES = 1000


@SETTINGS
@given(COUNTS)
def test_sums_and_blame_by_chunk(counts: list[int]) -> None:
    first_page = running_totals(np.array(counts))
    owners = [chunk for chunk, count in enumerate(counts) for _ in range(count)]
    values = np.arange(10, 10 + len(owners))
    assert sum_by_chunk(values, first_page).tolist() == [
        sum(int(value) for value, owner in zip(values, owners, strict=True) if owner == chunk)
        for chunk in range(len(counts))
    ]
    assert [chunk_of(page, first_page) for page in range(len(owners))] == owners
    for page, owner in enumerate(owners):
        wrong = np.arange(len(owners)) >= page
        with pytest.raises(MalformedError, match=f"^page {page}$") as caught:
            refuse_pages(wrong, first_page, lambda i: f"page {i}")
        assert caught.value.item == owner
    with pytest.raises(MalformedError, match=f"^chunk {len(counts) - 1}$") as caught:
        refuse(np.arange(len(counts)) == len(counts) - 1, lambda i: f"chunk {i}")
    assert caught.value.item == len(counts) - 1


def found(chunks: list[int], counts: list[int], scanned_bytes: int) -> ChunkPages:
    """A page knows its chunk and its number there; every third one is empty."""
    first_page = running_totals(np.array([counts[chunk] for chunk in chunks], np.int64))
    pages = np.zeros(first_page[-1], PAGE_DTYPE)
    pages["offset"] = [chunk * 10 + i for chunk in chunks for i in range(counts[chunk])]
    pages["tokens"] = pages["offset"] % 3
    dictionaries = np.array([[chunk, chunk + 1] for chunk in chunks]).reshape(-1, 2)
    return ChunkPages(first_page, pages, dictionaries, scanned_bytes)


@SETTINGS
@given(COUNTS, st.lists(st.integers(0, 3), min_size=9, max_size=9))
def test_parts_are_joined_in_the_order_of_chunks(counts: list[int], ways: list[int]) -> None:
    """Way 0 is none: such chunks have no pages."""
    of_ways = [[chunk for chunk in range(len(counts)) if ways[chunk] == way] for way in range(4)]
    parts = [
        (np.array(chunks, np.int64), found(chunks, counts, way))
        for way, chunks in enumerate(of_ways)
        if way
    ]
    whole = join_parts(len(counts), parts)
    expected = [
        [chunk * 10 + i for i in range(counts[chunk] if ways[chunk] else 0)]
        for chunk in range(len(counts))
    ]
    assert whole.pages["offset"].tolist() == [offset for offsets in expected for offset in offsets]
    assert whole.first_page.tolist() == np.cumsum([0, *map(len, expected)]).tolist()
    assert whole.dictionaries.tolist() == [
        [chunk, chunk + 1] if ways[chunk] else list(NO_DICTIONARY) for chunk in range(len(counts))
    ]
    assert whole.scanned_bytes == 6
    kept = without_empty(whole)
    left = [[offset for offset in offsets if offset % 3] for offsets in expected]
    assert kept.pages["offset"].tolist() == [offset for offsets in left for offset in offsets]
    assert kept.first_page.tolist() == np.cumsum([0, *map(len, left)]).tolist()
