"""The transfer that reading a run takes: requests, bytes and their price, found by planning the
reads of its loaders.

What is read while blocks are decoded (extra columns), and again after a failure or a restart, is
not included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from megablend.arrays import Float64s, Int64s
from megablend.errors import DataError
from megablend.index.tables.source_entry import ColumnEntry
from megablend.prefetch.memory_budget import batches_of
from megablend.prefetch.memory_need import check_memory
from megablend.prefetch.plan_stretches import PlannedRead, Stretch, plan_stretches
from megablend.prefetch.read_schedule import StepSequence
from megablend.prefetch.source_requests import SourceRequests
from megablend.run.run import Run
from megablend.run.skips import Skips
from megablend.storage.object_options import StoreOptions
from megablend.storage.transfer import RequestCount, Transfer, extrapolate, price_transfer

_OPENED_FILES = 256
"""Files to open, of all sources together."""
_FEWEST_FILES = 4
"""Files to open of each source, even if these are more in all."""
_OPENING_TOLERANCE = 0.1
"""Uncertainty of how many files are opened, where that is computed from chances."""
_TOLERANCE = 0.05
"""Uncertainty of figures that are not exact: requests may be sent a second time, and files that
were not opened may differ from those that were."""


def estimate_transfer(
    run: Run, *, micro_batch_size: int, data_parallel_size: int, num_workers: int
) -> Transfer | None:
    """Find what the loaders of a split request from object stores, from the run's first sample to
    its last.

    Returns: None if no source is in an object store, or a file cannot be opened.
    Raises: ConfigError if memory is too small.
    """
    future = StepSequence.of_loaders(
        run,
        micro_batch_size=micro_batch_size,
        data_parallel_size=data_parallel_size,
        num_workers=num_workers,
    )
    if run.store.max_files == 1 or not future.begins:
        return None
    num_batches = batches_of(num_workers)
    check_memory(
        run,
        Skips(),
        micro_batch_size=micro_batch_size,
        stride=future.stride,
        num_batches=num_batches,
    )
    stretches, is_whole = plan_stretches(run, future, num_batches)
    try:
        return _count_transfer(run, stretches, future, is_whole=is_whole)
    except DataError:
        return None


def _count_transfer(
    run: Run, stretches: Sequence[Stretch], future: StepSequence, *, is_whole: bool
) -> Transfer:
    """Count what the run requests, from the reads of stretches.

    Args:
        is_whole: whether each stretch is all steps of a process.

    Raises: see BlockStore.begin_read.
    """
    num_processes = len(future.begins)
    num_samples = future.stop
    snapshot = run.store.snapshot
    storage = run.store.storage
    # A store of its own for each source, which knows nothing of the files yet
    store_state = run.store.__getstate__() | {"storage": storage.for_reading()}
    files = np.unique([each.read.file for stretch in stretches for each in stretch.reads])
    file_columns = snapshot.files.columns[files]
    columns = np.unique(file_columns).tolist()
    num_opened = max(_FEWEST_FILES, _OPENED_FILES // max(1, len(columns)))
    # Figures (see `source_requests`) of each stretch: [stretches, 3]
    figures = defaultdict[StoreOptions, Float64s](lambda: np.zeros((len(stretches), 3)))
    # Figures of opening files, at least and at most: [2, 3]; for stretches that are not whole
    opening = defaultdict[StoreOptions, Float64s](lambda: np.zeros((2, 3)))
    is_exact = is_whole and len(stretches) == num_processes
    for column in columns:
        column_files = files[file_columns == column]
        path = snapshot.path(int(column_files[0]), run.store.roots)
        if storage.limits(path).max_files == 1:  # not in an object store
            continue
        opened = _spread(column_files, num_opened)
        is_exact &= len(opened) == len(column_files)
        reads = [
            [each for each in stretch.reads if snapshot.files.columns[each.read.file] == column]
            for stretch in stretches
        ]
        source = SourceRequests(type(run.store)(**store_state), {*opened.tolist()}, reads)
        options = run.runtime.objects.find(path)
        figures[options] += [source.count(those) for those in reads]
        if is_whole:
            files_opened = [len({each.read.file for each in those}) for those in reads]
            figures[options] += np.outer(files_opened, source.opening)
        else:
            planned_samples = sum(stretch.samples for stretch in stretches)
            samples_of_process = num_samples / num_processes
            bounds = _bound_opened_files(
                snapshot.columns[column], reads, samples_of_process / planned_samples, num_processes
            )
            opening[options] += np.outer(bounds, source.opening)
    total = Transfer()
    for options, of_stretches in figures.items():
        if is_whole:
            least, most = extrapolate(of_stretches, num_processes)
        else:
            per_sample = of_stretches / [[stretch.samples] for stretch in stretches]
            least, most = extrapolate(per_sample, num_samples)
        opening_least, opening_most = opening[options]
        least = least + opening_least
        most = most + opening_most
        if not is_exact or (most > least).any():
            least = least * (1 - _TOLERANCE)
            most = most * (1 + _TOLERANCE)
        total += price_transfer(
            RequestCount(least[0], least[1]), RequestCount(most[0], most[2]), options
        )
    return total


def _spread(numbers: Int64s, count: int) -> Int64s:
    """Choose at most `count` evenly spaced ones of some numbers."""
    chosen = np.linspace(0, len(numbers) - 1, min(count, len(numbers)))
    return numbers[np.unique(chosen.astype(np.int64))]


def _bound_opened_files(
    column: ColumnEntry, reads: Sequence[Sequence[PlannedRead]], scale: float, num_processes: int
) -> tuple[float, float]:
    """Estimate the least and the greatest number of a source's files that all processes open.

    A process opens a file if it reads one of the file's blocks, each of which it reads with the
    same chance.

    Args:
        reads: reads of the source, of each stretch.
        scale: samples of a process, divided by those of all stretches.
    """
    num_blocks = len(column.blocks)
    num_files = len(column.files)
    planned_blocks = sum(len(each.read.ids) for those in reads for each in those)
    chance = min(1, planned_blocks * scale / num_blocks)
    expected = num_processes * num_files * (1 - (1 - chance) ** (num_blocks / num_files))
    most = min((1 + _OPENING_TOLERANCE) * expected, num_processes * num_files)
    return (1 - _OPENING_TOLERANCE) * expected, most
