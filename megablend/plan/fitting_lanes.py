"""Which numbers of lanes suit which loaders. Sample k belongs to lane k mod K, and each process should have lanes of its own."""

from __future__ import annotations


def fitting_lanes(lanes: int, *, micro_batch_size: int, data_parallel_size: int, num_workers: int) -> int:
    """The least number of lanes, `lanes` or more, of which no two processes share one; `lanes` where it fits.

    Two processes that read one lane both read most of its blocks. A step of each process takes micro_batch_size neighbours, and
    the processes take turns, so a multiple of what all take in one turn keeps them apart.
    """
    processes = data_parallel_size * max(1, num_workers)
    if processes == 1:
        return lanes
    turn = micro_batch_size * processes
    return -(-lanes // turn) * turn


def unfit_lanes(lanes: int, *, micro_batch_size: int, data_parallel_size: int, num_workers: int) -> str | None:
    """What is wrong with a number of lanes, and which fits, in words; None where it fits."""
    fits = fitting_lanes(
        lanes, micro_batch_size=micro_batch_size, data_parallel_size=data_parallel_size, num_workers=num_workers
    )
    if fits == lanes:
        return None
    workers = f" x {num_workers} workers" if num_workers > 1 else ""
    return (
        f"lanes: {lanes} is not a multiple of micro batch {micro_batch_size} x {data_parallel_size} ranks{workers}, so several "
        f"processes read the same blocks; lanes: {fits} fits (of a new run: lanes decide the order)"
    )
