"""Compute the read amplification without reading: the stored bytes that all processes read, divided
by the stored bytes of the blocks that they use.

In document order, which reads single documents out of blocks, only part of a block counts as used,
in proportion to its tokens that are used. A dictionary counts as read whenever it is no longer
cached, and as used once. Reads that open files are not counted.
"""

from __future__ import annotations

import numpy as np

from megablend.arrays import Int64s
from megablend.prefetch.memory_budget import batches_of
from megablend.prefetch.plan_process import plan_process
from megablend.prefetch.read_schedule import StepSequence
from megablend.run.run import Run


def read_amplification(
    run: Run,
    *,
    micro_batch_size: int,
    data_parallel_size: int,
    num_workers: int,
    stop: int,
) -> float:
    """Compute the read amplification of the first `stop` samples.

    Args:
        micro_batch_size: samples per step of a rank.
        data_parallel_size: number of ranks.
        num_workers: loader workers per rank; 0 if the rank's own process reads.

    Raises: ConfigError if memory is too small.
    """
    sequence = StepSequence(
        first=0,
        micro_batch_size=micro_batch_size,
        stride=micro_batch_size * data_parallel_size * max(1, num_workers),
        stop=stop,
    )
    read_bytes = 0
    useful_bytes = 0.0
    used_blocks = list[Int64s]()  # for each window, [2, num_blocks]: epochs and blocks
    dictionary_bytes: dict[int, int] = {}
    for begin in sequence.begins:
        for view, window, reads in plan_process(run, sequence, begin, batches_of(num_workers)):
            schedule = window.schedule
            read_bytes += sum(read.stored_bytes + read.dictionary_bytes for read in reads)
            numbers, sizes = view.store.dictionaries(schedule.ids)
            needed = sizes > 0
            dictionary_bytes |= zip(numbers[needed].tolist(), sizes[needed].tolist(), strict=True)
            if run.consumes_whole_blocks:
                # A block that several windows use in an epoch counts once: the windows' blocks are
                # merged below
                spans = schedule.spans
                used_blocks.append(np.unique(np.stack([spans.epochs, spans.blocks]), axis=1))
            else:
                used_parts = schedule.used / run.store.num_tokens(schedule.ids)
                useful_bytes += float(schedule.rows["stored_bytes"] @ used_parts)
    if used_blocks:
        _, blocks = np.unique(np.concatenate(used_blocks, axis=1), axis=1)
        stored = run.store.snapshot.blocks(blocks)["stored_bytes"]
        useful_bytes = int(stored.sum(dtype=np.int64))
    return read_bytes / (useful_bytes + sum(dictionary_bytes.values()))
