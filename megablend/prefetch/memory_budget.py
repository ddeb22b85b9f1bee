"""The memory budget of a process that reads a split, and the least `memory` that has room for blocks.
`index.blocks.block_sizes` divides it.

The budget does not cover what is independent of data and config: Python, its libraries,
compiled kernels, the mapped part of the index (megablend.index.tables.mapped_table), and memory
that the allocator has not returned.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megablend.arrays import Int64s
from megablend.config import Config
from megablend.config.settings import Masks
from megablend.errors import ConfigError
from megablend.index.blocks.block_sizes import BLOCK_OVERHEAD_BYTES, EXTRA_PART, divide_rest
from megablend.run.run import Run

PREFETCH_FACTOR = 2
"""Batches that torch's DataLoader requests in advance from each worker by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes available to one process, by purpose."""

    batches: int
    """Batches that were returned and are still in use, and the one being assembled."""
    orders: int
    """Shuffled orders of the sources' blocks."""
    dictionaries: int
    """Decoded dictionaries of Parquet column chunks."""
    planning: int
    """Located samples of the coming windows."""
    cache: int
    """Blocks cached by `dataset[k]` while a loader reads ahead in the same process."""
    reads: int
    """Buffers needed while blocks are read and decoded: stored bytes and intermediate results."""
    blocks: int
    """Decoded blocks, including those being read."""

    @property
    def without_read_ahead(self) -> int:
        """Bytes for the blocks that `dataset[k]` caches while no loader reads ahead."""
        return self.blocks + self.cache + self.planning


class BlockNeed(NamedTuple):
    """What blocks need of the memory of a process."""

    blocks: int
    """Bytes of decoded blocks that are in memory at once."""
    with_reading: int = 0
    """These, and what reading the largest of them takes besides; may use the part for reads."""

    def fits(self, budget: Budget) -> bool:
        """Whether a budget has room for it."""
        return self.blocks <= budget.blocks and self.with_reading <= budget.blocks + budget.reads


def plan_budget(run: Run, *, micro_batch_size: int, num_batches: int = 2) -> Budget:
    """The memory budget of a process that reads steps of a run, whether or not it suffices; see
    `memory_need.check_memory`.

    Args:
        micro_batch_size: samples per step of the process.
        num_batches: batches that exist at once: the one in use and the next; in a worker, also
            those queued.
    """
    # The values, and int64 buffers to gather them
    extra = run.settings.sample_tokens * sum(16 + each.dtype.itemsize for each in run.extra_columns)
    return split_budget(
        run,
        num_batches
        * micro_batch_size
        * (sample_bytes(run.sequence_length, run.settings.masks) + extra),
    )


def least_memory(run: Run, need: BlockNeed, budget: Budget) -> int:
    """The least `memory` that has room for blocks beside the batches and orders of a budget."""
    return bisect_left(
        range(1 << 62),
        True,
        key=lambda memory: need.fits(_divide(run, memory, budget.batches, budget.orders)),
    )


def blocks_of_lanes(run: Run, lanes: int) -> Int64s:
    """Bytes of the blocks that `lanes` lanes keep of each source: int64 [num_sources]."""
    return np.minimum(lane_bytes(run) * lanes, _source_bytes(run))


def batches_of(num_workers: int, prefetch_factor: int | None = None) -> int:
    """Batches that exist at once in a loader's process, or in each of its workers."""
    return 2 if num_workers == 0 else 1 + (prefetch_factor or PREFETCH_FACTOR)


def split_budget(run: Run, batches: int) -> Budget:
    """The budget of a process whose batches take `batches` bytes; no part is negative."""
    orders = sum(
        each.order.memory_bytes
        for source in range(len(run.sources))
        for each in run.locator.readings(source)
    )
    return _divide(run, run.runtime.memory, batches, orders)


def _divide(run: Run, memory: int, batches: int, orders: int) -> Budget:
    extra = memory // EXTRA_PART if run.extra_columns else 0
    return Budget(batches=batches, orders=orders, **divide_rest(memory - batches - orders - extra))


def sample_bytes(length: int, masks: Masks) -> int:
    """Bytes of a sample of `length` tokens in a batch, including temporary arrays."""
    size = 32 * length  # tokens, labels, position_ids int64, loss_mask float32, marks
    if masks.create_attention_mask:
        size += length * length
    if masks.inter_document_masking:
        size += 4 * (length + 2)
    return size


def longest_sample_bytes(run: Run) -> int:
    """Bytes in a batch of the run's longest samples."""
    return max(sample_bytes(section.sequence_length, section.masks) for section in run.sections)


def check_sample(config: Config) -> None:
    """Raises: ConfigError if a single sample, of any stage, takes more than `memory`."""
    for each in (config, *config.stage_configs_ignoring_sources):
        size = sample_bytes(each.sequence_length, each.masks)
        if size > config.memory:
            raise ConfigError(
                f"memory: found {format_bytes(config.memory)}, expected "
                f"{format_bytes(size, up=True)} or more, the size of one sample of "
                f"sequence_length {each.sequence_length:,} in a batch; raise memory, or lower "
                "sequence_length"
            )


def lanes_of(lanes: int, micro_batch_size: int, stride: int) -> int:
    """How many of the run's lanes a process reads if its steps begin `stride` samples apart."""
    return min(lanes, micro_batch_size * (lanes // math.gcd(lanes, stride)))


def lane_bytes(run: Run) -> Int64s:
    """Bytes of blocks that a lane keeps of each source,
    in the stage that needs most: int64 [num_sources]."""
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
    """Bytes of all of each source's blocks: int64 [num_sources]."""
    return (
        np.asarray(run.data.tokens, np.int64) * _token_bytes(run)
        + _num_blocks(run) * BLOCK_OVERHEAD_BYTES
    )


def _num_blocks(run: Run) -> Int64s:
    counts: Int64s = np.maximum(1, run.data.parts["stop_block"] - run.data.parts["first_block"])
    return counts


def _token_bytes(run: Run) -> Int64s:
    snapshot = run.store.snapshot
    files = snapshot.file_of(run.data.parts["first_block"])
    sizes: Int64s = snapshot.files.token_bytes[files] + sum(
        each.dtype.itemsize for each in run.extra_columns
    )
    return sizes


def format_bytes(size: float, *, up: bool = False) -> str:
    """A size in KiB, MiB or GiB; with `up` rounded up, for messages that say how much is enough."""
    power = max(1, min(3, int(math.log2(size + 1) / 10)))
    tenths = 10 * size / 1024**power
    return f"{(math.ceil(tenths) if up else tenths) / 10:.1f} {' KMG'[power]}iB"
