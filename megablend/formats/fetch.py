"""Fetch the bytes of blocks of any format. Nearby ranges are read together if the storage prefers
that."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Protocol, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.errors import ChangedFileError, CorruptFileError, UnsupportedFileError
from megablend.formats.base import Array, BlockReader
from megablend.formats.blocks import decoded_sizes
from megablend.formats.buffers import allocate_buffer
from megablend.formats.decoded import DecodedBlocks
from megablend.storage.base import Allocate, Bytes, ReadLimits, Storage
from megablend.storage.futures import gather_futures
from megablend.storage.ranges import FetchedRanges, FileRanges, MergedRanges, merge_ranges, portions
from megablend.system.log import LOG

T = TypeVar("T")
Check: TypeAlias = Callable[[FetchedRanges], None]
"""A function that checks fetched ranges, and raises a DataError if they are damaged."""
_POOLED_BYTES = 1 << 20
"""Requests of this size or more take their memory from Arrow's pool, which keeps freed memory:
malloc returns it to the system, and new memory for every batch is slow on first access. Smaller
requests do not use the pool: a call to it lets another thread run; and when other threads free many
small buffers, the pool keeps more memory than a small `memory` allows."""
_POOLED_BYTES_OF_CALLER = 1 << 15
"""The same limit for requests that a caller waits for: only one thread allocates and frees them."""
BATCH_BYTES = 32 << 20
"""Decoded size of the blocks that are fetched together if a caller waits for them: the memory that
a call needs beyond its result."""


def _allocate(size: int, pooled_bytes: int = _POOLED_BYTES) -> Bytes:
    """Allocate memory for a request, uint8 [size]; from Arrow's pool if it has `pooled_bytes` or
    more."""
    if size < pooled_bytes:
        return np.empty(size, np.uint8)
    return np.frombuffer(allocate_buffer(size), np.uint8)


_allocate_for_caller = partial(_allocate, pooled_bytes=_POOLED_BYTES_OF_CALLER)
"""Allocate memory for a request that a caller waits for."""


def start_fetch(ranges: FileRanges, storage: Storage) -> Future[FetchedRanges]:
    """Request ranges of a file from the storage; see Storage.fetch."""
    merged, requests = _merge(ranges, storage.limits(ranges.path))
    futures = [storage.fetch(ranges.path, *request, _allocate) for request in requests]
    return gather_futures(futures, lambda parts: _place_ranges(ranges, merged, parts))


def fetch_now(
    ranges: FileRanges, storage: Storage, allocate: Allocate = _allocate
) -> FetchedRanges:
    """Read ranges of a file before returning. Raises: see Storage.read."""
    merged, requests = _merge(ranges, storage.limits(ranges.path))
    parts = [storage.read_ranges(ranges.path, *request, allocate) for request in requests]
    return _place_ranges(ranges, merged, parts)


def plan_fetch(ranges: FileRanges, storage: Storage) -> list[tuple[Int64s, Int64s]]:
    """Return the requests to the storage that fetch ranges: for each request the offsets and the
    sizes, arrays of int64 [n]."""
    return _merge(ranges, storage.limits(ranges.path))[1]


def _merge(
    ranges: FileRanges, limits: ReadLimits
) -> tuple[MergedRanges, list[tuple[Int64s, Int64s]]]:
    """Join ranges into runs that are read together.

    Returns: the runs, and the offsets and sizes of the runs of each request. All runs are one
        request, unless decoded blocks keep the fetched bytes: each run is then a request of its
        own.
    """
    offsets = ranges.offsets
    sizes = ranges.sizes
    min_bytes = limits.separate_bytes
    has_owners = ranges.owners is not None and len(sizes)
    # Decoded blocks keep the fetched bytes: large ranges are read separately, to avoid copies
    if has_owners and min_bytes is not None and sizes.min() >= min_bytes:
        merged = MergedRanges(offsets, offsets + sizes, np.arange(len(offsets)))
    else:
        merged = merge_ranges(offsets, sizes, limits)
    starts = merged.starts
    run_sizes = merged.stops - starts
    if ranges.owners is None:
        return merged, [(starts, run_sizes)]
    return merged, [(starts[i : i + 1], run_sizes[i : i + 1]) for i in range(len(starts))]


# Not frozen, since it would take twice as long to make; only `fetched` changes
@dataclass(slots=True, eq=False)
class FileRead:
    """A read of blocks of one file, with the bytes that have been fetched for them so far."""

    reader: BlockReader
    blocks: Array
    """PLACED_BLOCK_DTYPE [n]."""
    chunks: Array
    """Chunk table of the file: CHUNK_DTYPE [m]."""
    tokens: bool = True
    """Whether tokens will be decoded; otherwise only documents are needed."""
    check: Check | None = None
    """A function that is called with all fetched ranges."""
    retry_storage: Storage | None = None
    """The storage from which damaged bytes are fetched once more; None for files on a local disk,
    since their bytes would be the same."""
    number: int = -1
    """Number of the file in the index; -1 if the file is not in an index."""
    fetched: list[FetchedRanges] = field(default_factory=list)
    """The fetched ranges, in the order of the requests."""

    def next_ranges(self) -> Sequence[FileRanges]:
        """Return the ranges to fetch next; empty when nothing more is needed. Raises: see
        BlockReader.byte_ranges."""
        find = partial(
            self.reader.byte_ranges, self.blocks, self.chunks, self.fetched, tokens=self.tokens
        )
        return self._use(find)

    def add(self, fetched: FetchedRanges) -> None:
        """Check the fetched ranges that `next_ranges` requested, and add them. Raises: see
        `check`."""
        if self.check is not None:
            self.check(fetched)
        self.fetched.append(fetched)

    def decode(self, *, pieces: bool = True) -> DecodedBlocks:
        """See BlockReader.decode."""
        decode = partial(self.reader.decode, self.blocks, self.chunks, self.fetched, pieces=pieces)
        return DecodedBlocks.of(self._use(decode))

    def find_pieces(self) -> tuple[list[npt.NDArray[np.int64]], int]:
        """See BlockReader.find_pieces."""
        return self._use(partial(self.reader.find_pieces, self.blocks, self.chunks, self.fetched))

    def _use(self, work: Callable[[], T]) -> T:
        """Call `work`, which uses `fetched`; if it finds that the bytes are damaged, fetch them
        once more, and call it again.

        Bytes that a network or a proxy has damaged are usually intact the next time. Headers, and
        pages with a CRC, show the damage.
        """
        if self.retry_storage is None:
            return work()
        try:
            return work()
        except (ChangedFileError, CorruptFileError, UnsupportedFileError) as error:
            LOG.warning(
                "%s: reading the bytes again, since they may have been damaged in transit",
                error,
            )
        fresh_read = replace(self, retry_storage=None, fetched=[])
        fetch_all([fresh_read], self.retry_storage)
        self.fetched[:] = fresh_read.fetched
        return work()


class JointReader(BlockReader, Protocol):
    """A reader that can decode blocks of several files in one call. A format may have other readers
    as well."""

    @property
    def alike(self) -> Hashable:
        """Return a key that is equal for readers of this class whose files can be decoded
        together."""
        ...

    def decode_jointly(self, reads: Sequence[FileRead], *, pieces: bool) -> DecodedBlocks | None:
        """Decode the blocks of all reads, in order, as `decode` does; return None if the reads have
        to be decoded one by one.

        Args:
            reads: reads whose readers are alike, with all bytes that they need.

        Raises: see `decode`. The error may name the wrong file: each read is then decoded by
            itself, and the error of that call is reported.
        """
        ...


def decode_all(reads: Sequence[FileRead], *, pieces: bool) -> list[DecodedBlocks]:
    """Decode reads whose bytes were fetched. Consecutive reads are decoded by one call if their
    readers are alike.

    Returns: the blocks of all reads, in order; an item has the blocks of one read or of several.
    Raises: see FileRead.decode.
    """

    def key(read: FileRead) -> tuple[type, Hashable]:
        return type(read.reader), getattr(read.reader, "alike", id(read))

    decoded = list[DecodedBlocks]()
    for _, group in groupby(reads, key):
        decoded += _decode_alike(list(group), pieces=pieces)
    return decoded


def _decode_alike(reads: Sequence[FileRead], *, pieces: bool) -> list[DecodedBlocks]:
    """Decode, in one call if possible, the blocks of reads whose readers have the same settings."""
    if len(reads) > 1:
        # An error is raised again, or not at all, when each read is decoded by itself
        with suppress(ChangedFileError, CorruptFileError, UnsupportedFileError):
            joint = cast("JointReader", reads[0].reader).decode_jointly(reads, pieces=pieces)
            if joint is not None:
                return [joint]
    return [read.decode(pieces=pieces) for read in reads]


def fetch_all(reads: Sequence[FileRead], storage: Storage) -> None:
    """Fetch all bytes that reads need, and wait for them. Raises: see Storage.read."""
    while True:
        begun = list[tuple[FileRead, FetchedRanges | Future[FetchedRanges]]]()
        for read in reads:
            for ranges in read.next_ranges():
                if storage.limits(ranges.path).is_synchronous:
                    begun.append((read, fetch_now(ranges, storage, _allocate_for_caller)))
                else:
                    begun.append((read, start_fetch(ranges, storage)))
        if not begun:
            return
        for read, fetched in begun:
            read.add(fetched.result() if isinstance(fetched, Future) else fetched)


def read_blocks(
    reader: BlockReader,
    blocks: Array,
    chunks: Array,
    storage: Storage,
    *,
    pieces: bool = True,
    batch_bytes: int = BATCH_BYTES,
) -> DecodedBlocks:
    """Fetch and decode blocks of one file; see BlockReader.decode.
    Raises: see BlockReader.decode and Storage.read."""
    parts = list[DecodedBlocks]()
    order = np.argsort(blocks["offset"], kind="stable")
    for batch in _batches(blocks, order, batch_bytes):
        read = FileRead(reader, batch, chunks)
        fetch_all([read], storage)
        parts.append(read.decode(pieces=pieces))
    if not parts:
        return DecodedBlocks.of([])
    return DecodedBlocks.joined(parts).taken(np.argsort(order))


def read_pieces(
    reader: BlockReader,
    blocks: Array,
    chunks: Array,
    storage: Storage,
    check: Check | None = None,
    retry_storage: Storage | None = None,
) -> tuple[list[npt.NDArray[np.int64]], int]:
    """Fetch blocks of one file, and find the documents in them; see BlockReader.find_pieces."""
    all_offsets = list[npt.NDArray[np.int64]]()
    scanned_bytes = 0
    order = np.argsort(blocks["offset"], kind="stable")
    for batch in _batches(blocks, order):
        read = FileRead(
            reader, batch, chunks, tokens=False, check=check, retry_storage=retry_storage
        )
        fetch_all([read], storage)
        offsets, size = read.find_pieces()
        all_offsets += offsets
        scanned_bytes += size
    return [all_offsets[i] for i in np.argsort(order).tolist()], scanned_bytes


def _batches(blocks: Array, order: Int64s, batch_bytes: int = BATCH_BYTES) -> Iterator[Array]:
    """Yield blocks, sorted by `order`, in batches that are processed together."""
    ordered = blocks[order]
    for part in portions(decoded_sizes(ordered), batch_bytes):
        yield ordered[part]


def _place_ranges(
    ranges: FileRanges, merged: MergedRanges, read: list[tuple[Bytes, Int64s]]
) -> FetchedRanges:
    """Locate ranges in the buffers that were read. `read` has the buffers, each with the positions
    at which runs begin in it."""
    offsets_in_runs = ranges.offsets - merged.starts[merged.runs]
    runs = merged.runs
    if ranges.owners is None:
        data, run_begins = read[0]
        buffer_of = np.zeros(len(runs), np.int64)
        return FetchedRanges(ranges, [data], buffer_of, run_begins[runs] + offsets_in_runs)
    buffers = [data for data, _ in read]
    run_begins = np.array([int(begins[0]) for _, begins in read], np.int64)
    fetched = FetchedRanges(ranges, buffers, runs, run_begins[runs] + offsets_in_runs)
    return _separate(fetched, ranges.owners)


def _separate(fetched: FetchedRanges, owners: Int64s) -> FetchedRanges:
    """Copy ranges out of buffers that contain ranges of several owners, so that keeping one block
    does not keep the bytes of other blocks in memory."""
    if len(fetched.buffers) == len(owners):
        return fetched
    order = np.lexsort((owners, fetched.buffer_of))
    # A buffer is shared if two neighbours in this order have it, but not the same owner
    sorted_buffers = fetched.buffer_of[order]
    sorted_owners = owners[order]
    same_buffer = sorted_buffers[1:] == sorted_buffers[:-1]
    other_owner = sorted_owners[1:] != sorted_owners[:-1]
    is_shared = np.zeros(len(fetched.buffers), np.bool_)
    is_shared[sorted_buffers[1:][same_buffer & other_owner]] = True
    copied = is_shared[fetched.buffer_of]
    buffers = list(fetched.buffers)
    buffer_of = fetched.buffer_of.copy()
    begins = fetched.begins.copy()
    for i in np.flatnonzero(copied).tolist():
        buffer_of[i] = len(buffers)
        begins[i] = 0
        buffers.append(fetched[i].copy())
    return FetchedRanges(fetched.ranges, buffers, buffer_of, begins)
