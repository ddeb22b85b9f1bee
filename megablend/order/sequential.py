"""Blocks as they lie on disk, every epoch the same."""

from __future__ import annotations

from megablend.order.base import Blocks, Span


class SequentialOrder:
    """No shuffling: `key` is taken and not used, so that orders are made alike."""

    def __init__(self, blocks: Blocks, key: int) -> None:
        self._blocks = blocks

    def spans(self, start: int, stop: int) -> list[Span]:
        """Tokens [start, stop) of the endless concatenation of the source's epochs, in order."""
        blocks, spans = self._blocks, list[Span]()
        epoch, at = divmod(start, blocks.num_tokens)
        block, left = self._block_of(at), stop - start
        before = blocks.before(block)
        while left > 0:
            after = blocks.before(block + 1)
            size = min(after - before - (at - before), left)
            if size > 0:
                spans.append(Span(epoch, block, at - before, at - before + size))
                left -= size
                at += size
            block, before = block + 1, after
            if block == blocks.num_blocks:
                epoch, block, before, at = epoch + 1, 0, 0, 0
        return spans

    def _block_of(self, token: int) -> int:
        """The block that holds a token of an epoch."""
        low, high = 0, self._blocks.num_blocks
        while high - low > 1:
            middle = (low + high) // 2
            if self._blocks.before(middle) <= token:
                low = middle
            else:
                high = middle
        return low
