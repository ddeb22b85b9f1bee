"""How a window's blocks are divided into reads: each once, by first use, bounded, of several files where reads do not wait."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import megablend
from megablend.prefetch.memory_budget import plan_budget
from megablend.prefetch.read_schedule import StepSequence
from megablend.prefetch.reads import (
    LEAST_READ_BYTES,
    READ_BYTES,
    READS_AHEAD,
    Read,
    split_reads,
)
from megablend.prefetch.windows import Window, plan_windows
from megablend.storage.base import ReadLimits
from megablend.storage.wrapper import WrapperStorage
from tests.reader.test_reads import run_of
from tests.storages import STORAGE


class Waiting(WrapperStorage):
    """Local files, said to be read by requests that wait."""

    def limits(self, path: str) -> ReadLimits:
        return ReadLimits(max_gap_bytes=0, max_merged_bytes=1 << 20, max_reads=8)


@pytest.mark.parametrize("num_sources", [1, 3, 20])
@pytest.mark.parametrize("waits", [False, True])
def test_each_block_is_in_one_read(tmp_path: Path, num_sources: int, waits: bool) -> None:
    config = run_of(tmp_path, num_sources, 1 << 18, samples=2048, lanes=8, shuffle_window=64)
    run = megablend.open(config, storage=Waiting(STORAGE) if waits else STORAGE).run
    budget = plan_budget(run, micro_batch_size=8)
    sequence = StepSequence(first=0, micro_batch_size=8, stride=8, stop=2048)
    seen_together = False
    for window in plan_windows(run, sequence, budget):
        reads = split_reads(run, window, budget)
        check_reads(window, reads)
        window_bytes = int(window.schedule.sizes[window.reads].sum())
        least = 0 if waits else LEAST_READ_BYTES
        most = min(READ_BYTES, max(least, window_bytes // READS_AHEAD))
        for read in reads:
            files = np.unique(run.store.snapshot.file_of(read.ids))
            assert read.file == files[0]
            assert read.size <= most or len(read.ids) == 1 or len(files) == 1
            seen_together |= len(files) > 1
        if not waits:
            assert len(reads) <= num_sources + max(READS_AHEAD, window_bytes // READ_BYTES) + 1
            assert len(reads) <= 1 or window_bytes >= LEAST_READ_BYTES
    assert seen_together == (num_sources > 1 and not waits)


def check_reads(window: Window, reads: list[Read]) -> None:
    """Every block to read is in one read, with its sizes; reads are in the order in which steps need them."""
    now = window.schedule
    indices = np.concatenate([read.indices for read in reads]) if reads else np.zeros(0, np.int64)
    assert sorted(indices.tolist()) == sorted(window.reads.tolist())
    assert [read.first_use for read in reads] == sorted(read.first_use for read in reads)
    for read in reads:
        assert (np.diff(read.ids) > 0).all()
        assert read.ids.tolist() == now.ids[read.indices].tolist()
        assert read.rows.tobytes() == now.rows[read.indices].tobytes()
        assert read.first_use == now.first_use[read.indices].min()
        assert read.size == now.sizes[read.indices].sum()
        assert read.reading == now.reading[read.indices].sum()
