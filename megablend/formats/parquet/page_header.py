"""Page headers: one struct before each page, and the walk from page to page where a file has no index of them.

Source: parquet-format, parquet.thrift (PageHeader).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megablend.formats.parquet.footer import ColumnChunk
from megablend.formats.parquet.names import Encoding, PageType
from megablend.formats.parquet.source import ByteSource
from megablend.formats.parquet.thrift import MalformedError, Struct, TruncatedError, read_struct

PROBE_BYTES = 128
MAX_HEADER_BYTES = 16 << 20
"""Statistics of strings make headers long; pyarrow stops here, too."""
MAX_PAGE = (1 << 31) - 1 - MAX_HEADER_BYTES
"""The format counts in int32; so does the index, header included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageHeader:
    """One page header, whatever its version."""

    type: int
    header_bytes: int
    stored_bytes: int
    """Of the body."""
    decoded_bytes: int
    """Of the body, levels included."""
    crc: int | None
    num_values: int
    """Levels; in a dictionary, values."""
    encoding: int
    level_encodings: tuple[int, ...]
    """V1: of definition and repetition levels."""
    rep_bytes: int
    """V2: bytes of the repetition levels."""
    def_bytes: int
    """V2: bytes of the definition levels."""
    is_compressed: bool

    @property
    def is_data(self) -> bool:
        """Whether the page holds values."""
        return self.type in (PageType.DATA, PageType.DATA_V2)


@dataclass(frozen=True, slots=True)
class PagePlace:
    """A page header and the byte of the file at which it begins."""

    offset: int
    header: PageHeader

    @property
    def size(self) -> int:
        """Bytes of header and body."""
        return self.header.header_bytes + self.header.stored_bytes

    @property
    def end(self) -> int:
        """The byte after the page."""
        return self.offset + self.size


def parse_page_header(data: bytes | memoryview) -> PageHeader:
    """The page header with which `data` begins. Raises MalformedError; TruncatedError where `data` is too short."""
    page, end = read_struct(data)
    kind = page.integer(1, "page type")
    num_values, encoding, levels = 0, int(Encoding.PLAIN), (int(Encoding.RLE), int(Encoding.RLE))
    v2 = Struct({})
    if kind == PageType.DATA:
        v1 = page.struct(5, "data_page_header")
        num_values, encoding = v1.count(1, "num_values"), v1.integer(2, "encoding")
        levels = v1.integer(3, "definition_level_encoding"), v1.integer(4, "repetition_level_encoding")
    elif kind == PageType.DATA_V2:
        v2 = page.struct(8, "data_page_header_v2")
        num_values, encoding = v2.count(1, "num_values"), v2.integer(4, "encoding")
    elif kind == PageType.DICTIONARY:
        dictionary = page.struct(7, "dictionary_page_header")
        num_values, encoding = dictionary.count(1, "num_values"), dictionary.integer(2, "encoding")
    header = PageHeader(
        type=kind,
        header_bytes=end,
        stored_bytes=page.count(3, "compressed_page_size"),
        decoded_bytes=page.count(2, "uncompressed_page_size"),
        crc=page.integer(4, "crc") if 4 in page else None,
        num_values=num_values,
        encoding=encoding,
        level_encodings=levels,
        rep_bytes=v2.count(6, "repetition_levels_byte_length", 0),
        def_bytes=v2.count(5, "definition_levels_byte_length", 0),
        is_compressed=v2.boolean(7, "is_compressed", True),
    )
    if header.rep_bytes + header.def_bytes > min(header.stored_bytes, header.decoded_bytes):
        raise MalformedError("the levels of the page are longer than the page")
    if max(header.stored_bytes, header.decoded_bytes, num_values) > MAX_PAGE:
        raise MalformedError(f"the page is larger than a page can be ({MAX_PAGE} bytes or values)")
    return header


def read_page_header(source: ByteSource, offset: int, limit: int) -> PagePlace:
    """The page at `offset`; it has to end at or before byte `limit`. Raises CorruptFileError."""
    size = PROBE_BYTES
    with source.blamed(offset, "the page header"):
        while True:
            data = source.read(offset, max(0, min(size, limit - offset)), "the page header")
            try:
                place = PagePlace(offset, parse_page_header(data))
                break
            except TruncatedError:
                if len(data) < size or size >= MAX_HEADER_BYTES:
                    raise
                size *= 4
        if place.end > limit:
            raise MalformedError(
                f"the page would end at byte {place.end}, beyond {limit}, where its column chunk must end"
            )
        return place


def walk_pages(source: ByteSource, chunk: ColumnChunk, limit: int) -> Iterator[PagePlace]:
    """All pages of a chunk in order, dictionary included, header by header, until its values are complete.

    `limit` bounds the walk rather than the chunk's own size: some writers leave the dictionary's header out of that.
    """
    offset, left = chunk.start, chunk.num_values
    while left > 0:
        place = read_page_header(source, offset, limit)
        yield place
        offset = place.end
        left -= place.header.num_values if place.header.is_data else 0
    with source.blamed(offset, "the column chunk"):
        if left:
            raise MalformedError(f"its pages have {-left} values more than the {chunk.num_values} of its metadata")
