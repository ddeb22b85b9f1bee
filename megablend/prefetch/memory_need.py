"""The `memory` that the loaders of a run need.

A process needs room for the blocks that its lanes are currently in, so that no block is read twice.
It also needs room for the blocks of each of its steps, since `windows` refuses a step that does not
fit. If there are many steps, only some of them are examined, spread evenly over the run: a few
first, and more of them if `memory` is not plentiful for these.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megablend.arrays import Int64s
from megablend.errors import ConfigError
from megablend.index.blocks.block_sizes import SHARES
from megablend.prefetch.memory_budget import (
    BlockNeed,
    Budget,
    batches_of,
    count_lane_bytes,
    format_bytes,
    is_enough,
    lanes_of,
    least_memory,
    plan_budget,
)
from megablend.prefetch.read_schedule import (
    StepSequence,
    locate_steps,
    schedule_reads,
    step_needs,
)
from megablend.prefetch.windows import refuse_step
from megablend.run.run import Run, Section
from megablend.run.skips import Skips

FIRST_SAMPLES = 1 << 8
"""Number of samples of each part of a run that are examined at first."""
MOST_SAMPLES = 1 << 16
"""Number of samples of each part of a run that are examined if memory is not plentiful."""
_PLENTIFUL = 8
"""`memory` is plentiful if it is at least _PLENTIFUL times the memory that the first samples need.
It is then assumed to be enough for all samples."""
_NUM_STRETCHES = 16
"""Number of stretches of neighbouring steps that are examined if a part has too many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaders:
    """The loaders whose steps, memory and reads are estimated."""

    micro_batch_size: int
    data_parallel_size: int
    num_workers: int

    @property
    def step_samples(self) -> int:
        """Number of samples in a micro step of all ranks."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def num_processes(self) -> int:
        """Number of processes of each rank that read samples."""
        return max(1, self.num_workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartNeed:
    """The memory that a process needs for a *part* of a run: consecutive samples of the same
    length, none of which is skipped."""

    run: Run
    """A view of the run in the section that contains the part."""
    budget: Budget
    num_lanes: int
    """Number of lanes whose blocks the process keeps from one cycle to the next, or 0."""
    lane_bytes: Int64s
    """int64 [num_sources], bytes of the blocks of these lanes."""
    step: Int64s
    """int64 [...], the samples of the step that needs the most memory, among the examined steps."""
    step_need: BlockNeed
    """The memory that the blocks of this step need."""

    @property
    def lane_need(self) -> BlockNeed:
        """The memory that the blocks of the lanes need."""
        return BlockNeed(int(self.lane_bytes.sum()))

    @property
    def for_lanes(self) -> int:
        """The smallest `memory` that has room for the blocks of the lanes."""
        return least_memory(self.run, self.lane_need, self.budget)

    @property
    def for_step(self) -> int:
        """The smallest `memory` that has room for the examined steps."""
        return least_memory(self.run, self.step_need, self.budget)

    @property
    def memory(self) -> int:
        """The smallest `memory` that is enough for the part."""
        return max(self.for_lanes, self.for_step)

    def fits(self, memory: int) -> bool:
        """Return whether `memory` is enough."""
        return all(
            is_enough(self.run, memory, need, self.budget)
            for need in (self.lane_need, self.step_need)
        )


def check_memory(
    run: Run,
    skips: Skips,
    *,
    micro_batch_size: int,
    stride: int,
    num_batches: int = 2,
    first: int = 0,
) -> None:
    """Check that `memory` is enough for the loaders of all ranks, if they read from sample `first`
    on.

    Args:
        micro_batch_size: number of samples per step of a process.
        stride: number of samples from the start of a step to the start of the process's next step.
        num_batches: see `plan_budget`.

    Raises: ConfigError if `memory` is less than the lanes of a process need (for each source, what
        a cycle reads from it and the block that the lane is in), or less than one of its steps
        needs; the message gives the amount that suffices.
    """
    sizes = (micro_batch_size, stride, num_batches)
    needs = _find_needs(run, skips, first, *sizes, num_samples=FIRST_SAMPLES)
    if not all(need.fits(run.runtime.memory // _PLENTIFUL) for need in needs):
        _refuse_too_little(_find_needs(run, skips, first, *sizes), micro_batch_size, num_batches)


def plan_loaders(run: Run, loaders: Loaders) -> tuple[StepSequence, int]:
    """Plan the steps of the loaders of a run, from the first sample to the last, without skipping
    any.

    Returns: the steps of the first process, all of them complete (those of the other processes
        start at `begins`); and the number of batches that exist at the same time in a process, see
        `plan_budget`.
    Raises: see `check_memory`.
    """
    micro_batch_size = loaders.micro_batch_size
    samples = loaders.step_samples
    stride = samples * loaders.num_processes
    num_batches = batches_of(loaders.num_workers)
    check_memory(
        run, Skips(), micro_batch_size=micro_batch_size, stride=stride, num_batches=num_batches
    )
    stop = run.num_samples // samples * samples
    steps = StepSequence(first=0, micro_batch_size=micro_batch_size, stride=stride, stop=stop)
    return steps, num_batches


def find_memory_need(run: Run, skips: Skips, loaders: Loaders) -> int:
    """Find the memory that the loaders of a rank need: the smallest number of bytes that the rank's
    processes need together, for their lanes, steps, batches and the orders of blocks.

    Raises: see `check_memory`.
    """
    micro_batch_size = loaders.micro_batch_size
    stride = loaders.step_samples * loaders.num_processes
    num_batches = batches_of(loaders.num_workers)
    needs = _find_needs(run, skips, 0, micro_batch_size, stride, num_batches)
    _refuse_too_little(needs, micro_batch_size, num_batches)
    return loaders.num_processes * max(need.memory for need in needs)


def _find_needs(
    run: Run,
    skips: Skips,
    first: int,
    micro_batch_size: int,
    stride: int,
    num_batches: int,
    num_samples: int = MOST_SAMPLES,
) -> list[_PartNeed]:
    """Find the memory that each part of the run needs from sample `first` on, by examining about
    `num_samples` samples of each part."""
    needs = list[_PartNeed]()
    for section in run.sections:
        view = run.view(section)
        budget = plan_budget(view, micro_batch_size=micro_batch_size, num_batches=num_batches)
        num_lanes = 0
        lane_bytes = np.zeros(1, np.int64)
        if run.has_lanes and run.consumes_whole_blocks:
            num_lanes = max(
                lanes_of(blend.lanes, micro_batch_size, stride) for blend in view.blends
            )
            lane_bytes = count_lane_bytes(view, num_lanes)
        for start, stop in _list_parts(section, skips, first):
            # Any step of the part: which of them this process takes is not known
            step_need, step = _find_largest_step(view, start, stop, micro_batch_size, num_samples)
            needs.append(
                _PartNeed(
                    run=view,
                    budget=budget,
                    num_lanes=num_lanes,
                    lane_bytes=lane_bytes,
                    step=step,
                    step_need=step_need,
                )
            )
    return needs


def _list_parts(section: Section, skips: Skips, first: int) -> list[tuple[int, int]]:
    """List the ranges [start, stop) of a section's samples that are not skipped, from sample
    `first` on."""
    parts = list[tuple[int, int]]()
    start = max(first, section.start)
    # The empty range at the end of the section ends the last part
    for skip_start, skip_stop in [*skips.ranges, (section.stop, section.stop)]:
        stop = min(skip_start, section.stop)
        if start < stop:
            parts.append((start, stop))
        start = max(start, skip_stop)
    return parts


def _find_largest_step(
    run: Run, start: int, stop: int, micro_batch_size: int, num_samples: int
) -> tuple[BlockNeed, Int64s]:
    """Find the step that needs the most memory among consecutive steps of samples [start, stop).

    Args:
        num_samples: approximate maximum number of samples to examine. If there are more, only
            evenly spaced stretches of steps are examined.

    Returns: the most memory that any examined step needs; and the samples of the step that needs
        the largest share of a budget, int64 [...].
    """
    step_size = min(micro_batch_size, stop - start)
    num_steps = -(-(stop - start) // step_size)
    length = num_steps
    firsts = np.zeros(1, np.int64)
    if stop - start > num_samples:
        length = -(-num_samples // _NUM_STRETCHES // step_size)
        last = num_steps - length
        firsts = np.array([i * last // (_NUM_STRETCHES - 1) for i in range(_NUM_STRETCHES)])
    stretches_at_once = max(1, FIRST_SAMPLES // (length * step_size))
    most = BlockNeed(0, 0)
    largest = np.zeros(0, np.int64)
    largest_share = 0.0
    for number in range(0, len(firsts), stretches_at_once):
        begins = start + firsts[number : number + stretches_at_once] * step_size
        samples = np.add.outer(begins, np.arange(length * step_size)).ravel()
        offsets = np.arange(0, len(samples) + 1, step_size)
        samples = samples[samples < stop]  # the last step of all may be shorter
        offsets[-1] = len(samples)
        blocks, with_reading = step_needs(run, locate_steps(run, samples, offsets))
        block_shares = blocks / SHARES["blocks"]
        reading_shares = with_reading / (SHARES["blocks"] + SHARES["reads"])
        shares = np.maximum(block_shares, reading_shares)
        step = int(shares.argmax())
        if shares[step] > largest_share:
            largest_share = float(shares[step])
            largest = samples[offsets[step] : offsets[step + 1]]
        most = BlockNeed(*np.maximum(most, [blocks.max(), with_reading.max()]).tolist())
    return most, largest


def _refuse_too_little(needs: list[_PartNeed], micro_batch_size: int, num_batches: int) -> None:
    """Check that `memory` is enough for all parts of a run. Raises: ConfigError."""
    need = max(needs, key=lambda candidate: candidate.memory, default=None)
    if need is None or need.memory <= need.run.runtime.memory:
        return
    run = need.run
    if need.for_lanes < need.for_step:
        offsets = np.array([0, len(need.step)])
        schedule = schedule_reads(run, locate_steps(run, need.step, offsets))
        raise refuse_step(run, schedule, need.budget, need.memory)
    raise ConfigError(
        f"memory: found {format_bytes(run.runtime.memory)}, expected {format_bytes(need.memory, up=True)} or more "
        f"(blocks of {need.num_lanes} lanes: {format_bytes(need.lane_bytes.sum())}, {num_batches} batches of "
        f"{micro_batch_size} samples: {format_bytes(need.budget.batches)}, block orders: "
        f"{format_bytes(need.budget.orders)}); raise `memory`, or lower `shuffle_window`"
    )
