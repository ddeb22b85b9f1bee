"""Record batches of an Arrow file as blocks.

A batch that has little other than the token column's buffers is fetched whole. For others, the
message is fetched first: it contains the positions of the column's buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.errors import CHANGED_REMEDY, CorruptFileError
from megablend.formats.arrow.buffers import Buffers
from megablend.formats.arrow.column import Column
from megablend.formats.arrow.documents import decode, find_documents
from megablend.formats.arrow.message import Batch, locating, needed_ranges, parse_batch
from megablend.formats.base import Array, DecodedBlock, Stops
from megablend.storage.base import Bytes
from megablend.storage.ranges import FetchedRanges, FileRanges

_WASTE = 16
"""A batch is fetched whole if at most 1 / _WASTE of its bytes are not needed."""
_EMPTY = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class ArrowReader:
    """Decodes record batches of one file."""

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
        """Return whole batches, and the messages of the others; then the column's buffers of the
        others. See BlockReader.byte_ranges."""
        places = self._places(blocks)
        is_whole = _are_whole(blocks, _sizes_of(places)) & tokens
        if len(fetched) == 0 and len(blocks):
            sizes = places["metadata_bytes"] + np.where(is_whole, places["body_bytes"], 0)
            return [
                FileRanges(
                    self.path, np.ascontiguousarray(places["offset"]), sizes, np.arange(len(blocks))
                )
            ]
        if len(fetched) != 1 or is_whole.all():
            return []
        needed: list[tuple[int, int, int]] = []  # offset, size, index of the block
        for i in np.flatnonzero(~is_whole).tolist():
            batch = self._parse(places[i], fetched[0][i])
            body = int(places[i]["offset"]) + int(places[i]["metadata_bytes"])
            needed += [
                (body + offset, size, i)
                for offset, size in needed_ranges(batch, self.column, tokens=tokens)
            ]
        offsets, sizes, owners = np.array(needed, np.int64).reshape(-1, 3).T.copy()
        return [FileRanges(self.path, offsets, sizes, owners)]

    def decode(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges], *, pieces: bool = True
    ) -> list[DecodedBlock]:
        """See BlockReader.decode."""
        decoded_blocks = []
        for block, place, batch, buffers in self._batches(blocks, fetched, tokens=True):
            with locating(self.path, place):
                decoded = decode(batch, self.column, buffers)
            self._check(block, len(decoded.offsets) - 1, len(decoded.tokens))
            decoded_blocks.append(decoded)
        return decoded_blocks

    def find_pieces(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges]
    ) -> tuple[list[npt.NDArray[np.int64]], int]:
        """See BlockReader.find_pieces; only validity bitmaps and list offsets are read."""
        all_offsets = []
        body_bytes = 0
        for block, place, batch, buffers in self._batches(blocks, fetched, tokens=False):
            with locating(self.path, place):
                offsets = find_documents(batch, self.column, buffers).offsets
            self._check(block, len(offsets) - 1, int(offsets[-1]))
            all_offsets.append(offsets)
            body_bytes += buffers.fetched_bytes
        return all_offsets, body_bytes

    def _batches(
        self, blocks: Array, fetched: Sequence[FetchedRanges], *, tokens: bool
    ) -> list[tuple[np.void, np.void, Batch, Buffers]]:
        """Return for each block its row of the block table, the place of its batch, its message,
        and its buffers."""
        places = self._places(blocks)
        is_whole = _are_whole(blocks, _sizes_of(places)) & tokens
        parts = _parts_by_block(fetched[1:])
        batches = []
        for i, (block, place) in enumerate(zip(blocks, places, strict=True)):
            batch = self._parse(place, fetched[0][i])
            body = int(place["offset"]) + int(place["metadata_bytes"])
            if is_whole[i]:
                stored = {0: fetched[0][i][int(place["metadata_bytes"]) :]}
            else:
                stored = {offset - body: data for offset, data in parts.get(i, {}).items()}
            buffers = Buffers(batch, _Stored(stored, whole=bool(is_whole[i])).load)
            batches.append((block, place, batch, buffers))
        return batches

    def _places(self, blocks: Array) -> Array:
        """Find the places of the blocks' batches: PLACE_DTYPE [n]. Raises: CorruptFileError if no
        batch begins at the offset of a block."""
        offsets = blocks["offset"]
        numbers = np.searchsorted(self.offsets, offsets)
        is_wrong = numbers == len(self.offsets)
        found = np.flatnonzero(~is_wrong)
        is_wrong[found] = self.offsets[numbers[found]] != offsets[found]
        if is_wrong.any():
            raise CorruptFileError(
                self.path, "no record batch begins here", offset=int(offsets[is_wrong][0])
            )
        return self.places[numbers]

    def _parse(self, place: np.void, data: Bytes) -> Batch:
        """Parse the message with which a batch begins."""
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
                f"record batch has {rows} rows and {tokens} tokens, but had {block['rows']} and {block['tokens']} "
                f"when it was indexed; {CHANGED_REMEDY}",
                offset=int(block["offset"]),
            )


@dataclass(frozen=True, slots=True)
class _Stored:
    """The parts of a batch's body that were fetched."""

    parts: Mapping[int, Bytes]
    """The bytes of each part, by its offset in the body."""
    whole: bool
    """Whether the whole body was fetched, as the part at offset 0."""

    def load(self, offset: int, size: int) -> Bytes:
        """Return the bytes of a buffer, given its offset in the body."""
        if self.whole:
            return self.parts[0][offset : offset + size]
        return self.parts[offset][:size] if size else _EMPTY


def list_batch_ranges(path: str, blocks: Array, stops: Stops) -> list[FileRanges]:
    """See Format.list_ranges. Batches that are not fetched whole have ranges of 1 byte, at which
    their messages begin: only the messages contain the positions of the column's buffers."""
    sizes = stops() - blocks["offset"]
    sizes = np.where(_are_whole(blocks, sizes), sizes, 1)
    return [FileRanges(path, np.ascontiguousarray(blocks["offset"]), sizes, np.arange(len(blocks)))]


def _sizes_of(places: Array) -> Int64s:
    """Return the sizes of batches in bytes: int64 [n]."""
    sizes: Int64s = places["metadata_bytes"] + places["body_bytes"]
    return sizes


def _are_whole(blocks: Array, sizes: Int64s) -> npt.NDArray[np.bool_]:
    """Whether batches of `sizes` int64 [n], in bytes, are fetched whole if their tokens are needed:
    bool [n]."""
    are_whole: npt.NDArray[np.bool_] = sizes - blocks["stored_bytes"] <= sizes // _WASTE
    return are_whole


def _parts_by_block(fetched: Sequence[FetchedRanges]) -> dict[int, dict[int, Bytes]]:
    """Return the fetched parts of bodies, by index of the block and by offset in the file."""
    parts: dict[int, dict[int, Bytes]] = {}
    for fetch in fetched:
        assert fetch.ranges.owners is not None
        ranges = zip(fetch.ranges.owners.tolist(), fetch.ranges.offsets.tolist(), strict=True)
        for i, (block, offset) in enumerate(ranges):
            parts.setdefault(block, {})[offset] = fetch[i]
    return parts
