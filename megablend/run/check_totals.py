"""Refuse blends in which a source gets no samples, or more samples than its caps allow. The errors
name a blend or a length that would be accepted."""

from __future__ import annotations

from bisect import bisect_left
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
"""Maximum number of sources that a message lists."""


def check_limits(compiled: Compiled) -> None:
    """Check that each source with a share gets samples, and that none exceeds its caps.
    Raises: PlanError."""
    run = compiled.run
    if not run.is_blended:
        return
    if len(compiled.stages) > 1 or run.ledger.blend.schedule is not None:
        _check_stages(compiled)
    else:
        _check_only_stage(compiled)


def _check_only_stage(compiled: Compiled) -> None:
    """Check a run of one stage. Raises: PlanError that names the source, its numbers of samples,
    the longest run that fits the caps of all sources, and the nearest blend that fits."""
    config = compiled.config
    split = compiled.split
    sources = compiled.sources
    weights = compiled.weights
    tokens = compiled.run.data.tokens
    length = config.sequence_length
    extra = int(config.add_extra_token_to_sequence)
    # Samples of each source: what it gives, and what its caps allow
    totals = compiled.run.plan.counts(compiled.run.num_samples).tolist()
    caps = [cap_of(source, n, length, extra) for source, n in zip(sources, tokens, strict=True)]
    # From 1 / weight samples on, a source's share is at least one sample before rounding
    needed = max((-(-1 // weight) for weight in weights if weight), default=1)
    redistribute = compiled.stages[0].config.on_exhausted == "redistribute"
    longest = longest_stage(weights, caps, redistribute=redistribute) if any(weights) else None
    if redistribute and any(
        weight > 0 and not total for weight, total in zip(weights, totals, strict=True)
    ):
        # Each source gives more samples to a longer run, though their shares change with its length
        needed = bisect_left(
            range(needed if longest is None else min(needed, longest)),
            True,
            lo=sum(totals),
            key=lambda n: min(filter(None, capped_shares(compiled.requested, caps, n))) * n >= 1,
        )
    for source, weight, total, source_tokens, cap in zip(
        sources, weights, totals, tokens, caps, strict=True
    ):
        if weight > 0 and total == 0:
            raise PlanError(
                f"source {source.name!r} gets none of the {sum(totals):,} samples: its share is "
                f"{float(weight):.3g}. {_advise_longer(config, split, needed, longest, sum(tokens))}"
            )
        if cap is not None and total > cap:
            raise PlanError(
                f"source {source.name!r} would be read {total * length / source_tokens:.2f} times ({total:,} samples of "
                f"{length} tokens from its {source_tokens:,} tokens), more than {describe_caps(source)} ({cap:,} samples). "
                f"{_advise_shorter(config, split, needed, longest or 0)}"
                f"{_advise_cap(source, total, source_tokens, length, extra)}, or give it a smaller share"
                f"{_advise_shares(sources, weights, caps, sum(totals))}"
            )


def _check_stages(compiled: Compiled) -> None:
    """Check each stage of a run. Raises: PlanError that names the stage, the source, and where the
    stage could end."""
    plan = compiled.run.plan
    starts = compiled.ledger.starts
    totals = np.sum([part.read for part in plan.stages], axis=0)
    for number in np.flatnonzero(totals == 0).tolist():
        source = compiled.sources[number]
        weight = compiled.weights[number]
        if weight > 0:
            raise PlanError(
                f"source {source.name!r} gets none of the {compiled.num_samples:,} samples: its share of the run "
                f"is {float(weight):.3g}; give it a larger share, or a share of 0 in every stage"
            )
    for part in plan.stages:
        is_drain = part.number + 1 < len(starts) and part.start >= starts[part.number + 1]
        # A drain reads what earlier stages have begun, as far as their caps allowed. Only a drain
        # whose length was set reads further
        if not is_drain or compiled.stage_at(part.start).drain is not None:
            _check_caps(
                compiled,
                compiled.stage_at(starts[part.number]),
                part,
                plan.epochs,
                is_drain=is_drain,
            )


def _check_caps(
    compiled: Compiled,
    stage: RequestedStage,
    part: PlannedStage,
    epochs: Epochs,
    *,
    is_drain: bool,
) -> None:
    """Check a step of a stage, or a drain after it. Raises: PlanError that names the first source
    of which it reads more than the source's caps allow."""
    request = part.request
    extra = int(compiled.config.add_extra_token_to_sequence)
    length = request.sample_tokens
    sources = list(stage.config.sources_of(compiled.split).values())
    if not any(source.is_capped for source in sources):
        return
    totals = part.read.tolist()
    read_before = part.cursor.tolist()
    limits = find_most_tokens(sources, epochs, (part.cursor + part.read * length).tolist())
    caps = [
        cap_of(source, tokens, length, extra, read=read, most=limit)
        for source, tokens, read, limit in zip(
            sources, compiled.tokens_of(stage), read_before, limits, strict=True
        )
    ]
    for i, (source, total, cap) in enumerate(zip(sources, totals, caps, strict=True)):
        if cap is None or total <= cap or (is_drain and stage.weights[i] == 0):
            continue
        stage_key = f"stages[{compiled.stages.index(stage)}]"
        count = float(epochs.count(i, read_before[i] + total * length + extra))
        longest = longest_stage(stage.weights, caps, redistribute=False)
        earlier = f"end the stage at sample {part.start + longest:,} or before, " if longest else ""
        if is_drain:
            raise PlanError(
                f"{stage_key}: source {source.name!r} would have been read {count:.2f} times, more "
                f"than {describe_caps(source)}, by sample {part.stop:,}, where the length of "
                "samples changes; amend the run at an earlier sample, or raise the cap in that "
                "stage"
            )
        raise PlanError(
            f"{stage_key}: source {source.name!r} would have been read {count:.2f} times by the end of the stage, "
            f"more than {describe_caps(source)}: {total:,} samples of {length} tokens are requested, {cap:,} are "
            f"left; {earlier}raise the cap, give the source a smaller share, or set `on_exhausted: redistribute`"
        )


def _advise_longer(
    config: Config, split: str, needed: int, longest: int | None, tokens: int
) -> str:
    """Return advice on how to give every source at least one sample. This takes `needed` samples,
    which may be more than the caps allow."""
    remedy = "give the source a larger share, or a share of 0"
    if needed > MAX_SAMPLES:
        return (
            f"A run needs at least {needed:,} samples to include one of each source, but can have at most "
            f"{MAX_SAMPLES:,}: {remedy}"
        )
    if longest is not None and longest < needed:
        return (
            f"No length fits: a run needs at least {needed:,} samples to include one of each source, but the caps "
            f"allow only {longest:,}: {remedy}"
        )
    return (
        f"A run of {needed:,} samples or more has at least one of each source: "
        f"{set_length(config, split, needed, tokens)}; or {remedy}"
    )


def _advise_shorter(config: Config, split: str, needed: int, longest: int) -> str:
    """Say how to shorten the run so that no source exceeds its caps, if that leaves each source at
    least one sample."""
    if longest < needed:
        return "No length fits all sources: "
    return f"At most {longest:,} samples fit all caps: {fit_all_caps(config, split, longest)}"


def describe_caps(source: Source) -> str:
    """Describe a source's caps in words."""
    caps = [f"max_epochs {float(source.max_epochs):g}"] if source.max_epochs is not None else []
    caps += [f"max_tokens {source.max_tokens:,}"] if source.max_tokens is not None else []
    return f"its {' and '.join(caps)}"


def _advise_cap(source: Source, total: int, tokens: int, length: int, extra: int) -> str:
    """Say which caps to set so that a source may have `total` samples."""
    keys = []
    if source.max_epochs is not None:
        keys.append(f"`max_epochs: {round_up(Fraction(total * length + extra, tokens))}`")
    if source.max_tokens is not None:
        keys.append(f"`max_tokens: {total * length}`")
    return f"set {' and '.join(keys)} for it"


def _advise_shares(
    sources: Sequence[Source], weights: Sequence[Fraction], caps: Sequence[int | None], total: int
) -> str:
    """Say which blend `on_exhausted: redistribute` would give, or how long a run it allows."""
    longest = longest_stage(weights, caps, redistribute=True)
    if longest is not None and longest < total:
        if longest == 0:
            return ""
        return f"; with `on_exhausted: redistribute` at most {longest:,} samples fit all caps"
    shares = capped_shares(weights, caps, total)
    changed = [
        f"{source.name} {float(share):.6g}"
        for source, weight, share in zip(sources, weights, shares, strict=True)
        if weight != share
    ]
    more = f" and {len(changed) - SHOWN:,} more" if len(changed) > SHOWN else ""
    return f"; the nearest shares that fit all caps, which `on_exhausted: redistribute` gives: {', '.join(changed[:SHOWN])}{more}"
