"""Parse one page header in Python if the kernel rejects it, to report what is wrong or to accept
unusual fields.

Source: parquet-format, parquet.thrift (PageHeader).
"""

from __future__ import annotations

from dataclasses import dataclass

from megablend.formats.parquet.metadata.names import Encoding, PageType
from megablend.formats.parquet.metadata.source import FileBytes
from megablend.formats.parquet.metadata.thrift import (
    MalformedError,
    Struct,
    TruncatedError,
    read_struct,
)
from megablend.kernels.parquet.page_headers import MAX_HEADER_BYTES, MAX_PAGE

PROBE_BYTES = 128
"""Number of bytes that are read first, which is more than most headers have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageHeader:
    """A page header of any version: the fields of HEADER_DTYPE."""

    type: int
    header_bytes: int
    stored_bytes: int
    """Size of the body in the file."""
    decoded_bytes: int
    """Size of the decompressed body, levels included."""
    crc: int | None
    num_values: int
    """Number of levels; in a dictionary page, number of values."""
    encoding: int
    def_encoding: int
    rep_encoding: int
    def_bytes: int
    rep_bytes: int
    is_compressed: bool

    def record(self, offset: int) -> tuple[int, ...]:
        """Return the header of a page that begins at `offset` as a record of HEADER_DTYPE."""
        sizes = (offset, self.header_bytes, self.type, self.stored_bytes, self.decoded_bytes)
        crc = (0, False) if self.crc is None else (self.crc, True)
        levels = (self.def_encoding, self.rep_encoding, self.def_bytes, self.rep_bytes)
        return (*sizes, *crc, self.num_values, self.encoding, *levels, self.is_compressed)


def parse_page_header(data: bytes | memoryview) -> PageHeader:
    """Parse the page header at the start of `data`. Raises: MalformedError;
    TruncatedError if `data` is too short."""
    page, end = read_struct(data)
    kind = page.integer(1, "page type")
    num_values = 0
    encoding = int(Encoding.PLAIN)
    levels = (int(Encoding.RLE), int(Encoding.RLE))
    v2 = Struct({})
    if kind == PageType.DATA:
        v1 = page.struct(5, "data_page_header")
        num_values = v1.count(1, "num_values")
        encoding = v1.integer(2, "encoding")
        levels = (
            v1.integer(3, "definition_level_encoding"),
            v1.integer(4, "repetition_level_encoding"),
        )
    elif kind == PageType.DATA_V2:
        v2 = page.struct(8, "data_page_header_v2")
        num_values = v2.count(1, "num_values")
        encoding = v2.integer(4, "encoding")
    elif kind == PageType.DICTIONARY:
        dictionary = page.struct(7, "dictionary_page_header")
        num_values = dictionary.count(1, "num_values")
        encoding = dictionary.integer(2, "encoding")
    header = PageHeader(
        type=kind,
        header_bytes=end,
        stored_bytes=page.count(3, "compressed_page_size"),
        decoded_bytes=page.count(2, "uncompressed_page_size"),
        crc=page.integer(4, "crc") if 4 in page else None,
        num_values=num_values,
        encoding=encoding,
        def_encoding=levels[0],
        rep_encoding=levels[1],
        def_bytes=v2.count(5, "definition_levels_byte_length", 0),
        rep_bytes=v2.count(6, "repetition_levels_byte_length", 0),
        is_compressed=v2.boolean(7, "is_compressed", True),
    )
    if header.rep_bytes + header.def_bytes > min(header.stored_bytes, header.decoded_bytes):
        raise MalformedError("the page's levels are longer than the page")
    if max(header.stored_bytes, header.decoded_bytes, num_values) > MAX_PAGE:
        raise MalformedError(f"the page is larger than the limit of {MAX_PAGE} bytes or values")
    return header


def read_page_header(source: FileBytes, offset: int, limit: int) -> PageHeader:
    """Read the header of the page at `offset`; the page must end at or before byte `limit`.
    Raises: CorruptFileError."""
    size = PROBE_BYTES
    with source.error_context(offset, "the page header"):
        while True:
            data = source.read(offset, max(0, min(size, limit - offset)), "the page header")
            try:
                header = parse_page_header(data)
                break
            except TruncatedError:
                if len(data) < size or size >= MAX_HEADER_BYTES:
                    raise
                size *= 4
        end = offset + header.header_bytes + header.stored_bytes
        if end > limit:
            raise MalformedError(
                f"the page would end at byte {end}, after the end of its column chunk at {limit}"
            )
        return header
