"""Raw files: only token ids, after an optional header.
A block is a range of about `block_bytes` of them.

Documents are separated by a token, found by reading the file once when it is indexed; without one,
a file is one document. Large files are indexed in parts: a chunk is the smallest part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.config.read_spec import OptionValue, ReadSpec
from megablend.errors import (
    CHANGED_REMEDY,
    ChangedFileError,
    ConfigError,
    CorruptFileError,
    UnsupportedFileError,
)
from megablend.formats.base import (
    BLOCK_DTYPE,
    CHUNK_DTYPE,
    NO_OFFSETS,
    Array,
    BaseFormat,
    BlockReader,
    DecodedBlock,
    FileIndex,
    OpenedFile,
    check_size,
)
from megablend.formats.raw.boundaries import Separator, count_documents, find_offsets, make_blocks
from megablend.formats.raw.raw_header import Layout, find_container, read_layout
from megablend.formats.raw.raw_options import RawOptions, parse_options
from megablend.storage.base import Storage
from megablend.storage.prefetched import stream_portions
from megablend.storage.ranges import FetchedRanges, FileRanges


@dataclass(frozen=True, slots=True, kw_only=True)
class RawReader:
    """Decodes blocks of one file."""

    path: str
    size: int
    """Bytes of the file."""
    header_bytes: int
    dtype: str
    separator: Separator | None
    """None if the file is one document."""

    def byte_ranges(
        self,
        blocks: Array,
        chunks: Array,
        fetched: Sequence[FetchedRanges] = (),
        *,
        tokens: bool = True,
    ) -> list[FileRanges]:
        """The blocks' tokens; nothing if only documents are needed and the file is one document.
        See BlockReader.byte_ranges."""
        offsets, sizes = self._ranges(blocks)
        if fetched or not len(blocks) or not (tokens or self.separator is not None):
            return []
        return [FileRanges(self.path, offsets, sizes, np.arange(len(blocks)))]

    def decode(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges], *, pieces: bool = True
    ) -> list[DecodedBlock]:
        """See BlockReader.decode."""
        found = []
        for i, block in enumerate(blocks):
            tokens = self._tokens(fetched[0][i])
            found.append(
                DecodedBlock(
                    tokens,
                    find_offsets(self.path, block, self.separator, tokens)
                    if pieces
                    else NO_OFFSETS,
                )
            )
        return found

    def find_pieces(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges]
    ) -> tuple[list[npt.NDArray[np.int64]], int]:
        """See BlockReader.find_pieces; found in the tokens if these separate documents."""
        if self.separator is None:
            return [find_offsets(self.path, block, self.separator, None) for block in blocks], 0
        found = [
            find_offsets(self.path, block, self.separator, self._tokens(fetched[0][i]))
            for i, block in enumerate(blocks)
        ]
        return found, int(blocks["stored_bytes"].sum())

    def _ranges(self, blocks: Array) -> tuple[Int64s, Int64s]:
        """Offsets and sizes of blocks, int64 [n] each. Raises:
        CorruptFileError if they are not within the file."""
        offsets = blocks["offset"].astype(np.int64)
        sizes = blocks["tokens"].astype(np.int64) * np.dtype(self.dtype).itemsize
        wrong = (
            (sizes != blocks["stored_bytes"])
            | (offsets < self.header_bytes)
            | (offsets + sizes > self.size)
        )
        for i in np.flatnonzero(wrong)[:1]:
            raise CorruptFileError(
                self.path,
                f"block of {blocks['tokens'][i]} tokens in {blocks['stored_bytes'][i]} bytes is outside the file of {self.size} "
                "bytes",
                offset=int(offsets[i]),
            )
        return offsets, sizes

    def _tokens(self, data: Array) -> Array:
        """Tokens [num_tokens] from bytes, uint8 [stored_bytes]; read-only."""
        tokens: Array = np.require(
            data.view(np.dtype(self.dtype).newbyteorder("<")), requirements="A"
        )
        tokens.flags.writeable = False
        return tokens


_MAX_BLOCK_BYTES = 1 << 30


class RawFormat(BaseFormat):
    """Files of token ids; see the options in `raw_options`."""

    name = "raw"
    suffixes: Sequence[str] = (".npy",)
    chunk_bytes = 64 << 20
    """Size of a chunk's tokens, rounded to whole blocks."""
    scan_bytes = 8 << 20
    """Bytes per read when finding documents."""

    def check_options(self, options: Mapping[str, OptionValue]) -> None:
        """See Format.check_options."""
        parse_options(options)

    def index(self, path: str, read: ReadSpec, *, storage: Storage) -> FileIndex:
        """Find the documents of a file; see Format.index."""
        return self.index_part(path, read, span=(0, storage.stat(path).size), storage=storage)

    def describe_contradiction(self, path: str, read: ReadSpec, *, storage: Storage) -> str | None:
        """What the bytes of a container are, if they would be read as tokens; see
        Format.describe_contradiction."""
        options = parse_options(dict(read.options))
        if options.allow_container:
            return None
        found = find_container(path, storage.stat(path).size, options.header_bytes, storage)
        if found is None:
            return None
        return (
            f"its content is {found}, whose bytes are not token ids; correct or "
            "remove `format` and `header_bytes`, unpack a compressed file, or set `format_options: "
            "{allow_container: true}` if they are tokens"
        )

    def index_part(
        self, path: str, read: ReadSpec, *, span: tuple[int, int], storage: Storage
    ) -> FileIndex:
        """Find the documents of the chunks that begin in a span of bytes; see
        DivisibleFormat.index_part."""
        if read.column is not None:
            key = "extra_columns" if read.allow_float else "column"
            raise ConfigError(f"{path}: raw files have no columns; remove {key}: {read.column}")
        options = parse_options(dict(read.options))
        size = storage.stat(path).size
        layout, header = read_layout(path, size, options, storage)
        separator = _separator(options)
        block_tokens = max(1, min(read.block_bytes, _MAX_BLOCK_BYTES) // layout.token_bytes)
        chunk_tokens = block_tokens * max(
            1, self.chunk_bytes // (block_tokens * layout.token_bytes)
        )
        numbers = _chunks_in(span, layout, chunk_tokens)
        chunks = np.zeros(len(numbers), CHUNK_DTYPE)
        chunks["dictionary_offset"] = -1
        chunks["row_group"] = numbers
        scan_tokens = block_tokens * max(1, self.scan_bytes // (block_tokens * layout.token_bytes))
        ranges = list(_scan_ranges(numbers, chunk_tokens, scan_tokens, layout))
        reads = [] if separator is None else [_byte_range(layout, *each) for each in ranges]
        portions = [(np.array([offset]), np.array([size])) for offset, size in reads]
        ends = list[tuple[int, int]]()  # smallest and largest token of what is read anyway
        blocks = [
            _index_blocks(path, layout, separator, *ranges[i], block_tokens, storage, ends)
            for i in (stream_portions(storage, path, portions) if reads else range(len(ranges)))
        ]
        found = np.concatenate([np.zeros(0, BLOCK_DTYPE), *blocks])
        found["chunk"] = found["first_token"] // chunk_tokens - (
            numbers.start if len(numbers) else 0
        )
        before = int(found["first_token"][0]) if len(found) else 0
        found["first_token"] -= before
        chunks["first_token"] = np.arange(len(numbers)) * chunk_tokens
        return FileIndex(
            rows=int(found["rows"].sum()),
            tokens=int(found["tokens"].sum()),
            token_dtype=layout.dtype,
            chunks=chunks,
            blocks=found,
            structure=_digest(header, layout),
            meta={
                "header_bytes": layout.header_bytes,
                "separator": None if separator is None else [separator.token, separator.ends],
            },
            scanned_bytes=int(found["stored_bytes"].sum()) if separator is not None else 0,
            token_range=(min(low for low, _ in ends), max(high for _, high in ends))
            if ends
            else None,
        )

    def open(
        self, path: str, column: str | None, file: OpenedFile, *, storage: Storage
    ) -> BlockReader:
        """A reader of an indexed file; see Format.open."""
        size = check_size(path, file, storage)
        header_bytes = int(file.meta["header_bytes"])
        dtype = file.token_dtype
        options = RawOptions(dtype=dtype, header_bytes=header_bytes)
        try:
            layout, header = read_layout(path, size, options, storage)
        except (ConfigError, CorruptFileError, UnsupportedFileError) as error:
            raise ChangedFileError(
                path, f"changed since it was indexed: {error}; {CHANGED_REMEDY}"
            ) from error
        if (found := _digest(header, layout)) != file.structure:
            raise ChangedFileError(
                path,
                f"its header's digest is {found}, was {file.structure} when it was indexed; {CHANGED_REMEDY}",
            )
        separator = file.meta["separator"]
        return RawReader(
            path=path,
            size=size,
            header_bytes=header_bytes,
            dtype=dtype,
            separator=None
            if separator is None
            else Separator(int(separator[0]), bool(separator[1])),
        )


RAW = RawFormat()


def _separator(options: RawOptions) -> Separator | None:
    return (
        None
        if options.separator is None
        else Separator(options.separator, options.eod_token is not None)
    )


def _chunks_in(span: tuple[int, int], layout: Layout, chunk_tokens: int) -> range:
    """Numbers of the chunks that begin within bytes [start, stop) of the file; the first one counts
    as beginning at byte 0."""
    step = chunk_tokens * layout.token_bytes
    num_chunks = -(-layout.num_tokens // chunk_tokens)
    first, stop = (-(-(each - layout.header_bytes) // step) if each > 0 else 0 for each in span)
    return range(max(0, min(first, num_chunks)), max(0, min(stop, num_chunks)))


def _scan_ranges(
    numbers: range, chunk_tokens: int, step: int, layout: Layout
) -> Iterator[tuple[int, int]]:
    """Ranges of `step` tokens that are indexed together: whole blocks, of one chunk or several."""
    start = numbers.start * chunk_tokens
    end = min(numbers.stop * chunk_tokens, layout.num_tokens)
    while start < end:
        yield start, min(start + step, end)
        start += step


def _index_blocks(
    path: str,
    layout: Layout,
    separator: Separator | None,
    start: int,
    stop: int,
    block_tokens: int,
    storage: Storage,
    ends: list[tuple[int, int]],
) -> Array:
    """The blocks of tokens [start, stop), BLOCK_DTYPE [n]. If tokens are read, their smallest and
    largest are added to `ends`."""
    first = np.arange(start, stop, block_tokens, dtype=np.int64)
    sizes = np.minimum(block_tokens, stop - first)
    blocks = make_blocks(layout.header_bytes, layout.token_bytes, first, sizes)
    starts = np.zeros(0, np.int64)
    if separator is not None:
        data = storage.read(path, *_byte_range(layout, start, stop))
        tokens = np.frombuffer(data, np.dtype(layout.dtype).newbyteorder("<"))
        starts = max(0, start - 1) + separator.find_starts(tokens)
        ends.append((int(tokens.min()), int(tokens.max())))
    count_documents(blocks, first, starts, layout.num_tokens)
    return blocks


def _byte_range(layout: Layout, start: int, stop: int) -> tuple[int, int]:
    """Offset and size of tokens [start, stop), with the one before and the one after, which may end
    and begin a document."""
    low = max(0, start - 1)
    high = min(stop + 1, layout.num_tokens)
    return layout.header_bytes + low * layout.token_bytes, (high - low) * layout.token_bytes


def _digest(header: bytes, layout: Layout) -> str:
    return hashlib.blake2b(json.dumps(list(layout)).encode() + header, digest_size=16).hexdigest()
