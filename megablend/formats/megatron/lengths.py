"""The lengths in an `.idx`, read when they are needed, so that a long file is not read as a whole.

Readers use only the header and the lengths. A short `.idx` is compared with its digest when it is
opened. For a long one, `build` makes a digest of every GROUP_BYTES of header and lengths, and a
group is compared with its digest when it is first read.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.errors import CHANGED_REMEDY, ChangedFileError
from megablend.formats.megatron.idx import HEADER_BYTES, parse_header
from megablend.storage.base import Bytes, Storage
from megablend.storage.portions import read_portions
from megablend.system.log import LOG

GROUP_BYTES = 1 << 14
"""Size in bytes of a group. Header and lengths are divided into groups, each with its own
digest."""
WHOLE_BYTES = 1 << 20
"""An `.idx` up to this size is hashed as a whole whenever it is opened, which takes about a
millisecond."""
READ_BYTES = 64 * GROUP_BYTES
"""Number of bytes per read when a whole file is digested."""
Digests = npt.NDArray[np.uint64]


class LengthReader:
    """A reader of the lengths of the sequences in one `.idx`. Safe to share between threads, and to
    use after a fork.

    Args:
        path: path of the `.idx`.
        idx_bytes, structure: its size and its digest (see `digest_idx`) when it was indexed.
        digests: digests of its groups, as `digest_idx` returns them; None if `build` made none: a
            long file is then read to its end once, and a warning is logged.

    Raises: ChangedFileError if it is not the file that was indexed; MissingFileError.
    """

    def __init__(
        self, path: str, idx_bytes: int, structure: str, digests: Digests | None, storage: Storage
    ) -> None:
        self._path = path
        self._digests = digests
        if digests is None or idx_bytes <= WHOLE_BYTES:
            self._digests = None
            if idx_bytes > WHOLE_BYTES:
                LOG.warning(
                    "%s: the cache has no digests of the parts of this file, so every process reads all %d bytes of it; run "
                    "`megablend build CONFIG` to add them",
                    path,
                    idx_bytes,
                )
            digest, _ = digest_idx(path, idx_bytes, storage)
            if digest != structure:
                raise ChangedFileError(
                    path,
                    f"has digest {digest}, but had {structure} when it was indexed; {CHANGED_REMEDY}",
                )
        header = parse_header(path, storage.read(path, 0, min(HEADER_BYTES, idx_bytes)), idx_bytes)
        self.num_sequences = header.num_sequences
        self._end = HEADER_BYTES + 4 * self.num_sequences
        num_groups = -(-self._end // GROUP_BYTES)
        self._is_checked = np.zeros(num_groups, np.bool_)
        if self._digests is not None:
            if len(self._digests) != num_groups:
                raise self._changed(
                    f"has {self.num_sequences:,} sequences, whose lengths take {num_groups} digests (one per "
                    f"{GROUP_BYTES >> 10} KiB), but there were {len(self._digests)}"
                )
            first_group = storage.read(path, 0, min(GROUP_BYTES, self._end))
            self._check(0, np.frombuffer(first_group, np.uint8))

    def byte_ranges(self, firsts: Int64s, counts: Int64s) -> tuple[Int64s, Int64s]:
        """Return the byte ranges to fetch for lengths of sequences.

        Args:
            firsts, counts: int64 [n], first sequence and number of sequences of each range.

        Returns: offsets and sizes in bytes, arrays of int64 [n]. A range is extended to whole
            groups if one of its groups has not been checked yet.
        """
        starts = HEADER_BYTES + 4 * firsts
        stops = HEADER_BYTES + 4 * (firsts + counts)
        if self._digests is not None:
            for i in np.flatnonzero(counts).tolist():
                first = int(starts[i]) // GROUP_BYTES
                last = (int(stops[i]) - 1) // GROUP_BYTES
                if not self._is_checked[first : last + 1].all():
                    starts[i] = first * GROUP_BYTES
                    stops[i] = min((last + 1) * GROUP_BYTES, self._end)
        return starts, stops - starts

    def decode(self, begin: int, data: Bytes, first: int, count: int) -> npt.NDArray[np.int32]:
        """Decode the lengths of `count` sequences from `first` on: int32 [count].

        Args:
            begin: byte of the file at which `data` begins.
            data: the fetched bytes.

        Raises: ChangedFileError if the bytes differ from those that were indexed.
        """
        self._check(begin, data)
        start = HEADER_BYTES + 4 * first - begin
        return data[start : start + 4 * count].view("<i4")

    def _check(self, begin: int, data: Bytes) -> None:
        """Check the digests of the groups that `data` contains completely, except those that were
        checked before. `data` has the bytes of the file from `begin` on. Raises:
        ChangedFileError."""
        if self._digests is None:
            return
        for group in range(-(-begin // GROUP_BYTES), len(self._is_checked)):
            start = group * GROUP_BYTES
            stop = min((group + 1) * GROUP_BYTES, self._end)
            if stop > begin + len(data):
                return
            if not self._is_checked[group]:
                if _digest(data[start - begin : stop - begin].data) != self._digests[group]:
                    raise self._changed(f"has other bytes from {start} to {stop} than")
                self._is_checked[group] = True

    def _changed(self, problem: str) -> ChangedFileError:
        return ChangedFileError(self._path, f"{problem} when it was indexed; {CHANGED_REMEDY}")


def digest_idx(path: str, idx_bytes: int, storage: Storage) -> tuple[str, Digests]:
    """Compute the digests of an `.idx` in one pass and in constant memory.

    Returns: the hex digest (blake2b, 16 bytes) of the whole file; and the digests of the groups of
        header and lengths, uint64 [num_groups].
    Raises: see `parse_header` and Storage.read.
    """
    whole = hashlib.blake2b(digest_size=16)
    digests = list[int]()
    end = 0
    for start, data in read_portions(storage, path, idx_bytes, READ_BYTES):
        whole.update(data)
        if start == 0:
            header = parse_header(path, bytes(data[:HEADER_BYTES]), idx_bytes)
            end = HEADER_BYTES + 4 * header.num_sequences
        lengths = data[: max(0, end - start)]
        digests += [
            _digest(lengths[i : i + GROUP_BYTES]) for i in range(0, len(lengths), GROUP_BYTES)
        ]
    return whole.hexdigest(), np.array(digests, np.uint64)


def _digest(data: bytes | memoryview) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
