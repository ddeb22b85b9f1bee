"""Raw files, which contain only token ids after an optional header. A block is a range of tokens of
about `block_bytes` bytes.

If a token separates documents, the file is read once when it is indexed, to find them; otherwise
the file is one document. Large files are indexed in parts: a chunk is the smallest part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megablend.config.read_spec import OptionValue, ReadSpec
from megablend.errors import (
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
    changed_error,
    check_size,
    check_structure,
    refuse_column,
)
from megablend.formats.blocks import join_token_ranges
from megablend.formats.raw.boundaries import Separator, count_documents, make_blocks
from megablend.formats.raw.raw_header import Layout, find_container, read_layout
from megablend.formats.raw.raw_options import RawOptions, parse_options
from megablend.formats.raw.raw_reader import RawReader
from megablend.storage.base import Storage
from megablend.storage.prefetched import stream_portions
from megablend.system.digest import hex_digest

_MAX_BLOCK_BYTES = 1 << 30
"""Limit of `block_bytes`, since the index has 32 bits for the bytes of a block."""


class RawFormat(BaseFormat):
    """The format of raw files, which contain token ids; see `raw_options` for its options."""

    name = "raw"
    suffixes: Sequence[str] = (".npy",)
    chunk_bytes = 64 << 20
    """Size of a chunk's tokens, rounded to whole blocks."""
    scan_bytes = 8 << 20
    """Number of bytes per read when finding documents."""

    def check_options(self, options: Mapping[str, OptionValue]) -> None:
        """See Format.check_options."""
        parse_options(options)

    def index(self, path: str, read: ReadSpec, *, storage: Storage) -> FileIndex:
        """Find the documents of a file; see Format.index."""
        return self.index_part(path, read, span=(0, storage.stat(path).size), storage=storage)

    def describe_contradiction(self, path: str, read: ReadSpec, *, storage: Storage) -> str | None:
        """Return the problem if a file's content looks like another kind of file, not like token
        ids; see Format.describe_contradiction."""
        options = parse_options(dict(read.options))
        if options.allow_container:
            return None
        container = find_container(path, storage.stat(path).size, options.header_bytes, storage)
        if container is None:
            return None
        return (
            f"its content looks like {container}, not like token ids; correct or remove `format` and `header_bytes`, unpack a "
            "compressed file, or set `format_options: {allow_container: true}` if it contains token ids"
        )

    def index_part(
        self, path: str, read: ReadSpec, *, span: tuple[int, int], storage: Storage
    ) -> FileIndex:
        """Find the documents of the chunks that begin in a span of bytes; see
        DivisibleFormat.index_part."""
        refuse_column(path, read, "raw")
        options = parse_options(dict(read.options))
        layout, header = read_layout(path, storage.stat(path).size, options, storage)
        separator = _separator(options)
        sizes = self._choose_sizes(read.block_bytes, layout)
        numbers = _chunks_in(span, layout, sizes.chunk)
        indexed = _index_chunks(path, numbers, sizes, layout, separator, storage)

        # Chunks and tokens are counted from the start of this part of the file: joining the parts
        # adds the counts of earlier parts. Only `row_group` is the chunk's number in the file.
        blocks = np.concatenate([np.zeros(0, BLOCK_DTYPE), *(part.blocks for part in indexed)])
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
            token_range=join_token_ranges(part.token_range for part in indexed),
        )

    def _choose_sizes(self, block_bytes: int, layout: Layout) -> _Sizes:
        """Choose the numbers of tokens of a block, a chunk and a scan; the latter two consist of
        whole blocks, at least one."""
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
        """Return a reader of an indexed file; see Format.open."""
        size = check_size(path, file.size, storage)
        header_bytes = int(file.meta["header_bytes"])
        dtype = file.token_dtype
        options = RawOptions(dtype=dtype, header_bytes=header_bytes)
        try:
            layout, header = read_layout(path, size, options, storage)
        except (ConfigError, CorruptFileError, UnsupportedFileError) as error:
            raise changed_error(path, error) from error
        check_structure(path, _digest(header, layout), file, "header")
        separator = None
        if file.meta["separator"] is not None:
            token, ends = file.meta["separator"]
            separator = Separator(int(token), bool(ends))
        return RawReader(
            path=path,
            size=size,
            header_bytes=header_bytes,
            dtype=dtype,
            separator=separator,
        )


class _Sizes(NamedTuple):
    """Numbers of tokens of the ranges into which a file is divided."""

    block: int
    chunk: int
    scan: int
    """Number of tokens that are read at a time to find documents."""


class _IndexedRange(NamedTuple):
    """The index of a range of consecutive tokens of a file."""

    blocks: Array
    """The block table: BLOCK_DTYPE [n]; `first_token` counts from the start of the file."""
    token_range: tuple[int, int] | None
    """The smallest and the largest token; None if the tokens were not read."""


def _separator(options: RawOptions) -> Separator | None:
    if options.separator is None:
        return None
    return Separator(options.separator, options.eod_token is not None)


def _chunks_in(span: tuple[int, int], layout: Layout, chunk_tokens: int) -> range:
    """Return the numbers of the chunks that begin within bytes [start, stop) of the file; the
    file's first chunk counts as beginning at byte 0."""
    chunk_bytes = chunk_tokens * layout.token_bytes
    num_chunks = -(-layout.num_tokens // chunk_tokens)

    def first_chunk_from(byte: int) -> int:
        """Return the first chunk that begins at or after a byte, so that adjacent spans share no
        chunk."""
        if byte <= 0:
            return 0
        chunk = -(-(byte - layout.header_bytes) // chunk_bytes)
        return max(0, min(chunk, num_chunks))

    start, stop = span
    return range(first_chunk_from(start), first_chunk_from(stop))


def _index_chunks(
    path: str,
    numbers: range,
    sizes: _Sizes,
    layout: Layout,
    separator: Separator | None,
    storage: Storage,
) -> list[_IndexedRange]:
    """Index consecutive chunks, one scan after another. Tokens are read only if a token separates
    documents."""
    scans = list(_list_scans(numbers, sizes, layout))
    if separator is None:
        return [
            _index_range(layout, start, stop, sizes.block, separator=None, tokens=None)
            for start, stop in scans
        ]
    reads = [_byte_range(layout, start, stop) for start, stop in scans]
    portions = [(np.array([offset]), np.array([size])) for offset, size in reads]
    token_dtype = np.dtype(layout.dtype).newbyteorder("<")
    indexed = []
    for i in stream_portions(storage, path, portions):
        start, stop = scans[i]
        tokens = np.frombuffer(storage.read(path, *reads[i]), token_dtype)
        indexed.append(_index_range(layout, start, stop, sizes.block, separator, tokens))
    return indexed


def _list_scans(numbers: range, sizes: _Sizes, layout: Layout) -> Iterator[tuple[int, int]]:
    """Yield the ranges [start, stop) of tokens that are read and indexed at a time. A range may
    contain tokens of several chunks."""
    start = numbers.start * sizes.chunk
    end = min(numbers.stop * sizes.chunk, layout.num_tokens)
    while start < end:
        yield start, min(start + sizes.scan, end)
        start += sizes.scan


def _byte_range(layout: Layout, start: int, stop: int) -> tuple[int, int]:
    """Return the offset and the size in bytes of tokens [start, stop), with the token before them,
    which may end a document, and the token after them, which may begin one."""
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
    """Index tokens [start, stop).

    Args:
        tokens: the tokens in `_byte_range`; None without a separator.
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
    return hex_digest(json.dumps(list(layout)).encode() + header)


RAW = RawFormat()
