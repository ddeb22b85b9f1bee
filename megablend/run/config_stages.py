"""The stages that a config requests of a blended split: their settings, their shares, and the
samples at which they begin and end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from megablend.blend.epochs import ReadBefore
from megablend.blend.shares import shares_of
from megablend.config import Config
from megablend.config.stages import StageSettings
from megablend.errors import PlanError
from megablend.run.links import Link
from megablend.run.plan_stages import samples_of_one_pass


class RequestedSchedule(NamedTuple):
    """How a stage's shares change."""

    kind: str
    steps: int
    """Maximum number of steps of the schedule."""
    start: tuple[Fraction, ...]
    """[num_sources], sum 1: the shares of the previous stage, from which the shares change."""


class Drain(NamedTuple):
    """What is known in advance about the drain before a stage: its length, or its `unit`."""

    samples: int | None
    """See `Stage.drain`."""
    unit: int | None = None
    """The drain ends at a multiple of this many samples. None if its length is known, or if it
    reads exactly what earlier stages have left."""
    whole_epochs: bool | None = None
    """See `Stage.whole_epochs`; this is the value for the stage after the drain, or None if that
    stage is not committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedStage:
    """A stage as the config requests it."""

    config: Config
    """The settings of the stage, without `stages`."""
    weights: tuple[Fraction, ...]
    """[num_sources], sum 1; empty if the split is not blended."""
    requested: tuple[Fraction, ...]
    """The `weights` before `on_exhausted: redistribute` changes them."""
    start: int
    end: int
    """The stage consists of the samples [start, end) of the run."""
    first: int
    """The first sample with the stage's own settings; it comes after `start` if the stage begins
    with a drain, see `plan_stages`."""
    drain: int | None = None
    """See `Stage.drain`."""
    whole_epochs: bool = False
    """See `Stage.whole_epochs`."""
    cut: int | None = None
    """The sample at which the next stage begins, if that is before `end`."""
    schedule: RequestedSchedule | None = None
    """How the shares change to `weights`; None if they are constant."""

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


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Prefix the messages of errors with a place in the config."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{place}: {error}") from None


def depends_on_read(
    stages: Sequence[RequestedStage], stage_config: Config, *, is_new: bool
) -> bool:
    """Return whether a stage depends on what earlier stages have read: its shares, its first sample
    or, if it is not committed, its `whole_epochs`."""
    if not stages or stage_config.on_exhausted == "redistribute":
        return bool(stages)
    last = stages[-1].config
    if is_new and stage_config.snapshot:
        return True
    may_drain = (
        stage_config.sequence_length != last.sequence_length
        or stage_config.snapshot != last.snapshot
    )
    return may_drain and any(stage.cut is not None for stage in stages)


def explain_empty(start: int, first: int, end: int) -> str:
    """Say why a stage has no samples, and how to give it some."""
    if start == first:
        earlier = ", or begin earlier with `megablend amend CONFIG --at SAMPLE`" if start else ""
        return f"ends at sample {end:,}, but begins at sample {start:,}; let it end later{earlier}"
    return (
        f"ends at sample {end:,}, but the previous stage's settings are kept until sample {first:,}, since the length of "
        "samples changes or files are withdrawn; let the stage end later"
    )


def request_stage(
    config: Config,
    split: str,
    tokens: Sequence[int],
    start: int,
    first: int,
    read: ReadBefore | None = None,
) -> RequestedStage:
    """Return the stage that a config requests, with the length that the config sets.

    Args:
        start, first: see RequestedStage.
        read: what earlier stages have read; None if nothing depends on it.
    """
    shares = shares_of(config, split, tuple(config.sources_of(split).values()), tokens, read)
    return RequestedStage(
        config=config,
        weights=shares.weights,
        requested=shares.requested,
        start=start,
        end=first + shares.num_samples,
        first=first,
    )


def request_one_pass(config: Config, split: str, tokens: Sequence[int]) -> RequestedStage:
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


def request_top_level(config: Config, tokens: Sequence[int], samples: int) -> RequestedStage:
    """Return the stage of train, with `samples` samples, that the top level describes."""
    changes = {"stages": (), "samples": samples, "tokens": None, "epochs": None}
    return request_stage(config.model_copy(update=changes), "train", tokens, 0, 0)


def find_given_length(
    config: Config,
    settings: StageSettings,
    sequence_length: int,
    start: int,
    tokens_before: int,
    tokens: int,
    *,
    is_last: bool,
) -> int | None:
    """Return the number of samples of a stage, counted from `start`, that the config sets. Return
    None if it sets no number, so that the amounts of the sources decide.

    Args:
        start, tokens_before: samples and tokens of the stages before.
        tokens: tokens of one epoch of all sources.
    """
    if settings.samples is not None:
        return settings.samples - start
    if settings.tokens is not None:
        return (settings.tokens - tokens_before) // sequence_length
    share = settings.share
    if share is None and is_last:
        share = Fraction(1)
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


def round_to_lanes(
    length: int,
    settings: StageSettings,
    lanes: int,
    first: int,
    links: Sequence[Link],
    *,
    is_cut: bool,
) -> int:
    """Round the length of a stage down to a multiple of its lanes, if another stage follows and the
    end is not given in samples. A length is kept if it is committed, or if a cut makes it
    irrelevant.

    Raises: PlanError if nothing is left.
    """
    if settings.samples is not None:
        return length
    aligned = length - length % lanes
    committed = {end - first for link in links for end in (link.stop, link.end)}
    if aligned == length or length in committed or (is_cut and aligned not in committed):
        return length
    if aligned == 0:
        raise PlanError(
            f"has {length:,} samples, fewer than its {lanes} lanes; let the stage end later, or lower `lanes`"
        )
    return aligned


def find_cut(
    next_settings: StageSettings, first: int, end: int, links: Sequence[Link]
) -> int | None:
    """Return the sample at which the next stage cuts a stage of samples [first, end). The config
    sets it, or the run was amended there."""
    cut = next_settings.from_
    for link in links:
        if cut is None and link.cut is not None and first < link.cut <= end:
            cut = link.cut
    if cut is None or cut == end:
        return None
    if not first < cut < end:
        raise PlanError(
            f"from: found {cut:,}, expected a sample within the previous stage, {first + 1:,} to {end:,}"
        )
    return cut
