"""The stages that a config requests for a blended split:
their settings, shares and ends, in samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from megablend.blend.epochs import ReadBefore
from megablend.blend.shares import shares_of
from megablend.config import Config
from megablend.config.stages import StageSettings
from megablend.errors import PlanError
from megablend.run.links import Link


class RequestedSchedule(NamedTuple):
    """How the shares of a stage change."""

    kind: str
    steps: int
    """The most steps of the schedule."""
    start: tuple[Fraction, ...]
    """[num_sources], sum 1: the shares of the stage before."""


CountRead = Callable[[Sequence["RequestedStage"], Config, "Drain"], ReadBefore]


class Drain(NamedTuple):
    """A drain as far as it is fixed: its length (see `Stage.drain`),
    or the multiple at which it is to end; and what follows it."""

    samples: int | None
    unit: int | None = None
    """None where the length is known, and where it is what the stages before have left."""
    whole_epochs: bool | None = None
    """See `Stage.whole_epochs`; None for a stage that is not committed."""


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
    first: int
    """The first sample in its own settings: after `start` where a drain comes first; see
    plan_stages."""
    drain: int | None = None
    """See `Stage.drain`."""
    whole_epochs: bool = False
    """See `Stage.whole_epochs`."""
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
    config: Config,
    split: str,
    by_snapshot: Sequence[Sequence[int]],
    links: Sequence[Link],
    count_read: CountRead,
    batch: int | None = None,
) -> tuple[RequestedStage, ...]:
    """The stages of a blended split: those that the config lists for train, otherwise one.

    Args:
        by_snapshot: tokens of each source in this split, including end-of-document tokens, in each
            snapshot of the run.
        links: what the run is committed to. If an amendment cut a stage, the next one begins
            there, whether or not the config says so (`from`).
        count_read: what given stages read before one with these settings.
        batch: the run is being amended: where samples get another length is a multiple of this, and
            `drain` is not the config's.

    Raises: PlanError, naming the stage, if its shares or its end are not possible.
    """
    if split != "train" or not config.stages:
        return (_request_stage(config, split, by_snapshot[0], 0, 0),)
    found = list[RequestedStage]()
    start = 0
    tokens_before = 0
    first = 0
    following = [*config.stages[1:], None]
    for i, (settings, own, after) in enumerate(
        zip(config.stages, config.stage_configs, following, strict=True)
    ):
        tokens = by_snapshot[own.snapshot]
        with _naming(f"stages[{i}]"):
            drain = _find_drain(settings, found, own, links, batch)
            is_counted = drain.samples or _depends_on_read(
                found, own, is_new=drain.whole_epochs is None
            )
            read = count_read(found, own, drain) if is_counted else None
            chosen = None if read is None else read.drain
            if batch and settings.drain not in (None, chosen):
                expected = (
                    "no `drain`"
                    if chosen is None
                    else f"{chosen:,} (or another `--batch`), or no `drain`"
                )
                raise PlanError(f"drain: found {settings.drain:,}, expected {expected}")
            if read is not None:
                tokens_before += (read.first_sample - start) * found[-1].config.sequence_length
            first = start if read is None else read.first_sample
            length = _length(
                config,
                settings,
                own.sequence_length,
                first,
                tokens_before,
                sum(tokens),
                is_last=after is None,
            )
            if length is None:
                length = _request_stage(own, split, tokens, start, first).end - first
            if length < 1:
                raise PlanError(_explain_empty(start, first, first + length))
        with _naming(f"stages[{i + 1}]"):
            cut = None if after is None else _find_cut(after, first, first + length, links)
        with _naming(f"stages[{i}]"):
            if after is not None:
                length = _end_with_lanes(
                    length, settings, own.lanes, first, links, is_cut=cut is not None
                )
            own = own.model_copy(update={"samples": length})
            stage = _request_stage(own, split, tokens, start, first, read)
            whole_epochs = bool(drain.whole_epochs) if read is None else read.whole_epochs
            stage = replace(stage, drain=chosen, whole_epochs=whole_epochs)
            if settings.schedule is not None:
                before = found[-1] if found else _request_top_level(config, tokens, length)
                stage = replace(
                    stage,
                    schedule=RequestedSchedule(settings.schedule, settings.steps, before.weights),
                )
        found.append(replace(stage, cut=cut))
        start = found[-1].stop
        tokens_before += (start - first) * own.sequence_length
    return tuple(found)


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Begin errors with a place in the config."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{place}: {error}") from None


def _depends_on_read(found: Sequence[RequestedStage], own: Config, *, is_new: bool) -> bool:
    """Whether a stage with these settings depends on what the stages before it have read: for its
    shares, its first sample, or, if it is not committed, its `whole_epochs`."""
    if not found or own.on_exhausted == "redistribute":
        return bool(found)
    last = found[-1].config
    if is_new and own.snapshot:
        return True
    may_drain = own.sequence_length != last.sequence_length or own.snapshot != last.snapshot
    return may_drain and any(stage.cut is not None for stage in found)


def _find_drain(
    settings: StageSettings,
    found: Sequence[RequestedStage],
    own: Config,
    links: Sequence[Link],
    batch: int | None,
) -> Drain:
    """What a drain before a stage is to be: as it was committed, as the config says, or, in a run
    that was built, chosen.

    Raises: PlanError if the config says otherwise than the run is committed to.
    """
    start = found[-1].stop if found else 0
    if not links or (start >= links[-1].stop and settings.drain is not None and batch is None):
        return Drain(settings.drain)
    if start >= links[-1].stop:
        lanes = [found[-1].config.lanes] if found else []
        return Drain(None, math.lcm(own.lanes, batch or 1, *lanes))
    starts = [0, *(link.stop for link in links)]
    link = next((link for begin, link in zip(starts, links, strict=False) if begin == start), None)
    committed = None if link is None else link.drain
    if settings.drain not in (None, committed):
        expected = "no `drain`" if committed is None else f"{committed:,}, as the run was amended"
        raise PlanError(f"drain: found {settings.drain:,}, expected {expected}")
    return Drain(committed, whole_epochs=link is not None and link.whole_epochs)


def _explain_empty(start: int, first: int, end: int) -> str:
    if start == first:
        earlier = (
            ", or begin earlier, where training is: `megablend amend CONFIG --at SAMPLE`"
            if start
            else ""
        )
        return (
            f"it ends at sample {end:,}, but begins at sample {start:,}; let it end later{earlier}"
        )
    return (
        f"it ends at sample {end:,}, but since the amendment changes the length of samples or withdraws files, the "
        f"settings before it are kept until sample {first:,}; let it end later"
    )


def _request_stage(
    config: Config,
    split: str,
    tokens: Sequence[int],
    start: int,
    first: int,
    read: ReadBefore | None = None,
) -> RequestedStage:
    """A stage as long as its config says, with sample `first` as the first one, when `read` was
    read of each source."""
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
    """The stage of train, of this length, that the top level describes."""
    changes = {"stages": (), "samples": samples, "tokens": None, "epochs": None}
    return _request_stage(config.model_copy(update=changes), "train", tokens, 0, 0)


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
    """Samples from a stage's start to the end that it is given;
    None if its sources' amounts decide it.

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


def _end_with_lanes(
    length: int,
    settings: StageSettings,
    lanes: int,
    first: int,
    links: Sequence[Link],
    *,
    is_cut: bool,
) -> int:
    """The length of a stage that is followed by another: as many samples as its config says; of an
    end in other units, which is rounded anyway, a multiple of its lanes, unless it is committed
    already or cut before.

    Raises: PlanError for a stage shorter than its lanes, if its end is in other units.
    """
    if settings.samples is not None:
        return length
    aligned = length - length % lanes
    committed = {end - first for link in links for end in (link.stop, link.end)}
    if aligned == length or length in committed or (is_cut and aligned not in committed):
        return length
    if aligned == 0:
        raise PlanError(
            f"it has {length:,} samples, fewer than its {lanes} lanes; let the stage end later, or lower `lanes`"
        )
    return aligned


def _find_cut(after: StageSettings, first: int, end: int, links: Sequence[Link]) -> int | None:
    """Where the next stage cuts a stage of samples [first, end): where the config says, or where
    the run was amended."""
    committed = sorted(
        link.cut for link in links if link.cut is not None and first < link.cut <= end
    )
    cut = after.from_ if after.from_ is not None else next(iter(committed), None)
    if cut is None or cut == end:
        return None
    if not first < cut < end:
        raise PlanError(
            f"from: found {cut:,}, expected a sample of the stage before it, {first + 1:,} to {end:,}"
        )
    return cut
