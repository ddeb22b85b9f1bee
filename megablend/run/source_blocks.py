"""The blocks of a source in the snapshots of a run,
and what is left of an epoch when files are withdrawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.blend.epochs import Segment
from megablend.index.blocks.growing_splits import Ranges, SplitRanges
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
    """Number that its first block has among those of all snapshots of the run."""
    numbers: npt.NDArray[np.int64]
    """int64 [num_sources]: the number of each source in the snapshot; -1 where the snapshot does
    not have it."""
    splits: SplitRanges
    column: int
    """Number of the split in `splits`."""
    parts: npt.NDArray[np.void]
    """PART_DTYPE [num_sources]: the documents of each source that belong to the split, by blocks of
    the run, from the first range's begin to the last one's end; zeros where the snapshot does not
    have the source."""

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

    def ranges(self, source: int) -> Ranges:
        """The documents of a source, which the snapshot has, that belong to the split."""
        return self.splits.ranges(int(self.numbers[source]), self.column)


@dataclass(frozen=True, kw_only=True)
class SourceBlocks:
    """A source of a split, in all snapshots of a run that have it."""

    name: str
    """In the index."""
    number: int
    """In the split."""
    snapshots: Mapping[str, SplitData]
    """Those that have it, by digest."""
    appends_eod: bool
    """Whether an end-of-document token follows each document."""
    key: int
    """Random key of its orders."""

    def blocks(self, snapshot: str) -> SplitBlocks:
        """The blocks of a snapshot."""
        found = self.snapshots[snapshot]
        return SplitBlocks(found.snapshot, found.ranges(self.number), has_eod=self.appends_eod)

    def view(self, segment: Segment) -> SplitBlocks | RemainingBlocks:
        """The blocks as the segment's epochs read them: without those of files that are
        withdrawn."""
        blocks = self.blocks(segment.snapshot)
        if not segment.withdrawn:
            return blocks
        numbers = [
            i for index in segment.withdrawn for i in self._list_missing(segment.snapshot, index)
        ]
        return self._leave_out(blocks, sorted(set(numbers)))

    def loses_files(self, segment: Segment, index: str) -> bool:
        """Whether a snapshot has the source, but not all files that the segment's epochs read."""
        if (
            segment.snapshot == index
            or index not in self.snapshots
            or segment.snapshot not in self.snapshots
        ):
            return False
        known = {
            i for each in segment.withdrawn for i in self._list_missing(segment.snapshot, each)
        }
        return bool(set(self._list_missing(segment.snapshot, index)) - known)

    def count_left(self, segment: Segment, index: str, epoch: int, token: int) -> tuple[int, int]:
        """Tokens of a segment's epochs without the files that a snapshot lacks;
        and how many of these come before a given token of an epoch, counted over all files."""
        now = self.view(segment)
        left = self.view(segment._replace(withdrawn=(*segment.withdrawn, index)))
        files = self._list_missing(segment.snapshot, index)
        ranges = self._find_blocks(self.blocks(segment.snapshot), files)
        if not len(ranges):  # their documents are in other splits
            return left.num_tokens, token
        gone = np.concatenate([np.arange(first, stop) for first, stop in ranges.tolist()])
        starts = now.before(gone)
        stops = now.before(gone + 1)
        full = starts < stops
        placed = (
            find_order(segment.order)
            .make(now, self.key)
            .find_tokens(epoch, starts[full], stops[full])
        )
        stop = epoch * now.num_tokens + token
        read = np.clip(np.minimum(placed.stops, stop) - placed.starts, 0, None).sum()
        return left.num_tokens, token - int(read)

    def _leave_out(self, blocks: SplitBlocks, files: list[int]) -> SplitBlocks | RemainingBlocks:
        snapshot = blocks.snapshot
        entry = self._entry(blocks.snapshot)
        ranges = self._find_blocks(blocks, files)
        if not len(ranges):
            return blocks

        def find_documents() -> Int64s:
            rows = np.array([snapshot.file(i).rows for i in entry.files], np.int64)
            before = np.concatenate([[0], np.cumsum(rows)])
            numbers = np.array(files) - entry.files.start
            return _drop_empty(
                blocks.documents.local_blocks(
                    np.stack([before[numbers], before[numbers + 1]], axis=1)
                )
            )

        return RemainingBlocks(blocks, ranges, find_documents)

    def _find_blocks(self, blocks: SplitBlocks, files: list[int]) -> Int64s:
        """The local blocks of files, as ranges int64 [n, 2]."""
        listed = [blocks.snapshot.file(i) for i in files]
        edges = np.array(
            [[file.first_block, file.first_block + file.num_blocks] for file in listed], np.int64
        )
        return _drop_empty(blocks.local_blocks(edges.reshape(-1, 2)))

    def _list_missing(self, snapshot: str, index: str) -> list[int]:
        """Numbers of the source's files in a snapshot that another does not have."""
        first = self.snapshots[snapshot].snapshot
        other = self.snapshots[index].snapshot
        known = set(other.files.keys(self._entry(other)))
        entry = self._entry(first)
        return [
            i
            for i, key in zip(entry.files, first.files.keys(entry), strict=True)
            if key not in known
        ]

    def _entry(self, snapshot: Snapshot) -> SourceEntry:
        return next(each for each in snapshot.sources if each.name == self.name)


def _drop_empty(ranges: Int64s) -> Int64s:
    kept: Int64s = ranges[ranges[:, 0] < ranges[:, 1]]
    return kept
