"""Which numbers of lanes fit which loaders. Sample k belongs to lane k mod K, and no two processes
should share a lane."""

from __future__ import annotations


def fitting_lanes(
    lanes: int, *, micro_batch_size: int, data_parallel_size: int, num_workers: int
) -> int:
    """The smallest number of lanes, at least `lanes`, with which no two processes share a lane.

    Two processes that read the same lane both read most of its blocks. A step of a process is
    micro_batch_size consecutive samples, and the processes take turns, so the number of lanes must
    be a multiple of the samples in one round of turns.
    """
    processes = data_parallel_size * max(1, num_workers)
    if processes == 1:
        return lanes
    turn = micro_batch_size * processes
    return -(-lanes // turn) * turn


def unfit_lanes(
    lanes: int, *, micro_batch_size: int, data_parallel_size: int, num_workers: int
) -> str | None:
    """A message that says why a number of lanes does not fit and which one does; None where it
    fits."""
    fits = fitting_lanes(
        lanes,
        micro_batch_size=micro_batch_size,
        data_parallel_size=data_parallel_size,
        num_workers=num_workers,
    )
    if fits == lanes:
        return None
    workers = f" x {num_workers} workers" if num_workers > 1 else ""
    return (
        f"lanes: {lanes} is not a multiple of micro batch {micro_batch_size} x {data_parallel_size} ranks{workers}, so several "
        f"processes read the same blocks; lanes: {fits} fits (only for a new run, since lanes decide the order)"
    )
