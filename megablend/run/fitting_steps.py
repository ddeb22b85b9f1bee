"""Find out which steps and numbers of lanes fit a run. Steps fit if no batch contains samples of
two lengths or masks, or samples that are skipped. Lanes fit if no two processes read the same lane.

A step is what all data-parallel ranks read at the same time. Steps are counted from the position at
which training starts, so whether they fit also depends on that position.
"""

from __future__ import annotations

import math

from megablend.run.run import Run
from megablend.run.skips import Skips


def fitting_unit(run: Run) -> int | None:
    """Return the greatest number of samples in a step for which the length and the masks of samples
    change only between steps, counted from sample 0. Every divisor of it also fits. None if they
    never change."""
    return math.gcd(*(section.stop for section in run.sections[:-1])) or None


def unfit_step(run: Run, skips: Skips, first: int, step_samples: int) -> str | None:
    """Return a message that says why steps from sample `first` on do not fit, and which steps
    would; None if they fit.

    Args:
        step_samples: number of samples in a step: micro batch x data-parallel size.
    """
    # Where a step has to end: where the length or the masks change, and where a skipped range begins
    changes = {section.stop for section in run.sections[:-1]}
    skip_stops = dict(skips.ranges)
    start = skips.next_sample(first)
    for end in sorted(changes | set(skip_stops)):
        if end <= start:
            continue
        if end >= run.num_samples:
            return None
        rest = (end - start) % step_samples
        if rest and end in skip_stops:
            return _describe_unfit_skip(start, end, skip_stops[end], step_samples)
        if rest:
            return _describe_unfit_change(run, start, end, step_samples)
        start = skips.next_sample(end)
    return None


def _describe_unfit_skip(start: int, skip_start: int, skip_stop: int, step_samples: int) -> str:
    """Return a message which says that steps from sample `start` on reach into a skipped range."""
    # `skip` rounds to steps that are counted from sample 0
    skip_again = ""
    if start % step_samples == 0:
        skip_again = f", or `megablend skip` the range again with --batch {step_samples}"
    return (
        f"steps of {step_samples:,} samples from sample {start:,} on would reach into samples {skip_start:,} to "
        f"{skip_stop:,}, which are skipped: choose a micro batch and ranks whose steps end at sample {skip_start:,}{skip_again}"
    )


def _describe_unfit_change(run: Run, start: int, end: int, step_samples: int) -> str:
    """Return a message which says that no step from sample `start` on ends at `end`, where the
    length or the masks of samples change."""
    rest = (end - start) % step_samples
    nearest = end - rest
    if 2 * rest > step_samples or nearest <= start:
        nearest += step_samples
    remedy = f"end the stage at the nearest end of a step, sample {nearest:,}, or "
    if end not in run.ledger.starts:  # a drain ends there
        begin = max(sample for sample in run.ledger.starts if sample < end)
        remedy = ""
        # `amend` rounds to steps that are counted from sample 0
        if start % step_samples == 0:
            remedy = (
                f"amend the run again (`megablend amend CONFIG --at {begin} --batch {step_samples}`) if training "
                f"has not passed sample {begin:,}, or "
            )
    from_here = f"steps of {step_samples:,} samples from sample {start:,} on"
    return (
        f"the length or masks of samples change at sample {end:,}, in the middle of a batch ({from_here}): "
        f"{remedy}choose a micro batch and ranks whose steps end there"
    )


def fitting_lanes(
    lanes: int, *, micro_batch_size: int, data_parallel_size: int, num_workers: int
) -> int:
    """Return the smallest number of lanes, at least `lanes`, with which no two processes share a
    lane.

    Two processes that read the same lane both read most of its blocks. A step of a process is
    micro_batch_size consecutive samples, and the processes take turns, so the number of lanes must
    be a multiple of the samples in one round of turns.
    """
    processes = data_parallel_size * max(1, num_workers)
    if processes == 1:
        return lanes
    turn = micro_batch_size * processes
    return -(-lanes // turn) * turn


def unfit_lanes(
    lanes: int, *, micro_batch_size: int, data_parallel_size: int, num_workers: int
) -> str | None:
    """Return a message that says why a number of lanes does not fit, and which number would; None
    if it fits."""
    fitting = fitting_lanes(
        lanes,
        micro_batch_size=micro_batch_size,
        data_parallel_size=data_parallel_size,
        num_workers=num_workers,
    )
    if fitting == lanes:
        return None
    workers = f" x {num_workers} workers" if num_workers > 1 else ""
    return (
        f"lanes: {lanes} is not a multiple of micro batch {micro_batch_size} x {data_parallel_size} ranks{workers}, so several "
        f"processes read the same blocks; lanes: {fitting} fits (only for a new run, since lanes decide the order)"
    )
