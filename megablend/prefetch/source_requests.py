"""Count the requests that planned reads of a source's files would send. Their number depends on the
format, so a sample of the files is opened to find it out.

*Figures* are three numbers, float64 [3]: the number of requests, and the smallest and the largest
number of bytes that they return. The bytes differ if requests depend on earlier reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megablend.arrays import Float64s
from megablend.formats.fetch import plan_fetch, start_fetch
from megablend.index.blocks.block_store import BlockStore
from megablend.prefetch.plan_process import PlannedRead
from megablend.prefetch.reads import Read
from megablend.storage.objects.bucket import plan_requests
from megablend.storage.objects.clients import count_requests
from megablend.storage.parallel_map import parallel_map
from megablend.storage.ranges import FileRanges

_TRIED_READS = 8
"""Number of reads of a source that are tried: their first requests are actually sent, if only the
responses show what else a read requests."""


class SourceRequests:
    """Counts the requests that reads of a source's files would send.

    Args:
        store: a BlockStore that has opened none of the files.
        opened: numbers of the files to open; the other files are assumed to be similar.
        reads: for each stretch, its reads of the source.
    """

    def __init__(
        self, store: BlockStore, opened: set[int], reads: Sequence[Sequence[PlannedRead]]
    ) -> None:
        self._store = store
        self._num_tried = 0
        # Further requests and blocks of the reads whose first requests were sent
        self._later_requests = 0
        self._later_blocks = 0
        self._paths = {file: store.snapshot.path(file, store.roots) for file in opened}
        known = [planned for those in reads for planned in those if planned.read.file in opened]
        self.opening = self._open_files(known)
        """Figures for opening a file."""
        self._figures = {planned: self._count_known(planned) for planned in known}
        num_blocks = max(1, sum(len(planned.read.ids) for planned in known))
        stored_bytes = max(1, sum(planned.stored_bytes for planned in known))
        totals = np.sum(list(self._figures.values()), axis=0)
        # Requests per block, and requested bytes per stored byte
        self._mean_figures = totals / [num_blocks, stored_bytes, stored_bytes]

    def count(self, reads: Sequence[PlannedRead]) -> Float64s:
        """Return the sum of the figures of the reads of a stretch."""
        total = np.zeros(3)
        for planned in reads:
            total += [planned.num_dictionaries, planned.dictionary_bytes, planned.dictionary_bytes]
            if planned in self._figures:
                total += self._figures[planned]
            else:
                stored_bytes = planned.stored_bytes
                total += self._mean_figures * [len(planned.read.ids), stored_bytes, stored_bytes]
        return total

    def _open_files(self, reads: Sequence[PlannedRead]) -> Float64s:
        """Open each file by making one read of it. Return the mean figures for opening a file."""
        read_of_file = {planned.read.file: planned.read for planned in reads}

        def open_file(read: Read) -> None:
            self._store.begin_read(read.ids[:1], read.rows[:1])

        path = next(iter(self._paths.values()))
        threads = self._store.storage.limits(path).max_files
        before = count_requests()
        parallel_map(open_file, [*read_of_file.values()], threads)
        requests, num_bytes = np.subtract(count_requests(), before) / len(self._paths)
        return np.array([requests, num_bytes, num_bytes])

    def _count_known(self, planned: PlannedRead) -> Float64s:
        """Return the figures of a read of a file that has been opened, without dictionaries."""
        read = planned.read
        stored_bytes = planned.stored_bytes
        (file_read,) = self._store.begin_read(read.ids, read.rows)
        figures = np.zeros(3)
        is_first = True
        ranges = file_read.next_ranges()
        while ranges:
            path = self._paths[read.file]
            requested = np.sum(
                [self._count_ranges(file_ranges, path) for file_ranges in ranges], axis=0
            )
            figures += requested
            if not is_first:
                self._later_requests += requested[0]
                self._later_blocks += len(read.ids)
            if figures[2] >= stored_bytes:  # all stored bytes of the blocks
                break
            if self._num_tried >= _TRIED_READS:
                later_per_block = self._later_requests / max(1, self._later_blocks)
                num_requests = figures[0] + len(read.ids) * later_per_block
                return np.array([num_requests, stored_bytes, stored_bytes])
            self._num_tried += 1
            is_first = False
            for file_ranges in ranges:
                file_read.add(start_fetch(file_ranges, self._store.storage).result())
            ranges = file_read.next_ranges()
        return figures

    def _count_ranges(self, ranges: FileRanges, path: str) -> list[int]:
        """Return the number of requests, the least bytes, and the bytes that `ranges` of a read of the file at
        `path` take."""
        if ranges.is_shared:  # a dictionary
            return [0, 0, 0]
        requests = [
            request
            for offsets, sizes in plan_fetch(ranges, self._store.storage)
            for request in plan_requests(offsets, sizes, np.cumsum(sizes) - sizes)
        ]
        num_bytes = sum(stop - start for start, stop, _ in requests)
        # Another file, such as a long .idx, is requested only in part once other parts have been
        # checked
        least_bytes = num_bytes if ranges.path == path else 0
        return [len(requests), least_bytes, num_bytes]
