"""Parsing many page headers: from memory, at known offsets of a file,
or by scanning from each page to the next.

What is unusual, damaged or longer than the probe is left to `formats.parquet.metadata.page_header`, which
parses one header in Python and reports what is wrong with it.

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
"""Statistics of strings make headers long; pyarrow stops here, too."""
MAX_PAGE = (1 << 31) - 1 - MAX_HEADER_BYTES
"""The format counts in int32; so does the index, header included."""

HEADER_DTYPE = np.dtype(
    [
        ("offset", "<i8"),  # byte of the file at which the page begins
        ("header_bytes", "<i8"),
        ("type", "<i8"),
        ("stored_bytes", "<i8"),  # of the body
        ("decoded_bytes", "<i8"),  # of the body, levels included
        ("crc", "<i8"),  # signed, as stored
        ("has_crc", "?"),
        ("num_values", "<i8"),  # levels; in a dictionary, values
        ("encoding", "<i8"),
        ("def_encoding", "<i8"),  # V1: of the definition levels
        ("rep_encoding", "<i8"),
        ("def_bytes", "<i8"),  # V2: of the definition levels
        ("rep_bytes", "<i8"),
        ("is_compressed", "?"),  # V2: its values are; V1 always
    ]
)
"""One page header, whatever its version."""

Bytes = npt.NDArray[np.uint8]
Headers = npt.NDArray[np.void]


@kernel
def parse_headers(addresses: npt.NDArray[np.uint64], sizes: Int64s, headers: Headers) -> int:
    """Parse the headers of pages in memory; `offset` is not set. Returns the number of the first
    that needs care; n if none does.

    Args:
        addresses: uint64 [n], addresses of pages.
        sizes: int64 [n], bytes there.
        headers: HEADER_DTYPE [n], filled.
    """
    for i in range(len(addresses)):
        if parse_header(pointer_at(addresses[i], sizes[i]), 0, sizes[i], headers[i]) < 0:
            return i
    return len(addresses)


@kernel
def read_headers(fd: int, offsets: Int64s, limits: Int64s, probe: Bytes, headers: Headers) -> int:
    """Read the headers of pages at known offsets.
    Returns the number of the first that needs care; n if none does.

    Args:
        fd: descriptor of the file.
        offsets: int64 [n].
        limits: int64 [n], the byte of the file beyond which the page does not go.
        probe: uint8 [size], scratch: so many bytes are read for each header.
        headers: HEADER_DTYPE [n], filled.
    """
    data = pointer_at(probe.ctypes.data, len(probe))
    for i in range(len(offsets)):
        got = pread(fd, data, max(0, min(len(probe), limits[i] - offsets[i])), offsets[i])
        if parse_header(data, 0, got, headers[i]) < 0:
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
    """Walk through chunks, from page to page, until their values are passed, `headers` is full, or
    a header needs care.

    Args:
        fd: descriptor of the file; -1 if there is none, and the walk ends with the probe.
        probe: uint8 [size], the file's bytes from `probe_offset` on; with a descriptor, scratch to
            read into.
        chunk: the first that is not done.
        offsets: int64 [n], byte of the file at which the next page of each chunk begins; moved on.
        limit: byte of the file that no page goes beyond.
        num_values: int64 [n], of each chunk's data pages that are left; lowered.
        counts: int64 [n], pages of each chunk; raised.
        headers: HEADER_DTYPE [room], filled.

    Returns: how many were filled; the first chunk that is not done.
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
    """The byte of the file after a page."""
    return int(header["offset"] + header["header_bytes"] + header["stored_bytes"])


@device
def parse_header(data: Pointer, at: int, end: int, header: np.void) -> int:
    """Parse the header that begins at data[at]. Returns its size; below 0, see `kernels.parquet.thrift`."""
    kind = stored = decoded = values = encoding = -1
    header["crc"] = header["def_bytes"] = header["rep_bytes"] = 0
    header["def_encoding"] = header["rep_encoding"] = 3  # RLE, where a page does not tell
    header["has_crc"] = False
    header["is_compressed"] = True
    begin = at
    field = 0
    while True:
        at, field, wire = next_field(data, at, end, field)
        if at < 0:
            return at
        if wire == 0:
            break
        if 1 <= field <= 4:
            at, value = integer(data, at, end, wire)
            if field == 1:
                kind = value
            elif field == 2:
                decoded = value
            elif field == 3:
                stored = value
            else:
                header["crc"] = value
                header["has_crc"] = True
        elif wire == STRUCT and field == 5 and kind == DATA:
            header["def_encoding"] = header["rep_encoding"] = -1
            at, values, encoding = _counts(data, at, end, header, DATA)
        elif wire == STRUCT and field == 7 and kind == DICTIONARY:
            at, values, encoding = _counts(data, at, end, header, DICTIONARY)
        elif wire == STRUCT and field == 8 and kind == DATA_V2:
            at, values, encoding = _counts(data, at, end, header, DATA_V2)
        else:
            at = skip(data, at, end, wire)
        if at < 0:
            return at
    header["type"] = kind
    header["header_bytes"] = at - begin
    header["stored_bytes"] = stored
    header["decoded_bytes"] = decoded
    header["num_values"] = values
    header["encoding"] = encoding
    if (
        kind not in (DATA, DICTIONARY, DATA_V2)
        or min(encoding, header["def_encoding"], header["rep_encoding"]) < 0
    ):
        return UNUSUAL
    if min(stored, decoded, values, header["def_bytes"], header["rep_bytes"]) < 0:
        return UNUSUAL
    if max(stored, decoded, values, header["def_bytes"], header["rep_bytes"]) > MAX_PAGE:
        return UNUSUAL
    if header["def_bytes"] + header["rep_bytes"] > min(stored, decoded):
        return UNUSUAL
    return at - begin


@device
def _counts(data: Pointer, at: int, end: int, header: np.void, kind: int) -> tuple[int, int, int]:
    """Parse a DataPageHeader, DictionaryPageHeader or DataPageHeaderV2. Returns the position after
    it, values, encoding."""
    values = encoding = -1
    last_integer = 4 if kind == DATA else 2 if kind == DICTIONARY else 6
    field = 0
    while True:
        at, field, wire = next_field(data, at, end, field)
        if at < 0 or wire == 0:
            return at, values, encoding
        if 1 <= field <= last_integer:
            at, value = integer(data, at, end, wire)
            if field == 1:
                values = value
            elif field == (4 if kind == DATA_V2 else 2):
                encoding = value
            elif kind == DATA and field == 3:
                header["def_encoding"] = value
            elif kind == DATA:
                header["rep_encoding"] = value
            elif field == 5:
                header["def_bytes"] = value
            elif field == 6:
                header["rep_bytes"] = value
        elif kind == DATA_V2 and field == 7:
            if wire not in (TRUE, FALSE):
                return UNUSUAL, values, encoding
            header["is_compressed"] = wire == TRUE
        else:
            at = skip(data, at, end, wire)
        if at < 0:
            return at, values, encoding
