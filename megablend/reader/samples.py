"""A sample's tokens, gathered from its blocks, and where documents begin in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megablend.formats.base import CONTINUES, DecodedBlock
from megablend.plan.run import Run, Stretch
from megablend.reader.window import Window


@dataclass(frozen=True, slots=True)
class Sample:
    """What sample k is made of."""

    source: int
    """Number of its source in the split."""
    ordinal: int
    """Its number within the source, over all epochs."""
    stretches: tuple[Stretch, ...]
    tokens: npt.NDArray[np.int64]
    """int64 [sequence_length + 1] (without the extra token: [sequence_length])."""
    starts: npt.NDArray[np.int64]
    """int64 [num_pieces]: positions in `tokens` at which a document, or the part of it in another block, begins; first is 0."""


def read_sample(run: Run, window: Window, k: int) -> Sample:
    """Locate sample k and read its blocks.

    Raises: IndexError for k outside the run; MissingFileError, ChangedFileError, CorruptFileError from its files.
    """
    source, ordinal = run.plan.locate(k)
    stretches = run.stretches(source, ordinal)
    blocks = window.get([stretch.block for stretch in stretches])
    tokens = np.concatenate([b.tokens[s.start : s.stop] for s, b in zip(stretches, blocks, strict=True)]).astype(
        np.int64
    )
    return Sample(source, ordinal, tuple(stretches), tokens, _starts(run, stretches, blocks))


def _starts(run: Run, stretches: Sequence[Stretch], blocks: Sequence[DecodedBlock]) -> npt.NDArray[np.int64]:
    """Positions at which pieces begin; two neighbouring blocks that hold one document are one piece."""
    starts, position, before = [np.zeros(1, np.int64)], 0, None
    for stretch, block in zip(stretches, blocks, strict=True):
        first = np.searchsorted(block.offsets, stretch.start, side="right")
        last = np.searchsorted(block.offsets, stretch.stop, side="left")
        inner = block.offsets[first:last] - stretch.start + position
        if before is not None and not _joined(run, before, stretch, block):
            starts.append(np.array([position], np.int64))
        starts.append(inner)
        position += stretch.stop - stretch.start
        before = stretch
    return np.unique(np.concatenate(starts))


def _joined(run: Run, before: Stretch, stretch: Stretch, block: DecodedBlock) -> bool:
    """Whether a stretch goes on with the document that the one before it broke off."""
    if before.epoch != stretch.epoch or stretch.start != 0:
        return False
    if before.block == stretch.block - 1:
        return bool(run.store.generation.blocks(np.array([stretch.block]))["flags"][0] & CONTINUES)
    return False
