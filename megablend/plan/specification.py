"""What a config requests for one split of an index: sources, shares and length, before anything is committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from megablend.blocks.block_store import BlockStore
from megablend.blocks.splits import parts_of
from megablend.config import SPLITS, Config, Source
from megablend.errors import ConfigError, PlanError
from megablend.order.registry import current_name
from megablend.plan.allocate import cycles_per_run
from megablend.plan.interleavings.registry import find_interleaving
from megablend.plan.ledger import Ledger
from megablend.plan.ledger_format import PLAN_VERSION
from megablend.plan.links import Link
from megablend.plan.requested_stages import RequestedSchedule, RequestedStage, request_stages
from megablend.plan.schedule import Schedule, make_schedule
from megablend.plan.stage import Blend, SourceShare, Stage
from megablend.plan.stage_requests import plan_stages, samples_of_one_pass


@dataclass(frozen=True, kw_only=True)
class Specification:
    """One split of a run, as the config requests it."""

    config: Config
    split: str
    sources: tuple[Source, ...]
    """[num_sources], in the order of the config, as the top level has them."""
    parts: npt.NDArray[np.void]
    """PART_DTYPE [num_sources]: the documents of each source that belong to the split."""
    stages: tuple[RequestedStage, ...]
    """At least one; an unblended split has one, without weights."""

    @property
    def tokens(self) -> list[int]:
        """Tokens of each source in this split, including end-of-document tokens."""
        return [int(n) for n in self.parts["tokens"]]

    @property
    def num_samples(self) -> int:
        """Number of samples requested."""
        return self.stages[-1].end

    @property
    def weights(self) -> tuple[Fraction, ...]:
        """The sources' shares of all samples, [num_sources], sum 1; empty where the split is not blended."""
        return self._over_all_stages([stage.mean_weights for stage in self.stages])

    @property
    def requested(self) -> tuple[Fraction, ...]:
        """As `weights`, before `on_exhausted: redistribute` changes them."""
        return self._over_all_stages(
            [stage.requested if stage.schedule is None else stage.mean_weights for stage in self.stages]
        )

    def _over_all_stages(self, shares: Sequence[tuple[Fraction, ...]]) -> tuple[Fraction, ...]:
        if len(shares) == 1:
            return shares[0]
        lengths = [Fraction(stage.stop - stage.start, self.num_samples) for stage in self.stages]
        columns = zip(*shares, strict=True)
        return tuple(
            sum((share * length for share, length in zip(column, lengths, strict=True)), Fraction(0))
            for column in columns
        )

    def stage_at(self, sample: int) -> RequestedStage:
        """The stage that has a sample; the last one for samples beyond the request."""
        return next((stage for stage in self.stages if sample < stage.stop), self.stages[-1])

    def make_ledger(self, index: str) -> Ledger:
        """The ledger that commits to exactly this, with the newest plan version; `index`: digest of the index snapshot."""
        stages = (Stage(end=stage.end, index=index, blend=self._blend(stage), cut=stage.cut) for stage in self.stages)
        return Ledger(run=self.config.run, stages=tuple(stages))

    def _blend(self, stage: RequestedStage) -> Blend:
        """The blend of a stage with the newest plan version."""
        config = stage.config
        shares: Sequence[Fraction | None] = stage.mean_weights or [None] * len(self.sources)
        listed = zip(self.sources, self.parts, shares, strict=True)
        blend = Blend(
            split=f"{self.split} of {','.join(map(str, config.shares))}",
            sequence_length=config.sequence_length,
            add_extra_token_to_sequence=config.add_extra_token_to_sequence,
            sources=tuple(_share(config, source, part, share) for source, part, share in listed),
        )
        if not stage.weights:
            return blend
        return replace(
            blend,
            sources=tuple(
                replace(source, share=share) for source, share in zip(blend.sources, stage.weights, strict=True)
            ),
            interleaving=config.interleaving,
            order=current_name(config.order),
            plan_version=PLAN_VERSION,
            seed=config.seed,
            lanes=config.lanes,
            shuffle_window=config.shuffle_window,
            schedule=None if stage.schedule is None else _make_schedule(stage, stage.schedule, blend),
        )


def _make_schedule(stage: RequestedStage, requested: RequestedSchedule, blend: Blend) -> Schedule:
    """The schedule of a stage whose sources have the cycles of `blend`. Raises: PlanError where the stage is too short."""
    cycle, samples = stage.config.lanes * stage.config.shuffle_window, stage.end - stage.start
    longest = max(source.cycles or 1 for source in blend.sources)
    schedule = make_schedule(
        requested.kind, requested.steps, requested.start, samples=samples, cycle=cycle, longest=longest
    )
    if schedule is None:
        raise PlanError(
            f"schedule: the stage from sample {stage.start:,} on has {samples:,} samples, fewer than two cycles of {cycle:,} "
            "(lanes x shuffle_window), so it cannot have steps; end it later, or leave out schedule"
        )
    return schedule


def specify(
    config: Config, split: str, store: BlockStore, *, keep: bool = False, links: Sequence[Link] = ()
) -> Specification:
    """Compute what a config requests for a split.

    Args:
        keep: store the computed split ranges in the cache (`build` does).
        links: what the run is committed to; see `request_stages`.

    Raises: PlanError where the blend is not possible; ConfigError for an unknown interleaving.
    """
    try:
        find_interleaving(config.interleaving)
    except ValueError as error:
        raise ConfigError(f"interleaving: {error}") from None
    named = config.sources_of(split)
    if not named:
        raise PlanError(f"the config lists no sources for split {split!r}")
    numbers = {entry.name: number for number, entry in enumerate(store.generation.sources)}
    parts = parts_of(store, config.shares, keep=keep)
    column = 0 if config.listed_by_split else SPLITS.index(split)
    split_parts = parts[[numbers[name] for name in named], column]
    tokens = [int(n) for n in split_parts["tokens"]]

    def count_read(stages: Sequence[RequestedStage]) -> list[int]:
        before = Specification(
            config=config, split=split, sources=tuple(named.values()), parts=split_parts, stages=tuple(stages)
        )
        ledger = before.make_ledger("").with_links(links)
        read: list[int] = plan_stages(ledger.stages, tokens).count_tokens(before.stages[-1].stop).tolist()
        return read

    if config.is_blended(split):
        stages = request_stages(config, split, tokens, links, count_read)
    else:
        stages = (_request_one_pass(config, split, tokens),)
    return Specification(config=config, split=split, sources=tuple(named.values()), parts=split_parts, stages=stages)


def _request_one_pass(config: Config, split: str, tokens: Sequence[int]) -> RequestedStage:
    """The only stage of a split that is one pass over its sources. Raises: PlanError where it has no samples."""
    extra = int(config.add_extra_token_to_sequence)
    num_samples = sum(samples_of_one_pass(tokens, config.sequence_length, extra))
    if num_samples == 0:
        raise PlanError(
            f"split {split!r} has fewer tokens than one sample of {config.sequence_length} tokens ({sum(tokens):,} tokens in "
            "all): give it a larger share in `split`"
        )
    return RequestedStage(config=config, weights=(), requested=(), start=0, end=num_samples)


def _share(config: Config, source: Source, part: np.void, share: Fraction | None) -> SourceShare:
    """A source's share, and how many cycles share each of its runs, chosen so that a run spans whole blocks or documents."""
    if share is None:
        return SourceShare(name=source.name, append_eod=source.append_eod)
    num_units = part["documents"] if config.moves_documents else part["stop_block"] - part["first_block"]
    mean_tokens = Fraction(int(part["tokens"]), max(1, int(num_units)))
    cycles = cycles_per_run(mean_tokens, share, config.sequence_length, config.shuffle_window)
    return SourceShare(name=source.name, append_eod=source.append_eod, share=share, cycles=cycles)
