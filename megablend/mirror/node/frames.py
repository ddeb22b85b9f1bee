"""Frames on the socket between ranks and their node process. All numbers are little-endian.

    frame   u32 length of the payload, u8 kind, u64 number of the request, payload
    pages   u32 n, n x (u32 block, u32 0, u64 pages), u32 crc32 of all before and of the bytes, bytes of all pages in turn
    needs   u32 n, n x (u32 length of the JSON, JSON [location, etag, size], u32 m, m x (u32 block, i32 due, u64 pages))

Due times are in milliseconds relative to now, since the clocks of processes differ. A negative
value is in the past, and the greatest value means never.
"""

from __future__ import annotations

import enum
import json
import math
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from typing import Any

import numpy as np

from megablend import errors
from megablend.errors import DataError, MegablendError
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import (
    BLOCK_BYTES,
    PAGE_BYTES,
    Pages,
    count_bytes,
    find_last,
    subtract,
)
from megablend.mirror.disk.room import Need
from megablend.system.limited_json import parse_json

PROTOCOL = 5
"""The version of the protocol, which includes these frames and the requests between nodes."""
HEAD = struct.Struct("<IBQ")
ORIGINS = struct.Struct("<QQ")
"""The numbers of bytes that were fetched for a request: from the source, and from other nodes."""
MAX_PAYLOAD = 64 << 20
_BATCH_BYTES = 1 << 19
"""The approximate size of a batch of needs. It is small, so that other requests are not delayed."""
_COUNT = struct.Struct("<I")
_ROWS = np.dtype([("block", "<u4"), ("due", "<i4"), ("pages", "<u8")])
_NEVER = 0x7FFFFFFF


class Kind(enum.IntEnum):
    """The kinds of frames: requests, and the answers DONE and FAILED."""

    HELLO = 1
    """A client's greeting. Carries JSON of the client's settings. The answer is JSON of the
    node."""
    STAT = 2
    """Requests the states of files. Carries a list of locations. The answer is a list of [size,
    etag]."""
    WANT = 3
    """Requests pages. Carries needs. The answer, ORIGINS, is sent once all pages are held."""
    DUE = 4
    """Announces which pages the client will read. Carries needs, which replace the client's earlier
    ones. There is no answer."""
    DISTRUST = 5
    """Requests that wrong pages be dropped and fetched again. Carries needs."""
    STATUS = 6
    """Requests the status of the node. The answer is JSON."""
    STOP = 7
    """Stops the node process, after it has answered."""
    SCRUB = 8
    """Compares all held pages with their checksums. The answer is JSON of the wrong blocks."""
    REMOVE = 9
    """Deletes the mirror, and stops the node process."""
    KNOWN = 10
    """Reports the present states of files. Carries a JSON list of [location, size, etag]."""
    CHECK = 11
    """Checks the connections between nodes. The answer is JSON with a line for each connection that
    fails."""
    FILL = 12
    """Requests that pages be fetched at once. Carries a byte and needs. The byte is 1 if the pages
    should only be counted. The answer is JSON of `Filled`."""
    DATASETS = 13
    """A subcommand of `megablend datasets`. Carries its name and arguments. The answer is JSON."""
    DONE = 16
    FAILED = 17
    """The answer to a request that failed. Carries JSON of the error."""


def pack(kind: Kind, number: int, payload: bytes = b"") -> bytes:
    """Return a frame as bytes."""
    return HEAD.pack(len(payload), kind, number) + payload


def read_frame(
    connection: socket.socket, on_timeout: Callable[[], None] | None = None
) -> tuple[int, int, bytes]:
    """Read a frame from a blocking socket. `on_timeout` is called each time that the socket times
    out. Returns: the kind of the frame, its number, and its payload. Raises: EOFError if the
    connection has ended; OSError; the errors of `on_timeout`."""
    size, kind, number = HEAD.unpack(_read_exactly(connection, HEAD.size, on_timeout))
    return kind, number, _read_exactly(connection, size, on_timeout)


def _read_exactly(
    connection: socket.socket, size: int, on_timeout: Callable[[], None] | None
) -> bytes:
    parts: list[bytes] = []
    while size:
        try:
            part = connection.recv(min(size, 1 << 20))
        except TimeoutError:
            if on_timeout is None:
                raise
            on_timeout()
            continue
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def pack_json(value: Any) -> bytes:
    """Return a value as JSON, encoded for the payload of a frame."""
    return json.dumps(value).encode()


def pack_needs(needs: Iterable[Need]) -> bytes:
    """Serialize needs, for `unpack_needs`."""
    now = time.monotonic()
    parts: list[bytes] = []
    count = 0
    for need in needs:
        rows = _make_rows(need.pages)
        rows["due"] = np.clip((need.due - now) * 1000, -_NEVER, _NEVER).astype(np.int32)
        name = pack_json(need.key)
        parts += [_COUNT.pack(len(name)), name, _COUNT.pack(len(rows)), rows.tobytes()]
        count += 1
    return _COUNT.pack(count) + b"".join(parts)


def batch_needs(needs: Iterable[Need], max_bytes: int = _BATCH_BYTES) -> Iterator[list[Need]]:
    """Divide needs into one or more batches, each of which has about `max_bytes` when
    serialized."""
    batch: list[Need] = []
    left = max_bytes
    for need in needs:
        begin = 0
        while begin < len(need.due):
            left -= len(pack_json(need.key)) + 2 * _COUNT.size
            stop = begin + max(1, left // _ROWS.itemsize)
            part = need.at(slice(begin, stop))
            batch.append(part)
            left -= len(part.due) * _ROWS.itemsize
            begin = stop
            if left < _ROWS.itemsize:
                yield batch
                batch = []
                left = max_bytes
    yield batch


def check_pages(need: Need) -> None:
    """Check that a need has pages, and that they are in ascending order and within the file.
    Raises: ValueError if not."""
    pages = need.pages
    if not pages or not _is_ascending(pages):
        raise ValueError("found no pages, or pages that are out of order")
    if not find_last(pages) * PAGE_BYTES < need.key.size <= BLOCK_BYTES << 32:
        raise ValueError(f"found pages beyond the end of the file ({need.key.size} bytes)")


def _is_ascending(pages: Pages) -> bool:
    return bool((pages.blocks[1:] > pages.blocks[:-1]).all() and pages.masks.all())


def unpack_needs(data: bytes) -> list[Need]:
    """Parse the result of `pack_needs`. Raises: ValueError if it is damaged."""
    now = time.monotonic()
    stream = BytesIO(data)

    def read_count() -> int:
        (count,) = _COUNT.unpack(stream.read(_COUNT.size))
        return int(count)

    needs: list[Need] = []
    try:
        for _ in range(read_count()):
            location, etag, num_bytes = parse_json(stream.read(read_count()))
            num_rows = read_count()
            rows = np.frombuffer(stream.read(num_rows * _ROWS.itemsize), _ROWS, num_rows)
            due = np.where(rows["due"] == _NEVER, math.inf, now + rows["due"] / 1000)
            key = FileKey(str(location), str(etag), int(num_bytes))
            needs.append(Need(key, _read_rows(rows), due))
    except (struct.error, TypeError, OverflowError) as error:
        raise ValueError(f"cannot read the list of pages in the request: {error}") from None
    return needs


def pack_pages(pages: Pages, data: bytes) -> bytes:
    """Serialize pages, for `unpack_pages`.

    Args:
        data: the bytes of the pages, one page after another.
    """
    rows = _make_rows(pages)
    head = _COUNT.pack(len(rows)) + rows.tobytes()
    return b"".join([head, _COUNT.pack(zlib.crc32(data, zlib.crc32(head))), data])


def unpack_pages(answer: bytes, key: FileKey, requested: Pages) -> tuple[Pages, memoryview]:
    """Parse the result of `pack_pages`.

    Args:
        answer: the result of `pack_pages`.
        key: the file.
        requested: the pages that were requested.

    Returns: the pages, and their bytes one page after another.

    Raises: ValueError if the data are damaged, or contain pages that were not requested.
    """
    try:
        (count,) = _COUNT.unpack_from(answer)
        rows = np.frombuffer(answer, _ROWS, count, _COUNT.size)
        (checksum,) = _COUNT.unpack_from(answer, _COUNT.size + rows.nbytes)
    except (struct.error, ValueError) as error:
        raise ValueError(f"cannot read the pages: {error}") from None
    pages = _read_rows(rows)
    head = answer[: _COUNT.size + rows.nbytes]
    data = memoryview(answer)[len(head) + _COUNT.size :]
    # The checksum covers the list of pages, which matters as much as their bytes
    if zlib.crc32(data, zlib.crc32(head)) != checksum:
        raise ValueError("the checksum of the pages is wrong")
    if not _is_ascending(pages) or subtract(pages, requested):
        raise ValueError("found pages that were not requested")
    expected = count_bytes(pages, key.size)
    if len(data) != expected:
        raise ValueError(f"found {len(data)} bytes, expected {expected}, the size of the pages")
    return pages, data


def _make_rows(pages: Pages) -> Any:
    """Return pages as an array of type _ROWS, with due times of 0."""
    rows = np.zeros(len(pages.blocks), _ROWS)
    rows["block"] = pages.blocks
    rows["pages"] = pages.masks
    return rows


def _read_rows(rows: Any) -> Pages:
    """Return the pages in an array of type _ROWS."""
    return Pages(rows["block"].astype(np.uint32), rows["pages"].astype(np.uint64))


def pack_error(error: Exception) -> bytes:
    """Serialize an error, for `unpack_error` in another process."""
    # A subclass of another module is packed as its base in `errors`, if it has one
    names = [base.__name__ for base in type(error).__mro__ if hasattr(errors, base.__name__)]
    name = names[0] if names else type(error).__name__
    fields: dict[str, Any] = {"class": name, "text": str(error)}
    if isinstance(error, DataError):
        fields |= {"path": error.path, "problem": error.problem, "offset": error.offset}
    return pack_json(fields)


def unpack_error(data: bytes) -> Exception:
    """Parse the result of `pack_error`. Returns: the error; a RuntimeError if the packed error was
    not a MegablendError."""
    fields = parse_json(data)
    error_class = getattr(errors, fields["class"], None)
    if not (isinstance(error_class, type) and issubclass(error_class, MegablendError)):
        return RuntimeError(f"node process: {fields['class']}: {fields['text']}")
    if issubclass(error_class, DataError):
        return error_class(fields["path"], fields["problem"], offset=fields["offset"])
    return error_class(fields["text"])
