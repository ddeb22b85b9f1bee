"""Chunks that are streamed: in the order in which they are stored, which need not be that of the footer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megablend.formats.parquet.metadata import source
from megablend.formats.parquet.metadata.thrift import Kind
from megablend.storage.prefetched import PrefetchedStorage
from tests.formats.parquet_files import REQUIRED, Fields, data_page
from tests.formats.thrift_writer import write_struct
from tests.formats.writers import index, opened, pieces
from tests.storages import STORAGE

STORED = [[[1, 2, 3]], [[4, 5], [6]], [[7], [8, 9], [10, 11, 12, 13]]]
"""The tokens of each page of three row groups, as they are stored."""


def write_groups(path: Path, listed: list[int]) -> Path:
    """A file whose footer lists its row groups in this order."""
    places = list[int]()
    data = b"PAR1"
    bodies = list[bytes]()
    for pages in STORED:
        places.append(len(data))
        bodies.append(
            b"".join(data_page(np.array(tokens, "<i4").tobytes(), len(tokens)) for tokens in pages)
        )
        data += bodies[-1]
    groups = list[bytes]()
    for group in listed:
        count = sum(map(len, STORED[group]))
        column: Fields = [
            (1, Kind.I32, 1),
            (2, Kind.LIST, (Kind.I32, [0])),
            (3, Kind.LIST, (Kind.BINARY, [b"ids"])),
            (4, Kind.I32, 0),
            (5, Kind.I64, count),
            (6, Kind.I64, len(bodies[group])),
            (7, Kind.I64, len(bodies[group])),
            (9, Kind.I64, places[group]),
        ]
        chunk = write_struct([(2, Kind.I64, 4), (3, Kind.STRUCT, write_struct(column))])
        fields: Fields = [
            (1, Kind.LIST, (Kind.STRUCT, [chunk])),
            (2, Kind.I64, len(bodies[group])),
            (3, Kind.I64, count),
        ]
        groups.append(write_struct(fields))
    footer = write_struct(
        [
            (1, Kind.I32, 1),
            (2, Kind.LIST, (Kind.STRUCT, list(REQUIRED))),
            (3, Kind.I64, sum(len(tokens) for pages in STORED for tokens in pages)),
            (4, Kind.LIST, (Kind.STRUCT, groups)),
        ]
    )
    path.write_bytes(data + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    return path


@pytest.mark.parametrize("portion_bytes", [1, source.PORTION_BYTES])
@pytest.mark.parametrize("listed", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_chunks_that_the_footer_lists_in_another_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: list[int], portion_bytes: int
) -> None:
    """They are counted and read as on a local disk, where nothing is streamed."""
    monkeypatch.setattr(source, "PORTION_BYTES", portion_bytes)
    path = write_groups(tmp_path / "x.parquet", listed)
    local = index(path, "ids")
    streamed = index(path, "ids", storage=PrefetchedStorage(STORAGE))
    assert streamed.blocks.tolist() == local.blocks.tolist()
    read = pieces(opened(path, "ids", streamed), streamed.blocks, streamed.chunks)
    tokens = [token for block in read for piece in block for token in piece]
    assert tokens == [token for group in listed for page in STORED[group] for token in page]
