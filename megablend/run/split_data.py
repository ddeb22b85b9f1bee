"""The documents of a split's sources in each snapshot of the index that a run reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.config import SPLITS, Config
from megablend.errors import PlanError
from megablend.index.blocks.block_store import BlockStore
from megablend.index.blocks.growing_splits import find_split_ranges
from megablend.index.blocks.splits import PART_DTYPE
from megablend.lazy import cached_property
from megablend.run.source_blocks import SourceBlocks, SplitData
from megablend.run.stage import SourceShare
from megablend.system.digest import digest_json


@dataclass(frozen=True, kw_only=True)
class SplitSources:
    """The sources of a split, in the snapshots of a run."""

    split: str
    sources: tuple[SourceShare, ...]
    """[num_sources]; only their names and end-of-document tokens are used."""
    index_names: tuple[str, ...]
    """[num_sources]: the sources' names in the index."""
    seed: int
    snapshots: tuple[SplitData, ...]
    """The snapshots that the split reads, in order: at least one, and only one for valid and
    test."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)  # as in Run

    @cached_property
    def parts(self) -> npt.NDArray[np.void]:
        """PART_DTYPE [num_sources]: the documents of each source that belong to the split, in the
        last snapshot that has it; see SplitData."""
        if len(self.snapshots) == 1:
            return self.snapshots[0].parts
        parts: npt.NDArray[np.void] = self.snapshots[0].parts.copy()
        for snapshot in self.snapshots[1:]:
            parts[snapshot.has_source] = snapshot.parts[snapshot.has_source]
        return parts

    @cached_property
    def tokens(self) -> list[int]:
        """Number of tokens of each source in this split, including end-of-document tokens, in the
        last snapshot that has the source."""
        tokens: list[int] = self.parts["tokens"].tolist()
        return tokens

    @property
    def tokens_by_index(self) -> dict[str, list[int]]:
        """For each snapshot, by its digest: the number of tokens of each source in this split,
        including end-of-document tokens; 0 if the snapshot does not have the source."""
        tokens = dict[str, list[int]]()
        for snapshot in self.snapshots:
            tokens[snapshot.snapshot.digest] = snapshot.tokens
        return tokens

    @cached_property
    def blocks(self) -> tuple[SourceBlocks, ...]:
        """The blocks of each source, [num_sources]."""
        blocks = list[SourceBlocks]()
        for number, source in enumerate(self.sources):
            snapshots = dict[str, SplitData]()
            for snapshot in self.snapshots:
                if snapshot.numbers[number] >= 0:
                    snapshots[snapshot.snapshot.digest] = snapshot
            blocks.append(
                SourceBlocks(
                    name=self.index_names[number],
                    number=number,
                    snapshots=snapshots,
                    appends_eod=source.append_eod is not None,
                    key=int(digest_json([self.seed, self.split, source.name])[:16], 16),
                )
            )
        return tuple(blocks)

    def of_snapshot(self, number: int) -> SplitSources:
        """Return a copy with only one of the snapshots, given by its number."""
        return replace(self, snapshots=(self.snapshots[number],))


def find_requested(
    config: Config, split: str, store: BlockStore, *, is_built: bool
) -> SplitSources:
    """Find the sources that a config lists for a split, in the snapshots of the config's run. For
    valid and test, the result has only the snapshot that they read.

    Args:
        is_built: whether the run has a ledger.

    Raises: PlanError if the run lacks a snapshot that a stage of the config reads, or if the config
        lists a newer source before an older one.
    """
    needed = config.num_snapshots - 1 if split == "train" else config.snapshot
    if needed >= len(store.stores):
        others = (
            ""
            if needed == len(store.stores)
            else "leave out all but the first of these stages for now, "
        )
        stages_without = (
            i
            for i, stage in enumerate(config.stage_configs_ignoring_sources)
            if stage.snapshot == len(store.stores)
        )
        key = next((f"stages[{i}]" for i in stages_without), "stages")
        if not is_built:
            raise PlanError(
                f"{key}: new_data: run {config.run!r} is not built yet; build the run without {key} and later stages, then "
                "add the stage (`megablend index CONFIG`, then `megablend amend CONFIG --at SAMPLE`)"
            )
        raise PlanError(
            f"{key}: `new_data` is set, but the new files have not been added to run {config.run!r} yet; "
            f"{others}index the files (`megablend index CONFIG`), then add the stage (`megablend amend CONFIG --at "
            "SAMPLE`)"
        )
    data = find_sources(
        split,
        list(map(SourceShare.of, config.sources_of(split).values())),
        store,
        is_listed=config.listed_by_split,
        seed=config.seed,
        shares=config.shares,
    )
    if split != "train":
        return data.of_snapshot(config.snapshot)
    _check_sequence(config.run, data)
    return data


def find_sources(
    split: str,
    sources: Sequence[SourceShare],
    store: BlockStore,
    *,
    is_listed: bool,
    seed: int,
    shares: Sequence[Fraction],
) -> SplitSources:
    """Find the sources of a split in the snapshots of a run.

    Args:
        sources: all sources that the run has had.
        is_listed: whether each split has its own list of sources.
        shares: the fractions of the documents that belong to train, valid and test.
    """
    names = [f"{split}/{source.name}" if is_listed else source.name for source in sources]
    column = 0 if is_listed else SPLITS.index(split)
    ranges = find_split_ranges(store.stores, shares)
    snapshots = []
    for snapshot_store, first_block, splits in zip(
        store.stores, store.first_blocks, ranges, strict=True
    ):
        numbers = np.array([splits.numbers.get(name, -1) for name in names], np.int64)
        is_known = numbers >= 0
        parts = np.zeros(len(numbers), PART_DTYPE)
        parts[is_known] = splits.joined(numbers[is_known], column)
        if first_block:
            parts["first_block"] += first_block
            parts["stop_block"] += first_block
        snapshots.append(
            SplitData(
                snapshot=snapshot_store.snapshot,
                first_block=first_block,
                numbers=numbers,
                splits=splits,
                column=column,
                parts=parts,
            )
        )
    return SplitSources(
        split=split,
        sources=tuple(sources),
        index_names=tuple(names),
        seed=seed,
        snapshots=tuple(snapshots),
    )


def _check_sequence(run: str, sources: SplitSources) -> None:
    """Check that sources are listed in the order of the snapshots with which they were added.
    Raises: PlanError."""
    names = sources.index_names
    # For each source, the first snapshot that has it
    in_snapshots = [snapshot.has_source for snapshot in sources.snapshots]
    arrivals = np.argmax([*in_snapshots, np.ones(len(names), np.bool_)], axis=0)
    # For each source, the first snapshot that has it or a source listed after it
    earliest = np.minimum.accumulate(arrivals[::-1])[::-1]
    number = int(np.argmax(arrivals > earliest))
    if arrivals[number] > earliest[number]:
        raise PlanError(
            f"source {names[number]!r} is new in run {run!r}, but listed before sources that the run already had; "
            "list it after them"
        )
