"""Parse one page header in Python if the kernel rejects it, to report what is wrong or to accept
unusual fields.

Source: parquet-format, parquet.thrift (PageHeader).
"""

from __future__ import annotations

import numpy as np

from megablend.formats.parquet.metadata.names import PageType
from megablend.formats.parquet.metadata.source import FileBytes
from megablend.formats.parquet.metadata.thrift import (
    MalformedError,
    TruncatedError,
    read_struct,
)
from megablend.kernels.parquet.page_headers import HEADER_DTYPE, MAX_HEADER_BYTES, MAX_PAGE, RLE

PROBE_BYTES = 128
"""Number of bytes that are read first, which is more than most headers have."""


def parse_page_header(data: bytes | memoryview) -> np.void:
    """Parse the header at the start of `data`. Returns HEADER_DTYPE; its `offset` is 0. Raises:
    MalformedError; TruncatedError if `data` is too short."""
    page, end = read_struct(data)
    header: np.void = np.zeros(1, HEADER_DTYPE)[0]
    header["type"] = page_type = page.integer(1, "page type")
    header["def_encoding"] = header["rep_encoding"] = RLE
    header["is_compressed"] = True
    if page_type == PageType.DATA:
        v1 = page.struct(5, "data_page_header")
        header["num_values"] = v1.count(1, "num_values")
        header["encoding"] = v1.integer(2, "encoding")
        header["def_encoding"] = v1.integer(3, "definition_level_encoding")
        header["rep_encoding"] = v1.integer(4, "repetition_level_encoding")
    elif page_type == PageType.DATA_V2:
        v2 = page.struct(8, "data_page_header_v2")
        header["num_values"] = v2.count(1, "num_values")
        header["encoding"] = v2.integer(4, "encoding")
        header["def_bytes"] = v2.count(5, "definition_levels_byte_length", 0)
        header["rep_bytes"] = v2.count(6, "repetition_levels_byte_length", 0)
        header["is_compressed"] = v2.boolean(7, "is_compressed", True)
    elif page_type == PageType.DICTIONARY:
        dictionary = page.struct(7, "dictionary_page_header")
        header["num_values"] = dictionary.count(1, "num_values")
        header["encoding"] = dictionary.integer(2, "encoding")
    header["header_bytes"] = end
    header["stored_bytes"] = page.count(3, "compressed_page_size")
    header["decoded_bytes"] = page.count(2, "uncompressed_page_size")
    header["has_crc"] = 4 in page
    header["crc"] = page.integer(4, "crc") if 4 in page else 0
    size = min(header["stored_bytes"], header["decoded_bytes"])
    if header["rep_bytes"] + header["def_bytes"] > size:
        raise MalformedError("the page's levels are longer than the page")
    if max(header["stored_bytes"], header["decoded_bytes"], header["num_values"]) > MAX_PAGE:
        raise MalformedError(f"the page is larger than the limit of {MAX_PAGE} bytes or values")
    return header


def read_page_header(source: FileBytes, offset: int, limit: int) -> np.void:
    """Read the header of the page at `offset`, HEADER_DTYPE; the page must end at or before byte
    `limit`. Raises: CorruptFileError."""
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
        header["offset"] = offset
        end = offset + int(header["header_bytes"]) + int(header["stored_bytes"])
        if end > limit:
            raise MalformedError(
                f"the page would end at byte {end}, after the end of its column chunk at {limit}"
            )
        return header
