"""Decompress pages: the output must have exactly the size that the page header states.

pyarrow's one-shot codecs do not report that they wrote less than expected, and the rest of the
buffer would be whatever was in memory before. So the size is checked in a different way for each
codec.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeAlias, TypeVar

import pyarrow as pa

from megablend.arrays import Int64s
from megablend.formats.parquet.metadata.names import CodecId, name_of
from megablend.formats.parquet.metadata.thrift import MalformedError, UnsupportedError
from megablend.kernels.parquet.bodies import (
    ZSTD_LIBRARY,
    expand_lz4,
    expand_zstd,
    lz4_decompress,
    zstd_decompress,
)
from megablend.kernels.parquet.lz4 import lz4_size

Buffer: TypeAlias = "bytes | memoryview | pa.Buffer"
Many: TypeAlias = Callable[[Int64s, Int64s, Int64s, Int64s], int]
"""A function that decompresses many bodies; see `decompress_many`."""
Size = TypeVar("Size", int, Int64s)

SLACK_BYTES = 1 << 12
"""Number of bytes that are added to each maximum decompressed size, for small inputs."""


def decompress(codec: int, data: memoryview, size: int) -> Buffer:
    """Decompress `data` by the codec with this number, to exactly `size` bytes. Raises:
    MalformedError if the data is damaged or has another size; UnsupportedError if the codec is not
    in CODECS."""
    if codec not in CODECS:
        raise UnsupportedError(unsupported_codec_message(codec))
    function, _ = CODECS[codec]
    if size > max_decompressed_size(codec, len(data)):
        raise MalformedError(
            f"{len(data)} bytes of {name_of(CodecId, codec)} cannot decompress to {size} bytes, the size in the page's header"
        )
    try:
        out = function(data, size)
    except (pa.ArrowException, OSError) as error:
        raise MalformedError(
            f"its {name_of(CodecId, codec)} data cannot be decompressed ({error})"
        ) from error
    if len(out) != size:
        raise MalformedError(
            f"its data decompresses to {len(out)} bytes, expected {size} (from the page's header)"
        )
    return out


def max_decompressed_size(codec: int, size: Size) -> Size:
    """Return the maximum decompressed size of `size` compressed bytes. If a header states a larger
    size, it is wrong, and no memory may be allocated for it."""
    _, max_ratio = CODECS[codec]
    return size * max_ratio + SLACK_BYTES


def decompress_many(codec: int) -> Many | None:
    """Return a function that decompresses many bodies in one call, or None if this system has none
    for the codec.

    The function takes the addresses and sizes of bodies, the addresses to write to, and the
    expected decompressed sizes: arrays of int64 [n]. It returns -1, or the number of a body that is
    damaged or has another size.
    """
    if codec == CodecId.ZSTD and _THREAD_CODECS.zstd is not None:
        return partial(expand_zstd, _THREAD_CODECS.zstd.address)
    if codec == CodecId.LZ4_RAW and lz4_decompress is not None:
        return expand_lz4
    return None


def unsupported_codec_message(codec: int) -> str:
    """Return the message for a codec that is not in CODECS."""
    return f"codec {name_of(CodecId, codec)} is not supported; write the file with zstd or lz4"


def _uncompressed(data: memoryview, size: int) -> Buffer:
    return data


def _snappy(data: memoryview, size: int) -> Buffer:
    # The data begins with its decompressed size, a varint
    length = 0
    for shift, byte in enumerate(data[:5]):
        length |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            break
    if length != size:
        raise MalformedError(
            f"its data decompresses to {length} bytes, expected {size} (from the page's header)"
        )
    return _one_shot("snappy", data, size)


def _streamed(name: str, data: memoryview, size: int) -> Buffer:
    # One more byte, to detect longer output
    with pa.CompressedInputStream(pa.BufferReader(data), name) as stream:
        return stream.read_buffer(size + 1)


def _lz4_raw(data: memoryview, size: int) -> Buffer:
    stored = pa.py_buffer(data)
    if lz4_size(stored.address, stored.size) != size:
        raise MalformedError(
            f"its LZ4 data does not decompress to {size} bytes, the size in the page's header"
        )
    return _one_shot("lz4_raw", data, size)


def _lz4_hadoop(data: memoryview, size: int) -> Buffer:
    """Decompress blocks, each preceded by two big-endian sizes (decompressed, stored). Early
    writers omitted the sizes."""
    blocks = []
    position = 0
    while position + 8 <= len(data):
        decoded = int.from_bytes(data[position : position + 4], "big")
        stored = int.from_bytes(data[position + 4 : position + 8], "big")
        position += 8 + stored
        if position > len(data) or decoded > size:
            break
        blocks.append((data[position - stored : position], decoded))
    if position == len(data) and sum(decoded for _, decoded in blocks) == size:
        if len(blocks) == 1:
            return _lz4_raw(*blocks[0])
        # Into one buffer, so that only one block is in memory twice
        out = pa.allocate_buffer(size)
        unwritten = memoryview(out)
        for block, decoded in blocks:
            unwritten[:decoded] = memoryview(_lz4_raw(block, decoded))
            unwritten = unwritten[decoded:]
        return out
    return _lz4_raw(data, size)


class _Context:
    """A decompression context (ZSTD_DCtx) of the system's zstd library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.ZSTD_createDCtx.restype = ctypes.c_void_p
        self._free = library.ZSTD_freeDCtx
        self._free.argtypes = [ctypes.c_void_p]
        self.address: int = library.ZSTD_createDCtx() or 0
        if not self.address:
            raise MemoryError("not enough memory for a zstd context")

    def __del__(self) -> None:
        # ZSTD_freeDCtx accepts 0, for no context
        self._free(self.address)


class _ThreadCodecs(threading.local):
    """The codecs of a thread, which have state: pyarrow's codecs by name, and a zstd context."""

    def __init__(self) -> None:
        self.codecs: dict[str, pa.Codec] = {}
        self.zstd = None if zstd_decompress is None else _Context(ctypes.CDLL(ZSTD_LIBRARY))


_THREAD_CODECS = _ThreadCodecs()


def _one_shot(name: str, data: memoryview, size: int) -> Buffer:
    codecs = _THREAD_CODECS.codecs
    if name not in codecs:
        codecs[name] = pa.Codec(name)
    return codecs[name].decompress(data, size)


CODECS: dict[int, tuple[Callable[[memoryview, int], Buffer], int]] = {
    CodecId.UNCOMPRESSED: (_uncompressed, 1),
    CodecId.SNAPPY: (_snappy, 64),
    CodecId.GZIP: (partial(_streamed, "gzip"), 1100),
    CodecId.BROTLI: (partial(_streamed, "brotli"), 1 << 20),
    CodecId.LZ4_HADOOP: (_lz4_hadoop, 256),
    # The one-shot call of zstd, unlike those of other codecs, refuses a shorter result
    CodecId.ZSTD: (partial(_one_shot, "zstd"), 1 << 16),
    CodecId.LZ4_RAW: (_lz4_raw, 256),
}
"""For each codec: the function that decompresses, and the largest ratio of decompressed to stored
size."""
