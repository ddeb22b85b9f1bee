"""The memory budget of a process that reads a split, and the smallest `memory` that has room for
given blocks. `index.blocks.block_sizes` defines the proportions in which `memory` is divided.

The budget does not cover memory that is independent of data and config: Python and its libraries,
compiled kernels, the mapped part of the index (megablend.index.tables.mapped_table), and memory
that the allocator has not returned to the system.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megablend.arrays import Int64s
from megablend.config import Config
from megablend.errors import ConfigError
from megablend.index.blocks.block_sizes import (
    BLOCK_OVERHEAD_BYTES,
    EXTRA_PART,
    NUM_SHARES,
    SHARES,
)
from megablend.run.run import Run, Section

PREFETCH_FACTOR = 2
"""Number of batches that torch's DataLoader requests ahead from each worker by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The number of bytes that a process may use for each purpose."""

    batches: int
    """Batches that exist at the same time: those that were returned and are still in use, and the
    one being assembled."""
    orders: int
    """Shuffled orders of the sources' blocks."""
    dictionaries: int
    """Decoded dictionaries of Parquet column chunks."""
    planning: int
    """Samples of coming windows, with the places where their tokens are stored."""
    cache: int
    """Blocks cached by `dataset[k]` while a loader reads ahead in the same process."""
    reads: int
    """Buffers needed while blocks are read and decoded: stored bytes and intermediate results."""
    blocks: int
    """Decoded blocks, including those being read."""


class BlockNeed(NamedTuple):
    """The memory that blocks need in a process."""

    blocks: int
    """Bytes of the decoded blocks that are in memory at the same time."""
    with_reading: int = 0
    """`blocks` plus the bytes needed to read the largest of these blocks, which may come from a
    budget's part for reads."""

    def fits(self, budget: Budget) -> bool:
        """Return whether a budget has room for the blocks."""
        return self.blocks <= budget.blocks and self.with_reading <= budget.blocks + budget.reads


def plan_budget(run: Run, *, micro_batch_size: int, num_batches: int = 2) -> Budget:
    """Divide `memory` for a process that reads steps of a run. This does not check that `memory` is
    enough; see `memory_need.check_memory`.

    Args:
        micro_batch_size: number of samples per step of the process.
        num_batches: number of batches that exist at the same time; see `batches_of`.
    """
    # Each value of an extra column also needs two int64 buffers from which it is gathered
    value_bytes = sum(16 + column.dtype.itemsize for column in run.extra_columns)
    size = sample_bytes(run.settings)
    size += run.settings.sample_tokens * value_bytes
    return split_budget(run, num_batches * micro_batch_size * size)


def batches_of(num_workers: int, prefetch_factor: int | None = None) -> int:
    """Return the number of batches that exist at the same time in a process. In a loader's own
    process, these are the batch in use and the next one; in a worker, the one being made and those
    in its queue."""
    return 2 if num_workers == 0 else 1 + (prefetch_factor or PREFETCH_FACTOR)


def split_budget(run: Run, batches: int) -> Budget:
    """Divide `memory` for a process whose batches take `batches` bytes. No part is negative."""
    orders = 0
    for source in range(len(run.sources)):
        for reading in run.locator.readings(source):
            orders += reading.order.memory_bytes
    return _divide(run, run.runtime.memory, batches, orders)


def is_enough(run: Run, memory: int, need: BlockNeed, budget: Budget) -> bool:
    """Return whether `memory` has room for blocks in addition to the batches and orders of a
    budget."""
    return need.fits(_divide(run, memory, budget.batches, budget.orders))


def least_memory(run: Run, need: BlockNeed, budget: Budget) -> int:
    """Return the smallest `memory` that is enough for blocks; see `is_enough`."""
    return bisect_left(
        range(1 << 62), True, key=lambda memory: is_enough(run, memory, need, budget)
    )


def _divide(run: Run, memory: int, batches: int, orders: int) -> Budget:
    """Divide the part of `memory` that remains after batches and block orders in proportion to
    SHARES."""
    extra = memory // EXTRA_PART if run.extra_columns else 0
    rest = max(0, memory - batches - orders - extra)
    parts = {name: rest * part // NUM_SHARES for name, part in SHARES.items()}
    return Budget(batches=batches, orders=orders, **parts)


def sample_bytes(settings: Config | Section) -> int:
    """Return the number of bytes of a sample with these settings in a batch, including temporary
    arrays."""
    length = settings.sequence_length
    masks = settings.masks
    size = 32 * length  # tokens, labels, position_ids int64, loss_mask float32, marks
    if masks.create_attention_mask:
        size += length * length
    if masks.inter_document_masking:
        size += 4 * (length + 2)
    return size


def check_sample(config: Config) -> None:
    """Check that a single sample, of any stage, takes no more than `memory`.
    Raises: ConfigError."""
    for stage in (config, *config.stage_configs_ignoring_sources):
        size = sample_bytes(stage)
        if size > config.memory:
            raise ConfigError(
                f"memory: found {format_bytes(config.memory)}, expected "
                f"{format_bytes(size, up=True)} or more, the size of one sample of "
                f"sequence_length {stage.sequence_length:,} in a batch; raise memory, or lower "
                "sequence_length"
            )


def lanes_of(lanes: int, micro_batch_size: int, stride: int) -> int:
    """Return the number of a run's lanes that a process reads if its steps begin `stride` samples
    apart."""
    # The first samples of its steps are in every gcd(lanes, stride)-th lane
    return min(lanes, micro_batch_size * (lanes // math.gcd(lanes, stride)))


def count_lane_bytes(run: Run, num_lanes: int) -> Int64s:
    """Return the bytes of each source's blocks that are kept for `num_lanes` lanes (int64
    [num_sources])."""
    return np.minimum(num_lanes * _bytes_per_lane(run), _source_bytes(run))


def _bytes_per_lane(run: Run) -> Int64s:
    """Return the bytes of each source's blocks that are kept for a lane, in the stage that needs
    most (int64 [num_sources]). These are the blocks of a cycle and at most one block that the
    previous cycle did not finish."""
    block_tokens = np.maximum(1, run.data.parts["tokens"]) / _num_blocks(run)
    blocks = np.zeros(len(run.data.parts))
    for blend in run.blends:
        shares = np.zeros(len(run.data.parts))
        shares[: len(blend.sources)] = [float(share) for share in blend.largest_shares]
        cycle_tokens = blend.shuffle_window * blend.sequence_length
        blocks = np.maximum(blocks, shares * cycle_tokens / block_tokens + (shares > 0))
    sizes: Int64s = np.ceil(
        blocks * (block_tokens * _token_bytes(run) + BLOCK_OVERHEAD_BYTES)
    ).astype(np.int64)
    return sizes


def _source_bytes(run: Run) -> Int64s:
    """Return the bytes of all blocks of each source (int64 [num_sources])."""
    return (
        np.asarray(run.data.tokens, np.int64) * _token_bytes(run)
        + _num_blocks(run) * BLOCK_OVERHEAD_BYTES
    )


def _num_blocks(run: Run) -> Int64s:
    """Return the number of blocks of each source in the split, at least 1 (int64 [num_sources])."""
    counts: Int64s = np.maximum(1, run.data.parts["stop_block"] - run.data.parts["first_block"])
    return counts


def _token_bytes(run: Run) -> Int64s:
    """Return the bytes in memory of a token of each source, including its values of extra columns
    (int64 [num_sources])."""
    snapshot = run.store.snapshot
    files = snapshot.file_of(run.data.parts["first_block"])
    sizes: Int64s = snapshot.files.token_bytes[files] + sum(
        column.dtype.itemsize for column in run.extra_columns
    )
    return sizes


def format_bytes(size: float, *, up: bool = False) -> str:
    """Format a size in KiB, MiB or GiB. If `up`, round up, for messages that say how much memory is
    enough."""
    power = max(1, min(3, int(math.log2(size + 1) / 10)))
    tenths = 10 * size / 1024**power
    return f"{(math.ceil(tenths) if up else tenths) / 10:.1f} {' KMG'[power]}iB"
