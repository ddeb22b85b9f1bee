"""Fetching the bytes of blocks of any format;
nearby ranges are read together, as their storage prefers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
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
_POOLED_BYTES = 1 << 20
"""Requests of this size or more take their memory from Arrow's pool, which keeps what was freed:
malloc returns it to the system, and what it takes from there for every batch is slow on first
access. A call to the pool lets another thread run, and of many smaller requests, freed by other
threads, the pool keeps more than a small `memory` allows."""
_POOLED_BYTES_OF_CALLER = 1 << 15
"""The same where a caller waits for all that it reads, so that one thread requests memory, and
frees it."""
BATCH_BYTES = 32 << 20
"""Decoded size of the blocks fetched together if a caller waits for all: the memory a call needs
beyond its result."""


def _allocate(size: int) -> Bytes:
    """Memory for a request."""
    return (
        np.empty(size, np.uint8)
        if size < _POOLED_BYTES
        else np.frombuffer(allocate_buffer(size), np.uint8)
    )


def _allocate_for_caller(size: int) -> Bytes:
    """Memory for a request that a caller waits for."""
    return (
        _allocate(size)
        if size < _POOLED_BYTES_OF_CALLER
        else np.frombuffer(allocate_buffer(size), np.uint8)
    )


def start_fetch(ranges: FileRanges, storage: Storage) -> Future[FetchedRanges]:
    """Request ranges of a file from the storage; see Storage.fetch."""
    merged = _merge(ranges, storage.limits(ranges.path))
    read = [storage.fetch(ranges.path, *places, _allocate) for places in _requests(ranges, merged)]
    return gather_futures(read, lambda parts: _place_ranges(ranges, merged, parts))


def fetch_now(
    ranges: FileRanges, storage: Storage, allocate: Allocate = _allocate
) -> FetchedRanges:
    """Read ranges of a file before returning. Raises as Storage.read does."""
    merged = _merge(ranges, storage.limits(ranges.path))
    read = [
        storage.read_ranges(ranges.path, *places, allocate) for places in _requests(ranges, merged)
    ]
    return _place_ranges(ranges, merged, read)


def plan_fetch(ranges: FileRanges, storage: Storage) -> list[tuple[Int64s, Int64s]]:
    """The calls of the storage that fetch ranges: offsets and sizes, int64 [n], of each."""
    return _requests(ranges, _merge(ranges, storage.limits(ranges.path)))


def _merge(ranges: FileRanges, limits: ReadLimits) -> MergedRanges:
    """The ranges that are read together."""
    offsets = ranges.offsets
    sizes = ranges.sizes
    least = limits.separate_bytes
    if ranges.owners is not None and least is not None and len(sizes) and sizes.min() >= least:
        return MergedRanges(offsets, offsets + sizes, np.arange(len(offsets)))
    return merge_ranges(offsets, sizes, limits)


def _requests(ranges: FileRanges, merged: MergedRanges) -> list[tuple[Int64s, Int64s]]:
    """Offsets and sizes of the runs of each request:
    one for all, or for each run if blocks keep their bytes."""
    starts = merged.starts
    sizes = merged.stops - merged.starts
    if ranges.owners is None:
        return [(starts, sizes)]
    return [(starts[i : i + 1], sizes[i : i + 1]) for i in range(len(starts))]


@dataclass(slots=True, eq=False)  # frozen, each would take twice as long to make
class FileRead:
    """Blocks of one file, and their bytes fetched so far. Only `fetched` changes."""

    reader: BlockReader
    blocks: Array
    """PLACED_BLOCK_DTYPE [n]."""
    chunks: Array
    """CHUNK_DTYPE [m], the file's."""
    tokens: bool = True
    """Whether tokens will be decoded; otherwise only their documents are needed."""
    check: Check | None = None
    """Called with all that was fetched."""
    retry_storage: Storage | None = None
    """Fetches bytes that turn out to be damaged once more; None on a local disk, where they would
    be the same."""
    number: int = -1
    """Of the file in its index; -1 where it is in none."""
    fetched: list[FetchedRanges] = field(default_factory=list)
    """The fetched ranges, in the order of the requests."""

    def next_ranges(self) -> Sequence[FileRanges]:
        """The ranges to fetch next; empty when everything is there. Raises as
        BlockReader.byte_ranges does."""

        def find(read: FileRead) -> Sequence[FileRanges]:
            return read.reader.byte_ranges(
                read.blocks, read.chunks, read.fetched, tokens=read.tokens
            )

        return self._use(find)

    def add(self, fetched: FetchedRanges) -> None:
        """Add the ranges that were requested next, once they are checked. Raises: as `check`."""
        if self.check is not None:
            self.check(fetched)
        self.fetched.append(fetched)

    def decode(self, *, pieces: bool = True) -> DecodedBlocks:
        """See BlockReader.decode."""

        def decode(read: FileRead) -> DecodedBlocks:
            return DecodedBlocks.of(
                read.reader.decode(read.blocks, read.chunks, read.fetched, pieces=pieces)
            )

        return self._use(decode)

    def find_pieces(self) -> tuple[list[npt.NDArray[np.int64]], int]:
        """See BlockReader.find_pieces."""
        return self._use(
            lambda read: read.reader.find_pieces(read.blocks, read.chunks, read.fetched)
        )

    def _use(self, work: Callable[[FileRead], T]) -> T:
        """What `work` makes of the bytes; if they turn out to be damaged, of the same bytes
        fetched once more.

        What a network or a proxy damages is whole the next time;
        pages with a CRC, and headers, show it.
        """
        if self.retry_storage is None:
            return work(self)
        try:
            return work(self)
        except (ChangedFileError, CorruptFileError, UnsupportedFileError) as error:
            LOG.warning(
                "%s: reading the bytes again, since they may have been damaged in transit",
                error,
            )
        again = replace(self, retry_storage=None, fetched=[])
        fetch_all([again], self.retry_storage)
        self.fetched[:] = again.fetched
        return work(again)


class JointReader(BlockReader, Protocol):
    """A reader that decodes blocks of several files in one call;
    a format may have other readers as well."""

    @property
    def alike(self) -> Hashable:
        """A key that is equal for readers of this class whose files can be decoded together."""
        ...

    def decode_jointly(self, reads: Sequence[FileRead], *, pieces: bool) -> DecodedBlocks | None:
        """The blocks of all reads, one read after the other, as `decode` returns them;
        None if they have to be decoded one by one.

        Args:
            reads: of readers that are alike, and everything that they need.

        Raises: as `decode` does; which file it names does not matter, since each is then decoded by
            itself.
        """
        ...


def decode_all(reads: Sequence[FileRead], *, pieces: bool) -> list[DecodedBlocks]:
    """Decode reads whose bytes were fetched, those of consecutive files together if their
    readers can: fewer calls.

    Returns: the blocks of all reads, in order; how many reads an item is of is not defined.
    Raises: as FileRead.decode does.
    """
    found = list[DecodedBlocks]()
    for _, group in groupby(
        reads, lambda read: (type(read.reader), getattr(read.reader, "alike", id(read)))
    ):
        found += _decode_alike(list(group), pieces=pieces)
    return found


def _decode_alike(reads: Sequence[FileRead], *, pieces: bool) -> list[DecodedBlocks]:
    """Decode, in one call if possible, the blocks of reads whose readers have the same settings."""
    if len(reads) > 1:
        # Told, and tried again, file by file
        with suppress(ChangedFileError, CorruptFileError, UnsupportedFileError):
            joint = cast("JointReader", reads[0].reader).decode_jointly(reads, pieces=pieces)
            if joint is not None:
                return [joint]
    return [read.decode(pieces=pieces) for read in reads]


def fetch_all(reads: Sequence[FileRead], storage: Storage) -> None:
    """Fetch everything that reads need, and wait for it. Raises as Storage.read does."""

    def begin(ranges: FileRanges) -> FetchedRanges | Future[FetchedRanges]:
        if storage.limits(ranges.path).is_synchronous:
            return fetch_now(ranges, storage, _allocate_for_caller)
        return start_fetch(ranges, storage)

    while needed := [(read, ranges) for read in reads for ranges in read.next_ranges()]:
        fetched = [begin(ranges) for _, ranges in needed]
        for (read, _), each in zip(needed, fetched, strict=True):
            read.add(each.result() if isinstance(each, Future) else each)


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
    Raises also as Storage.read does."""
    parts = list[DecodedBlocks]()
    order = np.argsort(blocks["offset"], kind="stable")
    for mine in _batches(blocks, order, batch_bytes):
        read = FileRead(reader, mine, chunks)
        fetch_all([read], storage)
        parts.append(read.decode(pieces=pieces))
    return DecodedBlocks.joined(parts).taken(np.argsort(order)) if parts else DecodedBlocks.of([])


def read_pieces(
    reader: BlockReader,
    blocks: Array,
    chunks: Array,
    storage: Storage,
    check: Check | None = None,
    retry_storage: Storage | None = None,
) -> tuple[list[npt.NDArray[np.int64]], int]:
    """Fetch and find the documents in blocks of one file; see BlockReader.find_pieces."""
    found = list[npt.NDArray[np.int64]]()
    scanned_bytes = 0
    order = np.argsort(blocks["offset"], kind="stable")
    for mine in _batches(blocks, order):
        read = FileRead(
            reader, mine, chunks, tokens=False, check=check, retry_storage=retry_storage
        )
        fetch_all([read], storage)
        offsets, size = read.find_pieces()
        found += offsets
        scanned_bytes += size
    return [found[i] for i in np.argsort(order).tolist()], scanned_bytes


def _batches(blocks: Array, order: Int64s, batch_bytes: int = BATCH_BYTES) -> Iterator[Array]:
    """Blocks in an order, in batches that are processed together."""
    ordered = blocks[order]
    for part in portions(decoded_sizes(ordered), batch_bytes):
        yield ordered[part]


def _place_ranges(
    ranges: FileRanges, merged: MergedRanges, read: list[tuple[Bytes, Int64s]]
) -> FetchedRanges:
    """The positions of ranges in the buffers of their runs."""
    inside = ranges.offsets - merged.starts[merged.runs]
    runs = merged.runs
    if ranges.owners is None:
        data, begins = read[0]
        return FetchedRanges(ranges, [data], np.zeros(len(runs), np.int64), begins[runs] + inside)
    begins = np.array([int(places[0]) for _, places in read], np.int64)
    return _separate(
        FetchedRanges(ranges, [data for data, _ in read], runs, begins[runs] + inside),
        ranges.owners,
    )


def _separate(found: FetchedRanges, owners: Int64s) -> FetchedRanges:
    """Copy ranges out of buffers shared by several owners."""
    if len(found.buffers) == len(owners):
        return found
    order = np.lexsort((owners, found.buffer_of))
    is_other = (found.buffer_of[order[1:]] == found.buffer_of[order[:-1]]) & (
        owners[order[1:]] != owners[order[:-1]]
    )
    is_shared = np.zeros(len(found.buffers), np.bool_)
    is_shared[found.buffer_of[order[1:][is_other]]] = True
    copied = is_shared[found.buffer_of]
    buffers = list(found.buffers)
    buffer_of = found.buffer_of.copy()
    begins = found.begins.copy()
    for i in np.flatnonzero(copied).tolist():
        buffer_of[i] = len(buffers)
        begins[i] = 0
        buffers.append(found[i].copy())
    return FetchedRanges(found.ranges, buffers, buffer_of, begins)
