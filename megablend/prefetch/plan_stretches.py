"""Plan the reads of a run's loaders: all reads, or those of a few *stretches* of a long run, from
which the rest is extrapolated. A stretch consists of consecutive steps of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megablend.prefetch.plan_process import PlannedRead, plan_process
from megablend.prefetch.read_schedule import StepSequence
from megablend.prefetch.windows import FIRST_SAMPLES, WINDOW_SAMPLES
from megablend.run.run import Run
from megablend.storage.transfer import extrapolate

_PLANNED_SAMPLES = 1 << 16
"""Approximate number of samples in the stretches that are planned first. Shorter runs are planned
completely."""
_FEWEST_STRETCHES = 4
"""Minimum number of stretches that are planned: fewer would not show how much stretches differ."""
_WIDEST = 1.3
"""If the upper estimate of the reads is more than _WIDEST times the lower estimate, twice as many
stretches are planned."""


class Stretch(NamedTuple):
    """A stretch whose reads are planned."""

    samples: int
    """Number of samples."""
    reads: Sequence[PlannedRead]


def plan_stretches(
    run: Run, sequence: StepSequence, num_batches: int
) -> tuple[list[Stretch], bool]:
    """Plan the reads of all processes or, if there are many samples, of a few processes or of parts
    of processes. If these differ much from each other, more are planned.

    Args:
        sequence: the steps of the first process, see `plan_loaders`.
        num_batches: see `plan_budget`.

    Returns: the stretches; and whether each stretch comprises all steps of a process.
    """
    begins = sequence.begins
    samples_of_process = sequence.stop // len(begins)
    # If a process has more than two of the longest windows, plan only stretches of it
    is_long = samples_of_process > 2 * WINDOW_SAMPLES
    most = sequence.stop // (2 * WINDOW_SAMPLES) if is_long else len(begins)
    num_stretches = max(_FEWEST_STRETCHES, _PLANNED_SAMPLES // samples_of_process)
    is_all = sequence.stop <= _PLANNED_SAMPLES or num_stretches >= most
    while not is_all:
        firsts = [begins[i * len(begins) // num_stretches] for i in range(num_stretches)]
        if is_long:
            last = samples_of_process - 2 * WINDOW_SAMPLES
            num_steps = last // (num_stretches - 1) // sequence.micro_batch_size
            firsts = [first + i * num_steps * sequence.stride for i, first in enumerate(firsts)]
        stretches = [
            _plan_stretch(run, sequence, first, num_batches, is_whole=not is_long)
            for first in firsts
        ]
        if not _are_different(stretches, sequence.stop if is_long else len(begins)):
            return stretches, not is_long
        num_stretches *= 2
        is_all = num_stretches >= most
    return [
        _plan_stretch(run, sequence, begin, num_batches, is_whole=True) for begin in begins
    ], True


def _are_different(stretches: Sequence[Stretch], num_all: int) -> bool:
    """Return whether the reads per sample differ too much between stretches to extrapolate."""
    # A stretch is empty if samples of another length begin before its second window
    if any(stretch.samples == 0 for stretch in stretches):
        return True
    reads_per_sample = [
        [
            len(stretch.reads) / stretch.samples,
            sum(planned.stored_bytes for planned in stretch.reads) / stretch.samples,
        ]
        for stretch in stretches
    ]
    least, most = extrapolate(np.array(reads_per_sample), num_all)
    return bool((most > _WIDEST * least).any())


def _plan_stretch(
    run: Run, sequence: StepSequence, first: int, num_batches: int, *, is_whole: bool
) -> Stretch:
    """Plan the reads of a stretch. If `is_whole`, it consists of all steps of the process that
    begins with sample `first`. Otherwise it consists of the second window from `first` on, and of
    further windows if they are short. The first window is skipped because no blocks are in memory
    when it begins, unlike in the middle of a run."""
    num_samples = 0
    reads = list[PlannedRead]()
    first_samples = FIRST_SAMPLES if is_whole else WINDOW_SAMPLES
    windows = plan_process(run, sequence, first, num_batches, first_samples)
    for number, (_, window, window_reads) in enumerate(windows):
        if is_whole or number > 0:
            num_samples += len(window.schedule.samples)
            reads += window_reads
        if not is_whole and num_samples >= WINDOW_SAMPLES // 2:
            break
    return Stretch(num_samples, reads)
