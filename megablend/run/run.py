"""One split of a run: the settings that its ledger fixes, and the plan and orders that locate
samples.

No array here is as long as the run. Apart from the split ranges, nothing is computed for a source
before it is used.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from copy import copy
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.blend.interleavings.registry import find_interleaving
from megablend.blend.plan import StagesPlan
from megablend.config.runtime import Runtime
from megablend.config.settings import Masks
from megablend.index.blocks.block_store import BlockStore
from megablend.index.blocks.extra_columns import ExtraColumn
from megablend.lazy import cached_property
from megablend.order.base import Spans
from megablend.order.registry import find_order
from megablend.run.ledger import Ledger
from megablend.run.locator import Locator
from megablend.run.split_data import SplitSources
from megablend.run.stage import Blend, SourceShare


class Section(NamedTuple):
    """Consecutive samples of a run that have the same length and masks, so that a batch may contain
    any of them."""

    start: int
    stop: int
    sequence_length: int
    add_extra_token_to_sequence: bool
    masks: Masks

    @property
    def sample_tokens(self) -> int:
        """Number of tokens of a sample, including the extra one."""
        return self.sequence_length + self.add_extra_token_to_sequence


@dataclass(kw_only=True, eq=False)
class Run:
    """One split of a run over an opened index."""

    split: str
    """train, valid or test."""
    ledger: Ledger
    """The ledger of the split. For train this is the committed ledger; valid and test have ledgers
    of their own, with the run's plan version."""
    store: BlockStore
    data: SplitSources
    plan: StagesPlan
    """The plan, which maps the number of a sample to (source, ordinal)."""
    runtime: Runtime
    starts: tuple[int, ...] = (0,)
    """The first sample of each stage that the config lists, from which its masks apply."""
    section: Section | None = None
    """The section that this view shows; None if it shows the whole run."""

    def __getstate__(self) -> dict[str, Any]:
        # Other threads may add cached properties while these are pickled
        return dict(self.__dict__)

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The sections of the run, in order, at least one. The length of samples, or a mask,
        changes from each section to the next."""
        masks = self.runtime.stage_masks if self.split == "train" else ()
        starts = self.starts if masks else (0,)
        masks = masks or (self.runtime.masks,)
        extra = self.ledger.blend.add_extra_token_to_sequence
        lengths = dict[int, int]()
        for stage in self.plan.stages:
            lengths[stage.start] = stage.request.sample_tokens
        edges = sorted({*lengths, *starts[: bisect_left(starts, self.num_samples)]})
        sections = list[Section]()
        length = 0
        for start, stop in pairwise([*edges, self.num_samples]):
            length = lengths.get(start, length)
            section = Section(start, stop, length, extra, masks[bisect_right(starts, start) - 1])
            if sections and sections[-1]._replace(start=start, stop=stop) == section:
                sections[-1] = sections[-1]._replace(stop=stop)
            else:
                sections.append(section)
        return tuple(sections)

    def view_at(self, sample: int) -> Run:
        """Return a view of the run with the settings that apply to a sample; the last settings for
        samples beyond the run's end."""
        if len(self.sections) == 1:
            return self
        for section in self.sections:
            if sample < section.stop:
                return self.view(section)
        return self.view(self.sections[-1])

    def view(self, section: Section) -> Run:
        """Return a view of the run with the settings of a section, which shares the run's plan and
        orders."""
        if self.section is None and len(self.sections) == 1:
            return self
        self.locator  # noqa: B018  (made before it is copied, so that all views share it)
        view = copy(self)
        view.section = section
        return view

    @property
    def settings(self) -> Section:
        """The length and masks of the samples of this view's section; without a section, those of
        the first samples."""
        return self.section or self.sections[0]

    @property
    def sequence_length(self) -> int:
        """Number of tokens of a sample, without the extra one."""
        return self.settings.sequence_length

    @property
    def sources(self) -> tuple[SourceShare, ...]:
        """The sources, [num_sources]; only their names and end-of-document tokens are valid in all
        stages."""
        return self.data.sources

    @property
    def is_blended(self) -> bool:
        """Whether the split is a blend; otherwise it is one pass over its sources."""
        return self.ledger.blend.is_blended

    @property
    def num_samples(self) -> int:
        """Number of samples of the split."""
        return self.plan.num_samples

    @property
    def extra_token(self) -> int:
        """1 if each sample has an extra token, the first one of its source's next sample; otherwise
        0."""
        return int(self.ledger.blend.add_extra_token_to_sequence)

    @property
    def blends(self) -> tuple[Blend, ...]:
        """The blends of the samples of the run or its section, in order; neighbours differ."""
        start, stop = (0, self.num_samples) if self.section is None else self.section[:2]
        parts = (stage for stage in self.plan.stages if stage.start < stop and stage.stop > start)
        return tuple(
            blend for blend, _ in groupby(self.ledger.stages[stage.number].blend for stage in parts)
        )

    @property
    def consumes_whole_blocks(self) -> bool:
        """Whether lanes read each block to its end before they leave it, in all orders of the run;
        see OrderKind."""
        return all(
            find_order(stage.blend.order).consumes_whole_blocks for stage in self.ledger.stages
        )

    @property
    def has_lanes(self) -> bool:
        """Whether samples are interleaved in lanes, each of which continues in the block that it
        reads from."""
        return find_interleaving(self.ledger.blend.interleaving).has_lanes

    @cached_property
    def locator(self) -> Locator:
        """Locates the tokens of samples in blocks."""
        first_samples = dict[str, int]()
        start = 0
        for stage in self.ledger.stages:
            first_samples.setdefault(stage.index, start)
            start = stage.stop
        return Locator(self.data.blocks, self.plan, first_samples, self.extra_token)

    def locate_spans(
        self, sources: npt.NDArray[np.int32], ordinals: npt.NDArray[np.int64]
    ) -> Spans:
        """Find where the tokens of samples are stored (`sources`: int32 [n]; `ordinals`: int64
        [n]); see `Locator.locate_tokens`."""
        starts, steps = self.plan.token_ranges(sources, ordinals)
        return self.locator.locate_tokens(sources, starts, steps + self.extra_token)

    @property
    def extra_columns(self) -> tuple[ExtraColumn, ...]:
        """Columns that are read along with the tokens; all sources have the same ones."""
        return self.store.extra.get(self.data.index_names[0], ())
