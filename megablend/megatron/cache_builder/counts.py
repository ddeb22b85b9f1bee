"""Which blocks a rank counts."""

from __future__ import annotations

import numpy as np

from megablend.blocks.document_lengths import next_cut
from megablend.index.snapshot import Snapshot


def share_of(snapshot: Snapshot, rank: int, size: int) -> tuple[int, int]:
    """A rank's blocks, first and end: about equally many tokens, cut where a document begins."""
    tokens = snapshot.tokens_before
    num_blocks = len(tokens) - 1
    first, end = (int(np.searchsorted(tokens, int(tokens[-1]) * part // size)) for part in (rank, rank + 1))
    last = num_blocks if rank + 1 == size else next_cut(snapshot, end, num_blocks)
    return (next_cut(snapshot, first, num_blocks) if rank else 0), last
