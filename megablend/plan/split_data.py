"""What a split's sources have in each snapshot of the index that a run reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megablend.blocks.block_store import BlockStore
from megablend.blocks.growing_splits import Ranges, SplitRanges, find_split_ranges
from megablend.blocks.splits import PART_DTYPE
from megablend.config import SPLITS, Config, Source
from megablend.errors import PlanError
from megablend.index.snapshot import Snapshot
from megablend.plan.ledger_format import digest_of
from megablend.plan.source_blocks import SourceBlocks, SourceRanges


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitData:
    """The documents of a split's sources in one snapshot."""

    snapshot: Snapshot
    first_block: int
    """Number that its first block has among those of all snapshots of the run."""
    numbers: npt.NDArray[np.int64]
    """int64 [num_sources]: the number of each source in the snapshot; -1 where the snapshot does not have it."""
    splits: SplitRanges
    column: int
    """Number of the split in `splits`."""
    parts: npt.NDArray[np.void]
    """PART_DTYPE [num_sources]: the documents of each source that belong to the split, by blocks of the run, from the first
    range's begin to the last one's end; zeros where the snapshot does not have the source."""

    @property
    def tokens(self) -> list[int]:
        """Tokens per epoch of each source, including end-of-document tokens."""
        tokens: list[int] = self.parts["tokens"].tolist()
        return tokens

    @property
    def has_source(self) -> npt.NDArray[np.bool_]:
        """bool [num_sources]: whether the snapshot has each source."""
        has_source: npt.NDArray[np.bool_] = self.numbers >= 0
        return has_source

    def ranges(self, source: int) -> Ranges:
        """The documents of a source, which the snapshot has, that belong to the split."""
        return self.splits.ranges(int(self.numbers[source]), self.column)


def find_data(config: Config, split: str, store: BlockStore, *, keep: bool = False) -> tuple[SplitData, ...]:
    """What each snapshot of a run has for a split; for valid and test only the one of the config's stage.

    Args:
        keep: store the computed ranges in the cache.

    Raises: PlanError where a snapshot that a stage of the config reads is not there, or sources are in another sequence.
    """
    needed = config.num_snapshots - 1 if split == "train" else config.snapshot
    if needed >= len(store.stores):
        others = "" if needed == len(store.stores) else "leave out all but the first stage of these for now, "
        lacking = (i for i, each in enumerate(config.stage_settings) if each.snapshot == len(store.stores))
        place = next((f"stages[{i}]" for i in lacking), "stages")
        raise PlanError(
            f"{place}: new_data: run {config.run!r} has {len(store.stores)} of {needed + 1} versions of the index; "
            f"{others}index the files as they are now (`megablend index CONFIG`), and commit the stage (`megablend amend CONFIG "
            f"--at SAMPLE`); a run that is not built is built first without {place} and later ones, and one that was reset goes "
            "on when its ledger is moved back to `runs` in the cache"
        )
    names = list(config.sources_of(split))
    column = 0 if config.listed_by_split else SPLITS.index(split)
    found = find_split_ranges(store.stores, config.shares, keep=keep)
    data = []
    for each, first_block, splits in zip(store.stores, store.first_blocks, found, strict=True):
        numbers = np.array([splits.numbers.get(name, -1) for name in names], np.int64)
        known = numbers >= 0
        parts = np.zeros(len(names), PART_DTYPE)
        parts[known] = splits.joined(numbers[known], column)
        for field in ("first_block", "stop_block") if first_block else ():
            parts[field] += first_block
        data.append(
            SplitData(
                snapshot=each.snapshot,
                first_block=first_block,
                numbers=numbers,
                splits=splits,
                column=column,
                parts=parts,
            )
        )
    if split != "train":
        return (data[config.snapshot],)
    _check_sequence(config.run, names, data)
    return tuple(data)


def list_blocks(
    config: Config, split: str, sources: Sequence[Source], data: Sequence[SplitData]
) -> tuple[SourceBlocks, ...]:
    """The blocks of each source of a split, [num_sources]."""
    return tuple(
        SourceBlocks(
            name=name,
            ranges={
                each.snapshot.digest: SourceRanges(each.snapshot, each.ranges(number), each.first_block)
                for each in data
                if each.numbers[number] >= 0
            },
            appends_eod=source.append_eod is not None,
            key=int(digest_of([config.seed, split, source.name])[:16], 16),
        )
        for number, (name, source) in enumerate(zip(config.sources_of(split), sources, strict=True))
    )


def _check_sequence(run: str, names: Sequence[str], data: Sequence[SplitData]) -> None:
    """Refuse sources that came with a later snapshot, but are listed before others. Raises: PlanError."""
    arrivals = np.argmax([*(each.has_source for each in data), np.ones(len(names), np.bool_)], axis=0)
    earlier = np.minimum.accumulate(arrivals[::-1])[::-1]  # of the sources from each one on
    number = int(np.argmax(arrivals > earlier))
    if arrivals[number] > earlier[number]:
        raise PlanError(
            f"source {names[number]!r} is new in run {run!r}, and listed before sources that the run had already; list it after "
            "them"
        )
