"""Where the epochs of sources begin when a run's stages read several snapshots."""

from __future__ import annotations

import numpy as np
import pytest

from megablend.blend.epochs import EpochsBuilder, Segment

TOKENS = {"a": [10], "b": [20], "c": [30], "d": [40]}


class LosesFiles:
    """A source of which each snapshot after the first has other files."""

    def loses_files(self, segment: Segment, index: str) -> bool:
        """See Withdrawals."""
        return segment.snapshot > "a" and index > segment.snapshot

    def count_left(self, segment: Segment, index: str, epoch: int, token: int) -> tuple[int, int]:
        """See Withdrawals."""
        raise AssertionError


@pytest.mark.parametrize("extra", [0, 1])
def test_an_extra_token_stays_in_the_snapshot_from_which_it_was_read(extra: int) -> None:
    builder = EpochsBuilder(TOKENS, "a", "block", extra, [LosesFiles()])
    builder.enter("b", "block", np.array([8]), np.array([8]), whole=False)
    # Samples are read to the end of the first epoch, and the extra token of the last one is the first of the next epoch
    for index in ("c", "d"):
        builder.enter(index, "block", np.array([10]), np.array([10]), whole=True)
    (segments,) = builder.finish().segments
    expected = [("a", 0, 0), ("b", 10, 1), ("d", 10, 1)] if extra else [("a", 0, 0), ("d", 10, 1)]
    assert [(each.snapshot, each.position, each.epoch) for each in segments] == expected
