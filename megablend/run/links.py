"""The chain of a run's stages, as states store it. It has a link for each stage: the end of the
stage and the digest of the plan up to this end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Link(NamedTuple):
    """An item of the chain, which identifies a stage and all stages before it."""

    end: int
    """Number of the sample after the stage's last one, as it was planned."""
    digest: str
    """The plan's digest after the stage, as if the stage had not been cut."""
    cut: int | None = None
    """The sample at which an amendment stops the stage before its end; None if it was not cut."""
    drain: int | None = None
    """The number of the stage's first samples that continue the previous stage; see
    `Stage.drain`."""
    whole_epochs: bool = False
    """See `Stage.whole_epochs`."""

    @property
    def stop(self) -> int:
        """Number of the sample at which the next stage begins."""
        return self.end if self.cut is None else self.cut

    def to_list(self) -> list[int | str | None]:
        """Return the link as states store it: end and digest, then cut, drain and `whole_epochs`.
        Values that the stage does not have are left out at the end of the list."""
        if self.whole_epochs:
            return [self.end, self.digest, self.cut, self.drain, self.whole_epochs]
        if self.drain is not None:
            return [self.end, self.digest, self.cut, self.drain]
        if self.cut is not None:
            return [self.end, self.digest, self.cut]
        return [self.end, self.digest]


class Parting(NamedTuple):
    """The point at which two chains diverge, or at which the shorter one ends."""

    sample: int
    """The first sample that the chains do not certainly have in common."""
    by_cut: bool = False
    """Whether the chains have the same stage there, but cut at different samples."""
    is_end: bool = False
    """Whether one chain is a prefix of the other."""

    def agrees_before(self, sample: int) -> bool:
        """Return whether the chains have the same samples before `sample`, and have at least one
        sample in common. Samples after the end of a chain count as the same."""
        return self.is_end or 0 < self.sample >= sample


def find_parting(a: Sequence[Link], b: Sequence[Link]) -> Parting:
    """Find the point at which two chains diverge."""
    start = 0
    for x, y in zip(a, b, strict=False):
        if (x.end, x.digest) != (y.end, y.digest):
            return Parting(start)
        if x.cut != y.cut:
            return Parting(min(x.stop, y.stop), by_cut=True)
        start = x.stop
    return Parting(start, is_end=True)
