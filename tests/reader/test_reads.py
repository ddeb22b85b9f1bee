"""What loaders really read, byte by byte: as little as page order promises, and as much as `describe` predicted."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megablend
from megablend.formats.fetch import FileRead
from megablend.storage.base import Allocate, Bytes, Int64s, ReadLimits
from megablend.storage.ranges import FileRanges
from megablend.storage.wrapper import WrapperStorage
from tests.runs import make_config
from tests.storages import STORAGE

PAGE_TOKENS = 256
LENGTH = 64
"""As pages of 64 KB of int32 are to samples of 4k tokens."""


class LoggingStorage(WrapperStorage):
    """Local files; what is read of them, by which process, is written to a log. Footers, once an opening, are not."""

    def __init__(self, log: Path) -> None:
        super().__init__(STORAGE)
        self.log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def limits(self, path: str) -> ReadLimits:
        return replace(super().limits(path), max_gap_bytes=32)  # as 2 KB are to pages of 64 KB

    def read(self, path: str, offset: int, size: int) -> bytes:
        if offset + size < self.stat(path).size:
            self._note(path, offset, size)
        return super().read(path, offset, size)

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
            self._note(path, offset, size)
        return super().read_ranges(path, offsets, sizes, allocate)

    def _note(self, path: str, offset: int, size: int) -> None:
        os.write(self.log, f"{os.getpid()} {path} {offset} {size}\n".encode())


def run_of(folder: Path, num_sources: int, num_tokens: int, **settings: Any) -> dict[str, Any]:
    """A config over Parquet files of pages of PAGE_TOKENS tokens, built."""
    sources = []
    for number in range(num_sources):
        tokens = np.random.default_rng(number).integers(
            0, 50_000, num_tokens // num_sources, dtype=np.int32
        )
        offsets = np.arange(0, len(tokens) + 1, 32, dtype=np.int32)
        table = pa.table({"ids": pa.ListArray.from_arrays(offsets, tokens[: offsets[-1]])})
        options: dict[str, Any] = {
            "use_dictionary": False,
            "compression": "none",
            "write_page_index": True,
        }
        pq.write_table(
            table,
            folder / f"{number}.parquet",
            data_page_size=4 * PAGE_TOKENS,
            write_batch_size=8,
            **options,
        )
        sources.append(
            {"name": str(number), "path": str(folder / f"{number}.parquet"), "weight": 1}
        )
    config = make_config(
        folder, sources, sequence_length=LENGTH, **({"shuffle_window": 512} | settings)
    )
    megablend.build(config)
    return config


def read_all(config: dict[str, Any], log: Path, ranks: int, **options: Any) -> Reads:
    """Every rank's reads over a whole run."""
    storage = LoggingStorage(log)
    for rank in range(ranks):
        dataset = megablend.open(config, storage=storage)
        loader = megablend.Loader(
            dataset, data_parallel_rank=rank, data_parallel_size=ranks, drop_last=False, **options
        )
        assert sum(len(batch["tokens"]) for batch in loader) >= len(dataset) // ranks
    os.close(storage.log)
    found = []
    for line in log.read_text(encoding="utf-8").splitlines():
        process, path, offset, size = line.split(" ")
        found.append((int(process), path, int(offset), int(size)))
    return found


Reads = list[tuple[int, str, int, int]]
"""(process, path, offset, bytes)"""


def bytes_used(config: dict[str, Any]) -> int:
    """Of the blocks that a run needs, once an epoch each."""
    run = megablend.open(config).run
    spans = run.locate_spans(*run.plan.locate_many(np.arange(run.num_samples)))
    pairs = np.unique(np.stack([spans.epochs, spans.blocks]), axis=1)
    return int(run.store.snapshot.blocks(pairs[1])["stored_bytes"].sum(dtype=np.int64))


@pytest.mark.parametrize(
    ("num_sources", "micro_batch", "ranks", "bound"),
    [
        (1, 4, 1, 1.05),
        (10, 4, 1, 1.05),
        (100, 4, 1, 1.15),
        (10, 1, 4, 1.05),
        (100, 1, 4, 1.15),
        (10, 2, 3, 9),
    ],
)
def test_what_is_read_is_within_the_bounds_and_as_told(
    tmp_path: Path, num_sources: int, micro_batch: int, ranks: int, bound: float
) -> None:
    samples = 4 * 512 * (8 if num_sources == 100 else 4)
    config = run_of(tmp_path, num_sources, samples * LENGTH, samples=samples)
    predicted = megablend.describe(
        config, micro_batch_size=micro_batch, data_parallel_size=ranks
    ).to_dict()["read_amplification"]
    reads = read_all(config, tmp_path / "log", ranks, micro_batch_size=micro_batch)
    measured = sum(size for _, _, _, size in reads) / bytes_used(config)
    assert measured <= bound
    assert measured == pytest.approx(predicted, rel=0.05)


def run_with_dictionaries(folder: Path, **settings: Any) -> tuple[dict[str, Any], list[Any]]:
    """A config over a Parquet file of 16 row groups, built; the metadata of their column chunks, each with a dictionary."""
    path = folder / "0.parquet"
    samples = 4 * 512
    tokens = (
        np.random.default_rng(0).integers(0, 2000, samples * LENGTH, dtype=np.int32).reshape(-1, 32)
    )
    table = pa.table({"ids": pa.array(tokens.tolist(), pa.list_(pa.int32()))})
    pq.write_table(
        table, path, data_page_size=512, write_batch_size=8, row_group_size=256, compression="none"
    )
    source = {"name": "0", "path": str(path)}
    config = make_config(
        folder, [source], sequence_length=LENGTH, shuffle_window=16, samples=samples, **settings
    )
    megablend.build(config)
    return config, [pq.ParquetFile(path).metadata.row_group(i).column(0) for i in range(16)]


def test_no_dictionary_is_read_twice_whenever_threads_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that has found a dictionary missing may be held up until another one has fetched and decoded it."""
    find = FileRead.next_ranges

    def find_slowly(read: FileRead) -> Sequence[FileRanges]:
        ranges = find(read)
        time.sleep(0.002)
        return ranges

    config, groups = run_with_dictionaries(tmp_path)
    monkeypatch.setattr(FileRead, "next_ranges", find_slowly)
    times = Counter(
        offset for _, _, offset, _ in read_all(config, tmp_path / "log", 1, micro_batch_size=4)
    )
    assert [times[group.dictionary_page_offset] for group in groups] == [1] * 16


# of older versions of pyarrow, pages are larger, and the dictionaries' sizes include their headers
@pytest.mark.parametrize(("memory", "least", "most"), [("512MiB", 0.999, 1.3), (1_200_000, 2, 100)])
def test_dictionaries_that_are_read_again_are_told(
    tmp_path: Path, memory: object, least: float, most: float
) -> None:
    """Of small row groups each has one; where they are not all kept, a page costs more for its dictionary than for itself."""
    config, groups = run_with_dictionaries(tmp_path, memory=memory)
    dictionaries = sum(group.data_page_offset - group.dictionary_page_offset for group in groups)
    predicted = megablend.describe(config, micro_batch_size=4).to_dict()["read_amplification"]
    reads = read_all(config, tmp_path / "log", 1, micro_batch_size=4)
    measured = sum(size for _, _, _, size in reads) / (bytes_used(config) + dictionaries)
    assert least <= measured <= most
    assert measured <= predicted * 1.05
    # With little memory, reads that are in flight together share a dictionary that is not kept
    if memory == "512MiB":
        assert measured >= predicted * 0.95


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_with_lanes_of_their_own_read_no_page_twice(tmp_path: Path) -> None:
    """But those in which the runs of two lanes meet."""
    window = 128
    samples = 16 * window * 2
    epoch = samples * LENGTH * 17 // 16  # not all of it is read
    config = run_of(tmp_path, 10, epoch, samples=samples, lanes=16, shuffle_window=window)
    predicted = megablend.describe(
        config, micro_batch_size=4, data_parallel_size=2, num_workers=2
    ).to_dict()["read_amplification"]
    log = tmp_path / "log"
    reads = read_all(
        config, log, 2, micro_batch_size=4, num_workers=2, multiprocessing_context="fork"
    )
    index = megablend.open(config).run.store.snapshot
    files = {index.path(number): index.files.entry(number) for number in range(index.num_files)}
    blocks_of = {
        path: np.arange(file.first_block, file.first_block + file.num_blocks)
        for path, file in files.items()
    }
    places_of = {path: index.blocks(blocks)["offset"] for path, blocks in blocks_of.items()}
    pages = Counter[tuple[int, int]]()
    shared = Counter[int]()
    for process, path, offset, size in reads:
        blocks = blocks_of[path]
        places = places_of[path]
        inside = blocks[(places >= offset) & (places < offset + size)].tolist()
        pages.update((process, block) for block in inside)
        shared.update(inside)
    assert len({process for process, _ in pages}) == 4
    assert set(pages.values()) == {1}
    assert len(shared) >= samples * LENGTH // PAGE_TOKENS
    # As many as there are runs: lanes x sources
    assert sum(times - 1 for times in shared.values()) <= 16 * 10
    measured = sum(size for _, _, _, size in reads) / bytes_used(config)
    assert measured == pytest.approx(predicted, rel=0.05)
