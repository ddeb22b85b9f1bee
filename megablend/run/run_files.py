"""List the files that a run reads. Each has the sample up to which it is needed, since a later
snapshot may lack the file."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megablend.arrays import Int64s
from megablend.index.read.joined_snapshot import JoinedSnapshot
from megablend.index.verify.check_files import files_of
from megablend.run.run import Run

_BATCH = 1 << 16
"""Number of samples of a drain that are located by one call."""


class RunFile(NamedTuple):
    """A file that a run reads."""

    number: int
    """Number of the file in the run's index, which may join several snapshots."""
    stop: int | None = None
    """The sample from which the file is no longer read; None if it is needed to the run's end."""

    def is_needed(self, position: int) -> bool:
        """Return whether samples from `position` on may read the file."""
        return self.stop is None or position < self.stop


def list_files(run: Run) -> list[RunFile]:
    """Return the files of a split's sources: first the files of its last snapshot and then, for
    train, the files that only earlier snapshots have."""
    snapshot = run.store.snapshot
    names = run.data.index_names
    if not isinstance(snapshot, JoinedSnapshot):
        return [RunFile(number) for number in files_of(snapshot, names)]
    last = len(snapshot.snapshots) - 1
    if run.split != "train":  # valid and test read one snapshot
        number = snapshot.snapshots.index(run.data.snapshots[0].snapshot)
        return [RunFile(file) for file in snapshot.files_of(number, names)]
    gone = snapshot.list_gone(names)
    listed = [RunFile(number) for number in snapshot.files_of(last, names)]
    for number, (start, stop) in enumerate(_find_stops(run)):
        files = [file for file in gone if file.snapshot == number]
        ends = _find_ends(run, {file.source for file in files}, start, stop)
        listed += [RunFile(file.numbers[0], int(ends[file.numbers].max())) for file in files]
    return listed


def _find_stops(run: Run) -> list[tuple[int, int]]:
    """Return two samples for each snapshot of a run except the last: the first sample of the stage
    that reads the next snapshot, and the first sample of that stage after its drain, from which on
    only files of the next snapshot are read. If `list_late` lists the stage, both are the run's
    end."""
    late = {stage for _, stage in list_late(run)}
    return [
        (run.num_samples, run.num_samples) if stage in late else (run.ledger.starts[stage], first)
        for stage, first in _list_changes(run).items()
    ]


def _find_ends(run: Run, names: set[str], start: int, stop: int) -> Int64s:
    """Find the last sample of a drain, [start, stop), that reads each file of a run's index. Return
    the number of the sample after it, int64 [num_files]; `start` for a file that no sample reads.

    Args:
        names: index names of sources; only files of these are looked for.
    """
    ends = np.full(run.store.snapshot.num_files, start)
    numbers = [i for i, name in enumerate(run.data.index_names) if name in names]
    for first in range(start, stop if numbers else start, _BATCH):
        samples = np.arange(first, min(first + _BATCH, stop))
        sources, ordinals = run.plan.locate_many(samples)
        rows = np.flatnonzero(np.isin(sources, numbers))
        spans = run.locate_spans(sources[rows], ordinals[rows])
        files = run.store.snapshot.file_of(spans.blocks)
        np.maximum.at(ends, files, samples[rows[spans.rows]] + 1)
    return ends


def list_late(run: Run) -> list[tuple[int, int]]:
    """Return pairs (source, stage) of numbers. In each pair, the source still reads files that the
    stage's snapshot lacks, even after a drain. Only runs that were planned by releases without
    `Stage.whole_epochs` have such pairs."""
    pairs = list[tuple[int, int]]()
    indices = [stage.index for stage in run.ledger.stages]
    for stage, first in _list_changes(run).items():
        read = run.plan.count_tokens(first)
        for source, blocks in enumerate(run.data.blocks):
            segments = run.plan.epochs.segments[source]
            ends = [*(after.position for after in segments[1:]), None]
            if any(
                (end is None or end > max(read[source], segment.position))
                and segment.snapshot in indices[:stage]
                and blocks.loses_files(segment, indices[stage])
                for segment, end in zip(segments, ends, strict=True)
            ):
                pairs.append((source, stage))
    return pairs


def _list_changes(run: Run) -> dict[int, int]:
    """Return the first sample after the drain of each stage that reads a different snapshot from
    the previous stage, by the stage's number."""
    firsts = dict[int, int]()
    for planned in run.plan.stages:
        firsts[planned.number] = firsts.get(planned.number, planned.start)
    indices = [stage.index for stage in run.ledger.stages]
    return {i: firsts[i] for i in range(1, len(indices)) if indices[i] != indices[i - 1]}
