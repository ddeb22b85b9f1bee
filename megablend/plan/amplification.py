"""Read amplification, told without reading: compressed bytes that all processes read / those of the blocks used.

In row order, which takes single documents out of blocks, a block is used as far as its tokens are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.plan.forecast import Future, planned
from megablend.plan.memory import batches_of, budget_of
from megablend.plan.run import Run


def read_amplification(
    run: Run, *, micro_batch_size: int, data_parallel_size: int, num_workers: int, first: int, stop: int
) -> float:
    """Of samples [first, stop), read by loaders of that many ranks with that many workers (0: in the rank's own process).

    Raises: ConfigError where memory is too small.
    """
    step_samples, processes = micro_batch_size * data_parallel_size, max(1, num_workers)
    stride = step_samples * processes
    budget = budget_of(run, micro_batch_size=micro_batch_size, stride=stride, num_batches=batches_of(num_workers))
    read, useful, used = 0, 0.0, list[npt.NDArray[np.int64]]()
    for begin in range(first, min(first + stride, stop), micro_batch_size):
        future = Future(first=begin, micro_batch_size=micro_batch_size, stride=stride, stop=stop)
        for window in planned(run, future, budget):
            now = window.forecast
            read += _stored_bytes(run, now.ids[window.reads])
            if run.config.order == "row" and run.weights:
                useful += float(_stored(run, now.ids) @ (now.used / run.store.num_tokens(now.ids)))
            else:
                used.append(np.unique(np.stack([now.stretches.epochs, now.stretches.blocks]), axis=1))
    if not used:
        return read / useful
    _, blocks = np.unique(np.concatenate(used, axis=1), axis=1)
    return read / _stored_bytes(run, blocks)


def _stored_bytes(run: Run, ids: npt.NDArray[np.int64]) -> int:
    return int(_stored(run, ids).sum(dtype=np.int64))


def _stored(run: Run, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    stored: npt.NDArray[np.uint32] = run.store.generation.blocks(ids)["stored_bytes"]
    return stored
