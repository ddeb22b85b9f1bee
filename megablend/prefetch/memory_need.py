"""How much memory the processes of a rank need for a run,
and how many lanes the config's `memory` would suffice for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megablend.blend.interleavings.lanes import MAX_LANES
from megablend.index.blocks.block_sizes import NUM_SHARES, SHARES
from megablend.prefetch.memory_budget import (
    Budget,
    batches_of,
    blocks_of_lanes,
    lanes_of,
    plan_budget,
)
from megablend.run.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Memory of the loaders of a rank."""

    bytes_per_rank: int
    """What its processes need at least, for their lanes, batches and the order of blocks."""
    limit_per_rank: int
    """What `memory` allows them together."""
    most_lanes: int | None
    """The most lanes that suit the loaders and the run's length and for which `memory` is enough;
    None if memory does not depend on lanes."""


def find_memory_need(
    run: Run, *, micro_batch_size: int, data_parallel_size: int, num_workers: int
) -> MemoryNeed:
    """The memory of a rank whose loaders have these sizes."""
    processes = max(1, num_workers)
    turn = micro_batch_size * data_parallel_size * processes
    sizes = {"micro_batch_size": micro_batch_size, "num_batches": batches_of(num_workers)}
    budgets = [plan_budget(run.view(section), **sizes) for section in run.sections]
    budget = max(budgets, key=lambda each: each.batches)  # where samples are longest
    needed = budget.batches + budget.orders
    most = None
    if run.has_lanes and run.consumes_whole_blocks:
        # More lanes than the run has windows would not even fill one cycle.
        windows = max(run.num_samples // blend.shuffle_window for blend in run.blends)
        useful = min(MAX_LANES, max(windows, *(blend.lanes for blend in run.blends)))
        most = turn * _count_rounds(run, budget, micro_batch_size, useful // turn)
        lanes = max(lanes_of(blend.lanes, micro_batch_size, turn) for blend in run.blends)
        needed += math.ceil(blocks_of_lanes(run, lanes).sum() / SHARES["blocks"] * NUM_SHARES)
    return MemoryNeed(
        bytes_per_rank=processes * needed,
        limit_per_rank=processes * run.runtime.memory,
        most_lanes=most,
    )


def _count_rounds(run: Run, budget: Budget, micro_batch_size: int, most: int) -> int:
    """How many micro batches of lanes each process may read, so that their blocks fit in its
    budget; never more than `most`."""
    low = 0
    high = most + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = blocks_of_lanes(run, middle * micro_batch_size).sum() <= budget.blocks
        low, high = (middle, high) if fits else (low, middle)
    return low
