"""Read amplification, told without reading: compressed bytes that all processes read / those of the blocks used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.plan.forecast import Future, planned
from megablend.plan.run import Run


def read_amplification(
    run: Run, *, micro_batch_size: int, data_parallel_size: int, num_workers: int, first: int, stop: int
) -> float:
    """Of samples [first, stop), read by loaders of that many ranks with that many workers (0: in the rank's own process).

    Raises: ConfigError where memory is too small.
    """
    step_samples, processes = micro_batch_size * data_parallel_size, max(1, num_workers)
    read, used = 0, list[npt.NDArray[np.int64]]()
    for begin in range(first, min(first + step_samples * processes, stop), micro_batch_size):
        future = Future(first=begin, micro_batch_size=micro_batch_size, stride=step_samples * processes, stop=stop)
        for window in planned(run, future):
            read += _stored_bytes(run, window.forecast.ids[window.reads])
            used.append(
                np.unique(np.stack([window.forecast.stretches.epochs, window.forecast.stretches.blocks]), axis=1)
            )
    _, blocks = np.unique(np.concatenate(used, axis=1), axis=1)
    return read / _stored_bytes(run, blocks)


def _stored_bytes(run: Run, ids: npt.NDArray[np.int64]) -> int:
    return int(run.store.generation.blocks(ids)["stored_bytes"].sum(dtype=np.int64))
