"""What a loader will read, known before: windows hold what their steps need, within memory, and read nothing twice."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megablend
from megablend.prefetch.memory_budget import Budget, lanes_of
from megablend.prefetch.read_amplification import read_amplification
from megablend.prefetch.read_schedule import (
    ReadSchedule,
    StepSequence,
    locate_steps,
    schedule_reads,
)
from megablend.prefetch.windows import FIRST_SAMPLES, make_schedules, make_windows
from megablend.run.run import Run
from tests.runs import EOD, documents, make_config, write_source


def run_of(folder: Path, kinds: list[str], **settings: Any) -> Run:
    sources = [
        write_source(folder, d, kind, documents(d, 70, 40, seed=9)) for d, kind in enumerate(kinds)
    ]
    for source, weight in zip(sources, (5, 3, 2), strict=False):
        source |= {"weight": weight, "append_eod": EOD}
    config = make_config(folder, sources, **({"samples": 480} | settings))
    megablend.build(config)
    return megablend.open(config).run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return run_of(tmp_path, ["parquet", "arrow", "megatron"])


@pytest.mark.parametrize("first", [0, 7, 97])
@pytest.mark.parametrize(("micro_batch", "stride"), [(1, 1), (4, 4), (3, 11)])
def test_a_sequence_is_the_steps_that_follow(first: int, micro_batch: int, stride: int) -> None:
    sequence = StepSequence(first=first, micro_batch_size=micro_batch, stride=stride, stop=100)
    expected = [list(range(k, min(k + micro_batch, 100))) for k in range(first, 100, stride)]
    for step, number in ((0, 5), (2, 100), (0, 200)):
        samples, offsets = sequence.samples(step, number)
        steps = [samples[a:b].tolist() for a, b in pairwise(offsets)]
        assert steps == expected[step : step + number]


@pytest.mark.parametrize("size", [10**12, 1 << 63, 10**30])
def test_a_step_beyond_the_run_is_what_the_run_has(size: int) -> None:
    sequence = StepSequence(first=0, micro_batch_size=size, stride=size, stop=100)
    samples, offsets = sequence.samples(0, 3)
    assert (samples.tolist(), offsets.tolist()) == (list(range(100)), [0, 100])
    samples, offsets = sequence.samples(64, 64)
    assert (samples.tolist(), offsets.tolist()) == ([], [0])


def test_a_long_sequence_costs_no_more_than_its_next_steps() -> None:
    tracemalloc.start()
    samples, _ = StepSequence(first=5, micro_batch_size=2, stride=8, stop=10**15).samples(10**9, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert samples.tolist() == [8 * 10**9 + k for k in (5, 6, 13, 14, 21, 22)]
    assert peak < 1 << 20


def test_a_schedule_is_what_its_samples_say(run: Run) -> None:
    rng = random.Random(1)
    samples, offsets = StepSequence(first=3, micro_batch_size=4, stride=9, stop=480).samples(0, 30)
    found = schedule_reads(run, locate_steps(run, samples, offsets))
    sources, ordinals = run.plan.locate_many(samples)
    assert found.sources.tolist() == sources.tolist()
    touched: dict[int, list[int]] = {}
    for i in rng.sample(range(len(samples)), 40):
        alone = run.locate_spans(sources[i : i + 1], ordinals[i : i + 1])
        mine = found.spans.rows == i
        for column, single in zip(found.spans[1:], alone[1:], strict=True):
            assert column[mine].tolist() == single.tolist()
    for step in range(30):
        low, high = found.span_offsets[step : step + 2]
        for block in found.ids[found.span_blocks[low:high]].tolist():
            touched.setdefault(block, []).append(step)
    assert found.ids.tolist() == sorted(touched)
    assert found.first_use.tolist() == [touched[block][0] for block in sorted(touched)]
    assert found.last_use.tolist() == [touched[block][-1] for block in sorted(touched)]
    assert found.used.sum() == len(samples) * run.sequence_length
    # Nobody has their first token as an extra one
    assert found.pending_boundary_tokens.sum() == -(ordinals == 0).sum()


def budget(blocks: int, **others: int) -> Budget:
    """So many bytes for blocks, and enough for all else."""
    plenty = dict.fromkeys(
        ("batches", "orders", "dictionaries", "planning", "cache", "reads"), 1 << 30
    )
    return Budget(blocks=blocks, **plenty | others)


def hold(
    run: Run, sequence: StepSequence, given: Budget, first_samples: int = FIRST_SAMPLES
) -> Counter[int]:
    """Walk through the windows as a reader would; how often each block is read."""
    held: dict[int, int] = {}
    reads = Counter[int]()
    steps = list[list[int]]()
    for window in make_windows(run, make_schedules(run, sequence, given, first_samples), given):
        now = window.schedule
        for block in window.forgets.tolist():
            del held[block]
        new = now.ids[window.reads].tolist()
        assert not set(new) & set(held)
        assert (np.diff(now.first_use[window.reads]) >= 0).all()
        reads.update(new)
        held |= zip(new, now.sizes[window.reads].tolist(), strict=True)
        assert set(now.ids.tolist()) <= set(held)
        assert sum(held.values()) <= window.max_bytes <= given.blocks
        for block in now.ids[~window.keeps].tolist():
            del held[block]
        steps += [now.samples[a:b].tolist() for a, b in pairwise(now.step_offsets)]
    samples, offsets = sequence.samples(0, sequence.stop)
    assert steps == [samples[a:b].tolist() for a, b in pairwise(offsets)]
    return reads


def blocks_used(run: Run, samples: Any) -> Counter[int]:
    """How many passes need each block."""
    spans = run.locate_spans(*run.plan.locate_many(samples))
    return Counter(
        block for _, block in {*zip(spans.epochs.tolist(), spans.blocks.tolist(), strict=True)}
    )


@pytest.mark.parametrize("samples", [1, 40, 1000])
def test_with_room_for_all_every_block_is_read_once_a_pass(
    run: Run, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megablend.prefetch.windows.WINDOW_SAMPLES", 4 * samples)
    sequence = StepSequence(first=0, micro_batch_size=4, stride=4, stop=480)
    reads = hold(run, sequence, budget(1 << 30), samples)
    used = blocks_used(run, np.arange(480))
    assert all(reads[block] <= passes for block, passes in used.items())
    assert set(reads) == set(used)


@pytest.mark.parametrize("max_bytes", [12_000, 25_000, 60_000])
def test_with_little_room_windows_are_shorter(run: Run, max_bytes: int) -> None:
    reads = hold(
        run, StepSequence(first=1, micro_batch_size=2, stride=5, stop=480), budget(max_bytes)
    )
    assert set(reads) == set(blocks_used(run, [k for k in range(1, 480) if (k - 1) % 5 < 2]))


def test_a_step_that_does_not_fit_is_refused(run: Run) -> None:
    found = make_schedules(
        run, StepSequence(first=0, micro_batch_size=8, stride=8, stop=480), budget(3000)
    )
    with pytest.raises(
        megablend.ConfigError,
        match=r"memory: found 512.0 MiB, expected .* or more \(blocks of a step of 8 samples: .* of .*/1\.arrow: ",
    ):
        next(found)


@pytest.mark.parametrize(
    ("micro_batch", "ranks", "workers"),
    [(4, 1, 0), (2, 2, 0), (1, 2, 2), (1, 1, 0), (4, 2, 0), (3, 1, 2)],
)
def test_amplification_counts_what_all_processes_read(
    run: Run, micro_batch: int, ranks: int, workers: int
) -> None:
    found = read_amplification(
        run,
        micro_batch_size=micro_batch,
        data_parallel_size=ranks,
        num_workers=workers,
        stop=480,
    )
    processes = ranks * max(1, workers)
    stored = run.store.snapshot.blocks
    read = Counter[int]()
    for process in range(processes):
        sequence = StepSequence(
            first=process * micro_batch,
            micro_batch_size=micro_batch,
            stride=processes * micro_batch,
            stop=480,
        )
        read += hold(run, sequence, budget(384 << 20))
    used = blocks_used(run, np.arange(480))
    total = [
        sum(n * int(stored([b])["stored_bytes"][0]) for b, n in counts.items())
        for counts in (read, used)
    ]
    assert found == pytest.approx(total[0] / total[1])


def test_lanes_that_match_are_read_once(tmp_path: Path) -> None:
    run = run_of(tmp_path, ["arrow"], shuffle_window=20, sequence_length=4)
    alone = read_amplification(
        run, micro_batch_size=4, data_parallel_size=1, num_workers=0, stop=480
    )
    ranks = read_amplification(
        run, micro_batch_size=1, data_parallel_size=2, num_workers=2, stop=480
    )
    others = read_amplification(
        run, micro_batch_size=1, data_parallel_size=3, num_workers=0, stop=480
    )
    assert alone <= 1
    assert alone <= ranks < others


@pytest.mark.parametrize("lanes", [1, 4, 6, 12])
@pytest.mark.parametrize("micro_batch", [1, 2, 3])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_lanes_of_a_process_are_counted(lanes: int, micro_batch: int, processes: int) -> None:
    stride = micro_batch * processes
    touched = {
        k % lanes
        for start in range(0, stride * lanes, stride)
        for k in range(start, start + micro_batch)
    }
    assert lanes_of(lanes, micro_batch, stride) == len(touched)


def test_the_blocks_of_a_schedule_are_typed(run: Run) -> None:
    given = StepSequence(first=0, micro_batch_size=1, stride=1, stop=480).samples(0, 3)
    found: ReadSchedule = schedule_reads(run, locate_steps(run, *given))
    decoded = run.store.read(found.ids)
    assert all(
        size >= block.tokens.nbytes
        for size, block in zip(found.sizes.tolist(), decoded, strict=True)
    )


def test_a_compressed_dictionary_is_counted_once_where_it_is_read(tmp_path: Path) -> None:
    values = (
        np.random.default_rng(0)
        .permutation(np.tile(np.arange(100_000, dtype=np.int32), 2))
        .reshape(100, -1)
    )
    table = pa.table(
        {"ids": pa.FixedSizeListArray.from_arrays(values.ravel(), 2000).cast(pa.list_(pa.int32()))}
    )
    pq.write_table(
        table,
        tmp_path / "a.parquet",
        compression="zstd",
        data_page_size=1 << 14,
        write_batch_size=4,
    )
    source = {"name": "a", "path": str(tmp_path / "a.parquet"), "weight": 1}
    config = make_config(tmp_path, [source], samples=100)
    megablend.build(config)
    run = megablend.open(config).run
    found = schedule_reads(run, locate_steps(run, np.arange(100), np.arange(101)))
    alone = run.store.memory_bytes(found.ids, found.rows, documents=False)[1]
    stored = int(run.store.dictionaries(found.ids)[1].max())
    assert stored < 4 * 100_000 < found.reading.sum() - alone.sum() - stored <= 3 * 4 * 100_000
