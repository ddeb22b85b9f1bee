"""The interface between file formats and the rest of megablend: a file becomes a table of blocks,
and blocks become tokens.

A *document* is one row of the token column (one sequence of an `.idx`). A *token* is a non-null
value: null elements, and the slots of null rows, are not tokens. A *block* is the smallest unit of
reading: a Parquet data page, an Arrow record batch, a span of whole documents of a `.bin`. If a
document spans several blocks, each block has a *piece* of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.config.read_spec import OptionValue, ReadSpec
from megablend.errors import CHANGED_REMEDY, ChangedFileError, ConfigError, DataError
from megablend.storage.base import Storage
from megablend.storage.ranges import FetchedRanges, FileRanges

STARTS_MID_DOCUMENT = 1
"""Flag: the block's first piece continues a document of the previous block."""
ENDS_AT_DOCUMENT_END = 2
"""Flag: the document of the block's last piece ends in this block."""
HAS_EARLIER_TOKENS = 4
"""Flag: the continued document had tokens in an earlier block."""

CHUNK_DTYPE = np.dtype(
    [
        ("file", "<i4"),  # index of the file within the table's files; formats write 0
        ("row_group", "<i4"),  # Parquet row group; 0 elsewhere
        ("codec", "<i1"),  # Parquet CompressionCodec; 0 elsewhere
        ("dictionary_offset", "<i8"),  # byte offset of the dictionary page; -1 if there is none
        ("dictionary_bytes", "<i4"),  # stored size of the dictionary page, its header included
        ("first_row", "<i8"),  # the file's row at which the chunk begins
        ("first_token", "<i8"),  # tokens of the file before the chunk
    ]
)
"""A row of the chunk table: a column chunk of a Parquet file, or a part of a raw file. In other
formats, the whole file is one chunk."""

BLOCK_DTYPE = np.dtype(
    [
        ("chunk", "<i4"),  # index into the file's chunks
        ("offset", "<i8"),  # first byte in the file (of the page header, for Parquet)
        ("stored_bytes", "<u4"),  # bytes to read, header included
        ("decoded_bytes", "<u4"),  # bytes after decompression
        ("tokens", "<i8"),  # tokens, end-of-document ones not counted
        ("first_token", "<i8"),  # tokens of the file before the block
        # documents that begin in the block, empty and null ones included; -1 if unknown
        ("rows", "<i8"),
        # documents with tokens that end in the block (number of append_eod tokens); -1 if unknown
        ("ends", "<i8"),
        ("encoding", "<i1"),  # Parquet Encoding of the values; 0 elsewhere
        # STARTS_MID_DOCUMENT | ENDS_AT_DOCUMENT_END | HAS_EARLIER_TOKENS; valid if rows >= 0
        ("flags", "<u1"),
    ]
)
"""A row of the block table as a format makes it. The index stores running sums in place of the
counts."""

PLACED_BLOCK_DTYPE = np.dtype(
    [
        *((name, BLOCK_DTYPE[name]) for name in BLOCK_DTYPE.names or ()),
        ("first_row", "<i8"),  # documents of the file that begin before the block; -1 if unknown
    ]
)
"""A row of the block table as readers receive it: with running sums, so that readers do not need
the rows before it."""

Array = npt.NDArray[Any]
Stops = Callable[[], Int64s]
"""A function that returns the end of each of several blocks: the offset at which the next block
begins, or at which the file ends (int64 [n])."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIndex:
    """Everything that the index stores about a file. It is the same, byte for byte, for the same
    file, options and version of megablend."""

    rows: int
    """Number of documents, empty and null ones included."""
    tokens: int
    """Number of tokens."""
    token_dtype: str
    """numpy name of the decoded tokens' dtype: int32, int64, uint16 or uint32, for `.bin` also
    uint8, int8 or int16; for numbers in extra columns also bool, float16, float32 or float64."""
    chunks: Array
    """The chunk table: CHUNK_DTYPE [num_chunks]."""
    blocks: Array
    """The block table, in file order: BLOCK_DTYPE [num_blocks]. Blocks with neither tokens nor rows
    are left out."""
    structure: str
    """Hex digest (blake2b, 16 bytes) of the file's description: Parquet or Arrow footer, whole
    `.idx`."""
    meta: dict[str, Any]
    """JSON data that the format needs to decode blocks without reading the file's description."""
    scanned_bytes: int
    """Number of data bytes that were read to count the tokens (0 if the file's own index was
    enough)."""
    column: str | None = None
    """Dotted path of the column; None if the format has none, or if a version before 0.2 indexed an
    Arrow file."""
    note: str | None = None
    """A warning about a harmless defect of the file; not stored."""
    token_range: tuple[int, int] | None = None
    """The smallest and the largest token according to the file's own statistics, which may cover
    only some row groups; None if there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedFile:
    """The part of a FileIndex that a format needs to open the file again."""

    size: int
    """Size of the data file in bytes when it was indexed."""
    token_dtype: str
    structure: str
    meta: dict[str, Any]
    group_digests: npt.NDArray[np.uint64] | None = None
    """Digests of groups of the file's description. `build` makes them if the description is large
    (a long `.idx`), so that readers can check the parts that they read. None if there are none."""


@dataclass(frozen=True, slots=True)
class DecodedBlock:
    """A decoded block: its tokens, and the offsets of the pieces of documents in it."""

    tokens: Array
    """The tokens, of the file's token dtype: [num_tokens], read-only."""
    offsets: npt.NDArray[np.int64]
    """Offsets of the pieces, int64 [num_pieces + 1]: piece i is tokens[offsets[i]:offsets[i+1]];
    null and empty documents are pieces without tokens."""
    extra: tuple[Array, ...] = ()
    """One array for each requested extra column, with a number for each token: [num_tokens],
    read-only."""


NO_OFFSETS = np.zeros(1, np.int64)
"""`offsets` of a block whose document offsets were not requested."""
NO_OFFSETS.setflags(write=False)


class BlockReader(Protocol):
    """A reader that determines which bytes the blocks of one indexed file need, and decodes the
    blocks. It can be shared between threads and used after a fork. `formats.fetch` calls its
    methods one after another.

    Args of all methods:
        blocks: PLACED_BLOCK_DTYPE [n], rows of the file's block table, in any order and possibly
            repeated; their `chunk` is an index into `chunks`.
        chunks: CHUNK_DTYPE [m], the file's chunk table.
    """

    def byte_ranges(
        self,
        blocks: Array,
        chunks: Array,
        fetched: Sequence[FetchedRanges] = (),
        *,
        tokens: bool = True,
    ) -> Sequence[FileRanges]:
        """Return the ranges to fetch next. This method reads nothing itself; fetched bytes may
        determine which further ranges are needed.

        Args:
            fetched: the bytes of all ranges that have been requested, in the same order.
            tokens: whether `decode` will be called afterwards; if False, `find_pieces` will be
                called.

        Returns: an empty sequence when nothing more is needed.
        Raises: CorruptFileError if a range is not in the file, or fetched bytes are inconsistent.
        """
        ...

    def decode(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges], *, pieces: bool = True
    ) -> Sequence[DecodedBlock]:
        """Decode blocks whose bytes were fetched.

        Args:
            pieces: whether the blocks' `offsets` are needed; otherwise they may be NO_OFFSETS.

        Raises: CorruptFileError (CRC, counts, truncation), naming path and byte offset.
        """
        ...

    def find_pieces(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges]
    ) -> tuple[list[npt.NDArray[np.int64]], int]:
        """Find the offsets of documents' pieces in blocks, without decoding tokens if the format
        allows it.

        Returns: for each block, the `offsets` that its DecodedBlock would have; and the number of
            data bytes that had to be read.
        Raises: the same errors as `decode`.
        """
        ...


class BaseFormat(ABC):
    """A file format. Implementations are stateless singletons. The default methods and attributes
    suit most formats: one file per path, no options, documents always counted."""

    name: str
    suffixes: Sequence[str]
    """The suffixes of file names that have this format, e.g. (".parquet",)."""
    documents_known: bool = True
    """Whether `index` always counts documents exactly, even if this is not requested, because it
    costs nothing."""
    reader_block_bytes: int = 0
    """Approximate memory that a reader uses per block of its file."""
    kernel_modules: Sequence[str] = ()
    """Modules in `megablend.kernels` with the compiled kernels that decoding needs. They are loaded
    in the background when a file is opened."""
    has_row_groups: bool = False
    """Whether messages about a row also name its row group (`row_group` of the chunks)."""
    requests_in_turn: bool = False
    """Whether each read of `index` depends on the result of the previous one. If so, more files are
    indexed at the same time over a network."""
    has_group_digests: bool = False
    """Whether readers read only parts of a file's description if it is large. `build` then stores
    digests of groups of the description, with which readers check these parts."""

    def files(self, path: str) -> Sequence[str]:
        """Return all files that belong to `path`, the data file first: ["x.bin", "x.idx"] for the
        prefix "x" of a Megatron pair; [path] in other formats."""
        return [path]

    def describe_missing_remedy(self, path: str) -> str | None:
        """Return a remedy to add to the message about a missing file, or None if there is nothing
        to add. The missing file is one of `files`."""
        return None

    def recognizes(self, path: str, storage: Storage) -> bool:
        """Return whether the content of a file has this format. This is called only if several
        formats share the suffix of the file's name.

        Raises: MissingFileError; the errors of Storage.read.
        """
        return True

    def check_options(self, options: Mapping[str, OptionValue]) -> None:
        """Check the config's `format_options`. Raises: ValueError if an option is invalid; the
        message names the option, what was found, and what was expected."""
        if options:
            key = "`documents`" if "documents" in options else "format_options"
            raise ValueError(
                f"found option {min(options)!r}, but this format has no options; remove {key}"
            )

    def describe_contradiction(self, path: str, read: ReadSpec, *, storage: Storage) -> str | None:
        """Return why a file's content cannot be read as this format, and the remedy, or None if
        nothing contradicts it.

        A new file with a contradiction is refused; for a file that is already in the cache, the
        contradiction is a warning.

        Raises: see Storage.read.
        """
        return None

    @abstractmethod
    def index(self, path: str, read: ReadSpec, *, storage: Storage) -> FileIndex:
        """Find the blocks of a file and count their tokens.

        Args:
            path: as in `files`.
            read: how to read it; its options have passed `check_options`. With `count_documents`,
                rows, ends and flags must be exact, even if that requires a scan of the data.

        Raises: MissingFileError; CorruptFileError if the file is truncated, empty or inconsistent;
            UnsupportedFileError if it is encrypted or its codec is not supported; ConfigError if
            there is no such column or it does not contain integers (the message suggests the
            nearest name, and lists the columns).
        """

    @abstractmethod
    def open(
        self, path: str, column: str | None, file: OpenedFile, *, storage: Storage
    ) -> BlockReader:
        """Return a reader of an indexed file, after checking its size and its structure.
        Raises: MissingFileError, ChangedFileError."""

    def list_ranges(self, path: str, blocks: Array, stops: Stops) -> Sequence[FileRanges]:
        """Predict the ranges that readers of blocks will request, for storages that fetch ahead.
        The prediction uses only the index, without opening the file, so dictionaries are not
        included.

        Args:
            blocks: PLACED_BLOCK_DTYPE [n], blocks of one file.
            stops: a function that returns the end of each block; see `Stops`.

        Returns: ranges whose `owners` are indices into `blocks`.
        """
        sizes = blocks["stored_bytes"].astype(np.int64)
        offsets = np.ascontiguousarray(blocks["offset"])
        return [FileRanges(self.files(path)[0], offsets, sizes, np.arange(len(blocks)))]

    def describe_unused_bytes(self, path: str, blocks: Array, size: int) -> str | None:
        """Return a warning about bytes of an indexed file that no block contains, or None if there
        are none or they are expected.

        Args:
            blocks: BLOCK_DTYPE [num_blocks], all blocks of the file.
            size: size of the data file in bytes.
        """
        return None

    def needs_group_digests(self, file: OpenedFile) -> bool:
        """Return whether the file's description is large enough for digests of its groups."""
        return False

    def make_group_digests(
        self, path: str, file: OpenedFile, *, storage: Storage
    ) -> npt.NDArray[np.uint64]:
        """Compute the digests for `OpenedFile.group_digests`: uint64 [num_groups].

        Raises: ChangedFileError if the description is not the one that was indexed; the same errors
            as Storage.read.
        """
        raise NotImplementedError


Format: TypeAlias = BaseFormat
"""The type of formats, for annotations."""


class DivisibleFormat(Protocol):
    """A format that can index a file in parts, in several processes: a part consists of the chunks
    that begin in a range of bytes."""

    def index_part(
        self, path: str, read: ReadSpec, *, span: tuple[int, int], storage: Storage
    ) -> FileIndex:
        """Find the blocks of the chunks that begin within bytes [start, stop) of a file.

        Args and raises: as in `index`.

        Returns: the index of these chunks: rows, tokens and scanned_bytes are those of the part,
            `first_token` counts from the part's start, `first_row` from the file's.
            `index.build.file_parts.join` joins the parts.
        """
        ...


def is_divisible(kind: Format) -> TypeGuard[DivisibleFormat]:
    """Return whether a format is a DivisibleFormat."""
    return hasattr(kind, "index_part")


def refuse_column(path: str, read: ReadSpec, kind: str) -> None:
    """Raise ConfigError if the config names a column for a file of a kind that has no columns."""
    if read.column is not None:
        key = "extra_columns" if read.allow_float else "column"
        raise ConfigError(f"{path}: {kind} files have no columns; remove {key}: {read.column}")


def check_size(path: str, indexed: int, storage: Storage) -> int:
    """Return the size of a file in bytes. Raises: ChangedFileError if it is not the `indexed` size;
    the errors of Storage.stat."""
    size = storage.stat(path).size
    if size != indexed:
        raise ChangedFileError(
            path, f"has {size} bytes, but had {indexed} when it was indexed; {CHANGED_REMEDY}"
        )
    return size


def changed_error(path: str, error: ConfigError | DataError) -> ChangedFileError:
    """Return a ChangedFileError for an error that was raised while the structure of an indexed file
    was read."""
    if isinstance(error, DataError):
        problem = error.problem
        offset = error.offset
    else:
        problem = str(error).removeprefix(f"{path}: ")
        offset = None
    return ChangedFileError(
        path, f"changed since it was indexed: {problem}; {CHANGED_REMEDY}", offset=offset
    )


def check_structure(path: str, digest: str, file: OpenedFile, what: str) -> None:
    """Compare the digest of a file's structure with the indexed one. Raises: ChangedFileError.

    Args:
        what: the part of the file whose digest is compared, for the message.
    """
    if digest != file.structure:
        raise ChangedFileError(
            path,
            f"its {what}'s digest is {digest}, but was {file.structure} when it was indexed; "
            f"{CHANGED_REMEDY}",
        )
