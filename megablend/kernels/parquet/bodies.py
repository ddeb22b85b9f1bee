"""Decompress many page bodies in one call, with the system's zstd and lz4 libraries if they exist.

Arrow's codecs need one Python call per page, and create a new context for each.
"""

from __future__ import annotations

from megablend.arrays import Int64s
from megablend.intrinsics import library_function
from megablend.jit import kernel

ZSTD_LIBRARY = "libzstd.so.1"
# None if the system does not have the library
zstd_decompress = library_function(ZSTD_LIBRARY, "ZSTD_decompressDCtx", "uintp", *["uintp"] * 5)
lz4_decompress = library_function(
    "liblz4.so.1", "LZ4_decompress_safe", "intc", "uintp", "uintp", "intc", "intc"
)


@kernel
def expand_zstd(
    context: int, addresses: Int64s, sizes: Int64s, outs: Int64s, out_sizes: Int64s
) -> int:
    """Decompress zstd frames with libzstd. `zstd_decompress` must not be None.

    Returns: the index of the first frame that is damaged, or whose decompressed size is not the
        expected one; -1 if there is none.

    Args:
        context: address of a ZSTD_DCtx that no other thread uses.
        addresses, sizes: int64 [n], address in memory and size of each frame.
        outs, out_sizes: int64 [n], address to write each frame's data to, and its exact size.
    """
    for i in range(len(addresses)):
        if zstd_decompress(context, outs[i], out_sizes[i], addresses[i], sizes[i]) != out_sizes[i]:  # type: ignore[misc]
            return i
    return -1


@kernel
def expand_lz4(addresses: Int64s, sizes: Int64s, outs: Int64s, out_sizes: Int64s) -> int:
    """Decompress LZ4 blocks with the system's library; `lz4_decompress` must not be None. The
    arguments and the result are those of `expand_zstd`."""
    for i in range(len(addresses)):
        if lz4_decompress(addresses[i], outs[i], sizes[i], out_sizes[i]) != out_sizes[i]:  # type: ignore[misc]
            return i
    return -1
