"""The stages that a config requests of a blended split: their settings, their shares, and the
samples at which they begin and end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from megablend.blend.epochs import ReadBefore
from megablend.blend.schedule import MIN_STEPS
from megablend.blend.shares import shares_of
from megablend.config import Config
from megablend.config.stages import StageSettings
from megablend.errors import PlanError
from megablend.run.links import Link


class RequestedSchedule(NamedTuple):
    """How a stage's shares change."""

    kind: str
    steps: int
    """Maximum number of steps of the schedule."""
    start: tuple[Fraction, ...]
    """[num_sources], sum 1: the shares of the previous stage, from which the shares change."""


CountRead = Callable[[Sequence["RequestedStage"], Config, "Drain"], ReadBefore]
"""A function that counts what stages, and a drain after them, read before the next stage, given its
settings."""


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


def request_stages(
    config: Config,
    split: str,
    by_snapshot: Sequence[Sequence[int]],
    links: Sequence[Link],
    count_read: CountRead,
    batch: int | None = None,
) -> tuple[RequestedStage, ...]:
    """Return the stages of a blended split: those that the config lists for train, and one for
    other splits.

    Args:
        by_snapshot: tokens of each source in this split, including end-of-document tokens, in each
            snapshot of the run.
        links: what the run is committed to. If an amendment cut a stage, the next one begins
            there, whether or not the config says so (`from`).
        batch: given only if the run is being amended. The length of samples then changes only at a
            multiple of `batch`: the length of a drain is chosen to fit, and `drain` in the config
            must agree with it.

    Raises: PlanError, naming the stage, if its shares or its end are not possible.
    """
    if split != "train" or not config.stages:
        return (_request_stage(config, split, by_snapshot[0], 0, 0),)
    requester = _Requester(config, by_snapshot, links, count_read, batch)
    followers = [*config.stages[1:], None]
    for settings, stage_config, following in zip(
        config.stages, config.stage_configs, followers, strict=True
    ):
        requester.add(settings, stage_config, following)
    return tuple(requester.stages)


class _Requester:
    """Requests the stages of train one after another; see `request_stages` for the arguments.

    Attributes:
        stages: the stages so far.
        start: number of the sample at which the next stage begins.
        tokens_before: tokens of the samples before `start`, without extra ones.
    """

    def __init__(
        self,
        config: Config,
        by_snapshot: Sequence[Sequence[int]],
        links: Sequence[Link],
        count_read: CountRead,
        batch: int | None,
    ) -> None:
        self.stages = list[RequestedStage]()
        self.start = 0
        self.tokens_before = 0
        self._config = config
        self._by_snapshot = by_snapshot
        self._links = links
        self._count_read = count_read
        self._batch = batch

    def add(
        self, settings: StageSettings, stage_config: Config, following: StageSettings | None
    ) -> None:
        """Request the next stage. `following`: the settings of the stage after it; None for the
        last one. Raises: PlanError, naming the stage."""
        place = f"stages[{len(self.stages)}]"
        tokens = self._by_snapshot[stage_config.snapshot]
        cut = None
        with _naming(place):
            drain, read = self._find_begin(settings, stage_config)
            first = self.start if read is None else read.first_sample
            if read is not None:  # a drain, if any, has samples of the previous length
                previous = self.stages[-1].config.sequence_length
                self.tokens_before += (first - self.start) * previous
            length = self._find_length(settings, stage_config, first, is_last=following is None)
        if following is not None:
            with _naming(f"stages[{len(self.stages) + 1}]"):
                cut = _find_cut(following, first, first + length, self._links)
            with _naming(place):
                length = _round_to_lanes(
                    length, settings, stage_config.lanes, first, self._links, is_cut=cut is not None
                )
        with _naming(place):
            stage_config = stage_config.model_copy(update={"samples": length})
            stage = replace(
                _request_stage(stage_config, "train", tokens, self.start, first, read),
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
        drain = _find_drain(settings, self.stages, stage_config, self._links, self._batch)
        is_new = drain.whole_epochs is None
        read = None
        if drain.samples or _depends_on_read(self.stages, stage_config, is_new=is_new):
            read = self._count_read(self.stages, stage_config, drain)
        length = None if read is None else read.drain
        if self._batch and settings.drain not in (None, length):
            expected = (
                "no `drain`"
                if length is None
                else f"{length:,} (or another `--batch`), or no `drain`"
            )
            raise PlanError(f"drain: found {settings.drain:,}, expected {expected}")
        return drain, read

    def _find_length(
        self, settings: StageSettings, stage_config: Config, first: int, *, is_last: bool
    ) -> int:
        """Return the number of samples of the next stage, counted from its first one, before
        cutting and rounding. Raises: PlanError if there are none."""
        tokens = self._by_snapshot[stage_config.snapshot]
        length = _find_given_length(
            self._config,
            settings,
            stage_config.sequence_length,
            first,
            self.tokens_before,
            sum(tokens),
            is_last=is_last,
        )
        if length is None:  # the amounts of the sources decide
            length = _request_stage(stage_config, "train", tokens, self.start, first).end - first
        if length < 1:
            raise PlanError(_explain_empty(self.start, first, first + length))
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
        tokens = self._by_snapshot[stage_config.snapshot]
        before = (
            self.stages[-1] if self.stages else _request_top_level(self._config, tokens, length)
        )
        return RequestedSchedule(settings.schedule, settings.steps, before.weights)


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Prefix the messages of errors with a place in the config."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{place}: {error}") from None


def _depends_on_read(
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


def _find_drain(
    settings: StageSettings,
    stages: Sequence[RequestedStage],
    stage_config: Config,
    links: Sequence[Link],
    batch: int | None,
) -> Drain:
    """Return the drain before a stage, with the length that was committed or that the config sets;
    for a new stage of a built run, the length is still to be chosen.

    Raises: PlanError if the config differs from what the run is committed to.
    """
    start = stages[-1].stop if stages else 0
    if not links or (start >= links[-1].stop and settings.drain is not None and batch is None):
        return Drain(settings.drain)
    if start >= links[-1].stop:
        lanes = [stages[-1].config.lanes] if stages else []
        return Drain(None, math.lcm(stage_config.lanes, batch or 1, *lanes))
    starts = [0, *(link.stop for link in links)]
    link = next((link for begin, link in zip(starts, links, strict=False) if begin == start), None)
    committed = None if link is None else link.drain
    if settings.drain not in (None, committed):
        expected = "no `drain`" if committed is None else f"{committed:,}, as the run was amended"
        raise PlanError(f"drain: found {settings.drain:,}, expected {expected}")
    return Drain(committed, whole_epochs=link is not None and link.whole_epochs)


def _explain_empty(start: int, first: int, end: int) -> str:
    """Say why a stage has no samples, and how to give it some."""
    if start == first:
        earlier = ", or begin earlier with `megablend amend CONFIG --at SAMPLE`" if start else ""
        return f"ends at sample {end:,}, but begins at sample {start:,}; let it end later{earlier}"
    return (
        f"ends at sample {end:,}, but the previous stage's settings are kept until sample {first:,}, since the length of "
        "samples changes or files are withdrawn; let the stage end later"
    )


def _request_stage(
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


def _request_top_level(config: Config, tokens: Sequence[int], samples: int) -> RequestedStage:
    """Return the stage of train, with `samples` samples, that the top level describes."""
    changes = {"stages": (), "samples": samples, "tokens": None, "epochs": None}
    return _request_stage(config.model_copy(update=changes), "train", tokens, 0, 0)


def _find_given_length(
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


def _round_to_lanes(
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


def _find_cut(
    next_settings: StageSettings, first: int, end: int, links: Sequence[Link]
) -> int | None:
    """Return the sample at which the next stage cuts a stage of samples [first, end). The config
    sets it, or the run was amended there."""
    committed = sorted(
        link.cut for link in links if link.cut is not None and first < link.cut <= end
    )
    cut = next_settings.from_ if next_settings.from_ is not None else next(iter(committed), None)
    if cut is None or cut == end:
        return None
    if not first < cut < end:
        raise PlanError(
            f"from: found {cut:,}, expected a sample within the previous stage, {first + 1:,} to {end:,}"
        )
    return cut
