"""What indexing files of an object store will request, found by indexing them, or some of them,
without reading data."""

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
from megablend.storage.transfer import Counted, extrapolate

_FIRST_SAMPLE = 512
"""Files that are tried; all of a source with fewer."""
_WIDEST = 1.5
"""More are tried while the most is more than this times the least."""
_LARGE_SHARE = 256
"""Files with more than one in so many of the bytes are all tried."""


def estimate_indexing(source: SourceSpec, storage: Storage) -> tuple[Counted, Counted]:
    """Find the requests and bytes that indexing the files of a source takes at least and at most;
    none of files on a local disk.

    Raises: as a build does, of the files that are tried.
    """
    columns = list_columns([source])
    none = Counted(0, 0)
    if storage.limits(source.files[0].path).max_files == 1:
        return none, none
    work = sorted(plan_work(columns, []), key=lambda each: each.file.size)
    counted: dict[int, Counted] = {}
    num_large = _count_large([each.file.size for each in work])
    num_rest = len(work) - num_large
    num_tried = _FIRST_SAMPLE
    while True:
        num_tried = min(num_tried, num_rest)
        tried = (np.arange(num_tried) + 0.5) * num_rest // max(1, num_tried)
        numbers = [*tried.astype(np.int64).tolist(), *range(num_rest, len(work))]
        missing = [number for number in numbers if number not in counted]
        counted |= zip(
            missing, _try(columns, [work[number] for number in missing], storage), strict=True
        )
        found = np.array([counted[number] for number in numbers])
        least, most = extrapolate(found[:num_tried], num_rest)
        large = found[num_tried:].sum(axis=0)
        least = least + large
        most = most + large
        if num_tried == num_rest or (most <= _WIDEST * least).all():
            return Counted(*least.tolist()), Counted(*most.tolist())
        num_tried *= 2


def _count_large(sizes: Sequence[int]) -> int:
    """How many files have a large share of all bytes, by their sizes in ascending order."""
    return len(sizes) - int(np.searchsorted(sizes, sum(sizes) / _LARGE_SHARE, side="right"))


def _try(
    columns: Sequence[SourceSpec], work: Sequence[FileTask], storage: Storage
) -> list[Counted]:
    """What each file takes."""
    threads = max(max_files(column, storage) for column in columns)
    return parallel_map(lambda each: _try_file(columns[each.column], each, storage), work, threads)


def _try_file(column: SourceSpec, work: FileTask, storage: Storage) -> Counted:
    requests, size = count_digest_reads(column.kind, work.file.path, storage)
    for part in range(work.num_parts):
        reads = RequestedReads()
        dry = DryStorage(storage, reads)
        with contextlib.suppress(LongReadError):  # where it would read data, the rest is counted
            index_part(work, part, column, dry)
        reads.cancel()
        requests = requests + dry.requests
        size = size + dry.bytes
    return Counted(requests, size)
