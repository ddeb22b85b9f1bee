"""The stages that a config requests for a blended split: their settings, shares and ends, in samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from megablend.config import Config
from megablend.config.stages import StageSettings
from megablend.errors import PlanError
from megablend.plan.links import Link
from megablend.plan.shares import shares_of


class RequestedSchedule(NamedTuple):
    """How the shares of a stage change."""

    kind: str
    steps: int
    """The most steps of the schedule."""
    start: tuple[Fraction, ...]
    """[num_sources], sum 1: the shares of the stage before."""


CountRead = Callable[[Sequence["RequestedStage"]], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedStage:
    """A stage as the config requests it."""

    config: Config
    """The settings of the stage, without `stages`."""
    weights: tuple[Fraction, ...]
    """[num_sources], sum 1; empty where the split is not blended."""
    requested: tuple[Fraction, ...]
    """As `weights`, before `on_exhausted: redistribute` changes them."""
    start: int
    end: int
    """Sample numbers of the run, [start, end)."""
    cut: int | None = None
    """Where the next stage begins, if that is before the end."""
    schedule: RequestedSchedule | None = None
    """How the shares change to `weights`; None where they are constant."""

    @property
    def mean_weights(self) -> tuple[Fraction, ...]:
        """The sources' shares of the stage's samples, [num_sources]."""
        if self.schedule is None:
            return self.weights
        return tuple((a + b) / 2 for a, b in zip(self.schedule.start, self.weights, strict=True))

    @property
    def stop(self) -> int:
        """Number of the sample at which the next stage begins."""
        return self.end if self.cut is None else self.cut


def request_stages(
    config: Config, split: str, tokens: Sequence[int], links: Sequence[Link], count_read: CountRead
) -> tuple[RequestedStage, ...]:
    """The stages of a blended split: those that the config lists for train, otherwise one.

    Args:
        tokens: of each source in this split, including end-of-document tokens.
        links: what the run is committed to. Where an amendment cut a stage, the next one begins there, whether or not the
            config says so (`from`).
        count_read: tokens of each source that given stages read.

    Raises: PlanError, naming the stage, where its shares or its end are not possible.
    """
    if split != "train" or not config.stages:
        return (_request_stage(config, split, tokens, 0),)
    found, start, tokens_before = list[RequestedStage](), 0, 0
    following = [*config.stages[1:], None]
    for i, (settings, own, after) in enumerate(zip(config.stages, config.stage_configs, following, strict=True)):
        place = f"stages[{i}]"
        length = _length(
            config, settings, own.sequence_length, start, tokens_before, sum(tokens), is_last=after is None
        )
        try:
            if length is None:
                length = _request_stage(own, split, tokens, start).end - start
            if length < 1:
                raise PlanError(f"it ends at sample {start + length:,}, but begins at sample {start:,}; end it later")
            if after is not None:
                length = _align(length, settings, own.lanes, start, links)
            own = own.model_copy(update={"samples": length})
            is_solved = found and own.on_exhausted == "redistribute"
            stage = _request_stage(own, split, tokens, start, count_read(found) if is_solved else None)
            if settings.schedule is not None:
                before = found[-1] if found else _request_top_level(config, tokens, length)
                stage = replace(stage, schedule=RequestedSchedule(settings.schedule, settings.steps, before.weights))
        except PlanError as error:
            raise PlanError(f"{place}: {error}") from None
        if after is not None:
            stage = replace(stage, cut=_find_cut(after, stage, links, f"stages[{i + 1}]"))
        found.append(stage)
        tokens_before += (stage.stop - start) * own.sequence_length
        start = stage.stop
    return tuple(found)


def _request_stage(
    config: Config, split: str, tokens: Sequence[int], start: int, read: Sequence[int] | None = None
) -> RequestedStage:
    """A stage as long as its config says, which begins at sample `start`, when `read` tokens of each source have been read."""
    shares = shares_of(config, split, tuple(config.sources_of(split).values()), tokens, read)
    return RequestedStage(
        config=config,
        weights=shares.weights,
        requested=shares.requested,
        start=start,
        end=start + shares.num_samples,
    )


def _request_top_level(config: Config, tokens: Sequence[int], samples: int) -> RequestedStage:
    """The stage of train, of this length, that the top level describes."""
    changes = {"stages": (), "samples": samples, "tokens": None, "epochs": None}
    return _request_stage(config.model_copy(update=changes), "train", tokens, 0)


def _length(
    config: Config,
    settings: StageSettings,
    sequence_length: int,
    start: int,
    tokens_before: int,
    tokens: int,
    *,
    is_last: bool,
) -> int | None:
    """Samples from a stage's start to the end that it is given; None where its sources' amounts decide it.

    Args:
        start, tokens_before: samples and tokens of the stages before.
        tokens: of all sources, once.
    """
    if settings.samples is not None:
        return settings.samples - start
    if settings.tokens is not None:
        return (settings.tokens - tokens_before) // sequence_length
    share = Fraction(1) if is_last else settings.share
    share = settings.share if settings.share is not None else share
    if share is None:
        return None
    if config.samples is not None:
        return int(share * config.samples) - start
    if config.tokens is not None:
        return (int(share * config.tokens) - tokens_before) // sequence_length
    if config.epochs is not None:
        extra = int(config.add_extra_token_to_sequence)
        return (int(share * config.epochs * tokens) - extra - tokens_before) // sequence_length
    return None


def _align(length: int, settings: StageSettings, lanes: int, start: int, links: Sequence[Link]) -> int:
    """The length of a stage that is followed by another, rounded down to a multiple of its lanes unless it is committed already.

    Raises: PlanError for a number of samples that is not a multiple, and for a stage shorter than that.
    """
    if length % lanes == 0 or any(link.stop == start + length for link in links):
        return length
    aligned = length - length % lanes
    if settings.samples is not None:
        nearest = [f"{start + each:,}" for each in (aligned, aligned + lanes) if each]
        raise PlanError(
            f"samples: found {settings.samples:,}, expected {' or '.join(nearest)}: a stage that is followed by another must "
            f"have a multiple of its {lanes} lanes, counted from its start at sample {start:,}"
        )
    if aligned == 0:
        raise PlanError(f"it has {length:,} samples, fewer than its {lanes} lanes; end it later, or lower lanes")
    return aligned


def _find_cut(after: StageSettings, stage: RequestedStage, links: Sequence[Link], place: str) -> int | None:
    """Where the next stage cuts a stage: where the config says, or where the run was amended."""
    start, end, config = stage.start, stage.end, stage.config
    committed = sorted(link.cut for link in links if link.cut is not None and start < link.cut <= end)
    cut = after.from_ if after.from_ is not None else next(iter(committed), None)
    if cut is None or cut == end:
        return None
    if not start < cut < end:
        raise PlanError(
            f"{place}: from: found {cut:,}, expected a sample of the stage before it, {start + 1:,} to {end:,}"
        )
    if cut not in committed and config.interleaving == "lanes":
        cycle = config.lanes * config.shuffle_window
        rounded = min(end, start + -(-(cut - start) // cycle) * cycle)
        if rounded != cut:
            raise PlanError(
                f"{place}: from: found {cut:,}, expected {rounded:,}, the end of a cycle of lanes x shuffle_window samples; "
                "`megablend amend CONFIG --at SAMPLE` rounds up and prints the number to write here"
            )
    return cut
