"""What of a process's memory its blocks may take, and whether that is enough for its lanes."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from megablend.errors import ConfigError
from megablend.plan.run import Run

Int64s = npt.NDArray[np.int64]

BLOCKS_SHARE = 0.75
"""Of `memory`: decoded blocks. The rest is for bytes on their way to be decoded, the plan of the coming window, and batches."""


def block_bytes(run: Run, *, micro_batch_size: int, stride: int) -> int:
    """Bytes for the decoded blocks of one process.

    Args:
        micro_batch_size: samples of a step of the process.
        stride: from a step's first sample to the first of the process's next step.

    Raises: ConfigError where that is less than the lanes of the process need: of every source what a cycle takes from it, and
        the block in which the lane stands.
    """
    available = int(run.config.memory * BLOCKS_SHARE)
    if (
        not run.weights or run.config.order == "row"
    ):  # no lanes, or none that goes on in its block: a step at a time will do
        return available
    lanes = lanes_of(run.config.lanes, micro_batch_size, stride)
    held = np.minimum(lane_bytes(run) * lanes, _source_bytes(run))
    if held.sum() > available:
        most = run.sources[int(held.argmax())].name
        raise ConfigError(
            f"memory: found {_shown(run.config.memory)}, expected {_shown(held.sum() / BLOCKS_SHARE)} or more: each process "
            f"holds {lanes} of {run.config.lanes} lanes, and of each what a cycle of {run.config.cycle} samples takes "
            f"from {len(run.sources)} sources and the blocks that it stands in ({most!r} takes most, "
            f"{_shown(held.max())}); raise memory, or lower cycle, lanes or the sources' block sizes, or make lanes a "
            "multiple of micro batch x data-parallel size x workers"
        )
    return available


def lanes_of(lanes: int, micro_batch_size: int, stride: int) -> int:
    """How many of the run's lanes a process reads, of which each step begins `stride` samples after the one before."""
    return min(lanes, micro_batch_size * (lanes // math.gcd(lanes, stride)))


def lane_bytes(run: Run) -> Int64s:
    """Bytes that a lane holds of each source of a blend: int64 [num_sources]."""
    cycle_tokens = run.config.cycle * run.config.sequence_length
    shares = np.array([float(weight) for weight in run.weights])
    num_blocks = np.maximum(1, run.parts["stop_block"] - run.parts["first_block"])
    tokens = shares * cycle_tokens + (shares > 0) * run.parts["tokens"] / num_blocks
    held: Int64s = np.ceil(tokens * _token_bytes(run)).astype(np.int64)
    return held


def _source_bytes(run: Run) -> Int64s:
    """Bytes of all of each source's tokens: int64 [num_sources]."""
    return np.asarray(run.tokens, np.int64) * _token_bytes(run)


def _token_bytes(run: Run) -> Int64s:
    generation = run.store.generation
    files = generation.file_of(run.parts["first_block"])
    sizes: Int64s = generation.file_token_bytes[files]
    return sizes


def _shown(size: float) -> str:
    """Bytes as people write them."""
    power = max(1, min(3, int(math.log2(size + 1) / 10)))
    return f"{size / 1024**power:.1f} {' KMG'[power]}iB"
