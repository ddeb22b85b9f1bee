"""Refuse blends in which a source gets no samples, or more than its cap;
errors say which blend and length would do."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from megablend.blend.caps import capped_shares, longest_stage
from megablend.blend.epochs import Epochs
from megablend.blend.interleavings.base import MAX_SAMPLES
from megablend.blend.plan import PlannedStage
from megablend.blend.shares import cap_of, find_most_tokens, fit_all_caps, round_up, set_length
from megablend.config import Config, Source
from megablend.errors import PlanError
from megablend.run.compile import Compiled
from megablend.run.config_stages import RequestedStage

SHOWN = 5
"""Sources whose share a message gives."""


def check_limits(compiled: Compiled) -> None:
    """Raises: PlanError if a source with a share gets no samples of the run,
    or one exceeds its caps."""
    run = compiled.run
    if not run.is_blended:
        return
    if len(compiled.stages) > 1 or run.ledger.blend.schedule is not None:
        _check_stages(compiled)
    else:
        _check_only_stage(compiled)


def _check_only_stage(compiled: Compiled) -> None:
    """Raises: PlanError that names the source, its numbers, the longest run that fits all sources,
    and the nearest blend that fits."""
    config = compiled.config
    split = compiled.split
    sources = compiled.sources
    weights = compiled.weights
    tokens = compiled.run.data.tokens
    totals = compiled.run.plan.counts(compiled.run.num_samples).tolist()
    length = config.sequence_length
    extra = int(config.add_extra_token_to_sequence)
    caps = [cap_of(source, n, length, extra) for source, n in zip(sources, tokens, strict=True)]
    # From 1 / weight samples on, a source's share is at least one sample before rounding.
    needed = max((-(-1 // weight) for weight in weights if weight), default=1)
    fits = longest_stage(weights, caps, redistribute=False) if any(weights) else None
    for source, weight, total, source_tokens, cap in zip(
        sources, weights, totals, tokens, caps, strict=True
    ):
        if weight > 0 and total == 0:
            raise PlanError(
                f"source {source.name!r} gets none of {sum(totals):,} samples: its share is {float(weight):.3g}. "
                f"{_longer(config, split, needed, fits, sum(tokens))}"
            )
        if cap is not None and total > cap:
            raise PlanError(
                f"source {source.name!r} would be read {total * length / source_tokens:.2f} times ({total:,} samples of "
                f"{length} tokens from its {source_tokens:,} tokens), more than {describe_caps(source)} ({cap:,} samples). "
                f"{_shorter(config, split, needed, fits or 0)}{_raise_cap(source, total, source_tokens, length, extra)}, "
                f"or give it a smaller share{_redistribute(sources, weights, caps, sum(totals))}"
            )


def _longer(config: Config, split: str, needed: int, fits: int | None, tokens: int) -> str:
    """How to give every source at least one sample, if the caps allow it."""
    unshared = "give it a larger share, or a share of 0"
    if needed > MAX_SAMPLES:
        return f"All sources get at least one from {needed:,} samples on, but a plan can have at most {MAX_SAMPLES:,}: {unshared}"
    if fits is not None and fits < needed:
        return f"No length fits: all sources get at least one from {needed:,} samples on, but the caps allow {fits:,}: {unshared}"
    return f"All sources get at least one from {needed:,} samples on: {set_length(config, split, needed, tokens)}; or {unshared}"


def _shorter(config: Config, split: str, needed: int, fits: int) -> str:
    """How to shorten the run so that no source exceeds its caps, if each source would still get a
    sample then."""
    if fits < needed:
        return "No length fits all sources: "
    return f"At most {fits:,} samples fit all caps: {fit_all_caps(config, split, fits)}"


def describe_caps(source: Source) -> str:
    """A source's caps, in words."""
    caps = [f"max_epochs {float(source.max_epochs):g}"] if source.max_epochs is not None else []
    caps += [f"max_tokens {source.max_tokens:,}"] if source.max_tokens is not None else []
    return f"its {' and '.join(caps)}"


def _raise_cap(source: Source, total: int, tokens: int, length: int, extra: int) -> str:
    """What to set for a source so that it may give `total` samples."""
    keys = []
    if source.max_epochs is not None:
        keys.append(f"`max_epochs: {round_up(Fraction(total * length + extra, tokens))}`")
    if source.max_tokens is not None:
        keys.append(f"`max_tokens: {total * length}`")
    return f"set {' and '.join(keys)} for it"


def _redistribute(
    sources: Sequence[Source], weights: Sequence[Fraction], caps: Sequence[int | None], total: int
) -> str:
    """The blend that `on_exhausted: redistribute` would give, or the longest run that it allows."""
    most = longest_stage(weights, caps, redistribute=True)
    if most is not None and most < total:
        return (
            f"; with `on_exhausted: redistribute` at most {most:,} samples fit all caps"
            if most
            else ""
        )
    shares = capped_shares(weights, caps, total)
    changed = [
        f"{source.name} {float(share):.6g}"
        for source, weight, share in zip(sources, weights, shares, strict=True)
        if weight != share
    ]
    more = f" and {len(changed) - SHOWN:,} more" if len(changed) > SHOWN else ""
    return f"; the nearest shares that fit all caps, which `on_exhausted: redistribute` gives: {', '.join(changed[:SHOWN])}{more}"


def _check_stages(compiled: Compiled) -> None:
    """Raises: PlanError that names the stage, the source, and where the stage could end."""
    plan = compiled.run.plan
    starts = compiled.ledger.starts
    stretches = plan.stages
    totals = np.sum([stretch.read for stretch in stretches], axis=0)
    for number in np.flatnonzero(totals == 0).tolist():
        source = compiled.sources[number]
        weight = compiled.weights[number]
        if weight > 0:
            raise PlanError(
                f"source {source.name!r} gets none of {compiled.num_samples:,} samples: its share of the run is "
                f"{float(weight):.3g}; "
                "give it a larger share, or a share of 0 in every stage"
            )
    for stretch in stretches:
        is_drain = stretch.number + 1 < len(starts) and stretch.start >= starts[stretch.number + 1]
        # what is left of stages before was begun where their caps allowed it; a drain with a length
        # reads further
        if not is_drain or compiled.stage_at(stretch.start).drain is not None:
            _check_caps(
                compiled,
                compiled.stage_at(starts[stretch.number]),
                stretch,
                plan.epochs,
                is_drain=is_drain,
            )


def _check_caps(
    compiled: Compiled,
    stage: RequestedStage,
    stretch: PlannedStage,
    epochs: Epochs,
    *,
    is_drain: bool,
) -> None:
    """Raises: PlanError for the first source that the stage, or a drain after it, reads more often
    than its caps allow."""
    request = stretch.request
    extra = int(compiled.config.add_extra_token_to_sequence)
    length = request.sample_tokens
    sources = list(stage.config.sources_of(compiled.split).values())
    if not any(source.is_capped for source in sources):
        return
    totals = stretch.read.tolist()
    before = stretch.cursor.tolist()
    most = find_most_tokens(sources, epochs, (stretch.cursor + stretch.read * length).tolist())
    left = [
        cap_of(source, tokens, length, extra, read=read, most=limit)
        for source, tokens, read, limit in zip(
            sources, compiled.tokens_of(stage), before, most, strict=True
        )
    ]
    for i, (source, total, cap) in enumerate(zip(sources, totals, left, strict=True)):
        if cap is None or total <= cap or (is_drain and stage.weights[i] == 0):
            continue
        place = f"stages[{compiled.stages.index(stage)}]"
        count = float(epochs.count(i, before[i] + total * length + extra))
        longest = longest_stage(stage.weights, left, redistribute=False)
        ends = (
            ""
            if not longest
            else f"end the stage at sample {stretch.start + longest:,} or before, "
        )
        if is_drain:
            raise PlanError(
                f"{place}: source {source.name!r} would have been read {count:.2f} times, more "
                f"than {describe_caps(source)}, by sample {stretch.stop:,}, where the length of "
                "samples changes; amend the run at an earlier sample, or raise the cap in that "
                "stage"
            )
        raise PlanError(
            f"{place}: source {source.name!r} would have been read {count:.2f} times at the stage's end, more than "
            f"{describe_caps(source)}: {total:,} samples of {length} tokens are requested, {cap:,} are left; {ends}raise the "
            "cap, give the source a smaller share, or set `on_exhausted: redistribute`"
        )
