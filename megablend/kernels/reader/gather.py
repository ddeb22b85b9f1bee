"""Gather samples from decoded blocks: their tokens, and where documents begin in them.

Blocks are separate arrays, so kernels receive their addresses; the caller keeps them alive. A
sample's spans follow one another and together have `width` tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.intrinsics import bytes_at, prefetch
from megablend.jit import kernel

SLOT_DTYPE = np.dtype(
    [
        ("kind", "<i8"),  # number of the tokens' type
        ("size", "<i8"),  # in tokens; -1 of an empty slot: even token 0 is out of its range
        ("tokens", "<i8"),  # address of the tokens
        ("offsets", "<i8"),  # address of the offsets of its pieces: int64 [num_offsets]
        ("num_offsets", "<i8"),
    ]
)
"""A decoded block in memory."""
Slots = npt.NDArray[np.void]
PORTION = 256
"""Number of tokens that are copied at a time."""


@kernel
def gather_tokens(
    like: npt.NDArray[Any],
    kind: int,
    slots: Slots,
    places: Int64s,
    starts: Int64s,
    stops: Int64s,
    width: int,
    tokens: Int64s,
    labels: Int64s,
) -> int:
    """Copy the samples' tokens from the spans that are in blocks of one dtype. Other blocks are
    skipped.

    Args:
        like: any array of this dtype.
        kind: the number of this dtype.
        slots: SLOT_DTYPE [num_blocks].
        places, starts, stops: int64 [m], for each span the index of its block in `slots`, and its
            tokens [start, stop) in the block; a span lies within one sample.
        width: tokens per sample.
        tokens, labels: int64 [n, length], filled with each sample's tokens, and with its tokens
            from the second on. Entries for which there is no token are left unchanged.

    Returns: -1 on success; the number of a span that is not within its block or its sample; `m` if
        the spans are not n samples.
    """
    row = 0
    filled = 0
    for i in range(len(places)):
        place = places[i]
        start = starts[i]
        size = stops[i] - starts[i]
        if place < 0 or place >= len(slots) or start < 0 or size < 1:
            return i
        if stops[i] > slots[place]["size"]:
            return i
        if filled + size > width or row >= len(tokens):
            return i
        next_bytes = bytes_at(0, 0)
        if i + 1 < len(places) and 0 <= places[i + 1] < len(slots):
            next_bytes = bytes_at(
                slots[places[i + 1]]["tokens"] + starts[i + 1] * like.itemsize,
                (stops[i + 1] - starts[i + 1]) * like.itemsize,
            )
        if slots[place]["kind"] == kind:
            span = bytes_at(
                slots[place]["tokens"] + start * like.itemsize, size * like.itemsize
            ).view(like.dtype)
            prefetched = 0
            # In portions: the next span is prefetched while tokens are written, and labels are read
            # while a portion is still in the cache
            for begin in range(0, size, PORTION):
                end = min(begin + PORTION, size)
                ahead = len(next_bytes)
                if end < size:
                    ahead = min(end * like.itemsize, ahead)
                while prefetched < ahead:
                    prefetch(next_bytes, prefetched)
                    prefetched += 64
                # Views that end with the row, whose loops are vectorised
                portion = span[begin:end]
                target = tokens[row, filled + begin : filled + end]
                for j in range(len(target)):
                    target[j] = portion[j]
                unlabelled = 1 if filled + begin == 0 else 0  # the first token is no label
                portion = span[begin + unlabelled : end]
                target = labels[row, filled + begin + unlabelled - 1 : filled + end - 1]
                for j in range(len(target)):
                    target[j] = portion[j]
        filled += size
        if filled == width:
            row = row + 1
            filled = 0
    return -1 if row == len(tokens) and filled == 0 else len(places)


@kernel
def mark_documents(
    ids: Int64s,
    continues: npt.NDArray[np.bool_],
    slots: Slots,
    places: Int64s,
    epochs: Int64s,
    starts: Int64s,
    stops: Int64s,
    width: int,
    out: npt.NDArray[np.bool_],
) -> int:
    """Mark the first token of each document, of each sample, and of each span that does not
    continue the document of the span before it.

    Args:
        ids: int64 [num_blocks], the number of each block in the index.
        continues: bool [num_blocks], whether its first piece continues a document of the previous
            block.
        slots: SLOT_DTYPE [num_blocks].
        places, epochs, starts, stops: int64 [m], block, epoch, first token and stop of each span.
        width: tokens per sample.
        out: bool [all samples' tokens], all False; filled.

    Returns: -1 on success; the number of the first span outside all blocks; `m` if `out` has the
        wrong size.
    """
    filled = 0
    for i in range(len(places)):
        place = places[i]
        start = starts[i]
        size = stops[i] - starts[i]
        if place < 0 or place >= len(ids):
            return i
        if size < 0 or filled + size > len(out):
            return len(places)
        offsets = bytes_at(slots[place]["offsets"], slots[place]["num_offsets"] * 8).view(np.int64)
        piece = np.searchsorted(offsets, start, side="right")
        while piece < len(offsets) and offsets[piece] < stops[i]:
            out[filled + offsets[piece] - start] = True
            piece += 1
        if size > 0:
            goes_on = (
                filled % width > 0
                and start == 0
                and epochs[i] == epochs[i - 1]
                and continues[place]
            )
            out[filled] |= not (goes_on and ids[places[i - 1]] == ids[place] - 1)
        filled += size
    return -1 if filled == len(out) else len(places)
