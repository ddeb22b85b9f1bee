"""One split of a run: what the config requests, what the ledger fixed, and the plan and orders that locate samples.

No array here is as long as the run. Apart from the split ranges, nothing is computed for a source before it is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.blocks.block_store import BlockStore
from megablend.blocks.extra_columns import ExtraColumn
from megablend.blocks.growing_splits import find_split_ranges
from megablend.blocks.splits import SplitBlocks
from megablend.config import SPLITS, Config, Source
from megablend.config.stages import MASKS
from megablend.lazy import cached_property
from megablend.order.base import Order, Spans
from megablend.order.registry import find_order
from megablend.plan.check_totals import check_totals
from megablend.plan.epochs import Epochs, Segment
from megablend.plan.interleavings.registry import find_interleaving
from megablend.plan.ledger import Ledger
from megablend.plan.links import Link
from megablend.plan.locator import LocatedSource, Locator
from megablend.plan.specification import Specification, prepare
from megablend.plan.stage import Blend
from megablend.plan.stage_requests import plan_stages
from megablend.plan.stage_totals import check_stage_totals
from megablend.plan.stages_plan import StagesPlan


class Section(NamedTuple):
    """Consecutive samples of a run that all have the same length and masks, so that a batch may have any of them."""

    start: int
    stop: int
    config: Config
    """The top level's settings, with the section's length and masks."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One split of a run over an opened index."""

    asked: Specification
    store: BlockStore
    ledger: Ledger
    """Train: the committed ledger. Valid and test: derived from the config each time, with the run's plan version."""
    section: Section | None = None
    """The part of the run whose settings `config` has; None where it has those of the top level."""

    @property
    def config(self) -> Config:
        """The config; in a view of a section, with that section's settings."""
        return self.asked.config if self.section is None else self.section.config

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The parts of the run between which the length of samples, or a mask, changes; in order, at least one."""
        if not any(each.changes_samples for each in self.asked.config.stages) or len(self.asked.stages) == 1:
            return (Section(0, self.num_samples, self.asked.config),)
        lengths = {each.start: each.request.sample_tokens for each in self.plan.list_stretches()}
        edges = sorted({*lengths, *(stage.start for stage in self.asked.stages if stage.start < self.num_samples)})
        found, changes = list[Section](), dict[str, Any]()
        for start, stop in pairwise([*edges, self.num_samples]):
            own, before = self.asked.stage_at(start).config, changes
            changes = {name: getattr(own, name) for name in MASKS}
            changes["sequence_length"] = lengths.get(start, before.get("sequence_length"))
            if changes == before:
                found[-1] = found[-1]._replace(stop=stop)
            else:
                found.append(Section(start, stop, self.asked.config.model_copy(update=changes)))
        return tuple(found)

    def view_at(self, sample: int) -> Run:
        """The run with the settings that it has at a sample; the last ones for samples beyond its end."""
        if len(self.sections) == 1:
            return self
        return self.view(next((each for each in self.sections if sample < each.stop), self.sections[-1]))

    def view(self, section: Section) -> Run:
        """The run with the settings of a section; plan and orders are shared."""
        if self.section is None and len(self.sections) == 1:
            return self
        self.plan, self.locator  # noqa: B018  (created before they are copied, so that all views share them)
        view = copy(self)
        object.__setattr__(view, "section", section)
        return view

    @property
    def split(self) -> str:
        """train, valid or test."""
        return self.asked.split

    @property
    def sources(self) -> tuple[Source, ...]:
        """[num_sources], in the order of the config."""
        return self.asked.sources

    @property
    def parts(self) -> npt.NDArray[np.void]:
        """PART_DTYPE [num_sources]: the documents of each source that belong to the split."""
        return self.asked.parts

    @property
    def weights(self) -> tuple[Fraction, ...]:
        """[num_sources], sum 1; empty where the split is not blended."""
        return self.asked.weights

    @property
    def is_blended(self) -> bool:
        """Whether the split is a blend; otherwise it is one pass over its sources."""
        return self.ledger.blend.is_blended

    @cached_property
    def num_samples(self) -> int:
        """Number of samples of the split."""
        return self.ledger.num_samples

    @property
    def tokens(self) -> list[int]:
        """Tokens of each source in this split, including end-of-document tokens."""
        return self.asked.tokens

    @property
    def sample_tokens(self) -> int:
        """Tokens of a sample, including the extra one."""
        return self.config.sequence_length + self.config.add_extra_token_to_sequence

    @property
    def blends(self) -> tuple[Blend, ...]:
        """The blends that the run's samples are read in, or those of a section; neighbours differ."""
        start, stop = (0, self.num_samples) if self.section is None else (self.section.start, self.section.stop)
        stretches = (each for each in self.plan.list_stretches() if each.start < stop and each.stop > start)
        return tuple(blend for blend, _ in groupby(self.ledger.stages[each.stage].blend for each in stretches))

    @property
    def consumes_whole_blocks(self) -> bool:
        """Whether a lane reads a block to its end before it leaves it, in all orders of the run; see OrderKind."""
        return all(find_order(stage.blend.order).consumes_whole_blocks for stage in self.ledger.stages)

    @property
    def has_lanes(self) -> bool:
        """Whether the samples are in lanes, each of which continues in the blocks that it reads from."""
        return find_interleaving(self.ledger.blend.interleaving).has_lanes

    @cached_property
    def plan(self) -> StagesPlan:
        """Sample number -> (source, ordinal)."""
        file = self.ledger.plan_file
        plan = None if file is None else file.make_plan(self.asked.data_digest)
        return plan or plan_stages(self.ledger.stages, self.asked.tokens_by_index, self.asked.blocks)

    @cached_property
    def locator(self) -> Locator:
        """(source, ordinal) -> tokens of blocks."""
        located = [
            LocatedSource(blocks=blocks, segments=segments, is_promised=partial(self._is_promised, number))
            for number, (blocks, segments) in enumerate(zip(self.asked.blocks, self.plan.epochs.segments, strict=True))
        ]
        return Locator(located, int(self.asked.config.add_extra_token_to_sequence))

    def _is_promised(self, source: int, segment: Segment) -> bool:
        """Whether the sample of a source that ends where a segment begins comes before the stage that reads its files."""
        ordinal = self.plan.ordinal_ending_at(source, segment.position)
        if ordinal is None:
            return False
        index = segment.withdrawn[-1] if segment.withdrawn else segment.snapshot
        starts = zip(self.ledger.starts, self.ledger.stages, strict=True)
        start = next(start for start, stage in starts if stage.index == index)
        sample = self.plan.find_samples(np.array([source], np.int32), np.array([ordinal]))[0]
        return 0 <= int(sample) < start

    @property
    def epochs(self) -> Epochs:
        """Where the sources' epochs begin."""
        return self.plan.epochs

    def blocks(self, source: int) -> SplitBlocks:
        """The source's blocks in this split, in the last snapshot that the run reads of it."""
        return self.locator.blocks(source)

    def order(self, source: int) -> Order:
        """How the source's samples are arranged over its blocks."""
        return self.locator.order(source)

    def locate_spans(self, sources: npt.NDArray[np.int32], ordinals: npt.NDArray[np.int64]) -> Spans:
        """Where the tokens of samples are stored; see `Locator.locate_tokens`."""
        starts, steps = self.plan.token_ranges(sources, ordinals)
        return self.locator.locate_tokens(sources, starts, steps + self.asked.config.add_extra_token_to_sequence)

    @property
    def extra_columns(self) -> tuple[ExtraColumn, ...]:
        """Columns read along with the tokens, the same for all sources."""
        return self.store.extra.get(self._first_source, ())

    @cached_property
    def _first_source(self) -> str:
        return next(iter(self.config.sources_of(self.split)))


def plan_run(
    config: Config,
    split: str,
    store: BlockStore,
    *,
    batch: int | None = None,
    promised: Ledger | None = None,
    links: Sequence[Link] = (),
    keep: bool = False,
) -> Run:
    """Assemble a split as the config requests it, with the newest plan version. Its limits are checked by `check_run`.

    Args:
        keep: store the computed split ranges in the cache (`build` does).
        links, batch, promised: see `prepare`.

    Raises: PlanError where the blend is not possible.
    """
    return make_run(prepare(config, split, store, keep=keep, links=links, batch=batch, promised=promised), store)


def make_run(asked: Specification, store: BlockStore) -> Run:
    """The run that commits to exactly what is requested, with the newest plan version. Raises: as plan_run."""
    return Run(asked=asked, store=store, ledger=asked.make_ledger())


def as_promised(run: Run, ledger: Ledger) -> Run:
    """The run with the plan version of a committed ledger; train also with its cycles, which are chosen only once."""
    planned = run.ledger.in_version(ledger.plan_version)
    return dataclasses.replace(run, ledger=planned.with_cycles_of(ledger) if run.split == "train" else planned)


def precompute_orders(run: Run) -> None:
    """Store in the cache the totals that the orders of blended splits would otherwise compute on opening. Raises CacheError.

    For a train split, these are the orders in which it reads each snapshot of the index: others may have no document table.
    """
    config, store = run.asked.config, run.store
    found = find_split_ranges(store.stores, config.shares)
    for number, split in enumerate(SPLITS):
        if not config.is_blended(split):
            continue
        for name, source in config.sources_of(split).items():
            for each, ranges in zip(store.stores, found, strict=True):
                if name not in ranges.numbers:
                    continue
                part = ranges.ranges(ranges.numbers[name], 0 if config.listed_by_split else number)
                blocks = SplitBlocks(each.snapshot, part, has_eod=source.append_eod is not None)
                if blocks.num_tokens == 0:
                    continue  # opening the split raises the error
                used = _list_orders(run, name, each.snapshot.digest) if split == run.split else {config.order}
                for order in sorted(used):
                    find_order(order).make(blocks, 0).precompute()


def _list_orders(run: Run, source: str, snapshot: str) -> set[str]:
    """The orders in which a run reads a source of a snapshot."""
    number = list(run.asked.config.sources_of(run.split)).index(source)
    return {segment.order for segment in run.epochs.segments[number] if segment.snapshot == snapshot}


def check_run(run: Run) -> None:
    """Raises: PlanError where a source with a share gets no samples of the run, or one exceeds its max_epochs."""
    if not run.is_blended:
        return
    if len(run.asked.stages) == 1 and run.ledger.blend.schedule is None:
        totals = run.plan.counts(run.num_samples).tolist()
        check_totals(run.config, run.split, run.sources, run.weights, totals, run.tokens)
        return
    check_stage_totals(run.asked, run.plan, run.ledger.starts)
