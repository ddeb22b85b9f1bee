"""Compile a config to a ledger, given the data and, if the run has one, its ledger. The result says
what the config requests of a split, and what the run commits to.

A run that has begun keeps what its ledger has fixed: the version of the plan, and the number of
cycles that share each run of a source's ordinals. Both are chosen only once. A config is refused if
it requests other samples than those that were committed; the error names the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from megablend.blend.allocate import cycles_per_run
from megablend.blend.epochs import ReadBefore
from megablend.blend.interleavings.registry import find_interleaving
from megablend.blend.schedule import Schedule, make_schedule
from megablend.config import Config, Source
from megablend.config.runtime import Runtime
from megablend.errors import CacheError, ConfigError, PlanError
from megablend.index.blocks.block_store import BlockStore
from megablend.lazy import cached_property
from megablend.run.config_stages import Drain, RequestedSchedule, RequestedStage, request_stages
from megablend.run.ledger import Ledger
from megablend.run.ledger_format import PLAN_VERSION
from megablend.run.links import Link
from megablend.run.plan_stages import count_before, plan_stages, samples_of_one_pass
from megablend.run.run import Run
from megablend.run.source_blocks import SplitData
from megablend.run.split_data import SplitSources, find_requested
from megablend.run.stage import Blend, SourceShare, Stage


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The split that a config requests, over an opened index, and the ledger that commits to it."""

    config: Config
    split: str
    sources: tuple[Source, ...]
    """[num_sources], as the top level of the config lists them."""
    store: BlockStore
    data: SplitSources
    stages: tuple[RequestedStage, ...]
    """At least one; an unblended split has one, without weights."""
    ledger: Ledger
    """A ledger of exactly these `stages`; after `continue_ledger` or `follow_ledger`, the run's
    ledger."""

    @property
    def num_samples(self) -> int:
        """Number of samples requested."""
        return self.stages[-1].end

    @cached_property
    def weights(self) -> tuple[Fraction, ...]:
        """The sources' shares of all samples, [num_sources], sum 1;
        empty if the split is not blended."""
        return self._over_all_stages([stage.mean_weights for stage in self.stages])

    @cached_property
    def requested(self) -> tuple[Fraction, ...]:
        """The weights before `on_exhausted: redistribute` changes them."""
        return self._over_all_stages(
            [
                stage.requested if stage.schedule is None else stage.mean_weights
                for stage in self.stages
            ]
        )

    def _over_all_stages(self, shares: Sequence[tuple[Fraction, ...]]) -> tuple[Fraction, ...]:
        """Return the sources' shares of all samples, computed from their shares of each stage."""
        if len(shares) == 1:
            return shares[0]
        lengths = [Fraction(stage.stop - stage.start, self.num_samples) for stage in self.stages]
        columns = zip(*shares, strict=True)
        return tuple(
            sum(
                (share * length for share, length in zip(column, lengths, strict=True)), Fraction(0)
            )
            for column in columns
        )

    def stage_at(self, sample: int) -> RequestedStage:
        """Return the stage that contains a sample; the last stage for samples beyond the
        request."""
        return next((stage for stage in self.stages if sample < stage.stop), self.stages[-1])

    def tokens_of(self, stage: RequestedStage) -> list[int]:
        """Return the number of tokens of each source of this split in a stage's snapshot; 0 if the
        snapshot does not have the source."""
        return _data_of(self.data, stage).tokens

    @cached_property
    def run(self) -> Run:
        """The run that the ledger describes."""
        return Run(
            split=self.split,
            ledger=self.ledger,
            store=self.store,
            data=self.data,
            runtime=Runtime.of(self.config),
            starts=tuple(stage.start for stage in self.stages),
            plan=plan_stages(self.ledger.stages, self.data.tokens_by_index, self.data.blocks),
        )

    def continue_ledger(self, committed: Ledger) -> Compiled:
        """Return the split with the stages of a committed ledger, followed by new stages if more
        samples are requested.

        Raises: PlanError if a committed sample would change, if fewer samples are requested, or if
            `new_data` of committed samples would have no effect.
        """
        extended = committed.extend(self.ledger)
        committed.check_indices(self.ledger, committed.num_samples)
        return replace(self, ledger=extended)

    def follow_ledger(self, committed: Ledger) -> Compiled:
        """Return the split with the stages of a committed ledger. If the run has been extended
        since, the split still has only as many samples as the config requests, so that a job whose
        config did not change keeps the order that it was promised.

        Raises: PlanError if a committed sample would change; CacheError if more samples are
            requested.
        """
        promised = committed.until(self.num_samples)
        if promised.extend(self.ledger) != promised:
            raise CacheError(
                f"run {promised.run!r} was built for {promised.num_samples:,} samples, but the config now requests "
                f"{self.num_samples:,}; run `megablend build CONFIG` to extend it"
            )
        return replace(self, ledger=promised)


def compile_split(
    config: Config,
    split: str,
    store: BlockStore,
    *,
    committed: Ledger | None = None,
    links: Sequence[Link] = (),
    batch: int | None = None,
) -> Compiled:
    """Compile what a config requests of a split.

    Args:
        committed: the ledger of the run's train, whose plan version and cycles are kept.
        links: the chain that train is committed to, if `committed` is not given.
        batch: `--batch` of an amendment; see `request_stages`.

    Raises: PlanError if the split has no sources, or the blend is not possible; ConfigError for
        an unknown interleaving.
    """
    try:
        find_interleaving(config.interleaving)
    except ValueError as error:
        raise ConfigError(f"interleaving: {error}") from None
    sources = config.sources_of(split)
    if not sources:
        raise PlanError(
            f"the config lists no sources for split {split!r}; list some, or give it a share in `split`"
        )
    promised = committed if split == "train" else None
    compiler = _Compiler(
        config=config,
        split=split,
        sources=tuple(sources.values()),
        data=find_requested(config, split, store, is_built=committed is not None),
        promised=promised,
        links=promised.links if promised else tuple(links),
    )
    stages = compiler.request(batch)
    ledger = compiler.make_ledger(stages)
    if committed is not None:
        ledger = ledger.in_version(committed.plan_version)
    if promised is not None:
        ledger = ledger.with_cycles_of(promised)
    return Compiled(
        config=config,
        split=split,
        sources=compiler.sources,
        store=store,
        data=compiler.data,
        stages=stages,
        ledger=ledger,
    )


@dataclass(frozen=True, kw_only=True)
class _Compiler:
    """Finds what is requested of a split; see `compile_split`."""

    config: Config
    split: str
    sources: tuple[Source, ...]
    data: SplitSources
    promised: Ledger | None
    """The committed ledger of train; None for other splits."""
    links: Sequence[Link]

    def request(self, batch: int | None) -> tuple[RequestedStage, ...]:
        """List the stages that the config requests. Raises: PlanError if they are not possible."""
        tokens = [each.tokens for each in self.data.snapshots]
        if self.config.is_blended(self.split):
            return request_stages(
                self.config, self.split, tokens, self.links, self._count_read, batch
            )
        return (_request_one_pass(self.config, self.split, tokens[0]),)

    def make_ledger(self, stages: Sequence[RequestedStage]) -> Ledger:
        """Make the ledger that commits to exactly these stages, with the newest plan version."""
        made = (
            Stage(
                end=stage.end,
                index=_data_of(self.data, stage).snapshot.digest,
                blend=self._make_blend(stage),
                cut=stage.cut,
                drain=stage.drain,
                whole_epochs=stage.whole_epochs,
            )
            for stage in stages
        )
        return Ledger(run=self.config.run, stages=tuple(made))

    def _count_read(
        self, stages: Sequence[RequestedStage], following: Config, drain: Drain
    ) -> ReadBefore:
        """Count what stages, and a drain after them, read before the next stage, which has the
        settings `following`."""
        ledger = self.make_ledger(stages).with_links(self.links)
        if self.promised is not None and (drain.samples, drain.unit) != (None, None):
            # The rest that a cut leaves, and so a drain, depends on the version and cycles of the
            # run
            ledger = ledger.in_version(self.promised.plan_version).with_cycles_of(self.promised)
        last = ledger.stages[-1]
        index = self.data.snapshots[following.snapshot].snapshot.digest
        blend = replace(
            last.blend,
            order=following.order,
            sequence_length=following.sequence_length,
        )
        # A stage that is not committed: whether it reads epochs whole is yet to be found out
        is_new = drain.whole_epochs is None
        # The next stage, with the settings on which the reads before it depend
        next_stage = replace(
            last,
            index=index,
            blend=blend,
            drain=drain.samples,
            whole_epochs=bool(drain.whole_epochs),
        )
        return count_before(
            ledger.stages,
            self.data.tokens_by_index,
            self.data.blocks,
            stages[-1].stop,
            next_stage,
            drain.unit,
            is_new=is_new,
        )

    def _make_blend(self, stage: RequestedStage) -> Blend:
        """Make the blend of a stage, with the newest plan version."""
        config = stage.config
        num_sources = self._count_sources(stage)
        blend = Blend(
            split=f"{self.split} of {','.join(map(str, config.shares))}",
            sequence_length=config.sequence_length,
            add_extra_token_to_sequence=config.add_extra_token_to_sequence,
            sources=tuple(map(SourceShare.of, self.sources[:num_sources])),
        )
        if not stage.weights:
            return blend
        cycles = _choose_cycles(stage, _data_of(self.data, stage).parts)[:num_sources]
        schedule = None
        if stage.schedule is not None:
            schedule = _make_schedule(stage, stage.schedule, cycles)
        return replace(
            blend,
            sources=tuple(map(SourceShare.with_share, blend.sources, stage.weights, cycles)),
            interleaving=config.interleaving,
            order=config.order,
            plan_version=PLAN_VERSION,
            seed=config.seed,
            lanes=config.lanes,
            shuffle_window=config.shuffle_window,
            schedule=schedule,
        )

    def _count_sources(self, stage: RequestedStage) -> int:
        """Return the number of sources in a stage's snapshot and in earlier ones. These come first
        in the list of all sources."""
        number = stage.config.snapshot if self.split == "train" else 0
        has_source = np.any([each.has_source for each in self.data.snapshots[: number + 1]], axis=0)
        return int(np.flatnonzero(has_source)[-1]) + 1


def _data_of(data: SplitSources, stage: RequestedStage) -> SplitData:
    """Return the documents of the split in the snapshot that a stage reads."""
    return data.snapshots[stage.config.snapshot if data.split == "train" else 0]


def _make_schedule(
    stage: RequestedStage, requested: RequestedSchedule, cycles: Sequence[int]
) -> Schedule:
    """Make the schedule of a stage whose sources have the given cycles, [num_sources]."""
    schedule = make_schedule(
        requested.kind,
        requested.steps,
        requested.start[: len(cycles)],
        samples=stage.end - stage.first,
        cycle=stage.config.lanes * stage.config.shuffle_window,
        longest=max(cycles),
    )
    assert schedule is not None  # `request_stages` refuses stages that are too short
    return schedule


def _request_one_pass(config: Config, split: str, tokens: Sequence[int]) -> RequestedStage:
    """Make the only stage of a split that is one pass over its sources.
    Raises: PlanError if the stage has no samples."""
    extra = int(config.add_extra_token_to_sequence)
    num_samples = sum(samples_of_one_pass(tokens, config.sequence_length, extra))
    if num_samples == 0:
        remedy = (
            "add data to its sources"
            if config.listed_by_split
            else "give it a larger share in `split`"
        )
        where = " in each of its sources" if sum(tokens) >= config.sequence_length + extra else ""
        raise PlanError(
            f"split {split!r} has fewer tokens than one sample of {config.sequence_length} tokens{where} ({sum(tokens):,} tokens "
            f"in all): {remedy}"
        )
    return RequestedStage(
        config=config, weights=(), requested=(), start=0, end=num_samples, first=0
    )


def _choose_cycles(stage: RequestedStage, parts: npt.NDArray[np.void]) -> list[int]:
    """Choose how many cycles share each run of a source's ordinals, [num_sources], so that a run
    spans several documents if their lengths are needed, and otherwise several blocks.

    Args:
        parts: the documents of each source, PART_DTYPE [num_sources].
    """
    config = stage.config
    units = (
        parts["documents"]
        if config.top_level_needs_lengths
        else parts["stop_block"] - parts["first_block"]
    )
    unit_tokens = map(Fraction, parts["tokens"].tolist(), np.maximum(1, units).tolist())
    return [
        cycles_per_run(tokens, share, config.sequence_length, config.shuffle_window)
        for tokens, share in zip(unit_tokens, stage.mean_weights, strict=True)
    ]
