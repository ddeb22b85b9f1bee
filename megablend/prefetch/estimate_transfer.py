"""Estimate the requests, the bytes and the price of reading a run from object stores, by planning
the reads of the run's loaders.

The estimates do not include reads of extra columns, which are made while blocks are decoded, and
reads that are repeated after a failure or a restart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from megablend.arrays import Float64s, Int64s
from megablend.errors import DataError
from megablend.index.blocks.block_store import BlockStore
from megablend.index.tables.source_entry import ColumnEntry
from megablend.prefetch.memory_need import Loaders, plan_loaders
from megablend.prefetch.plan_process import PlannedRead
from megablend.prefetch.plan_stretches import Stretch, plan_stretches
from megablend.prefetch.read_schedule import StepSequence
from megablend.prefetch.source_requests import SourceRequests
from megablend.run.run import Run
from megablend.storage.store_options import StoreOptions, find_options
from megablend.storage.transfer import RequestCount, Transfer, extrapolate, price_transfer

_OPENED_FILES = 256
"""Maximum number of files to open, of all sources together."""
_FEWEST_FILES = 4
"""Minimum number of files to open of each source, even if the total exceeds _OPENED_FILES."""
_OPENING_TOLERANCE = 0.1
"""Relative uncertainty of the number of opened files, where it is computed from probabilities."""
_TOLERANCE = 0.05
"""Relative uncertainty of figures that are not exact: requests may be sent twice, and files that
were not opened may differ from those that were."""


def estimate_transfer(run: Run, loaders: Loaders) -> Transfer | None:
    """Estimate the requests that a split's loaders send to object stores, from the first sample of
    the run to the last.

    Returns: None if no source is in an object store, or if a file cannot be opened.
    Raises: ConfigError if memory is too small.
    """
    if run.store.max_files == 1:
        return None
    sequence, num_batches = plan_loaders(run, loaders)
    if not sequence.begins:
        return None
    stretches, is_whole = plan_stretches(run, sequence, num_batches)
    try:
        return _count_transfer(run, stretches, sequence, is_whole=is_whole)
    except DataError:
        return None


def _count_transfer(
    run: Run, stretches: Sequence[Stretch], sequence: StepSequence, *, is_whole: bool
) -> Transfer:
    """Count a run's requests, given the planned reads of stretches.

    Args:
        is_whole: whether each stretch comprises all steps of a process.

    Raises: see BlockStore.begin_read.
    """
    num_processes = len(sequence.begins)
    snapshot = run.store.snapshot
    storage = run.store.storage
    files = np.unique([planned.read.file for stretch in stretches for planned in stretch.reads])
    file_columns = snapshot.files.columns[files]
    columns = np.unique(file_columns).tolist()
    num_planned = sum(stretch.samples for stretch in stretches)
    most_opened = max(_FEWEST_FILES, _OPENED_FILES // max(1, len(columns)))
    by_options = defaultdict[StoreOptions, _Figures](lambda: _Figures(stretches))
    is_exact = is_whole and len(stretches) == num_processes
    for column in columns:
        column_files = files[file_columns == column]
        path = snapshot.path(int(column_files[0]), run.store.roots)
        if storage.limits(path).max_files == 1:  # not in an object store
            continue
        opened = _spread(column_files, most_opened)
        is_exact &= len(opened) == len(column_files)
        reads = [
            [
                planned
                for planned in stretch.reads
                if snapshot.files.columns[planned.read.file] == column
            ]
            for stretch in stretches
        ]
        source = SourceRequests(_copy_unopened(run.store), {*opened.tolist()}, reads)
        figures = by_options[find_options(run.runtime.objects, path)]
        figures.of_stretches += [source.count(those) for those in reads]
        if is_whole:
            files_opened = [len({planned.read.file for planned in those}) for those in reads]
            figures.of_stretches += np.outer(files_opened, source.opening)
        else:
            bounds = _bound_opened_files(snapshot.columns[column], reads, num_planned, sequence)
            figures.of_opening += np.outer(bounds, source.opening)
    total = Transfer()
    for options, figures in by_options.items():
        least, most = figures.extrapolate(sequence, is_whole=is_whole)
        if not is_exact or (most > least).any():
            least = least * (1 - _TOLERANCE)
            most = most * (1 + _TOLERANCE)
        total += price_transfer(
            RequestCount(least[0], least[1]), RequestCount(most[0], most[2]), options
        )
    return total


class _Figures:
    """Figures (see `source_requests`) for the requests to all stores that have the same options."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._num_samples = np.array([stretch.samples for stretch in stretches])
        self.of_stretches = np.zeros((len(stretches), 3))
        """Figures of each stretch, [stretches, 3]. They include opening files only if the stretches
        are whole."""
        self.of_opening = np.zeros((2, 3))
        """The smallest and the largest figures for opening files, if the stretches are not
        whole."""

    def extrapolate(self, sequence: StepSequence, *, is_whole: bool) -> tuple[Float64s, Float64s]:
        """Return the lower and upper bounds of the figures of the whole run."""
        if is_whole:
            return extrapolate(self.of_stretches, len(sequence.begins))
        per_sample = self.of_stretches / self._num_samples[:, np.newaxis]
        least, most = extrapolate(per_sample, sequence.stop)
        least_opening, most_opening = self.of_opening
        return least + least_opening, most + most_opening


def _copy_unopened(store: BlockStore) -> BlockStore:
    """Return a new store of the same blocks, which has opened no files yet."""
    return type(store)(**store.__getstate__() | {"storage": store.storage.for_reading()})


def _spread(numbers: Int64s, count: int) -> Int64s:
    """Choose at most `count` of `numbers`, evenly spaced."""
    chosen = np.linspace(0, len(numbers) - 1, min(count, len(numbers)))
    return numbers[np.unique(chosen.astype(np.int64))]


def _bound_opened_files(
    column: ColumnEntry,
    reads: Sequence[Sequence[PlannedRead]],
    num_planned: int,
    sequence: StepSequence,
) -> tuple[float, float]:
    """Estimate a lower and an upper bound for the number of a source's files that all processes
    open.

    A process opens a file if it reads one of its blocks; all blocks are assumed to be read with the
    same probability.

    Args:
        reads: for each stretch, the reads of the source.
        num_planned: number of samples of all stretches.
    """
    num_processes = len(sequence.begins)
    samples_of_process = sequence.stop / num_processes
    num_blocks = len(column.blocks)
    num_files = len(column.files)
    planned_blocks = sum(len(planned.read.ids) for those in reads for planned in those)
    blocks_of_process = planned_blocks * (samples_of_process / num_planned)
    chance = min(1, blocks_of_process / num_blocks)
    expected = num_processes * num_files * (1 - (1 - chance) ** (num_blocks / num_files))
    most = min((1 + _OPENING_TOLERANCE) * expected, num_processes * num_files)
    return (1 - _OPENING_TOLERANCE) * expected, most
