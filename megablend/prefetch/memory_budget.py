"""The memory of a process that reads a split, and whether that is enough for its lanes. `blocks.memory_shares` divides it.

Beside it stands what does not depend on data or config: Python, its libraries, compiled kernels, what is mapped of the index
(megablend.index.mapped_table), and what the allocator keeps at hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megablend.blocks.block_store import BLOCK_OVERHEAD_BYTES
from megablend.blocks.memory_shares import NUM_SHARES, SHARES, divide_rest
from megablend.config import Config
from megablend.errors import ConfigError
from megablend.plan.run import Run

Int64s = npt.NDArray[np.int64]

PREFETCH_FACTOR = 2
"""Batches that torch's DataLoader asks of each worker in advance, where nothing else is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes, of one process."""

    batches: int
    """Batches that are handed over, and the one that is made."""
    orders: int
    """Shuffles of the sources' blocks."""
    dictionaries: int
    """Decoded dictionaries of Parquet column chunks."""
    planning: int
    """Places of the samples of the coming windows."""
    window: int
    """Blocks that `dataset[k]` keeps while a loader reads ahead beside it."""
    reads: int
    """What is needed while blocks are read and decoded: bytes as they are stored, and what they are made into first."""
    blocks: int
    """Decoded blocks that are held, or on their way."""

    @property
    def without_read_ahead(self) -> int:
        """For the blocks that `dataset[k]` keeps while no loader reads ahead."""
        return self.blocks + self.window + self.planning


def budget_of(run: Run, *, micro_batch_size: int, stride: int, num_batches: int = 2) -> Budget:
    """The memory of a process that reads steps of a run.

    Args:
        micro_batch_size: samples of a step of the process.
        stride: from a step's first sample to the first of the process's next step.
        num_batches: that exist at once: the one in use and the next; in a worker, those that wait for it, too.

    Raises: ConfigError where there is less than the lanes of the process need: of every source what a cycle takes from it, and
        the block in which the lane stands.
    """
    width = run.config.sequence_length + run.config.add_extra_token_to_sequence
    extra = width * sum(16 + each.dtype.itemsize for each in run.extra_columns)  # as it is, and as it is gathered
    budget = split_budget(run, num_batches * micro_batch_size * (sample_bytes(run.config) + extra))
    if (
        not run.has_lanes or not run.order_kind.consumes_whole_blocks
    ):  # no lane continues in its block: one step must fit
        return budget
    lanes = lanes_of(run.config.lanes, micro_batch_size, stride)
    held = np.minimum(lane_bytes(run) * lanes, _source_bytes(run))
    if held.sum() <= budget.blocks:
        return budget
    most = run.sources[int(held.argmax())].name
    config, for_lanes = run.config, held.sum() / SHARES["blocks"] * NUM_SHARES
    needed = format_bytes(for_lanes + budget.batches + budget.orders, up=True)
    raise ConfigError(
        f"memory: found {format_bytes(config.memory)}, expected {needed} or more: each process holds {lanes} of "
        f"{config.lanes} lanes, and of each what a shuffle window of {config.shuffle_window} samples takes from "
        f"{len(run.sources)} sources and the blocks that it stands in ({format_bytes(for_lanes)} with what reading them takes; "
        f"{most!r} takes most, {format_bytes(held.max())}), besides {num_batches} batches of {micro_batch_size} samples "
        f"({format_bytes(budget.batches)}) and the order of the sources' blocks ({format_bytes(budget.orders)}); "
        f"raise memory, or lower shuffle_window, lanes, micro batch or "
        "the sources' block sizes, or make lanes a multiple of micro batch x data-parallel size x workers"
    )


def batches_of(num_workers: int, prefetch_factor: int | None = None) -> int:
    """Batches that a process has made and not seen the end of: of a loader, or of each of its workers."""
    return 2 if num_workers == 0 else 1 + (prefetch_factor or PREFETCH_FACTOR)


def split_budget(run: Run, batches: int) -> Budget:
    """The memory of a process that makes `batches` bytes of batches; no part is below 0."""
    orders = sum(run.order(source).memory_bytes for source in range(len(run.sources)))
    extra = run.store.extra_bytes if run.extra_columns else 0
    return Budget(batches=batches, orders=orders, **divide_rest(run.config.memory - batches - orders - extra))


def sample_bytes(config: Config) -> int:
    """Bytes of a sample in a batch, and of what is made beside it."""
    length = config.sequence_length
    found = 32 * length  # tokens, labels, position_ids int64, loss_mask float32, marks
    if config.create_attention_mask:
        found += length * length
    if config.inter_document_masking:
        found += 4 * (length + 2)
    return found


def check_sample(config: Config) -> None:
    """Raises: ConfigError where a single sample takes more than `memory`: nothing could read it."""
    if (size := sample_bytes(config)) > config.memory:
        raise ConfigError(
            f"memory: found {format_bytes(config.memory)}, expected {format_bytes(size, up=True)} or more, which one sample "
            f"of sequence_length {config.sequence_length:,} takes in a batch; raise memory, or lower sequence_length"
        )


def lanes_of(lanes: int, micro_batch_size: int, stride: int) -> int:
    """How many of the run's lanes a process reads, of which each step begins `stride` samples after the one before."""
    return min(lanes, micro_batch_size * (lanes // math.gcd(lanes, stride)))


def lane_bytes(run: Run) -> Int64s:
    """Bytes that a lane holds of each source of a blend: int64 [num_sources]."""
    cycle_tokens = run.config.shuffle_window * run.config.sequence_length
    shares = np.array([float(weight) for weight in run.weights])
    block_tokens = np.maximum(1, run.parts["tokens"]) / _num_blocks(run)
    blocks = shares * cycle_tokens / block_tokens + (shares > 0)
    held: Int64s = np.ceil(blocks * (block_tokens * _token_bytes(run) + BLOCK_OVERHEAD_BYTES)).astype(np.int64)
    return held


def _source_bytes(run: Run) -> Int64s:
    """Bytes of all of each source's blocks: int64 [num_sources]."""
    return np.asarray(run.tokens, np.int64) * _token_bytes(run) + _num_blocks(run) * BLOCK_OVERHEAD_BYTES


def _num_blocks(run: Run) -> Int64s:
    found: Int64s = np.maximum(1, run.parts["stop_block"] - run.parts["first_block"])
    return found


def _token_bytes(run: Run) -> Int64s:
    generation = run.store.generation
    files = generation.file_of(run.parts["first_block"])
    sizes: Int64s = generation.file_token_bytes[files] + sum(each.dtype.itemsize for each in run.extra_columns)
    return sizes


def format_bytes(size: float, *, up: bool = False) -> str:
    """Bytes as people write them; with `up`, never less than they are, for messages that say how much is enough."""
    power = max(1, min(3, int(math.log2(size + 1) / 10)))
    tenths = 10 * size / 1024**power
    return f"{(math.ceil(tenths) if up else tenths) / 10:.1f} {' KMG'[power]}iB"
