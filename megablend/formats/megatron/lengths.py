"""The lengths in an `.idx`, read where they are needed: never the whole file, however long it is.

Readers look at the header and the lengths alone. A short `.idx` is compared with its digest when it is opened. Of a long one
`build` makes a digest for every GROUP_BYTES of header and lengths, and a group is compared with its own when it is first read.
"""

from __future__ import annotations

import hashlib
import logging

import numpy as np
import numpy.typing as npt

from megablend.errors import CHANGED_REMEDY, ChangedFileError
from megablend.formats.megatron.idx import HEADER_BYTES, parse_header
from megablend.storage.base import Storage

GROUP_BYTES = 1 << 14
WHOLE_BYTES = 1 << 20
"""An `.idx` up to this size is digested as a whole whenever it is opened, which takes about a millisecond."""
_READ_BYTES = 64 * GROUP_BYTES
_LOG = logging.getLogger(__name__)
Digests = npt.NDArray[np.uint64]


class LengthReader:
    """Lengths of the sequences of one `.idx`. Safe to share between threads, and after a fork.

    Args:
        path: of the `.idx`.
        idx_bytes, structure: its size and its digest (see `digest_idx`) when it was indexed.
        digests: of its groups, as `digest_idx` returns them; None where `build` made none: a long file is then read to its end
            once, and a warning is logged.

    Raises: ChangedFileError where it is not the file that was indexed; MissingFileError.
    """

    def __init__(self, path: str, idx_bytes: int, structure: str, digests: Digests | None, storage: Storage) -> None:
        self._path, self._storage, self._digests = path, storage, digests
        if digests is None or idx_bytes <= WHOLE_BYTES:
            self._digests = None
            if idx_bytes > WHOLE_BYTES:
                _LOG.warning(
                    "%s: the cache has no digests of its parts, so all %d bytes are read in every process; the next "
                    "`megablend build CONFIG` makes them",
                    path,
                    idx_bytes,
                )
            found, _ = digest_idx(path, idx_bytes, storage)
            if found != structure:
                raise ChangedFileError(
                    path, f"has digest {found}, had {structure} when it was indexed; {CHANGED_REMEDY}"
                )
        header = parse_header(path, storage.read(path, 0, min(HEADER_BYTES, idx_bytes)), idx_bytes)
        self.num_sequences = header.num_sequences
        self._end = HEADER_BYTES + 4 * self.num_sequences
        num_groups = -(-self._end // GROUP_BYTES)
        self._is_checked = np.zeros(num_groups, np.bool_)
        if self._digests is not None:
            if len(self._digests) != num_groups:
                raise self._changed(f"has {num_groups} groups of lengths, had {len(self._digests)}")
            self._check(0, HEADER_BYTES)

    def read(self, first: int, count: int) -> npt.NDArray[np.int32]:
        """Lengths of sequences `first` to `first + count`, which are in range: int32 [count].

        Raises: ChangedFileError where they are not what was indexed.
        """
        start, stop = HEADER_BYTES + 4 * first, HEADER_BYTES + 4 * (first + count)
        self._check(start, stop)
        return np.frombuffer(self._storage.read(self._path, start, stop - start), "<i4")

    def _check(self, start: int, stop: int) -> None:
        """Compare the groups that bytes start:stop lie in with their digests, each once."""
        if self._digests is None or stop <= start:
            return
        first, last = start // GROUP_BYTES, (stop - 1) // GROUP_BYTES
        for group in first + np.flatnonzero(~self._is_checked[first : last + 1]):
            begin = int(group) * GROUP_BYTES
            data = self._storage.read(self._path, begin, min(GROUP_BYTES, self._end - begin))
            if _digest(data) != self._digests[group]:
                raise self._changed(f"its bytes from {begin} to {begin + len(data)} are others than")
            self._is_checked[group] = True

    def _changed(self, problem: str) -> ChangedFileError:
        return ChangedFileError(self._path, f"{problem} when it was indexed; {CHANGED_REMEDY}")


def digest_idx(path: str, idx_bytes: int, storage: Storage) -> tuple[str, Digests]:
    """Digest an `.idx` in one pass and in constant memory.

    Returns: hex digest (blake2b, 16 bytes) of the whole file; uint64 [num_groups], digests of the groups of header and lengths.
    Raises: as `parse_header` and Storage.read do.
    """
    whole, digests = hashlib.blake2b(digest_size=16), list[int]()
    end = 0
    for start in range(0, idx_bytes, _READ_BYTES):
        data = memoryview(storage.read(path, start, min(_READ_BYTES, idx_bytes - start)))
        whole.update(data)
        if not start:
            end = HEADER_BYTES + 4 * parse_header(path, bytes(data[:HEADER_BYTES]), idx_bytes).num_sequences
        covered = data[: max(0, end - start)]
        digests += [_digest(covered[i : i + GROUP_BYTES]) for i in range(0, len(covered), GROUP_BYTES)]
    return whole.hexdigest(), np.array(digests, np.uint64)


def _digest(data: bytes | memoryview) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
