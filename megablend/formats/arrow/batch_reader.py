"""Record batches of an Arrow file as blocks.

If a batch contains little besides the buffers of the token column, it is fetched whole. Otherwise,
its message is fetched first, because the message contains the positions of the column's buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.errors import CHANGED_REMEDY, CorruptFileError
from megablend.formats.arrow.buffers import Buffers, Fetch
from megablend.formats.arrow.column import Column
from megablend.formats.arrow.documents import decode, find_documents
from megablend.formats.arrow.footer import bodies_of
from megablend.formats.arrow.message import Batch, locating, needed_ranges, parse_batch
from megablend.formats.base import Array, DecodedBlock, Stops
from megablend.storage.base import Bytes
from megablend.storage.ranges import FetchedRanges, FileRanges

_WASTE = 16
"""A batch is fetched whole if at most 1 / _WASTE of its bytes are not needed."""
_EMPTY = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class ArrowReader:
    """A reader that decodes record batches of one file."""

    path: str
    column: Column
    places: Array
    """Places of the record batches, sorted by offset: PLACE_DTYPE [num_batches]."""
    offsets: Array
    """A contiguous copy of `places["offset"]`, int64 [num_batches]: searching a field of a
    structured array would copy all of it each time."""

    def byte_ranges(
        self,
        blocks: Array,
        chunks: Array,
        fetched: Sequence[FetchedRanges] = (),
        *,
        tokens: bool = True,
    ) -> list[FileRanges]:
        """Return the ranges to fetch next. The first call returns the ranges of the batches that
        are fetched whole, and those of the messages of the other batches. The second call returns
        the ranges of the column's buffers in the other batches. See BlockReader.byte_ranges."""
        if not len(blocks) or len(fetched) > 1:
            return []
        places = self._find_places(blocks)
        is_whole = _are_whole(blocks, _sizes_of(places)) & tokens
        if not len(fetched):
            sizes = places["metadata_bytes"] + np.where(is_whole, places["body_bytes"], 0)
            return [_one_per_block(self.path, places["offset"], sizes)]
        if is_whole.all():
            return []
        offsets = list[int]()
        sizes_of_buffers = list[int]()
        owners = list[int]()
        for i in np.flatnonzero(~is_whole).tolist():
            batch = self._parse(places[i], fetched[0][i])
            body = int(bodies_of(places[i]))
            for offset, size in needed_ranges(batch, self.column, tokens=tokens):
                offsets.append(body + offset)
                sizes_of_buffers.append(size)
                owners.append(i)
        return [
            FileRanges(
                self.path,
                np.array(offsets, np.int64),
                np.array(sizes_of_buffers, np.int64),
                np.array(owners, np.int64),
            )
        ]

    def decode(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges], *, pieces: bool = True
    ) -> list[DecodedBlock]:
        """See BlockReader.decode."""
        decoded_blocks = []
        for batch in self._iterate(blocks, fetched, tokens=True):
            with locating(self.path, batch.place):
                decoded = decode(batch.message, self.column, batch.buffers)
            self._check(batch.block, len(decoded.offsets) - 1, len(decoded.tokens))
            decoded_blocks.append(decoded)
        return decoded_blocks

    def find_pieces(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges]
    ) -> tuple[list[npt.NDArray[np.int64]], int]:
        """See BlockReader.find_pieces; only validity bitmaps and list offsets are read."""
        all_offsets = []
        body_bytes = 0
        for batch in self._iterate(blocks, fetched, tokens=False):
            with locating(self.path, batch.place):
                offsets = find_documents(batch.message, self.column, batch.buffers).offsets
            self._check(batch.block, len(offsets) - 1, int(offsets[-1]))
            all_offsets.append(offsets)
            body_bytes += batch.buffers.fetched_bytes
        return all_offsets, body_bytes

    def _iterate(
        self, blocks: Array, fetched: Sequence[FetchedRanges], *, tokens: bool
    ) -> Iterator[_FetchedBatch]:
        """Yield the record batch of each block."""
        places = self._find_places(blocks)
        is_whole = _are_whole(blocks, _sizes_of(places)) & tokens
        parts = _parts_by_block(fetched[1:])
        for i, (block, place) in enumerate(zip(blocks, places, strict=True)):
            message = self._parse(place, fetched[0][i])
            if is_whole[i]:
                fetch = _from_whole(fetched[0][i][int(place["metadata_bytes"]) :])
            else:
                fetch = _from_parts(parts.get(i, {}), int(bodies_of(place)))
            yield _FetchedBatch(block, place, message, Buffers(message, fetch))

    def _find_places(self, blocks: Array) -> Array:
        """Find where the record batch of each block is stored (PLACE_DTYPE [n]). Raises:
        CorruptFileError if no batch begins at the offset of a block."""
        offsets = blocks["offset"]
        numbers = np.searchsorted(self.offsets, offsets)
        is_wrong = numbers == len(self.offsets)
        candidates = np.flatnonzero(~is_wrong)
        is_wrong[candidates] = self.offsets[numbers[candidates]] != offsets[candidates]
        if is_wrong.any():
            raise CorruptFileError(
                self.path,
                f"no record batch begins here, but one did when the file was indexed; {CHANGED_REMEDY}",
                offset=int(offsets[is_wrong][0]),
            )
        return self.places[numbers]

    def _parse(self, place: np.void, data: Bytes) -> Batch:
        """Parse the message at the beginning of a batch."""
        with locating(self.path, place):
            return parse_batch(
                data[: int(place["metadata_bytes"])].tobytes(),
                int(place["body_bytes"]),
                self.column,
            )

    def _check(self, block: np.void, rows: int, tokens: int) -> None:
        """Check that a batch has the rows and tokens that were indexed."""
        # -1 if documents are not rows; see `flat`
        has_other_rows = int(block["rows"]) not in (rows, -1)
        if has_other_rows or tokens != int(block["tokens"]):
            raise CorruptFileError(
                self.path,
                f"the record batch has {rows} rows and {tokens} tokens, but had {block['rows']} and {block['tokens']} "
                f"when it was indexed; {CHANGED_REMEDY}",
                offset=int(block["offset"]),
            )


class _FetchedBatch(NamedTuple):
    """A record batch whose required parts have been fetched."""

    block: np.void
    """The batch's row of the block table: BLOCK_DTYPE."""
    place: np.void
    """The place of the batch: PLACE_DTYPE."""
    message: Batch
    buffers: Buffers


def _from_whole(body: Bytes) -> Fetch:
    """Return a function that takes buffers from a body that was fetched whole."""
    return lambda offset, size: body[offset : offset + size]


def _from_parts(parts: Mapping[int, Bytes], body: int) -> Fetch:
    """Return a function that takes buffers from the parts of a body that were fetched.

    Args:
        parts: the bytes of each part, by its offset in the file.
        body: the offset of the body in the file.
    """
    return lambda offset, size: parts[body + offset][:size] if size else _EMPTY


def list_batch_ranges(path: str, blocks: Array, stops: Stops) -> list[FileRanges]:
    """See Format.list_ranges. For a batch that is not fetched whole, the range contains only the
    first byte of its message, because only the message tells where the column's buffers are."""
    sizes = stops() - blocks["offset"]
    sizes = np.where(_are_whole(blocks, sizes), sizes, 1)
    return [_one_per_block(path, blocks["offset"], sizes)]


def _one_per_block(path: str, offsets: Int64s, sizes: Int64s) -> FileRanges:
    """Make FileRanges in which the first range belongs to the first block, and so on."""
    return FileRanges(path, np.ascontiguousarray(offsets), sizes, np.arange(len(offsets)))


def _sizes_of(places: Array) -> Int64s:
    """Return the sizes of batches in bytes: int64 [n]."""
    sizes: Int64s = places["metadata_bytes"] + places["body_bytes"]
    return sizes


def _are_whole(blocks: Array, sizes: Int64s) -> npt.NDArray[np.bool_]:
    """Return whether the batch of each block is fetched whole if its tokens are needed: bool [n].

    Args:
        sizes: int64 [n], size of each batch in bytes.
    """
    are_whole: npt.NDArray[np.bool_] = sizes - blocks["stored_bytes"] <= sizes // _WASTE
    return are_whole


def _parts_by_block(fetched: Sequence[FetchedRanges]) -> dict[int, dict[int, Bytes]]:
    """Return the fetched parts of each batch's body, as a dict from the index of the block to a
    dict from the offset in the file to the bytes."""
    parts: dict[int, dict[int, Bytes]] = {}
    for fetch in fetched:
        assert fetch.ranges.owners is not None
        ranges = zip(fetch.ranges.owners.tolist(), fetch.ranges.offsets.tolist(), strict=True)
        for i, (block, offset) in enumerate(ranges):
            parts.setdefault(block, {})[offset] = fetch[i]
    return parts
