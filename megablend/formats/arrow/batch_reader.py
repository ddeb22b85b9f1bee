"""Record batches of an Arrow file as blocks.

A batch that consists of little else than the token column's buffers is fetched whole. Of others the
message is fetched first: it says where the column's buffers are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.errors import CHANGED_REMEDY, REWRITE_REMEDY, CorruptFileError
from megablend.formats.arrow.buffers import Buffers
from megablend.formats.arrow.column import Column
from megablend.formats.arrow.documents import decode, find_documents
from megablend.formats.arrow.message import Batch, BatchError, needed_ranges, parse_batch
from megablend.formats.base import Array, DecodedBlock, Stops
from megablend.storage.base import Bytes
from megablend.storage.ranges import FetchedRanges, FileRanges

_WASTE = 16
"""A batch is fetched whole where no more than 1 / _WASTE of it is of no use."""
_EMPTY = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class ArrowReader:
    """Decodes record batches of one file. Holds nothing but where they are."""

    path: str
    column: Column
    places: Array
    """PLACE_DTYPE [num_batches], sorted by offset."""
    offsets: Array
    """int64 [num_batches]: the places' offsets, side by side: a search in a field of a table copies
    all of it."""

    def byte_ranges(
        self,
        blocks: Array,
        chunks: Array,
        fetched: Sequence[FetchedRanges] = (),
        *,
        tokens: bool = True,
    ) -> list[FileRanges]:
        """Whole batches and messages; then the column's buffers of the latter.
        See BlockReader.byte_ranges."""
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
        found: list[tuple[int, int, int]] = []  # offset, size, block
        for i in np.flatnonzero(~is_whole).tolist():
            batch = self._parse(places[i], fetched[0][i])
            body = int(places[i]["offset"]) + int(places[i]["metadata_bytes"])
            found += [
                (body + offset, size, i)
                for offset, size in needed_ranges(batch, self.column, tokens=tokens)
            ]
        offsets, sizes, owners = np.array(found, np.int64).reshape(-1, 3).T.copy()
        return [FileRanges(self.path, offsets, sizes, owners)]

    def decode(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges], *, pieces: bool = True
    ) -> list[DecodedBlock]:
        """See BlockReader.decode."""
        found = []
        for block, place, batch, buffers in self._batches(blocks, fetched, tokens=True):
            try:
                decoded = decode(batch, self.column, buffers)
            except BatchError as error:
                raise self._corrupt(place, error) from error
            self._check(block, len(decoded.offsets) - 1, len(decoded.tokens))
            found.append(decoded)
        return found

    def find_pieces(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges]
    ) -> tuple[list[npt.NDArray[np.int64]], int]:
        """See BlockReader.find_pieces; from validity bitmaps and offsets."""
        found = []
        body_bytes = 0
        for block, place, batch, buffers in self._batches(blocks, fetched, tokens=False):
            try:
                offsets = find_documents(batch, self.column, buffers).offsets
            except BatchError as error:
                raise self._corrupt(place, error) from error
            self._check(block, len(offsets) - 1, int(offsets[-1]))
            found.append(offsets)
            body_bytes += buffers.fetched_bytes
        return found, body_bytes

    def _batches(
        self, blocks: Array, fetched: Sequence[FetchedRanges], *, tokens: bool
    ) -> list[tuple[np.void, np.void, Batch, Buffers]]:
        """For each block: its row, its location, its message and its buffers."""
        places = self._places(blocks)
        is_whole = _are_whole(blocks, _sizes_of(places)) & tokens
        parts = _parts_by_block(fetched[1:])
        found = []
        for i, (block, place) in enumerate(zip(blocks, places, strict=True)):
            batch = self._parse(place, fetched[0][i])
            body = int(place["offset"]) + int(place["metadata_bytes"])
            if is_whole[i]:
                stored = {0: fetched[0][i][int(place["metadata_bytes"]) :]}
            else:
                stored = {offset - body: data for offset, data in parts.get(i, {}).items()}
            found.append(
                (block, place, batch, Buffers(batch, _Stored(stored, whole=bool(is_whole[i])).load))
            )
        return found

    def _places(self, blocks: Array) -> Array:
        """Where the blocks' batches are: PLACE_DTYPE [n]. Raises: CorruptFileError if none
        begins."""
        offsets = blocks["offset"]
        numbers = np.searchsorted(self.offsets, offsets)
        known = numbers < len(self.offsets)
        known[known] = self.offsets[numbers[known]] == offsets[known]
        if not known.all():
            raise CorruptFileError(
                self.path, "no record batch begins here", offset=int(offsets[~known][0])
            )
        return self.places[numbers]

    def _parse(self, place: np.void, data: Bytes) -> Batch:
        """The message with which a batch begins."""
        try:
            return parse_batch(
                data[: int(place["metadata_bytes"])].tobytes(),
                int(place["body_bytes"]),
                self.column,
            )
        except BatchError as error:
            raise self._corrupt(place, error) from error

    def _corrupt(self, place: np.void, error: BatchError) -> CorruptFileError:
        return CorruptFileError(
            self.path, f"record batch {error}; {REWRITE_REMEDY}", offset=int(place["offset"])
        )

    def _check(self, block: np.void, rows: int, tokens: int) -> None:
        """Check that a batch has the rows and tokens that were indexed."""
        is_other = int(block["rows"]) not in (rows, -1)  # -1: not those of its documents
        if is_other or tokens != int(block["tokens"]):
            raise CorruptFileError(
                self.path,
                f"record batch has {rows} rows and {tokens} tokens, but had {block['rows']} and {block['tokens']} "
                f"when it was indexed; {CHANGED_REMEDY}",
                offset=int(block["offset"]),
            )


@dataclass(frozen=True, slots=True)
class _Stored:
    """Parts of a batch's body that were fetched, by their offset in it."""

    parts: Mapping[int, Bytes]
    whole: bool

    def load(self, offset: int, size: int) -> Bytes:
        """The bytes at a buffer's offset, as Buffers requests them."""
        if self.whole:
            return self.parts[0][offset : offset + size]
        return self.parts[offset][:size] if size else _EMPTY


def list_batch_ranges(path: str, blocks: Array, stops: Stops) -> list[FileRanges]:
    """See Format.list_ranges: whole batches; of others only where their messages begin, which say
    where the column is."""
    sizes = stops() - blocks["offset"]
    sizes = np.where(_are_whole(blocks, sizes), sizes, 1)
    return [FileRanges(path, np.ascontiguousarray(blocks["offset"]), sizes, np.arange(len(blocks)))]


def _sizes_of(places: Array) -> Int64s:
    """Bytes of batches: int64 [n]."""
    sizes: Int64s = places["metadata_bytes"] + places["body_bytes"]
    return sizes


def _are_whole(blocks: Array, sizes: Int64s) -> npt.NDArray[np.bool_]:
    """Which batches of `sizes` int64 [n] are fetched whole if their tokens are needed: bool [n]."""
    found: npt.NDArray[np.bool_] = sizes - blocks["stored_bytes"] <= sizes // _WASTE
    return found


def _parts_by_block(fetched: Sequence[FetchedRanges]) -> dict[int, dict[int, Bytes]]:
    """What was fetched of bodies, by block and by offset in the file."""
    found: dict[int, dict[int, Bytes]] = {}
    for each in fetched:
        assert each.ranges.owners is not None
        places = zip(each.ranges.owners.tolist(), each.ranges.offsets.tolist(), strict=True)
        for i, (block, offset) in enumerate(places):
            found.setdefault(block, {})[offset] = each[i]
    return found
