"""Raw files: only token ids, after an optional header.
A block is a range of about `block_bytes` of them.

Documents are separated by a token, found by reading the file once when it is indexed; without one,
a file is one document. Large files are indexed in parts: a chunk is the smallest part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

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
    Array,
    BaseFormat,
    BlockReader,
    FileIndex,
    OpenedFile,
    check_size,
)
from megablend.formats.raw.boundaries import Separator, count_documents, make_blocks
from megablend.formats.raw.raw_header import Layout, find_container, read_layout
from megablend.formats.raw.raw_options import RawOptions, parse_options
from megablend.formats.raw.raw_reader import RawReader
from megablend.storage.base import Storage
from megablend.storage.prefetched import stream_portions

_MAX_BLOCK_BYTES = 1 << 30
"""What `block_bytes` is limited to: the index has 32 bits for the bytes of a block."""


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
        layout, header = read_layout(path, storage.stat(path).size, options, storage)
        separator = _separator(options)
        sizes = self._choose_sizes(read.block_bytes, layout)
        numbers = _chunks_in(span, layout, sizes.chunk)
        indexed = _index_chunks(path, numbers, sizes, layout, separator, storage)
        token_ranges = [each.token_range for each in indexed if each.token_range is not None]

        # Of a part, chunks and tokens count from its own first ones: parts are joined by adding
        # what is before each. Only `row_group` is the number of the chunk in the file.
        blocks = np.concatenate([np.zeros(0, BLOCK_DTYPE), *(each.blocks for each in indexed)])
        blocks["chunk"] = blocks["first_token"] // sizes.chunk - numbers.start
        if len(blocks):
            blocks["first_token"] -= blocks["first_token"][0]
        chunks = np.zeros(len(numbers), CHUNK_DTYPE)
        chunks["dictionary_offset"] = -1
        chunks["row_group"] = numbers
        chunks["first_token"] = np.arange(len(numbers)) * sizes.chunk
        return FileIndex(
            rows=int(blocks["rows"].sum()),
            tokens=int(blocks["tokens"].sum()),
            token_dtype=layout.dtype,
            chunks=chunks,
            blocks=blocks,
            structure=_digest(header, layout),
            meta={
                "header_bytes": layout.header_bytes,
                "separator": None if separator is None else [separator.token, separator.ends],
            },
            scanned_bytes=int(blocks["stored_bytes"].sum()) if separator is not None else 0,
            token_range=(min(low for low, _ in token_ranges), max(high for _, high in token_ranges))
            if token_ranges
            else None,
        )

    def _choose_sizes(self, block_bytes: int, layout: Layout) -> _Sizes:
        """Chunks and scans are whole blocks, one at least."""
        block = max(1, min(block_bytes, _MAX_BLOCK_BYTES) // layout.token_bytes)
        stored_bytes = block * layout.token_bytes
        return _Sizes(
            block=block,
            chunk=block * max(1, self.chunk_bytes // stored_bytes),
            scan=block * max(1, self.scan_bytes // stored_bytes),
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
                f"its header's digest is {found}, but was {file.structure} when it was indexed; {CHANGED_REMEDY}",
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


class _Sizes(NamedTuple):
    """Tokens of what a file is divided into."""

    block: int
    chunk: int
    scan: int
    """Of what is read at a time when documents are looked for."""


class _IndexedRange(NamedTuple):
    """What is found in consecutive tokens of a file."""

    blocks: Array
    """BLOCK_DTYPE [n], whose `first_token` counts from the start of the file."""
    token_range: tuple[int, int] | None
    """The smallest and the largest token; None if the tokens were not read."""


def _separator(options: RawOptions) -> Separator | None:
    return (
        None
        if options.separator is None
        else Separator(options.separator, options.eod_token is not None)
    )


def _chunks_in(span: tuple[int, int], layout: Layout, chunk_tokens: int) -> range:
    """Numbers of the chunks that begin within bytes [start, stop) of the file; the first one counts
    as beginning at byte 0."""
    chunk_bytes = chunk_tokens * layout.token_bytes
    num_chunks = -(-layout.num_tokens // chunk_tokens)
    # The first chunk that begins at a byte or after it. Two spans that meet share no chunk.
    first, stop = (
        -(-(byte - layout.header_bytes) // chunk_bytes) if byte > 0 else 0 for byte in span
    )
    return range(max(0, min(first, num_chunks)), max(0, min(stop, num_chunks)))


def _index_chunks(
    path: str,
    numbers: range,
    sizes: _Sizes,
    layout: Layout,
    separator: Separator | None,
    storage: Storage,
) -> list[_IndexedRange]:
    """The blocks of consecutive chunks, one scan after the other. Tokens are read only if one of
    them separates documents."""
    scans = list(_list_scans(numbers, sizes, layout))
    if separator is None:
        return [_index_range(layout, *scan, sizes.block, None, None) for scan in scans]
    reads = [_byte_range(layout, *scan) for scan in scans]
    portions = [(np.array([offset]), np.array([size])) for offset, size in reads]
    token_dtype = np.dtype(layout.dtype).newbyteorder("<")
    return [
        _index_range(
            layout,
            *scans[i],
            sizes.block,
            separator,
            np.frombuffer(storage.read(path, *reads[i]), token_dtype),
        )
        for i in stream_portions(storage, path, portions)
    ]


def _list_scans(numbers: range, sizes: _Sizes, layout: Layout) -> Iterator[tuple[int, int]]:
    """Ranges of the chunks' tokens that are indexed together: of one chunk or several."""
    start = numbers.start * sizes.chunk
    end = min(numbers.stop * sizes.chunk, layout.num_tokens)
    while start < end:
        yield start, min(start + sizes.scan, end)
        start += sizes.scan


def _byte_range(layout: Layout, start: int, stop: int) -> tuple[int, int]:
    """Offset and size of tokens [start, stop), with the one before and the one after, which may end
    and begin a document."""
    low = max(0, start - 1)
    high = min(stop + 1, layout.num_tokens)
    return layout.header_bytes + low * layout.token_bytes, (high - low) * layout.token_bytes


def _index_range(
    layout: Layout,
    start: int,
    stop: int,
    block_tokens: int,
    separator: Separator | None,
    tokens: Array | None,
) -> _IndexedRange:
    """The blocks of tokens [start, stop).

    Args:
        tokens: of `_byte_range`; not needed without a separator.
    """
    first = np.arange(start, stop, block_tokens, dtype=np.int64)
    num_tokens = np.minimum(block_tokens, stop - first)
    blocks = make_blocks(layout.header_bytes, layout.token_bytes, first, num_tokens)
    document_starts = np.zeros(0, np.int64)
    token_range = None
    if separator is not None and tokens is not None:
        document_starts = max(0, start - 1) + separator.find_starts(tokens)
        token_range = int(tokens.min()), int(tokens.max())
    count_documents(blocks, first, document_starts, layout.num_tokens)
    return _IndexedRange(blocks, token_range)


def _digest(header: bytes, layout: Layout) -> str:
    return hashlib.blake2b(json.dumps(list(layout)).encode() + header, digest_size=16).hexdigest()
