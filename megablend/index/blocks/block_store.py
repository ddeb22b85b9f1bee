"""Read blocks of an index by number: find and open their files, decode them, and insert
end-of-document tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s, running_totals
from megablend.errors import CHANGED_REMEDY, CorruptFileError
from megablend.formats.base import NO_OFFSETS, Array, DecodedBlock
from megablend.formats.blocks import decoded_sizes
from megablend.formats.decoded import DecodedBlocks
from megablend.formats.eod import with_eod
from megablend.formats.fetch import BATCH_BYTES, FileRead, decode_all, fetch_all, read_pieces
from megablend.index.blocks.block_sizes import BlockSizes
from megablend.index.blocks.extra_columns import ExtraColumn, list_extra_blocks, read_extra_columns
from megablend.index.blocks.open_files import OpenFiles
from megablend.index.read.joined_snapshot import JoinedSnapshot
from megablend.index.read.snapshot import Snapshot
from megablend.index.tables.source_entry import ColumnEntry, SourceEntry
from megablend.lazy import cached_property
from megablend.lru import LRUCache
from megablend.storage.base import ReadLimits, Storage
from megablend.storage.ranges import portions
from megablend.system.failures import translating


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """The tokens of several blocks, one block after another."""

    tokens: npt.NDArray[Any]
    """[num_tokens], in the widest token dtype among the blocks."""
    offsets: npt.NDArray[np.int64]
    """Offsets of the pieces: int64 [num_pieces + 1]. A piece is a document, or the part of a
    document that is in one block. Piece i is tokens[offsets[i]:offsets[i+1]]."""
    block_offsets: npt.NDArray[np.int64]
    """Offsets of the blocks: int64 [num_blocks + 1]. Block j is
    tokens[block_offsets[j]:block_offsets[j+1]]."""


class BlockStore(BlockSizes):
    """Reads the blocks of one index by number. A store can be shared between threads, pickled, and
    used after a fork.

    Args:
        snapshot: the opened index.
        append_eod: for each source of the index, the token inserted after each document, or None.
        roots: source name -> folder of the source's files. For a source without an entry, the
            folder that the last build recorded is used.
        extra: the columns to read with the tokens, by source name.
        extra_bytes: maximum size in bytes of the cache of decoded pages of extra columns, since
            several blocks of tokens may need the same page.
        storage: the storage that reads the files.
    """

    first_blocks: tuple[int, ...] = (0,)
    """For each of `stores`, the number of its first block in this store."""

    def __init__(
        self,
        snapshot: Snapshot,
        append_eod: Sequence[int | None] = (),
        roots: Mapping[str, str] | None = None,
        extra: Mapping[str, tuple[ExtraColumn, ...]] | None = None,
        extra_bytes: int = 0,
        *,
        storage: Storage,
    ) -> None:
        self.storage = storage
        self.snapshot = snapshot
        self.append_eod = (*append_eod, *[None] * (len(snapshot.columns) - len(append_eod)))
        """End-of-document tokens of the sources, and None for each extra column: [num_columns]."""
        self.roots = dict(roots or {})
        self.extra = dict(extra or {})
        self._changes_blocks = bool(self.extra) or not {None}.issuperset(self.append_eod)
        """Whether end-of-document tokens or extra columns are added to the decoded blocks of any
        source."""
        self.extra_bytes = extra_bytes
        self.damaged: set[int] = set()
        """Numbers of blocks that were found damaged and replaced; see `damaged_blocks`."""
        self._extra_blocks = LRUCache[DecodedBlock](extra_bytes, _count_bytes)
        self._files = OpenFiles(snapshot, self.roots, storage)

    @property
    def source_eods(self) -> tuple[int | None, ...]:
        """End-of-document tokens of the sources: `append_eod` without the items for extra columns
        ([num_sources])."""
        return self.append_eod[: len(self.snapshot.sources)]

    @property
    def stores(self) -> tuple[BlockStore, ...]:
        """The stores of a run's snapshots. A JoinedStore has one per snapshot; other stores have
        only themselves."""
        return (self,)

    @cached_property
    def max_reads(self) -> int:
        """Number of reads to keep in flight: the largest number that the storage of any source
        prefers."""
        return max((limits.max_reads for limits in self._limits), default=1)

    @cached_property
    def is_synchronous(self) -> bool:
        """Whether the storages of all sources complete reads before `fetch` returns."""
        return all(limits.is_synchronous for limits in self._limits)

    @cached_property
    def max_files(self) -> int:
        """Number of files to read at a time when whole files are read: the largest number that the
        storage of any source prefers."""
        return max((limits.max_files for limits in self._limits), default=1)

    @cached_property
    def _limits(self) -> list[ReadLimits]:
        _, first_files = np.unique(self.snapshot.files.columns, return_index=True)
        paths = (self.snapshot.path(file, self.roots) for file in first_files.tolist())
        return [self.storage.limits(path) for path in paths]

    def read(
        self, ids: npt.ArrayLike, *, rows: Array | None = None, pieces: bool = True
    ) -> DecodedBlocks:
        """Read and decode blocks.

        Args:
            ids: int64 [n], block numbers of the index, in any order and possibly repeated.
            rows: PLACED_BLOCK_DTYPE [n], the blocks' rows of the block table, if the caller has
                already looked them up.
            pieces: whether to return document offsets; otherwise `offsets` are NO_OFFSETS.

        Raises: IndexError for a number out of range; TypeError for non-integers; MissingFileError,
            ChangedFileError, CorruptFileError.
        """
        numbers = self._checked(ids)
        order = None
        if (np.diff(numbers) < 0).any():
            # In the order of the files
            order = np.argsort(numbers, kind="stable")
            numbers = numbers[order]
            rows = None if rows is None else rows[order]
        parts = list[DecodedBlocks]()
        with translating(str(self.snapshot.folder)):
            if rows is None:
                rows = self.snapshot.blocks(numbers)
            for part in portions(decoded_sizes(rows), BATCH_BYTES):
                reads = self.begin_read(numbers[part], rows[part])
                fetch_all(reads, self.storage)
                parts.append(self.decode(numbers[part], reads, pieces=pieces))
        blocks = DecodedBlocks.joined(parts)
        return blocks if order is None else blocks.taken(np.argsort(order))

    def begin_read(self, numbers: npt.NDArray[np.int64], rows: Array) -> list[FileRead]:
        """Open the files of blocks. The caller then fetches the bytes of each read (see
        `formats.fetch`), and calls `decode`.

        Args:
            numbers: int64 [n], numbers of the blocks, ascending.
            rows: PLACED_BLOCK_DTYPE [n], the blocks' rows of the block table (`snapshot.blocks`).

        Returns: one read per file, in the order of the blocks.
        Raises: see `read`.
        """
        reads = list[FileRead]()
        for file, in_file in self.cut_by_file(numbers):
            opened = self._files.get(file)
            reads.append(
                FileRead(
                    opened.reader,
                    rows[in_file],
                    opened.chunks,
                    check=opened.check,
                    retry_storage=opened.retry_storage,
                    number=file,
                )
            )
        return reads

    def decode(
        self, numbers: npt.NDArray[np.int64], reads: Sequence[FileRead], *, pieces: bool
    ) -> DecodedBlocks:
        """Decode blocks whose bytes have been fetched.

        Args:
            numbers: int64 [n], numbers of the blocks.
            reads: the result of `begin_read` for these blocks.
            pieces: as in `read`.

        Raises: see `read`.
        """
        if not self._changes_blocks:
            blocks = DecodedBlocks.joined(decode_all(reads, pieces=pieces))
            return blocks if pieces else blocks.without_offsets()
        parts = list[DecodedBlocks]()
        stop = 0
        for read in reads:
            start = stop
            stop = stop + len(read.blocks)
            parts.append(self._decode_file(numbers[start:stop], read, pieces=pieces))
        return DecodedBlocks.joined(parts)

    def reads_more(self, reads: Sequence[FileRead]) -> bool:
        """Return whether `decode` will itself read more files. These are the files of extra
        columns, whose blocks are known only after the tokens have been decoded."""
        return bool(self.extra) and any(self._extra_of(self._column_of(read)) for read in reads)

    def list_extra_blocks(self, ids: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
        """Yield, for each extra column, the column's blocks that are read while blocks of tokens
        are decoded.

        Args:
            ids: int64 [n], numbers of the blocks of tokens, ascending.

        Yields: the numbers of the column's blocks, int64 [m]; and for each of them, the position in
            `ids` of the block of tokens that needs it, int64 [m].
        """
        if not self.extra:
            return
        for number, source in enumerate(self.snapshot.sources):
            columns = self._extra_of(source)
            begin, stop = np.searchsorted(ids, [source.blocks.start, source.blocks.stop]).tolist()
            if columns is not None and begin < stop:
                has_eod = self.append_eod[number] is not None
                needed = list_extra_blocks(
                    self.snapshot, columns, source, ids[begin:stop], has_eod=has_eod
                )
                for numbers, positions in needed:
                    yield numbers, begin + positions

    def _column_of(self, read: FileRead) -> ColumnEntry:
        return self.snapshot.columns[int(self.snapshot.files.columns[read.number])]

    def _extra_of(self, column: ColumnEntry) -> tuple[ExtraColumn, ...] | None:
        return self.extra.get(column.source_name) if isinstance(column, SourceEntry) else None

    def _decode_file(
        self, ids: npt.NDArray[np.int64], read: FileRead, *, pieces: bool
    ) -> DecodedBlocks:
        """Decode blocks of one file, and add end-of-document tokens and extra columns."""
        column = int(self.snapshot.files.columns[read.number])
        source = self.snapshot.columns[column]
        append_eod = self.append_eod[column]
        columns = self._extra_of(source)
        blocks: Sequence[DecodedBlock] = read.decode(
            pieces=pieces or append_eod is not None or columns is not None
        )
        if append_eod is None and columns is None:
            decoded = DecodedBlocks.of(blocks)
            return decoded if pieces else decoded.without_offsets()
        extra: list[tuple[Array, ...]] = [()] * len(ids)
        if columns is not None:
            assert isinstance(source, SourceEntry)
            read_cached = partial(self._extra_blocks.get_all, make=self.read)
            has_eod = append_eod is not None
            extra = read_extra_columns(
                self.snapshot, columns, source, read_cached, ids, blocks, has_eod=has_eod
            )
        if append_eod is not None:
            flags = read.blocks["flags"].tolist()
            blocks = [
                with_eod(block, flag, append_eod) for block, flag in zip(blocks, flags, strict=True)
            ]
            self._check_ends(ids, read.blocks, blocks)
        return DecodedBlocks.of(
            [
                DecodedBlock(block.tokens, block.offsets if pieces else NO_OFFSETS, numbers)
                for block, numbers in zip(blocks, extra, strict=True)
            ]
        )

    def _check_ends(
        self, ids: npt.NDArray[np.int64], rows: Array, blocks: Sequence[DecodedBlock]
    ) -> None:
        """Check that the number of end-of-document tokens added to each block agrees with the
        index. Raises: CorruptFileError."""
        ends = np.array([len(block.tokens) for block in blocks], np.int64) - rows["tokens"]
        wrong = np.flatnonzero(ends != rows["ends"])
        if len(wrong):
            first = wrong[0]
            path = self.snapshot.path(int(self.snapshot.file_of(ids[first:])[0]), self.roots)
            raise CorruptFileError(
                path,
                f"{ends[first]} documents with tokens end in this block, but {rows['ends'][first]} did when it was "
                f"indexed; {CHANGED_REMEDY}",
                offset=int(rows["offset"][first]),
            )

    def pieces(self, ids: npt.ArrayLike) -> tuple[list[npt.NDArray[np.int64]], int]:
        """Return the document offsets of blocks, in the order of `ids`, and the number of data
        bytes that were read; see BlockReader.find_pieces. The offsets do not count end-of-document
        tokens. Raises: see `read`."""
        numbers = self._checked(ids)
        order = np.argsort(numbers, kind="stable")
        rows = self.snapshot.blocks(numbers[order])
        all_offsets = list[npt.NDArray[np.int64]]()
        scanned_bytes = 0
        for file, in_file in self.cut_by_file(numbers[order]):
            opened = self._files.get(file)
            offsets, size = read_pieces(
                opened.reader,
                rows[in_file],
                opened.chunks,
                self.storage,
                opened.check,
                opened.retry_storage,
            )
            scanned_bytes += size
            all_offsets += offsets
        return [all_offsets[i] for i in np.argsort(order).tolist()], scanned_bytes

    def read_blocks(self, ids: npt.ArrayLike) -> BlockBatch:
        """Read the tokens and the document pieces of any blocks, and return them in the requested
        order. Raises: see `read`."""
        blocks = self.read(ids)
        if not blocks:
            return BlockBatch(np.empty(0, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64))
        block_offsets = running_totals([len(block.tokens) for block in blocks])
        pieces = [
            block.offsets[1:] + start for block, start in zip(blocks, block_offsets, strict=False)
        ]
        return BlockBatch(
            np.concatenate([block.tokens for block in blocks]),
            np.concatenate([[0], *pieces]),
            block_offsets,
        )

    def _checked(self, ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Check block numbers from a caller, and return them as int64 [n]. Raises: IndexError,
        TypeError."""
        values = np.asarray(ids)
        if values.size and values.dtype.kind not in "iu":
            raise TypeError(f"block numbers must be integers, not {values.dtype}")
        numbers: npt.NDArray[np.int64] = values.astype(np.int64).reshape(-1)
        num_blocks = self.snapshot.num_blocks
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < num_blocks):
            wrong = numbers[(numbers < 0) | (numbers >= num_blocks)][0]
            raise IndexError(
                f"block {wrong} is out of range: the index has blocks 0 to {num_blocks - 1}"
            )
        return numbers

    def cut_by_file(self, numbers: npt.NDArray[np.int64]) -> Iterator[tuple[int, slice]]:
        """Group blocks by file. Yield the number of each file, and the slice of `numbers` that
        contains its blocks (`numbers`: int64 [n], ascending)."""
        files = self.snapshot.file_of(numbers)
        firsts = np.flatnonzero(np.diff(files, prepend=-1))
        for start, stop in pairwise([*firsts.tolist(), len(files)]):
            yield int(files[start]), slice(start, stop)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "snapshot": self.snapshot,
            "append_eod": self.append_eod,
            "roots": self.roots,
            "extra": self.extra,
            "extra_bytes": self.extra_bytes,
            "storage": self.storage,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _count_bytes(block: DecodedBlock) -> int:
    return block.tokens.nbytes + block.offsets.nbytes


class JoinedStore(BlockStore):
    """Reads the blocks of all snapshots of a run as if they were one index. The attribute `stores`
    has a store for each snapshot."""

    def __init__(
        self,
        stores: Sequence[BlockStore],
        extra: Mapping[str, tuple[ExtraColumn, ...]],
        roots: Mapping[str, str],
        *,
        storage: Storage,
    ) -> None:
        """Join the stores of a run's snapshots.

        Args:
            extra: the extra columns of each source, as they are in the store of its snapshot, by
                the source's name in the JoinedSnapshot.
            roots: the folder of each source's files, by the same names.
        """
        self._stores = tuple(stores)
        snapshot = JoinedSnapshot([store.snapshot for store in stores])
        append_eod = [eod for store in stores for eod in store.source_eods]
        moved = {
            source.name: tuple(_move(column, source) for column in extra[source.name])
            for source in snapshot.sources
            if source.name in extra
        }
        super().__init__(
            snapshot, append_eod, roots, moved, stores[-1].extra_bytes, storage=storage
        )
        self.first_blocks = tuple(snapshot.first_blocks[:-1].tolist())

    @property
    def stores(self) -> tuple[BlockStore, ...]:
        """A store for each snapshot."""
        return self._stores

    def __getstate__(self) -> dict[str, Any]:
        return {
            "stores": self._stores,
            "extra": self.extra,
            "roots": self.roots,
            "storage": self.storage,
        }


def _move(column: ExtraColumn, source: SourceEntry) -> ExtraColumn:
    """Convert an extra column of a snapshot to an extra column of `source`, a source of the
    JoinedSnapshot."""
    entry = source.find_extra(column.column)
    assert entry is not None, column.column
    return dataclasses.replace(column, entry=entry)
