"""Compile a config to a ledger, given the data and, if the run has one, its ledger. The result says
what the config requests of a split, and what the run commits to.

A run that has begun keeps what its ledger has fixed: the version of the plan, and the number of
cycles that share each run of a source's ordinals. Both are chosen only once. A config is refused if
it requests other samples than those that were committed; the error names the difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from megablend.blend.allocate import cycles_per_run
from megablend.blend.epochs import ReadBefore
from megablend.blend.interleavings.registry import find_interleaving
from megablend.blend.schedule import MIN_STEPS, Schedule, make_schedule
from megablend.config import Config, Source
from megablend.config.runtime import Runtime
from megablend.config.stages import StageSettings
from megablend.errors import CacheError, ConfigError, PlanError
from megablend.index.blocks.block_store import BlockStore
from megablend.lazy import cached_property
from megablend.run.config_stages import (
    Drain,
    RequestedSchedule,
    RequestedStage,
    depends_on_read,
    explain_empty,
    find_cut,
    find_given_length,
    naming,
    request_one_pass,
    request_stage,
    request_top_level,
    round_to_lanes,
)
from megablend.run.ledger import Ledger
from megablend.run.ledger_format import PLAN_VERSION
from megablend.run.links import Link
from megablend.run.plan_stages import count_before, plan_stages
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
        for stage in self.stages:
            if sample < stage.stop:
                return stage
        return self.stages[-1]

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
        batch: `--batch`, given only if the run is being amended. The length of samples then
            changes only at a multiple of `batch`: the length of a drain is chosen to fit, and
            `drain` in the config must agree with it.

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
        links=promised.links if promised else links,
        batch=batch,
    )
    compiler.request()
    ledger = compiler.make_ledger()
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
        stages=tuple(compiler.stages),
        ledger=ledger,
    )


@dataclass(kw_only=True)
class _Compiler:
    """Finds what is requested of a split, stage by stage."""

    config: Config
    split: str
    sources: tuple[Source, ...]
    data: SplitSources
    promised: Ledger | None
    """The committed ledger of train; None for other splits."""
    links: Sequence[Link]
    """What the run is committed to. If an amendment cut a stage, the next one begins there, whether
    or not the config says so (`from`)."""
    batch: int | None
    """See `compile_split`."""
    stages: list[RequestedStage] = field(default_factory=list)
    """The stages so far."""
    start: int = 0
    """Number of the sample at which the next stage begins."""
    tokens_before: int = 0
    """Tokens of the samples before `start`, without extra ones."""

    def request(self) -> None:
        """Request all stages: those that the config lists for train, and one for other splits.
        Raises: PlanError, naming the stage, if its shares or its end are not possible."""
        config = self.config
        tokens = self.data.snapshots[0].tokens
        if not config.is_blended(self.split):
            self.stages.append(request_one_pass(config, self.split, tokens))
        elif self.split != "train" or not config.stages:
            self.stages.append(request_stage(config, self.split, tokens, 0, 0))
        else:
            for listed in zip(
                config.stages, config.stage_configs, [*config.stages[1:], None], strict=True
            ):
                self._add(*listed)

    def _add(
        self, settings: StageSettings, stage_config: Config, following: StageSettings | None
    ) -> None:
        """Request the next stage. `following`: the settings of the stage after it; None for the
        last one. Raises: PlanError, naming the stage."""
        stage_key = f"stages[{len(self.stages)}]"
        tokens = self.data.snapshots[stage_config.snapshot].tokens
        cut = None
        with naming(stage_key):
            drain, read = self._find_begin(settings, stage_config)
            first = self.start if read is None else read.first_sample
            if read is not None:  # a drain, if any, has samples of the previous length
                previous = self.stages[-1].config.sequence_length
                self.tokens_before += (first - self.start) * previous
            length = self._find_length(settings, stage_config, first, is_last=following is None)
        if following is not None:
            with naming(f"stages[{len(self.stages) + 1}]"):
                cut = find_cut(following, first, first + length, self.links)
            with naming(stage_key):
                length = round_to_lanes(
                    length, settings, stage_config.lanes, first, self.links, is_cut=cut is not None
                )
        with naming(stage_key):
            stage_config = stage_config.model_copy(update={"samples": length})
            stage = replace(
                request_stage(stage_config, "train", tokens, self.start, first, read),
                drain=None if read is None else read.drain,
                whole_epochs=bool(drain.whole_epochs) if read is None else read.whole_epochs,
                schedule=self._find_schedule(settings, stage_config, length),
                cut=cut,
            )
        self.stages.append(stage)
        self.start = stage.stop
        self.tokens_before += (stage.stop - first) * stage_config.sequence_length

    def _find_begin(
        self, settings: StageSettings, stage_config: Config
    ) -> tuple[Drain, ReadBefore | None]:
        """Return the drain before the next stage, and what has been read by its end, or None if
        nothing depends on that. Raises: PlanError if the config sets a different length for the
        drain."""
        drain = self._find_drain(settings, stage_config)
        is_new = drain.whole_epochs is None
        read = None
        if drain.samples or depends_on_read(self.stages, stage_config, is_new=is_new):
            read = self._count_read(stage_config, drain)
        length = None if read is None else read.drain
        if self.batch and settings.drain not in (None, length):
            expected = (
                "no `drain`"
                if length is None
                else f"{length:,} (or another `--batch`), or no `drain`"
            )
            raise PlanError(f"drain: found {settings.drain:,}, expected {expected}")
        return drain, read

    def _find_drain(self, settings: StageSettings, stage_config: Config) -> Drain:
        """Return the drain before the next stage, with the length that was committed or that the
        config sets; for a new stage of a built run, the length is still to be chosen.

        Raises: PlanError if the config differs from what the run is committed to.
        """
        start = self.start
        if not self.links or (
            start >= self.links[-1].stop and settings.drain is not None and self.batch is None
        ):
            return Drain(settings.drain)
        if start >= self.links[-1].stop:
            lanes = [self.stages[-1].config.lanes] if self.stages else []
            return Drain(None, math.lcm(stage_config.lanes, self.batch or 1, *lanes))
        link = None
        begin = 0
        for stage in self.links:
            if begin == start:
                link = stage
                break
            begin = stage.stop
        committed = None if link is None else link.drain
        if settings.drain not in (None, committed):
            expected = (
                "no `drain`" if committed is None else f"{committed:,}, as the run was amended"
            )
            raise PlanError(f"drain: found {settings.drain:,}, expected {expected}")
        return Drain(committed, whole_epochs=link is not None and link.whole_epochs)

    def _find_length(
        self, settings: StageSettings, stage_config: Config, first: int, *, is_last: bool
    ) -> int:
        """Return the number of samples of the next stage, counted from its first one, before
        cutting and rounding. Raises: PlanError if there are none."""
        tokens = self.data.snapshots[stage_config.snapshot].tokens
        length = find_given_length(
            self.config,
            settings,
            stage_config.sequence_length,
            first,
            self.tokens_before,
            sum(tokens),
            is_last=is_last,
        )
        if length is None:  # the amounts of the sources decide
            length = request_stage(stage_config, "train", tokens, self.start, first).end - first
        if length < 1:
            raise PlanError(explain_empty(self.start, first, first + length))
        return length

    def _find_schedule(
        self, settings: StageSettings, stage_config: Config, length: int
    ) -> RequestedSchedule | None:
        """Return the schedule of the next stage, whose shares begin at those of the previous stage,
        or of the top level if it is the first one. Raises: PlanError if the stage is too short."""
        if settings.schedule is None:
            return None
        cycle = stage_config.lanes * stage_config.shuffle_window
        if length // cycle < MIN_STEPS:
            raise PlanError(
                f"schedule: the stage from sample {self.start:,} on has {length:,} samples, fewer than two cycles of {cycle:,} "
                "samples (lanes x shuffle_window), so it cannot have steps; let the stage end later, or leave out `schedule`"
            )
        tokens = self.data.snapshots[stage_config.snapshot].tokens
        before = self.stages[-1] if self.stages else request_top_level(self.config, tokens, length)
        return RequestedSchedule(settings.schedule, settings.steps, before.weights)

    def make_ledger(self) -> Ledger:
        """Make the ledger that commits to exactly the stages so far, with the newest plan version."""
        made = list[Stage]()
        for stage in self.stages:
            data = _data_of(self.data, stage)
            made.append(
                Stage(
                    end=stage.end,
                    index=data.snapshot.digest,
                    blend=self._make_blend(stage, data.parts),
                    cut=stage.cut,
                    drain=stage.drain,
                    whole_epochs=stage.whole_epochs,
                )
            )
        return Ledger(run=self.config.run, stages=tuple(made))

    def _count_read(self, following: Config, drain: Drain) -> ReadBefore:
        """Count what the stages so far, and a drain after them, read before the next stage, which
        has the settings `following`."""
        ledger = self.make_ledger().with_links(self.links)
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
            self.start,
            next_stage,
            drain.unit,
            is_new=is_new,
        )

    def _make_blend(self, stage: RequestedStage, parts: npt.NDArray[np.void]) -> Blend:
        """Make the blend of a stage, with the newest plan version. `parts`: see `_choose_cycles`."""
        config = stage.config
        number = config.snapshot if self.split == "train" else 0
        # The sources of the stage's snapshot and of earlier ones come first in the list of all
        in_snapshots = [snapshot.has_source for snapshot in self.data.snapshots[: number + 1]]
        num_sources = int(np.flatnonzero(np.any(in_snapshots, axis=0))[-1]) + 1
        blend = Blend(
            split=f"{self.split} of {','.join(map(str, config.shares))}",
            sequence_length=config.sequence_length,
            add_extra_token_to_sequence=config.add_extra_token_to_sequence,
            sources=tuple(map(SourceShare.of, self.sources[:num_sources])),
        )
        if not stage.weights:
            return blend
        cycles = _choose_cycles(stage, parts)[:num_sources]
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
    assert schedule is not None  # `_find_schedule` refuses stages that are too short
    return schedule


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
