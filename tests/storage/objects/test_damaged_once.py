"""Bytes that a network or a proxy damages on their way: read once more, and an error where they stay so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megablend
from megablend.errors import CorruptFileError
from tests.runs import make_config
from tests.storage.faulty import FaultySource

pytestmark = [pytest.mark.usefixtures("obstore"), pytest.mark.long]
KEY = "d/a.parquet"
Make = Callable[..., dict[str, Any]]


@pytest.fixture
def source() -> Iterator[FaultySource]:
    with FaultySource({}) as source:
        yield source


@pytest.fixture
def make(tmp_path: Path, source: FaultySource) -> Make:
    """A function that writes one file of checked pages, and returns the config of a run over it."""

    def make(*, index: bool, **settings: Any) -> dict[str, Any]:
        rows = [[(i * 7 + k) % 997 for k in range(40)] for i in range(600)]
        table = pa.table({"tokens": pa.array(rows, pa.list_(pa.int32()))})
        path = tmp_path / "a.parquet"
        pq.write_table(
            table,
            path,
            row_group_size=300,
            use_dictionary=False,
            data_page_size=2048,
            write_batch_size=16,
            compression="NONE",
            write_page_checksum=True,
            write_page_index=index,
        )
        source.files = {KEY: path.read_bytes()}
        listed = [{"name": "a", "path": f"{source.url}/{KEY}", "column": "tokens", "weight": 1}]
        return make_config(tmp_path, listed, sequence_length=64, samples=370, **settings)

    return make


def read(dataset: megablend.Dataset) -> list[list[int]]:
    """All samples."""
    return [dataset[k]["tokens"].tolist() for k in range(len(dataset))]


def test_a_page_that_is_damaged_once_is_read_once_more(
    make: Make, source: FaultySource, caplog: pytest.LogCaptureFixture
) -> None:
    config = make(index=True)
    megablend.build(config)
    expected = read(megablend.open(config))
    size = len(source.files[KEY])
    num_read_again = 0
    for place in range(100, size * 9 // 10, size // 17):
        caplog.clear()
        dataset = megablend.open(config)
        # The file's end is read when it is opened
        assert dataset[0]["tokens"].tolist() == expected[0]
        source.damages = {KEY: place}
        with caplog.at_level(logging.WARNING, "megablend"):
            assert read(dataset) == expected
        read_again = sum("reading the bytes again" in each.getMessage() for each in caplog.records)
        assert read_again <= (not source.damages)  # statistics in headers are not read
        num_read_again += read_again
    assert num_read_again >= 10


def test_a_loader_reads_ahead_through_damage(make: Make, source: FaultySource) -> None:
    config = make(index=True)
    megablend.build(config)
    expected = read(megablend.open(config))
    loader = megablend.Loader(megablend.open(config), micro_batch_size=10)
    source.damages = {KEY: 28_300}
    found = [row for batch in loader for row in batch["tokens"].tolist()]
    assert (found, source.damages) == (expected, {})


def test_a_page_header_that_is_damaged_once(
    make: Make, source: FaultySource, caplog: pytest.LogCaptureFixture
) -> None:
    config = make(index=False)
    megablend.build(config)
    expected = read(megablend.open(config))
    for place in range(4, 24):
        dataset = megablend.open(config)
        source.damages = {KEY: place}
        with caplog.at_level(logging.WARNING, "megablend"):
            assert read(dataset) == expected
        assert not source.damages
    assert sum("reading the bytes again" in each.getMessage() for each in caplog.records) >= 10


def test_damage_that_stays_is_an_error(make: Make, source: FaultySource) -> None:
    config = make(index=True)
    megablend.build(config)
    dataset = megablend.open(config)

    class Staying(dict[str, int]):
        def pop(self, key: str, *_: Any) -> int:
            return self[key]

    source.damages = Staying({KEY: 28_300})
    with pytest.raises(CorruptFileError, match="checksum"):
        read(dataset)


@pytest.mark.parametrize("from_end", [3, 6])
def test_a_file_whose_end_is_damaged_while_it_is_indexed_is_read_once_more(
    make: Make, source: FaultySource, tmp_path: Path, from_end: int
) -> None:
    digest = megablend.build(make(index=True)).index.digest
    config = make(index=True, cache=str(tmp_path / "second"))
    source.damages = {KEY: len(source.files[KEY]) - from_end}
    built = megablend.build(config)
    assert (built.index.digest, source.damages) == (digest, {})
