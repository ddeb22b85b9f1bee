"""Low-level datasets: classes with the interface of Megatron's IndexedDataset, from which
GPTDataset and other code read documents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megablend.errors import CacheError, ChangedFileError
from megablend.formats.base import STARTS_MID_DOCUMENT, Array
from megablend.formats.megatron.idx import HEADER_BYTES, parse_header
from megablend.lazy import cached_property
from megablend.megatron.cache_builder.catalog import open_catalog
from megablend.megatron.cache_builder.document_tables import open_table, table_path
from megablend.megatron.cache_builder.lengths import lengths_of, read_lengths
from megablend.megatron.pair_files import PairState, check_etags, check_open_size, look_at_pair
from megablend.megatron.request.address import Address
from megablend.prefetch.block_cache import BlockCache
from megablend.storage.base import Storage
from megablend.storage.local import without_inodes
from megablend.storage.location import find_scheme
from megablend.system.safe_open import map_descriptor


class SequenceIndex:
    """The lengths and positions of sequences, and the documents that they form. Positions and
    documents are read on first use.

    Args:
        sequence_lengths: int32 [num_sequences], number of tokens of each sequence.
        dtype: dtype of the tokens.
        read_pointers: returns int64 [num_sequences], the position of each sequence in the data, in
            bytes.
        read_documents: returns int64 [num_documents + 1], the number of the first sequence of each
            document, followed by the number of sequences.

    Source: megatron.core.datasets.indexed_dataset._IndexReader.
    """

    sequence_modes = None
    """Always None, since the data is not multimodal."""

    def __init__(
        self,
        sequence_lengths: Array,
        dtype: np.dtype[Any],
        read_pointers: Callable[[], Array],
        read_documents: Callable[[], Array],
    ) -> None:
        self.sequence_lengths = sequence_lengths
        self.dtype = dtype.type
        self.dtype_size = dtype.itemsize
        self._read_pointers = read_pointers
        self._read_documents = read_documents

    @cached_property
    def sequence_pointers(self) -> Array:
        """The position of each sequence in the data, in bytes (int64 [num_sequences])."""
        return self._read_pointers()

    @cached_property
    def document_indices(self) -> Array:
        """The number of the first sequence of each document, followed by the number of sequences
        (int64 [num_documents + 1])."""
        return self._read_documents()

    @property
    def sequence_count(self) -> int:
        """The number of sequences."""
        return len(self)

    @property
    def document_count(self) -> int:
        """The length of `document_indices`: one more than the number of documents."""
        return len(self.document_indices)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, idx: int) -> tuple[np.int64, np.int32, None]:
        """Return the position, length and mode of a sequence; the mode is None. Raises: IndexError
        if `idx` is out of range."""
        return self.sequence_pointers[idx], self.sequence_lengths[idx], None


class Documents(ABC):
    """A picklable collection of documents, which are accessed by number. It has the interface of
    megatron.core.datasets.indexed_dataset.IndexedDataset."""

    path_prefix: str
    """The name of the documents in the blend."""
    sequence_lengths: Array
    """The number of tokens of each document (int32 [num_documents], memory-mapped)."""
    multimodal = False

    @abstractmethod
    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Array:
        """Return tokens [offset, offset + length) of a document; without a length, all tokens from
        the offset on. Raises: IndexError if `idx` is out of range."""

    @property
    @abstractmethod
    def index(self) -> SequenceIndex:
        """The lengths and positions of the sequences, and the first sequence of each document."""

    @property
    def document_indices(self) -> Array:
        """See `SequenceIndex.document_indices`. A document of a pair may consist of several
        sequences."""
        return self.index.document_indices

    def get_document_indices(self) -> Array:
        """See document_indices."""
        return self.document_indices

    def set_document_indices(self, document_indices: Array) -> None:
        """Replace document_indices in this object only, not in the files."""
        self.index.document_indices = document_indices

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, idx: int | np.integer[Any] | slice) -> Array | list[Array]:
        """Return the tokens of a document, or of each document of a slice.

        Raises: IndexError if `idx` is out of range; ValueError for a slice with a step; TypeError
            for an index of another type.
        """
        if isinstance(idx, slice):
            start, stop, step = idx.indices(len(self))
            if step != 1:
                raise ValueError(
                    f"{self.path_prefix}: found a slice with step {step}; expected consecutive "
                    "documents"
                )
            # Megatron reads a slice at once and splits it; numpy splits nothing into one empty part
            return [self.get(i) for i in range(start, stop)] or [np.zeros(0, self.index.dtype)]
        if isinstance(idx, int | np.integer):
            return self.get(int(idx))
        raise TypeError(
            f"{self.path_prefix}: found a {type(idx).__name__}; expected a document's number or a slice"
        )

    def _number(self, idx: int) -> int:
        """Return a document's number. A negative number is counted from the end. Raises: IndexError
        if `idx` is out of range."""
        count = len(self)
        if not -count <= idx < count:
            raise IndexError(
                f"{self.path_prefix}: document {idx} is out of range: there are {count} documents"
            )
        return int(idx) % count


class PairDocuments(Documents):
    """The documents of a `.bin/.idx` pair, whose files belong to the process's pool of open files.

    The lengths of documents are taken from a catalog (see cache_builder/catalog.py). The position
    of a document in the `.bin` is read from the `.idx` whenever the document is read.
    """

    def __init__(
        self,
        prefix: str,
        catalog: Path,
        storage: Storage,
        files: PairState | None = None,
        etags: Sequence[str | None] | None = None,
    ) -> None:
        lengths, entries = open_catalog(catalog)
        entry = entries[prefix]
        if etags is not None:
            check_etags(prefix, etags, entry["etags"])
        self.path_prefix = prefix
        self.sequence_lengths = lengths[entry["first"] :][: entry["sequences"]]
        self.dtype = np.dtype(entry["dtype"]).newbyteorder("<")
        self.storage = storage
        self._catalog = catalog
        self.etags = self._etag, self._data_etag = tuple(entry["etags"])
        """The etags of the `.idx` and the `.bin` when the lengths were read."""
        self._checked = False
        self._files = look_at_pair(prefix) if files is None else files
        """The states of the files when the documents were first opened, by this process or the one
        that pickled them."""

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Array:
        """See Documents.get.

        Raises: IndexError; MissingFileError; CorruptFileError if the pair's files end early;
            ChangedFileError if the lengths of the documents are not those that the cache was built
            from, or if the sizes of the files have changed.
        """
        if not self._checked:
            self._check()
        width = self.dtype.itemsize
        number = self._number(idx)
        entry = self.storage.read(f"{self.path_prefix}.idx", self.pointers_start + 8 * number, 8)
        pointer = int.from_bytes(entry, "little", signed=True)
        count = int(self.sequence_lengths[number]) - offset if length is None else int(length)
        data = self.storage.read(
            f"{self.path_prefix}.bin", pointer + int(offset) * width, count * width
        )
        idx_file, bin_file = self.files
        with (
            self.storage.descriptor(idx_file) as idx_fd,
            self.storage.descriptor(bin_file) as bin_fd,
        ):
            self.check_sizes(idx_fd, bin_fd)
        return np.frombuffer(data, self.dtype)

    def check_sizes(self, *descriptors: int) -> None:
        """Check that the open `.idx` and `.bin` still have the sizes that they had when the
        documents were first opened. Called after reading, since the files may have been overwritten
        with other documents. Raises: ChangedFileError if a size differs."""
        for path, descriptor, before in zip(self.files, descriptors, self._files, strict=True):
            check_open_size(path, descriptor, before)

    @property
    def pointers_start(self) -> int:
        """The offset in the `.idx`, in bytes, at which the positions of the sequences begin."""
        return HEADER_BYTES + 4 * len(self)

    @cached_property
    def files(self) -> tuple[str, str]:
        """The paths of the `.idx` and the `.bin`. The files are checked before the paths are
        returned. Raises: see `get`."""
        if not self._checked:
            self._check()
        return f"{self.path_prefix}.idx", f"{self.path_prefix}.bin"

    @cached_property
    def index(self) -> SequenceIndex:
        """See Documents.index. The arrays are memory maps of the `.idx`."""
        return SequenceIndex(
            self.sequence_lengths,
            self.dtype,
            lambda: self._idx_arrays[0],
            lambda: self._idx_arrays[1],
        )

    @cached_property
    def _idx_arrays(self) -> tuple[Array, Array]:
        """The positions of the sequences, and the first sequence of each document (both int64).
        Raises: see `get`."""
        self._check()
        path = f"{self.path_prefix}.idx"
        # The storage keeps the file open that was checked, even if it was replaced since
        with self.storage.descriptor(path) as fd:
            if fd < 0:  # in an object store, without a copy
                whole: Array = np.frombuffer(
                    self.storage.read(path, 0, self.storage.stat(path).size), np.uint8
                )
            else:
                whole = np.frombuffer(map_descriptor(fd), np.uint8)
        header = parse_header(path, whole[:HEADER_BYTES].tobytes(), len(whole))
        pointers, rest = np.split(whole[self.pointers_start :], [8 * len(self)])
        return pointers.view("<i8"), rest[: 8 * header.num_boundaries].view("<i8")

    def _check(self) -> None:
        """Check that the catalog was made from this `.idx`. Called on first use, when the file is
        opened anyway.

        If the file was copied or touched, its lengths are read and compared, once per process.
        """
        path = f"{self.path_prefix}.idx"
        data = f"{self.path_prefix}.bin"
        if self.storage.stat(data).etag != self._data_etag and find_scheme(data):
            # Sizes and times of local files are compared where the dataset is opened
            raise ChangedFileError(
                data,
                "was replaced after this job began to build its datasets: restart the job (without "
                "fast_cache_load), or restore the file first",
            )
        if without_inodes(self.storage.stat(path).etag) != without_inodes(self._etag):
            stored = lengths_of(self.path_prefix, storage=self.storage)
            if not np.array_equal(read_lengths(stored), self.sequence_lengths):
                raise ChangedFileError(
                    path,
                    f"does not contain the sequences that the cache was built from (found {stored.num_sequences:,}, expected "
                    f"{len(self):,} of the same lengths): restore the file, or remove the cache ({self._catalog.parent.parent}) "
                    "and rebuild it",
                )
        self._checked = True

    def __reduce__(self) -> tuple[Callable[..., PairDocuments], tuple[Any, ...]]:
        return PairDocuments, (
            self.path_prefix,
            self._catalog,
            self.storage,
            self._files,
            self.etags,
        )


class TableDocuments(Documents):
    """The documents of Parquet or Arrow files. The block of a document is found by the index
    snapshot and the table of the documents' lengths. Up to `memory` bytes of the most recently read
    blocks are kept."""

    def __init__(self, cache: str, address: Address, memory: int, storage: Storage) -> None:
        store, self.sequence_lengths = open_table(cache, address, storage)
        self.path_prefix = str(address)
        self._arguments = (cache, address, memory, storage)
        self._has_eod = address.append_eod is not None
        self._block_cache = BlockCache(store, memory)
        self._snapshot = store.snapshot
        self._table = table_path(cache, address)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Array:
        """See Documents.get. Raises: IndexError, MissingFileError, ChangedFileError,
        CorruptFileError, CacheError."""
        number = self._number(idx)
        count = int(self.sequence_lengths[number]) - offset if length is None else int(length)
        start = self._position(number) + int(offset)
        parts = []
        block = int(np.searchsorted(self._tokens_before, start, side="right")) - 1
        while count > 0:
            exists = 0 <= block < self._snapshot.num_blocks
            tokens = self._block_cache.get([block])[0].tokens if exists else np.zeros(0, np.int32)
            first = start - self._count_before(block) if exists else -1
            if not 0 <= first <= max(0, len(tokens) - 1):
                raise CacheError(
                    f"{self._table}: damaged: document {number:,} has more tokens than are left in its files; remove "
                    "the table and build again"
                )
            part = tokens[first : first + count]
            parts.append(part)
            start += len(part)
            count -= len(part)
            block += 1
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    @cached_property
    def index(self) -> SequenceIndex:
        """See Documents.index. The index describes all tokens as if they were in one `.bin`, and
        each row of the table as a sequence that is also a document."""
        dtype = np.result_type(*self._snapshot.files.token_dtypes(self._snapshot.sources[0].files))
        return SequenceIndex(
            self.sequence_lengths,
            dtype,
            lambda: (
                (np.cumsum(self.sequence_lengths, dtype=np.int64) - self.sequence_lengths)
                * dtype.itemsize
            ),
            lambda: np.arange(len(self) + 1, dtype=np.int64),
        )

    def _position(self, idx: int) -> int:
        """Return the number of tokens before a document, over all files."""
        snapshot = self._snapshot
        block = int(
            snapshot.find_blocks("rows_before", range(snapshot.num_blocks), np.array([idx]))[0]
        )
        row = int(snapshot.running("rows_before", [block])[0])
        position = self._count_before(block) + int(
            self.sequence_lengths[row:idx].sum(dtype=np.int64)
        )
        if self._snapshot.blocks(np.array([block]))["flags"][0] & STARTS_MID_DOCUMENT:
            position += int(self._block_cache.get([block])[0].offsets[1])
        return position

    def _count_before(self, block: int) -> int:
        """Return the number of tokens before a block, end-of-document tokens included. Raises:
        CacheError."""
        return int(self._snapshot.count_tokens_before([block], has_eod=self._has_eod)[0])

    @cached_property
    def _tokens_before(self) -> Array:
        """The number of tokens before each block, including end-of-document tokens (int64
        [num_blocks + 1]). The numbers are not verified by checksums."""
        tokens: Array = self._snapshot.tokens_before
        return tokens + self._snapshot.ends_before if self._has_eod else tokens

    def __reduce__(self) -> tuple[Callable[..., TableDocuments], tuple[Any, ...]]:
        return TableDocuments, self._arguments
