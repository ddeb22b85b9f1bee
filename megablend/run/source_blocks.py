"""The blocks of a source in the snapshots of a run, and how much of the source's epochs is left
after files are withdrawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.blend.epochs import Segment
from megablend.index.blocks.growing_splits import SplitRanges
from megablend.index.blocks.splits import SplitBlocks
from megablend.index.blocks.withdrawn_blocks import RemainingBlocks
from megablend.index.read.snapshot import Snapshot
from megablend.index.tables.source_entry import SourceEntry
from megablend.order.registry import find_order


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitData:
    """The documents of a split's sources in one snapshot."""

    snapshot: Snapshot
    first_block: int
    """Number of the snapshot's first block among the blocks of all snapshots of the run."""
    numbers: npt.NDArray[np.int64]
    """int64 [num_sources]: the number of each source in the snapshot; -1 if the snapshot does not
    have it."""
    splits: SplitRanges
    column: int
    """Number of the split in `splits`."""
    parts: npt.NDArray[np.void]
    """PART_DTYPE [num_sources]: for each source, one part in blocks of the run. It reaches from the
    beginning of the split's first range of documents to the end of the last range; zeros if the
    snapshot does not have the source."""

    @property
    def tokens(self) -> list[int]:
        """Tokens per epoch of each source, including end-of-document tokens."""
        tokens: list[int] = self.parts["tokens"].tolist()
        return tokens

    @property
    def has_source(self) -> npt.NDArray[np.bool_]:
        """bool [num_sources]: whether the snapshot has each source."""
        has_source: npt.NDArray[np.bool_] = self.numbers >= 0
        return has_source


@dataclass(frozen=True, kw_only=True)
class SourceBlocks:
    """A source of a split, in all snapshots of a run that have it."""

    name: str
    """Name of the source in the index."""
    number: int
    """Number of the source in the split."""
    snapshots: Mapping[str, SplitData]
    """The snapshots that have the source, by digest."""
    appends_eod: bool
    """Whether an end-of-document token follows each document."""
    key: int
    """Random key of the source's orders."""

    def blocks(self, snapshot: str) -> SplitBlocks:
        """Return the blocks of the source in a snapshot, given by its digest."""
        split_snapshot = self.snapshots[snapshot]
        documents = split_snapshot.splits.ranges(
            int(split_snapshot.numbers[self.number]), split_snapshot.column
        )
        return SplitBlocks(split_snapshot.snapshot, documents, has_eod=self.appends_eod)

    def view(self, segment: Segment) -> SplitBlocks | RemainingBlocks:
        """Return the blocks that a segment's epochs read: the blocks of its snapshot, except those
        of withdrawn files."""
        blocks = self.blocks(segment.snapshot)
        if not segment.withdrawn:
            return blocks
        return self._leave_out(blocks, sorted(self._find_withdrawn(segment)))

    def loses_files(self, segment: Segment, index: str) -> bool:
        """Return whether the snapshot `index` has the source, but lacks files that the segment's
        epochs read."""
        if (
            segment.snapshot == index
            or index not in self.snapshots
            or segment.snapshot not in self.snapshots
        ):
            return False
        missing = set(self._list_missing(segment.snapshot, index))
        return bool(missing - self._find_withdrawn(segment))

    def count_left(self, segment: Segment, index: str, epoch: int, token: int) -> tuple[int, int]:
        """See `Withdrawals.count_left`."""
        now = self.view(segment)
        left = self.view(segment._replace(withdrawn=(*segment.withdrawn, index)))
        files = self._list_missing(segment.snapshot, index)
        ranges = self._find_blocks(self.blocks(segment.snapshot), files)
        if not len(ranges):  # all documents of the files belong to other splits
            return left.num_tokens, token
        missing = np.concatenate([np.arange(first, stop) for first, stop in ranges.tolist()])
        starts = now.before(missing)
        stops = now.before(missing + 1)
        has_tokens = starts < stops
        order = find_order(segment.order).make(now, self.key)
        placed = order.find_tokens(epoch, starts[has_tokens], stops[has_tokens])
        # How many tokens of missing files come before the given one
        stop = epoch * now.num_tokens + token
        read = np.clip(np.minimum(placed.stops, stop) - placed.starts, 0, None).sum()
        return left.num_tokens, token - int(read)

    def _leave_out(self, blocks: SplitBlocks, files: list[int]) -> SplitBlocks | RemainingBlocks:
        """Return blocks without those of the given files, which are numbers in the snapshot."""
        snapshot = blocks.snapshot
        entry = self._entry(blocks.snapshot)
        ranges = self._find_blocks(blocks, files)
        if not len(ranges):
            return blocks

        def find_documents() -> Int64s:
            rows = np.array([snapshot.files.entry(i).rows for i in entry.files], np.int64)
            before = np.concatenate([[0], np.cumsum(rows)])
            numbers = np.array(files) - entry.files.start
            return _drop_empty(
                blocks.documents.local_blocks(
                    np.stack([before[numbers], before[numbers + 1]], axis=1)
                )
            )

        return RemainingBlocks(blocks, ranges, find_documents)

    def _find_blocks(self, blocks: SplitBlocks, files: list[int]) -> Int64s:
        """Return the ranges [start, stop) of the local blocks of files: int64 [n, 2]."""
        listed = [blocks.snapshot.files.entry(i) for i in files]
        edges = np.array(
            [[file.first_block, file.first_block + file.num_blocks] for file in listed], np.int64
        )
        return _drop_empty(blocks.local_blocks(edges.reshape(-1, 2)))

    def _find_withdrawn(self, segment: Segment) -> set[int]:
        """Return the numbers of the files of a segment's snapshot that its epochs leave out."""
        return {
            i for index in segment.withdrawn for i in self._list_missing(segment.snapshot, index)
        }

    def _list_missing(self, snapshot: str, index: str) -> list[int]:
        """Return the numbers of the source's files in a snapshot that snapshot `index` lacks."""
        ours = self.snapshots[snapshot].snapshot
        other = self.snapshots[index].snapshot
        other_keys = set(other.files.keys(self._entry(other)))
        entry = self._entry(ours)
        return [
            i
            for i, key in zip(entry.files, ours.files.keys(entry), strict=True)
            if key not in other_keys
        ]

    def _entry(self, snapshot: Snapshot) -> SourceEntry:
        return snapshot.sources[snapshot.sources.numbers[self.name]]


def _drop_empty(ranges: Int64s) -> Int64s:
    """Return the ranges [start, stop), int64 [n, 2], that are not empty."""
    kept: Int64s = ranges[ranges[:, 0] < ranges[:, 1]]
    return kept
