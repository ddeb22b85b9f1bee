"""Read and sum the lengths of sequences. The lengths are the first array of an `.idx` file, or the
content of a table, which is a `.npy` file of int32."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megablend.errors import ChangedFileError, CorruptFileError
from megablend.formats.base import Array
from megablend.formats.megatron.idx import (
    HEADER_BYTES,
    Header,
    check_last_place,
    describe_unused_bytes,
    parse_header,
)
from megablend.kernels.exact.length_totals import total_lengths
from megablend.megatron.request.address import check_pair
from megablend.megatron.request.layout import sequence_range
from megablend.megatron.request.request import CacheRequest
from megablend.storage.base import Storage
from megablend.system.log import LOG

_CHUNK = 1 << 20
"""Number of lengths that are read at a time; they take 4 MiB."""

_MAX_KEPT = 1 << 16
"""Maximum number of lengths of a dataset that are kept in memory. More lengths are faster to read
again from the page cache than to keep in newly allocated memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSize:
    """The range of sequences of a part of a dataset, and their number of tokens."""

    begin: int
    """The number of the first sequence of the part."""
    end: int
    """The number of the last sequence of the part, plus 1."""
    tokens: int
    num_sequences: int
    """The number of sequences in the whole dataset."""
    checksum: int
    """The checksum of the lengths of the part's sequences; see `total_lengths`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLengths:
    """The location of a dataset's lengths: consecutive int32 values in a file."""

    path: str
    offset: int
    """The offset of the first length in the file, in bytes."""
    num_sequences: int
    storage: Storage
    kept: Array | None = field(default=None, compare=False, repr=False)
    """All lengths (int32 [num_sequences]) if they are kept in memory; otherwise None."""

    def read(self, first: int, last: int) -> Array:
        """Read the lengths of sequences [first, last). Negative lengths are not rejected.

        Returns: int32 [last - first].
        Raises: MissingFileError."""
        if self.kept is not None:
            return self.kept[first:last]
        lengths = np.empty(last - first, "<i4")
        offsets = np.array([self.offset + 4 * first])
        sizes = np.array([lengths.nbytes])
        self.storage.read_ranges(self.path, offsets, sizes, lambda _: lengths.view(np.uint8))
        return lengths

    def total(self, first: int, lengths: Array, position: int = 0) -> tuple[int, int]:
        """Return the sum and the checksum of the lengths of consecutive sequences.

        Args:
            first: number of the first sequence, for error messages.
            position: position of the first length in the part over which the checksum is computed.

        Raises: CorruptFileError if a length is negative.
        """
        smallest, tokens, checksum = total_lengths(lengths, position)
        if smallest < 0:
            number = int(np.argmin(lengths))
            raise CorruptFileError(
                self.path,
                f"sequence {first + number} has {lengths[number]} tokens; expected 0 or more: restore the file",
                offset=self.offset + 4 * (first + number),
            )
        return tokens, checksum


def lengths_of(prefix: str, *, storage: Storage) -> StoredLengths:
    """Return the location of the lengths of a pair, and check that its `.bin` exists and contains
    the last sequence.

    Raises: MissingFileError, CorruptFileError, UnsupportedFileError; ConfigError if `prefix` is an
        address of another format.
    """
    check_pair(prefix)
    path = f"{prefix}.idx"
    bin_bytes = storage.stat(f"{prefix}.bin").size
    size = storage.stat(path).size
    header = parse_header(path, storage.read(path, 0, min(size, HEADER_BYTES)), size)
    _check_end(prefix, header, bin_bytes, storage)
    return StoredLengths(
        path=path, offset=HEADER_BYTES, num_sequences=header.num_sequences, storage=storage
    )


def _check_end(prefix: str, header: Header, bin_bytes: int, storage: Storage) -> None:
    """Check that the last sequence ends within the `.bin`, and warn if the `.bin` has bytes after
    the end of all sequences. Raises: CorruptFileError."""
    path = f"{prefix}.idx"
    count = header.num_sequences
    if not count:
        return
    lengths, pointers = _read_places(path, count - 1, count, count, storage)
    check_last_place(path, header, int(lengths[0]), int(pointers[0]), bin_bytes)
    width = np.dtype(header.token_dtype).itemsize
    used = int(pointers[0]) + width * int(lengths[0])
    # Another sequence may be stored after the last one
    if used < bin_bytes:
        for first, last in _chunks(0, count):
            lengths, pointers = _read_places(path, first, last, count, storage)
            used = max(used, int((pointers + width * lengths.astype(np.int64)).max()))
    if used < bin_bytes:
        LOG.warning("%s", describe_unused_bytes(f"{prefix}.bin", path, used, bin_bytes))


def _read_places(
    path: str, first: int, last: int, num_sequences: int, storage: Storage
) -> tuple[Array, Array]:
    """Read the lengths and positions of sequences [first, last).

    Returns: lengths in tokens (int32) and positions in bytes (int64), both [last - first].
    """
    offsets = np.array([4 * first, 4 * num_sequences + 8 * first]) + HEADER_BYTES
    sizes = np.array([4, 8]) * (last - first)
    data, starts = storage.read_ranges(
        path, offsets, sizes, lambda nbytes: np.empty(nbytes, np.uint8)
    )
    lengths, pointers = (
        data[start : start + size] for start, size in zip(starts, sizes, strict=True)
    )
    return np.frombuffer(lengths, "<i4"), np.frombuffer(pointers, "<i8")


def counted_lengths(prefix: str, num_sequences: int, *, storage: Storage) -> StoredLengths:
    """Return the location of the lengths of a pair whose number of sequences is known. Unlike in
    `lengths_of`, the files are not checked."""
    return StoredLengths(
        path=f"{prefix}.idx", offset=HEADER_BYTES, num_sequences=num_sequences, storage=storage
    )


def part_sizes(stored: StoredLengths, spans: Sequence[tuple[float, float]]) -> list[PartSize]:
    """Return the sizes of parts of a dataset. The lengths are read in one pass, with bounded
    memory. Raises: DataError; see StoredLengths.read."""
    ranges = [sequence_range(span, stored.num_sequences) for span in spans]
    tokens = [0] * len(ranges)
    checksums = [0] * len(ranges)
    for first, last in _chunks(min(begin for begin, _ in ranges), max(end for _, end in ranges)):
        lengths = stored.read(first, last)
        for number, (begin, end) in enumerate(ranges):
            low = max(begin, first)
            in_part = lengths[low - first : max(end - first, 0)]
            count, checksum = stored.total(low, in_part, low - begin)
            tokens[number] += count
            checksums[number] = (checksums[number] + checksum) % (1 << 32)
    return [
        PartSize(
            begin=begin,
            end=end,
            tokens=count,
            num_sequences=stored.num_sequences,
            checksum=checksum,
        )
        for (begin, end), count, checksum in zip(ranges, tokens, checksums, strict=True)
    ]


def read_lengths(stored: StoredLengths) -> Array:
    """Read and check all lengths of a dataset. Raises: CorruptFileError if a length is negative;
    MissingFileError.

    Returns: int32 [num_sequences].
    """
    lengths = np.empty(stored.num_sequences, np.int32)
    for first, last in _chunks(0, stored.num_sequences):
        lengths[first:last] = stored.read(first, last)
        stored.total(first, lengths[first:last])
    return lengths


def read_part(stored: StoredLengths, part: PartSize) -> Array:
    """Read the lengths of a part whose size is known, into an array that has an entry for every
    sequence of the dataset. Entries outside the part are 0, unless all lengths are kept in memory.
    (Entries that are never accessed take no memory.)

    Returns: int32 [num_sequences].
    Raises: ChangedFileError if the lengths have changed since they were counted; MissingFileError.
    """
    if stored.kept is not None:
        return stored.kept
    lengths = np.zeros(stored.num_sequences, np.int32)
    for first, last in _chunks(part.begin, part.end):
        lengths[first:last] = stored.read(first, last)
    _, tokens, checksum = total_lengths(lengths[part.begin : part.end], 0)
    if (tokens, checksum) != (part.tokens, part.checksum):
        raise ChangedFileError(
            stored.path,
            f"the lengths of sequences {part.begin:,} to {part.end:,} changed while this build ran ({part.tokens:,} tokens "
            f"before, {tokens:,} now): the file is being written, or is not the same on all nodes; build again when the "
            "file is complete",
        )
    return lengths


def _chunks(begin: int, end: int) -> list[tuple[int, int]]:
    return [(first, min(first + _CHUNK, end)) for first in range(begin, end, _CHUNK)]


class LengthReader:
    """A thread-safe reader of the lengths of one rank's datasets. It keeps some of the lengths in
    memory.

    Args:
        keep_bytes: number of bytes of memory for lengths that were counted.
    """

    def __init__(self, request: CacheRequest, storage: Storage, *, keep_bytes: int) -> None:
        self._tables = request.lengths_at
        self._storage = storage
        self._kept: dict[str, StoredLengths] = {}
        self._free = keep_bytes // 4

        self._lock = threading.Lock()

    def count(self, prefix: str, spans: Sequence[tuple[float, float]]) -> list[PartSize]:
        """Return the sizes of parts of a dataset. Raises: DataError if the files of the dataset are
        missing or damaged.

        Args:
            spans: the fractions of the sequences that the parts take, as (begin, end).
        """
        stored = self._open_table(prefix) or lengths_of(prefix, storage=self._storage)
        whole = min(begin for begin, _ in spans), max(end for _, end in spans)
        size = stored.num_sequences
        keeps = size <= _MAX_KEPT and sequence_range(whole, size) == (0, size)
        with self._lock:
            keeps = keeps and size <= self._free
            self._free -= size * keeps
        if not keeps:
            return part_sizes(stored, spans)
        kept = dataclasses.replace(stored, kept=stored.read(0, size))
        sizes = part_sizes(kept, spans)
        # Only now is it known that the lengths are not damaged
        self._kept[prefix] = kept
        return sizes

    def find(self, prefix: str, size: PartSize) -> StoredLengths:
        """Return the location of the lengths of a dataset.

        Args:
            size: the size of a part of the dataset, which this or another rank has counted.
        """
        kept = self._kept.get(prefix) or self._open_table(prefix)
        return kept or counted_lengths(prefix, size.num_sequences, storage=self._storage)

    def _open_table(self, prefix: str) -> StoredLengths | None:
        """Return the location of a dataset's lengths in its table (a `.npy` file of int32); None if
        the dataset is a pair and has no table."""
        path = self._tables.get(prefix)
        if path is None:
            return None
        with Path(path).open("rb") as file:
            np.lib.format.read_magic(file)
            (count,), _, dtype = np.lib.format.read_array_header_1_0(file)
            assert dtype == np.int32
            return StoredLengths(
                path=path, offset=file.tell(), num_sequences=count, storage=self._storage
            )
