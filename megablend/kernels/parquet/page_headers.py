"""Parse many page headers: in memory, at known offsets of a file, or by scanning from each page to
the next.

A header that is unusual, damaged or longer than the bytes read for it is left to
`formats.parquet.metadata.page_header`, which parses one header in Python and reports what is wrong.

Source: parquet-format, parquet.thrift (PageHeader).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.intrinsics import Pointer, pointer_at, pread
from megablend.jit import device, kernel
from megablend.kernels.parquet.thrift import FALSE, STRUCT, TRUE, UNUSUAL, integer, next_field, skip

DATA = 0
DICTIONARY = 2
DATA_V2 = 3
"""Types of pages."""
MAX_HEADER_BYTES = 16 << 20
"""Maximum size of a header, as in pyarrow; statistics of strings make headers long."""
MAX_PAGE = (1 << 31) - 1 - MAX_HEADER_BYTES
"""Maximum size of the body of a page. The format has int32 sizes, and so has the index, where they
include the header."""

# Ids of fields of PageHeader
PAGE_TYPE = 1
DECODED_BYTES = 2
STORED_BYTES = 3
CRC = 4
DATA_HEADER = 5
DICTIONARY_HEADER = 7
DATA_V2_HEADER = 8
# Ids of fields of DataPageHeader, DictionaryPageHeader and DataPageHeaderV2
NUM_VALUES = 1
ENCODING = 2
DEF_ENCODING = 3
REP_ENCODING = 4
V2_ENCODING = 4
V2_DEF_BYTES = 5
V2_REP_BYTES = 6
V2_IS_COMPRESSED = 7
RLE = 3
"""The encoding of levels in pages whose headers do not state any."""

HEADER_DTYPE = np.dtype(
    [
        ("offset", "<i8"),  # byte of the file at which the page begins
        ("header_bytes", "<i8"),
        ("type", "<i8"),
        ("stored_bytes", "<i8"),  # size of the body in the file
        ("decoded_bytes", "<i8"),  # size of the decompressed body, levels included
        ("crc", "<i8"),  # signed, as stored
        ("has_crc", "?"),
        ("num_values", "<i8"),  # number of levels; in a dictionary page, of values
        ("encoding", "<i8"),
        ("def_encoding", "<i8"),  # V1: encoding of the definition levels
        ("rep_encoding", "<i8"),
        ("def_bytes", "<i8"),  # V2: size of the definition levels
        ("rep_bytes", "<i8"),
        ("is_compressed", "?"),  # V2: whether values are compressed; V1: true
    ]
)
"""A page header of any version."""

Bytes = npt.NDArray[np.uint8]
Headers = npt.NDArray[np.void]


@kernel
def parse_headers(addresses: npt.NDArray[np.uint64], sizes: Int64s, headers: Headers) -> int:
    """Parse the headers of pages in memory. The field `offset` is not filled. Returns the number of
    the first header that has to be parsed in Python; n if there is none.

    Args:
        addresses: uint64 [n], address of each page.
        sizes: int64 [n], number of bytes at each address.
        headers: HEADER_DTYPE [n], filled.
    """
    for i in range(len(addresses)):
        if parse_header(pointer_at(addresses[i], sizes[i]), 0, sizes[i], headers[i]) < 0:
            return i
    return len(addresses)


@kernel
def read_headers(fd: int, offsets: Int64s, limits: Int64s, probe: Bytes, headers: Headers) -> int:
    """Read the headers of pages at known offsets. Returns the number of the first header that has
    to be parsed in Python; n if there is none.

    Args:
        fd: descriptor of the file.
        offsets: int64 [n], offset of each page in the file.
        limits: int64 [n], offset in the file at or before which each page must end.
        probe: uint8 [size], scratch memory; `size` bytes are read for each header.
        headers: HEADER_DTYPE [n], filled.
    """
    data = pointer_at(probe.ctypes.data, len(probe))
    for i in range(len(offsets)):
        num_read = pread(fd, data, max(0, min(len(probe), limits[i] - offsets[i])), offsets[i])
        if parse_header(data, 0, num_read, headers[i]) < 0:
            return i
        headers[i]["offset"] = offsets[i]
        if page_end(headers[i]) > limits[i]:
            return i
    return len(offsets)


@kernel
def walk_headers(
    fd: int,
    probe: Bytes,
    probe_offset: int,
    chunk: int,
    offsets: Int64s,
    limit: int,
    num_values: Int64s,
    counts: Int64s,
    headers: Headers,
) -> tuple[int, int]:
    """Read the page headers of chunks, one after another, until all values of the chunks have been
    found, `headers` is full, or a header has to be parsed in Python.

    Args:
        fd: descriptor of the file, or -1 if there is none; the scan then ends where `probe` ends.
        probe: uint8 [size], the file's bytes from `probe_offset` on. If there is a descriptor,
            other parts of the file are read into it.
        chunk: first chunk that is not complete.
        offsets: int64 [n], offset in the file of the next page of each chunk; updated.
        limit: offset in the file at or before which all pages must end.
        num_values: int64 [n], number of values in the remaining data pages of each chunk; updated.
        counts: int64 [n], number of pages found in each chunk so far; updated.
        headers: HEADER_DTYPE [room], filled.

    Returns: the number of headers that were filled, and the first chunk that is not complete.
    """
    data = pointer_at(probe.ctypes.data, len(probe))
    size = len(probe)
    filled = 0
    while chunk < len(offsets) and filled < len(headers):
        if num_values[chunk] <= 0:
            chunk += 1
            continue
        offset = offsets[chunk]
        begin = offset - probe_offset
        end = -1
        if 0 <= begin < size:
            end = parse_header(data, begin, size, headers[filled])
        if end < 0 and fd >= 0:
            probe_offset = offset
            size = pread(fd, data, max(0, min(len(probe), limit - offset)), offset)
            end = parse_header(data, 0, size, headers[filled])
        if end < 0:
            break
        headers[filled]["offset"] = offset
        if page_end(headers[filled]) > limit:
            break
        offsets[chunk] = page_end(headers[filled])
        if headers[filled]["type"] in (DATA, DATA_V2):
            num_values[chunk] -= headers[filled]["num_values"]
        counts[chunk] += 1
        filled += 1
    return filled, chunk


@device
def page_end(header: np.void) -> int:
    """Return the offset in the file after a page."""
    return int(header["offset"] + header["header_bytes"] + header["stored_bytes"])


@device
def parse_header(data: Pointer, position: int, end: int, header: np.void) -> int:
    """Parse the header that begins at data[position]. Returns its size, or an error code of
    `kernels.parquet.thrift`."""
    page_type = stored = decoded = values = encoding = -1
    header["crc"] = header["def_bytes"] = header["rep_bytes"] = 0
    header["def_encoding"] = header["rep_encoding"] = RLE
    header["has_crc"] = False
    header["is_compressed"] = True
    begin = position
    field = 0
    while True:
        position, field, wire = next_field(data, position, end, field)
        if position < 0:
            return position
        if wire == 0:
            break
        if PAGE_TYPE <= field <= CRC:
            position, value = integer(data, position, end, wire)
            if field == PAGE_TYPE:
                page_type = value
            elif field == DECODED_BYTES:
                decoded = value
            elif field == STORED_BYTES:
                stored = value
            else:
                header["crc"] = value
                header["has_crc"] = True
        elif wire == STRUCT and field == DATA_HEADER and page_type == DATA:
            header["def_encoding"] = header["rep_encoding"] = -1
            position, values, encoding = _parse_type_header(data, position, end, header, DATA)
        elif wire == STRUCT and field == DICTIONARY_HEADER and page_type == DICTIONARY:
            position, values, encoding = _parse_type_header(data, position, end, header, DICTIONARY)
        elif wire == STRUCT and field == DATA_V2_HEADER and page_type == DATA_V2:
            position, values, encoding = _parse_type_header(data, position, end, header, DATA_V2)
        else:
            position = skip(data, position, end, wire)
        if position < 0:
            return position
    header["type"] = page_type
    header["header_bytes"] = position - begin
    header["stored_bytes"] = stored
    header["decoded_bytes"] = decoded
    header["num_values"] = values
    header["encoding"] = encoding
    if (
        page_type not in (DATA, DICTIONARY, DATA_V2)
        or min(encoding, header["def_encoding"], header["rep_encoding"]) < 0
    ):
        return UNUSUAL
    if min(stored, decoded, values, header["def_bytes"], header["rep_bytes"]) < 0:
        return UNUSUAL
    if max(stored, decoded, values, header["def_bytes"], header["rep_bytes"]) > MAX_PAGE:
        return UNUSUAL
    if header["def_bytes"] + header["rep_bytes"] > min(stored, decoded):
        return UNUSUAL
    return position - begin


@device
def _parse_type_header(
    data: Pointer, position: int, end: int, header: np.void, page_type: int
) -> tuple[int, int, int]:
    """Parse a DataPageHeader, DictionaryPageHeader or DataPageHeaderV2, by the type of the page,
    and fill the fields of `header` about levels and compression. Returns the position after it, the
    number of values, and their encoding."""
    values = encoding = -1
    # Fields up to `last_integer` are integers
    encoding_field = ENCODING
    if page_type == DATA:
        last_integer = REP_ENCODING
    elif page_type == DICTIONARY:
        last_integer = ENCODING
    else:
        last_integer = V2_REP_BYTES
        encoding_field = V2_ENCODING
    field = 0
    while True:
        position, field, wire = next_field(data, position, end, field)
        if position < 0 or wire == 0:
            return position, values, encoding
        if NUM_VALUES <= field <= last_integer:
            position, value = integer(data, position, end, wire)
            if field == NUM_VALUES:
                values = value
            elif field == encoding_field:
                encoding = value
            elif page_type == DATA and field == DEF_ENCODING:
                header["def_encoding"] = value
            elif page_type == DATA:
                header["rep_encoding"] = value
            elif field == V2_DEF_BYTES:
                header["def_bytes"] = value
            elif field == V2_REP_BYTES:
                header["rep_bytes"] = value
        elif page_type == DATA_V2 and field == V2_IS_COMPRESSED:
            if wire not in (TRUE, FALSE):
                return UNUSUAL, values, encoding
            header["is_compressed"] = wire == TRUE
        else:
            position = skip(data, position, end, wire)
        if position < 0:
            return position, values, encoding
