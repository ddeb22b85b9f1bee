"""Decompressing many page bodies in one call, with the system's own libraries if it has them.

Arrow's codecs need one Python call per page, and create a new context for each.
"""

from __future__ import annotations

from megablend.arrays import Int64s
from megablend.intrinsics import library_function
from megablend.jit import kernel
from megablend.kernels.parquet.lz4 import decode_lz4

ZSTD_LIBRARY = "libzstd.so.1"
zstd_decompress = library_function(ZSTD_LIBRARY, "ZSTD_decompressDCtx", "uintp", *["uintp"] * 5)
lz4_decompress = library_function(
    "liblz4.so.1", "LZ4_decompress_safe", "intc", "uintp", "uintp", "intc", "intc"
)


@kernel
def expand_zstd(
    context: int, addresses: Int64s, sizes: Int64s, outs: Int64s, lengths: Int64s
) -> int:
    """Decompress frames of zstd; only where there is `zstd_decompress`. Returns the first that is
    damaged, or -1.

    Args:
        context: address of a ZSTD_DCtx that is not used by another thread.
        addresses, sizes: int64 [n], addresses of frames in memory, and their sizes.
        outs, lengths: int64 [n], output addresses, and exact decompressed sizes.
    """
    for i in range(len(addresses)):
        if zstd_decompress(context, outs[i], lengths[i], addresses[i], sizes[i]) != lengths[i]:  # type: ignore[misc]
            return i
    return -1


@kernel
def expand_lz4(addresses: Int64s, sizes: Int64s, outs: Int64s, lengths: Int64s) -> int:
    """Decompress blocks of LZ4 by the system's library; only where there is `lz4_decompress`. As
    `expand_zstd`."""
    for i in range(len(addresses)):
        if lz4_decompress(addresses[i], outs[i], sizes[i], lengths[i]) != lengths[i]:  # type: ignore[misc]
            return i
    return -1


@kernel
def expand_lz4_plainly(addresses: Int64s, sizes: Int64s, outs: Int64s, lengths: Int64s) -> int:
    """Decompress blocks of LZ4 with our own decoder; as `expand_zstd`."""
    for i in range(len(addresses)):
        if decode_lz4(addresses[i], sizes[i], outs[i], lengths[i]) != lengths[i]:
            return i
    return -1
