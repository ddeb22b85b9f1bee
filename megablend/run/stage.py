"""A stage of a run: a range of its samples with one blend, and everything that decides their
order."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fractions import Fraction

from megablend.blend.schedule import Schedule
from megablend.config import Source

SETTINGS = {
    "split": str,
    "sequence_length": int,
    "add_extra_token_to_sequence": bool,
    "interleaving": str,
    "order": str,
    "plan_version": int,
    "seed": int,
    "lanes": int,
    "shuffle_window": int,
}
"""The fields of a `Blend` except its sources and its schedule, with their types, in the order in
which they are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceShare:
    """A source in a blend: its share, and the settings that are the same in all stages.

    These settings are compared and stored as a whole (`fixed`), except in the ledger: a new field
    must also be added to `ledger_format`, which writes it, and to `ledger_file`, which reads it.
    """

    name: str
    append_eod: int | None
    """The end-of-document token added after each document; None to add none."""
    share: Fraction | None = None
    """Fraction of the stage's samples; the shares of a blend sum to 1. None if the split is not
    blended."""
    cycles: int | None = None
    """The number of cycles that share each run of the source's ordinals; chosen once, from the
    block sizes. None if the split is not blended."""

    @classmethod
    def of(cls, source: Source) -> SourceShare:
        """Return the settings of a source that a config fixes, without its share."""
        return cls(name=source.name, append_eod=source.append_eod)

    @property
    def fixed(self) -> SourceShare:
        """Return the source without its share: the settings that are the same in all stages."""
        return self.with_share(None, None)

    def with_share(self, share: Fraction | None, cycles: int | None) -> SourceShare:
        """Return the source with the given `share` and `cycles`."""
        return dataclasses.replace(self, share=share, cycles=cycles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """The settings that, together with the index and the stages' ends, decide the order of samples.
    Defaults are those of unblended splits."""

    split: str
    """The split's name and the fractions of all splits, such as `train of 1,0,0`."""
    sequence_length: int
    add_extra_token_to_sequence: bool
    sources: tuple[SourceShare, ...]
    """The sources in the order of the config."""
    interleaving: str = "sequential"
    """A name of `INTERLEAVINGS`."""
    order: str = "sequential"
    """A name of `ORDERS`."""
    plan_version: int = 1
    seed: int = 0
    lanes: int = 1
    shuffle_window: int = 1
    """Number of samples per lane in a cycle."""
    schedule: Schedule | None = None
    """How the shares change to those of `sources`; None if they are constant."""

    @property
    def fractions(self) -> tuple[Fraction, ...]:
        """The fractions of the documents in train, valid and test, as given in `split`."""
        return tuple(map(Fraction, self.split.partition(" of ")[2].split(",")))

    @property
    def is_blended(self) -> bool:
        """Whether sources have shares; otherwise the split is one pass over each source."""
        return self.sources[0].share is not None

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """The sources' shares of the samples, [num_sources]; empty if the split is not blended."""
        return tuple(source.share for source in self.sources if source.share is not None)

    @property
    def largest_shares(self) -> tuple[Fraction, ...]:
        """The largest share of each source in the stage, [num_sources];
        empty if the split is not blended."""
        return (
            self.shares
            if self.schedule is None
            else tuple(map(max, self.schedule.start, self.shares))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A contiguous range of a run's samples with one blend and one index."""

    end: int
    """Number of the sample after the stage's last one, as it was planned; a stage begins where the
    previous one stops."""
    index: str
    """Digest of the index snapshot that the stage reads."""
    blend: Blend
    cut: int | None = None
    """The sample at which an amendment stops the stage, at the end of a cycle; None if it continues
    to its end."""
    drain: int | None = None
    """The number of the stage's first samples that continue the previous stage, with its settings
    and shares. None if they are only the samples that the previous stage has left, if any; see
    `plan_stages`."""
    whole_epochs: bool = False
    """Whether epochs are read whole when files are withdrawn. If True, withdrawn files are read
    only by a drain, to finish epochs that earlier stages have begun, and an epoch that is shorter
    without them is read to its new end. False if that makes no difference, and in ledgers of
    earlier releases. In these, an epoch that begins exactly where lanes have stopped is still read
    from withdrawn files; and an epoch that became shorter ends within another epoch, the rest of
    which is not read."""

    @property
    def stop(self) -> int:
        """Number of the sample at which the next stage begins."""
        return self.end if self.cut is None else self.cut
