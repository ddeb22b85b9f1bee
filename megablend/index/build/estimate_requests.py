"""Estimate the number of requests and bytes that indexing the files of an object store will take.
All files, or a sample of them, are indexed as a trial, which stops before data would be read."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from megablend.index.build.file_tasks import FileTask, index_part, plan_work
from megablend.index.build.share_work import max_files
from megablend.index.build.source_spec import SourceSpec, list_columns
from megablend.index.read.idx_digests import count_digest_reads
from megablend.storage.base import Storage
from megablend.storage.dry_reads import DryStorage, LongReadError
from megablend.storage.parallel_map import parallel_map
from megablend.storage.requested_reads import RequestedReads
from megablend.storage.transfer import RequestCount, extrapolate

_FIRST_SAMPLE = 512
"""Number of files in the first sample. If a source has fewer files, all of them are tried."""
_MAX_RATIO = 1.5
"""More files are tried while the upper bound is larger than _MAX_RATIO times the lower bound."""
_LARGE_SHARE = 256
"""Every file that has more than 1 / _LARGE_SHARE of all bytes is tried."""


def estimate_indexing(source: SourceSpec, storage: Storage) -> tuple[RequestCount, RequestCount]:
    """Estimate the requests and bytes that indexing the files of a source takes.

    Returns: a lower and an upper bound, which are 0 for files on a local disk.
    Raises: the errors that a build would raise for the files that are tried.
    """
    columns = list_columns([source])
    none = RequestCount(0, 0)
    if storage.limits(source.files[0].path).max_files == 1:
        return none, none
    work = sorted(plan_work(columns, []), key=lambda task: task.file.size)
    threads = max(max_files(column, storage) for column in columns)
    counted: dict[int, RequestCount] = {}
    num_large = _count_large([task.file.size for task in work])
    num_small = len(work) - num_large
    num_tried = _FIRST_SAMPLE
    while True:
        num_tried = min(num_tried, num_small)
        # All large files; and of the small ones, a sample that is evenly spaced by size
        tried = (np.arange(num_tried) + 0.5) * num_small // max(1, num_tried)
        numbers = [*tried.astype(np.int64).tolist(), *range(num_small, len(work))]
        missing = [number for number in numbers if number not in counted]
        tasks = [work[number] for number in missing]
        counts_here = parallel_map(lambda task: _count(task, storage), tasks, threads)
        counted |= zip(missing, counts_here, strict=True)
        counts = np.array([counted[number] for number in numbers])
        low, high = extrapolate(counts[:num_tried], num_small)
        large_total = counts[num_tried:].sum(axis=0)
        low = low + large_total
        high = high + large_total
        if num_tried == num_small or (high <= _MAX_RATIO * low).all():
            return RequestCount(*low.tolist()), RequestCount(*high.tolist())
        num_tried *= 2


def _count_large(sizes: Sequence[int]) -> int:
    """Count the files that have a large share of all bytes (`sizes` in ascending order)."""
    return len(sizes) - int(np.searchsorted(sizes, sum(sizes) / _LARGE_SHARE, side="right"))


def _count(work: FileTask, storage: Storage) -> RequestCount:
    """Count the requests and bytes that indexing a file takes."""
    requests, size = count_digest_reads(work.column.kind, work.file.path, storage)
    for part in range(work.num_parts):
        reads = RequestedReads()
        dry = DryStorage(storage, reads)
        # Raised when data would be read; the storage has counted that request as well
        with contextlib.suppress(LongReadError):
            index_part(work, part, dry)
        reads.cancel()
        requests = requests + dry.requests
        size = size + dry.bytes
    return RequestCount(requests, size)
