"""What a config requests for one split of an index: sources, shares and length, before anything is committed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

import numpy as np
import numpy.typing as npt

from megablend.blocks.block_store import BlockStore
from megablend.config import Config, Source
from megablend.errors import ConfigError, PlanError
from megablend.lazy import LazyTuple, cached_property
from megablend.order.registry import current_name
from megablend.plan.allocate import cycles_per_run
from megablend.plan.epochs import ReadBefore
from megablend.plan.interleavings.registry import find_interleaving
from megablend.plan.ledger import Ledger
from megablend.plan.ledger_format import PLAN_VERSION, digest_of
from megablend.plan.links import Link
from megablend.plan.requested_stages import Drain, RequestedSchedule, RequestedStage, request_stages
from megablend.plan.schedule import Schedule, make_schedule
from megablend.plan.source_blocks import SourceBlocks
from megablend.plan.split_data import SplitData, find_data, list_blocks
from megablend.plan.stage import Blend, SourceShare, Stage
from megablend.plan.stage_requests import count_before, samples_of_one_pass


@dataclass(frozen=True, kw_only=True)
class Specification:
    """One split of a run, as the config requests it."""

    config: Config
    split: str
    sources: tuple[Source, ...]
    """[num_sources], in the order of the config, as the top level has them."""
    data: tuple[SplitData, ...]
    """The snapshots of the run, in order: at least one."""
    stages: Sequence[RequestedStage]
    """At least one; an unblended split has one, without weights. A tuple, or a LazyTuple."""

    @cached_property
    def parts(self) -> npt.NDArray[np.void]:
        """PART_DTYPE [num_sources]: the documents of each source that belong to the split, in the last snapshot that has it; see
        SplitData."""
        if len(self.data) == 1:
            return self.data[0].parts
        parts: npt.NDArray[np.void] = self.data[0].parts.copy()
        for each in self.data[1:]:
            parts[each.has_source] = each.parts[each.has_source]
        return parts

    @cached_property
    def tokens(self) -> list[int]:
        """Tokens of each source in this split, including end-of-document tokens, in the last snapshot that has it."""
        tokens: list[int] = self.parts["tokens"].tolist()
        return tokens

    @property
    def tokens_by_index(self) -> dict[str, list[int]]:
        """Tokens of each source in this split, including end-of-document tokens, by the digest of the snapshot; 0 where it does
        not have the source."""
        return {each.snapshot.digest: each.tokens for each in self.data}

    @cached_property
    def blocks(self) -> tuple[SourceBlocks, ...]:
        """The blocks of each source, [num_sources]."""
        return list_blocks(self.config, self.split, self.sources, self.data)

    @cached_property
    def data_digest(self) -> str:
        """A digest of the documents that the split has: of the snapshots, and of its ranges in them."""
        parts = [[each.snapshot.digest, hashlib.blake2b(each.parts.tobytes()).hexdigest()] for each in self.data]
        return digest_of([self.split, [source.name for source in self.sources], parts])

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

    def make_ledger(self) -> Ledger:
        """The ledger that commits to exactly this, with the newest plan version."""
        stages = (
            Stage(
                end=stage.end,
                index=self._data_of(stage).snapshot.digest,
                blend=self._blend(stage),
                cut=stage.cut,
                drain=stage.drain,
                whole_epochs=stage.whole_epochs,
            )
            for stage in self.stages
        )
        return Ledger(run=self.config.run, stages=tuple(stages))

    def tokens_of(self, stage: RequestedStage) -> list[int]:
        """Tokens of each source in this split, in a stage's snapshot; 0 where it does not have the source."""
        return self._data_of(stage).tokens

    def _data_of(self, stage: RequestedStage) -> SplitData:
        return self.data[stage.config.snapshot if self.split == "train" else 0]

    def _count_sources(self, stage: RequestedStage) -> int:
        """How many sources a stage's snapshot, and those before, have: the first ones."""
        number = stage.config.snapshot if self.split == "train" else 0
        has_source = np.any([each.has_source for each in self.data[: number + 1]], axis=0)
        return int(np.flatnonzero(has_source)[-1]) + 1

    def _blend(self, stage: RequestedStage) -> Blend:
        """The blend of a stage with the newest plan version."""
        config = stage.config
        shares: Sequence[Fraction | None] = stage.mean_weights or [None] * len(self.sources)
        known = self._count_sources(stage)
        listed = list(zip(self.sources, _mean_unit_tokens(config, self._data_of(stage).parts), shares, strict=True))
        listed = listed[:known]
        blend = Blend(
            split=f"{self.split} of {','.join(map(str, config.shares))}",
            sequence_length=config.sequence_length,
            add_extra_token_to_sequence=config.add_extra_token_to_sequence,
            sources=tuple(_share(config, source, tokens, share) for source, tokens, share in listed),
        )
        if not stage.weights:
            return blend
        sources = blend.sources  # the cycles are those of the mean shares
        if stage.schedule is not None:
            sources = tuple(
                replace(source, share=share) for source, share in zip(sources, stage.weights[:known], strict=True)
            )
        return replace(
            blend,
            sources=sources,
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
    cycle, samples = stage.config.lanes * stage.config.shuffle_window, stage.end - stage.first
    longest = max(source.cycles or 1 for source in blend.sources)
    start = requested.start[: len(blend.sources)]
    schedule = make_schedule(requested.kind, requested.steps, start, samples=samples, cycle=cycle, longest=longest)
    if schedule is None:
        raise PlanError(
            f"schedule: the stage from sample {stage.start:,} on has {samples:,} samples, fewer than two cycles of {cycle:,} "
            "(lanes x shuffle_window), so it cannot have steps; end it later, or leave out schedule"
        )
    return schedule


def prepare(
    config: Config,
    split: str,
    store: BlockStore,
    *,
    keep: bool = False,
    links: Sequence[Link] = (),
    batch: int | None = None,
    promised: Ledger | None = None,
) -> Specification:
    """What a config requests for a split, whose stages are computed when one of them is first needed.

    Args:
        keep: store the computed split ranges in the cache (`build` does).
        links, batch: what the run is committed to, and of an amendment `--batch`; see `request_stages`.
        promised: the committed ledger, in whose plan version, and with whose cycles, drains are planned.

    Raises: PlanError where the split has no sources; ConfigError for an unknown interleaving. `stages` raises PlanError where the
        blend is not possible.
    """
    try:
        find_interleaving(config.interleaving)
    except ValueError as error:
        raise ConfigError(f"interleaving: {error}") from None
    named = config.sources_of(split)
    if not named:
        raise PlanError(f"the config lists no sources for split {split!r}")
    first = Specification(
        config=config,
        split=split,
        sources=tuple(named.values()),
        data=find_data(config, split, store, keep=keep),
        stages=(),
    )
    number = len(config.stages) if split == "train" and config.stages else 1
    return replace(first, stages=LazyTuple(number, partial(_request, first, tuple(links), batch, promised)))


def _request(
    first: Specification, links: Sequence[Link], batch: int | None, promised: Ledger | None
) -> Sequence[RequestedStage]:
    """The stages of a specification that has none yet."""
    config, split, data = first.config, first.split, first.data

    def count_read(stages: Sequence[RequestedStage], following: Config, drain: Drain) -> ReadBefore:
        before = replace(first, stages=tuple(stages))
        ledger = before.make_ledger().with_links(links)
        if promised is not None and (drain.samples, drain.unit) != (None, None):
            ledger = ledger.in_version(promised.plan_version).with_cycles_of(promised)
        last, index = ledger.stages[-1], data[following.snapshot].snapshot.digest
        blend = replace(last.blend, order=current_name(following.order), sequence_length=following.sequence_length)
        is_new, stop = drain.whole_epochs is None, before.stages[-1].stop
        after = replace(last, index=index, blend=blend, drain=drain.samples, whole_epochs=bool(drain.whole_epochs))
        data_of = before.tokens_by_index, before.blocks
        return count_before(ledger.stages, *data_of, stop, after, drain.unit, is_new=is_new)

    tokens = [each.tokens for each in data]
    if config.is_blended(split):
        return request_stages(config, split, tokens, links, count_read, batch)
    return (_request_one_pass(config, split, tokens[0]),)


def _request_one_pass(config: Config, split: str, tokens: Sequence[int]) -> RequestedStage:
    """The only stage of a split that is one pass over its sources. Raises: PlanError where it has no samples."""
    extra = int(config.add_extra_token_to_sequence)
    num_samples = sum(samples_of_one_pass(tokens, config.sequence_length, extra))
    if num_samples == 0:
        remedy = "add data to its sources" if config.listed_by_split else "give it a larger share in `split`"
        where = " in each of its sources" if sum(tokens) >= config.sequence_length + extra else ""
        raise PlanError(
            f"split {split!r} has fewer tokens than one sample of {config.sequence_length} tokens{where} ({sum(tokens):,} tokens "
            f"in all): {remedy}"
        )
    return RequestedStage(config=config, weights=(), requested=(), start=0, end=num_samples, first=0)


def _mean_unit_tokens(config: Config, parts: npt.NDArray[np.void]) -> list[Fraction]:
    """Mean tokens of what the order of each source moves: of its blocks, or of its documents."""
    units = parts["documents"] if config.moves_documents else parts["stop_block"] - parts["first_block"]
    return list(map(Fraction, parts["tokens"].tolist(), np.maximum(1, units).tolist()))


def _share(config: Config, source: Source, unit_tokens: Fraction, share: Fraction | None) -> SourceShare:
    """A source's share, and how many cycles share each of its runs, chosen so that a run spans whole blocks or documents."""
    if share is None:
        return SourceShare(name=source.name, append_eod=source.append_eod)
    cycles = cycles_per_run(unit_tokens, share, config.sequence_length, config.shuffle_window)
    return SourceShare(name=source.name, append_eod=source.append_eod, share=share, cycles=cycles)
