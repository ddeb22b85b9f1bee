"""The seam between files and everything above: a file becomes a table of blocks; blocks become tokens.

A *document* is one row of the token column (one sequence of an `.idx`). A *token* is a non-null value: null elements, and the
slots of null rows, carry none. A *block* is the smallest thing read at once: a Parquet data page, an Arrow record batch, a span
of whole documents of a `.bin`. Where a document straddles blocks, each block holds a *piece* of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from megablend.config.read_spec import OptionValue, ReadSpec
from megablend.storage.base import Storage
from megablend.storage.ranges import FetchedRanges, FileRanges

STARTS_MID_DOCUMENT = 1
"""Flag: the block's first piece continues a document of the block before it."""
ENDS_AT_DOCUMENT_END = 2
"""Flag: the document of the block's last piece ends in this block."""
HAS_EARLIER_TOKENS = 4
"""Flag: the continued document had tokens in an earlier block."""

CHUNK_DTYPE = np.dtype(
    [
        ("file", "<i4"),  # index of the file within the table's files; 0 as a format writes it
        ("row_group", "<i4"),  # Parquet row group; 0 elsewhere
        ("codec", "<i1"),  # Parquet CompressionCodec; 0 elsewhere
        ("dictionary_offset", "<i8"),  # byte offset of the dictionary page; -1 where there is none
        ("dictionary_bytes", "<i4"),  # stored size of the dictionary page, its header included
        ("first_row", "<i8"),  # the file's row with which the chunk begins
        ("first_token", "<i8"),  # tokens of the file before the chunk
    ]
)
"""A column chunk of a Parquet file, or a part of a raw one; other formats have one a file."""

BLOCK_DTYPE = np.dtype(
    [
        ("chunk", "<i4"),  # index into the file's chunks
        ("offset", "<i8"),  # first byte in the file (of the page header, for Parquet)
        ("stored_bytes", "<u4"),  # bytes to read, header included
        ("decoded_bytes", "<u4"),  # bytes after decompression
        ("tokens", "<i8"),  # tokens, end-of-document ones not counted
        ("first_token", "<i8"),  # tokens of the file before the block
        ("rows", "<i8"),  # documents that begin in the block, empty and null ones included; -1 where not known
        ("ends", "<i8"),  # documents with tokens that end in the block (what append_eod adds); -1 where not known
        ("encoding", "<i1"),  # Parquet Encoding of the values; 0 elsewhere
        ("flags", "<u1"),  # STARTS_MID_DOCUMENT | ENDS_AT_DOCUMENT_END | HAS_EARLIER_TOKENS; meaningful where rows >= 0
    ]
)
"""A block as its format finds it; the index stores running sums of the counts instead."""

PLACED_BLOCK_DTYPE = np.dtype(
    [
        *((name, BLOCK_DTYPE[name]) for name in BLOCK_DTYPE.names or ()),
        ("first_row", "<i8"),  # documents of the file that begin before the block; -1 where not known
    ]
)
"""A block as readers take it: what the running sums of the index add, so that no reader needs a table of its file's blocks."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIndex:
    """All that the index keeps of one file. Deterministic: the same bytes for the same file, options and megablend version."""

    rows: int
    """Documents, empty and null ones included."""
    tokens: int
    token_dtype: str
    """numpy name of the tokens as decoded: int32, int64, uint16 or uint32 (uint8, int8, int16 too for `.bin`); of numbers beside
    the tokens bool, float16, float32 or float64, too."""
    chunks: Array
    """CHUNK_DTYPE [num_chunks]."""
    blocks: Array
    """BLOCK_DTYPE [num_blocks], in file order; blocks without tokens or rows are left out."""
    structure: str
    """Hex digest (blake2b, 16 bytes) of what describes the file: Parquet or Arrow footer, whole `.idx`."""
    meta: dict[str, Any]
    """JSON-able facts the format needs to decode blocks without reading the file's description again."""
    scanned_bytes: int
    """Body bytes that had to be read to count (0 where the file's own index sufficed)."""
    column: str | None = None
    """Dotted path of the column; None where the format has none, or where a version before 0.2 indexed an Arrow file."""
    note: str | None = None
    """What was found wrong in the file that did no harm; not kept."""
    token_range: tuple[int, int] | None = None
    """The smallest and the largest token as the file's own statistics give them, perhaps for some of its row groups alone; None
    where there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedFile:
    """The part of a FileIndex that a reader needs (what the index hands back to the format)."""

    size: int
    """Bytes of the data file when it was indexed."""
    token_dtype: str
    structure: str
    meta: dict[str, Any]
    group_digests: npt.NDArray[np.uint64] | None = None
    """What `build` found in the file's description, group by group, for a reader that looks at some of it (a large `.idx`);
    None where there is no such table."""


@dataclass(frozen=True, slots=True)
class DecodedBlock:
    """Tokens of one block, and where its documents' pieces lie."""

    tokens: Array
    """[num_tokens], of the file's token dtype; read-only."""
    offsets: npt.NDArray[np.int64]
    """int64 [num_pieces + 1]: piece i is tokens[offsets[i]:offsets[i+1]]; null and empty documents are pieces of no tokens."""
    extra: tuple[Array, ...] = ()
    """Of each extra column that was asked for: a number a token, [num_tokens]; read-only."""


NO_OFFSETS = np.zeros(1, np.int64)
"""`offsets` of a block of which nobody asked where its documents lie."""
NO_OFFSETS.setflags(write=False)


class BlockReader(Protocol):
    """Knows which bytes the blocks of one indexed file need, and decodes them. Safe to share between threads, and after a fork.

    What it is given are blocks: PLACED_BLOCK_DTYPE [n], rows of the file's block table (`chunk` indexes `chunks`); any order,
    repeats allowed; and chunks: CHUNK_DTYPE [m], the file's chunk table. `formats.fetch` has what calls these methods in turn.
    """

    def byte_ranges(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges] = (), *, tokens: bool = True
    ) -> Sequence[FileRanges]:
        """What is to be fetched next. Nothing is read here: what was fetched may say where the rest is.

        Args:
            fetched: what came of all that was asked for before, in the same order.
            tokens: for `decode`; otherwise for `find_pieces`.

        Returns: nothing when all is there.
        Raises: CorruptFileError where it is not in the file, or what came contradicts itself.
        """
        ...

    def decode(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges], *, pieces: bool = True
    ) -> Sequence[DecodedBlock]:
        """Decode blocks whose bytes were fetched.

        Args:
            pieces: whether somebody will look at the blocks' `offsets`; otherwise they may be NO_OFFSETS.

        Raises: CorruptFileError (CRC, counts, truncation), naming path and byte offset.
        """
        ...

    def find_pieces(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges]
    ) -> tuple[list[npt.NDArray[np.int64]], int]:
        """Where the documents' pieces lie in blocks, without their tokens where the format can tell.

        Returns: `offsets` of each DecodedBlock; the bytes of bodies that had to be read.
        Raises: as `decode` does.
        """
        ...


class Format(Protocol):
    """A kind of file. Implementations are stateless singletons of their modules, and derive from `BaseFormat`."""

    name: str
    suffixes: Sequence[str]
    """File name endings by which a path is recognised, e.g. (".parquet",)."""
    documents_known: bool
    """Documents are always counted exactly, whether asked for or not: it costs nothing."""
    reader_block_bytes: int
    """Approximate memory that a reader uses per block of its file."""
    has_row_groups: bool
    """Whether messages about a row also name its row group (`row_group` of the chunks)."""

    def files(self, path: str) -> Sequence[str]:
        """All files that `path` stands for, data file first: ["x.bin", "x.idx"] for the prefix "x"; [path] elsewhere."""
        ...

    def describe_missing_remedy(self, path: str) -> str | None:
        """What to do about one of `files` that does not exist, for the message; None where there is nothing to add."""
        ...

    def recognizes(self, path: str, storage: Storage) -> bool:
        """Whether the content of a file is of this format; called only where several formats have the suffix of its name.

        Raises: MissingFileError; as Storage.read does.
        """
        ...

    def check_options(self, options: Mapping[str, OptionValue]) -> None:
        """Check the config's `format_options`. Raises: ValueError, which says which option, what was found and expected."""
        ...

    def index(self, path: str, read: ReadSpec, *, storage: Storage) -> FileIndex:
        """Find the blocks of a file and count their tokens.

        Args:
            path: as in `files`.
            read: how; its options have passed `check_options`. Rows, ends and flags must be exact where it says
                `count_documents`, even if that takes a scan of the body.

        Raises: MissingFileError; CorruptFileError (truncated, emptied, inconsistent); UnsupportedFileError (encrypted, codec);
            ConfigError (no such column, or not of integers: names the nearest, lists those there are).
        """
        ...

    def open(self, path: str, column: str | None, file: OpenedFile, *, storage: Storage) -> BlockReader:
        """A reader of an indexed file. Checks size and structure first. Raises MissingFileError, ChangedFileError."""
        ...

    def describe_unused_bytes(self, path: str, blocks: Array, size: int) -> str | None:
        """A warning about bytes of an indexed file that no block contains; None where that is as it should be.

        Args:
            blocks: BLOCK_DTYPE [num_blocks], of the whole file.
            size: bytes of the data file.
        """
        ...


class BaseFormat:
    """What most formats do: one file a path, no options, documents always counted."""

    documents_known: bool = True
    reader_block_bytes: int = 0
    has_row_groups: bool = False

    def files(self, path: str) -> Sequence[str]:
        """The file itself."""
        return [path]

    def describe_missing_remedy(self, path: str) -> str | None:
        """Nothing to add."""
        return None

    def recognizes(self, path: str, storage: Storage) -> bool:
        """Every file with one of the suffixes."""
        return True

    def check_options(self, options: Mapping[str, OptionValue]) -> None:
        """Refuse any option."""
        if options:
            raise ValueError(f"found option {min(options)!r}, but this format has no options; remove format_options")

    def describe_unused_bytes(self, path: str, blocks: Array, size: int) -> str | None:
        """No warning."""
        return None


class DivisibleFormat(Format, Protocol):
    """A format of which several processes may index one file together, each the chunks that begin in its part of the bytes."""

    def index_part(self, path: str, read: ReadSpec, *, span: tuple[int, int], storage: Storage) -> FileIndex:
        """Find the blocks of the chunks that begin within bytes [start, stop) of a file.

        Args and raises: as of `index`.

        Returns: the index of these chunks; rows, tokens and scanned_bytes are theirs alone, `first_token` counts from the part's
            start; `first_row` is the file's. `index.parts.join` makes the parts one.
        """
        ...


class GroupDigestFormat(Format, Protocol):
    """A format whose readers look at parts of a large description, each of which `build` digests (`index.idx_digests`)."""

    def needs_group_digests(self, file: OpenedFile) -> bool:
        """Whether the file's description is so large that its groups are digested."""
        ...

    def make_group_digests(self, path: str, file: OpenedFile, *, storage: Storage) -> npt.NDArray[np.uint64]:
        """The digests that `open` takes as `OpenedFile.group_digests`: uint64 [num_groups].

        Raises: ChangedFileError where the description is not the one that was indexed; as Storage.read does.
        """
        ...


def is_divisible(kind: Format) -> TypeGuard[DivisibleFormat]:
    """Whether a format is a DivisibleFormat."""
    return hasattr(kind, "index_part")


def has_group_digests(kind: Format) -> TypeGuard[GroupDigestFormat]:
    """Whether a format is a GroupDigestFormat."""
    return hasattr(kind, "make_group_digests")
