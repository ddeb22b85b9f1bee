"""The seam of orders: where the tokens of a source's endless concatenation of epochs lie in its blocks."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class Blocks(Protocol):
    """A source's token counts, block by block, numbered from 0."""

    num_blocks: int
    num_tokens: int
    """Tokens of one epoch, above 0."""

    def sizes(self, start: int, stop: int, step: int = 1) -> npt.NDArray[np.int64]:
        """Tokens of blocks start:stop:step, int64; some may be 0."""
        ...

    def before(self, block: int) -> int:
        """Tokens of the blocks before `block`, which is at most num_blocks."""
        ...


class Span(NamedTuple):
    """Tokens start:stop of a block, as it comes up in an epoch; never empty."""

    epoch: int
    block: int
    start: int
    stop: int


class Order(Protocol):
    """Lays a source's tokens out for reading. Safe to share between threads, and to pickle."""

    def spans(self, start: int, stop: int) -> list[Span]:
        """Tokens [start, stop) of the endless concatenation of the source's epochs, in order; 0 <= start <= stop < 2^63."""
        ...
