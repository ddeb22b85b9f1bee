"""From a config's weights or amounts to exact weights and a length. Impossible blends are refused; errors name the source."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from megablend.config import Config, Source
from megablend.errors import PlanError
from megablend.plan.interleavings.base import MAX_SAMPLES


class Shares(NamedTuple):
    """The weights and the length of a requested blend."""

    weights: tuple[Fraction, ...]
    """[num_sources], summing to 1."""
    num_samples: int


def samples_in(tokens: Fraction | int, sequence_length: int, extra: int) -> int:
    """The number of complete samples in `tokens` tokens: sample i takes tokens [i*S, i*S + S + extra)."""
    return max(0, int((Fraction(tokens) - extra) // sequence_length))


def shares_of(config: Config, split: str, sources: Sequence[Source], tokens: Sequence[int]) -> Shares:
    """Weights and length of a blended split.

    Where the config sets a length, the sources' numbers are relative to it; otherwise they are amounts and their sum is the
    length.

    Args:
        tokens: of each source in this split, including end-of-document tokens.

    Raises: PlanError where a source with a share has no tokens or less than one sample, or the split would have no samples or
        more than MAX_SAMPLES.
    """
    extra = int(config.add_extra_token_to_sequence)
    unit = sources[0].unit or "weight"
    values = [getattr(source, unit) if source.unit else Fraction(1) for source in sources]
    for source, value, source_tokens in zip(sources, values, tokens, strict=True):
        if value > 0 and source_tokens == 0:
            fewer = f", or leave it out with `{unit}: 0`" if len(sources) > 1 else ""
            raise PlanError(
                f"source {source.name!r} has no tokens in {split}: add files with tokens to it, or give {split} a larger share "
                f"of `split`{fewer}"
            )
    num_samples = _length(config, split, sum(tokens), extra)
    if unit == "epochs":
        values = [value * source_tokens for value, source_tokens in zip(values, tokens, strict=True)]
    if num_samples is None:
        if unit in ("epochs", "tokens"):
            extras = extra if unit == "epochs" else 0
            amounts, values = values, [Fraction(samples_in(v, config.sequence_length, extras)) for v in values]
            for source, amount, value in zip(sources, amounts, values, strict=True):
                if amount > 0 and value == 0:
                    raise PlanError(
                        f"source {source.name!r} would give {split} {float(amount):,.0f} tokens, fewer than one sample of "
                        f"{config.sequence_length + extras}: {_enough(source, unit, amount, config.sequence_length + extras)}"
                    )
        elif any(value.denominator != 1 for value in values):
            raise PlanError("`samples` of sources are counts where the config sets no length: expected integers")
        num_samples = int(sum(values))
    if num_samples < 1:
        raise PlanError(
            f"{split} would have fewer tokens than one sample of {config.sequence_length} tokens: "
            f"{_set_length(config, split, 1, sum(tokens))}, or add data"
        )
    if num_samples > MAX_SAMPLES:
        raise PlanError(
            f"{split} would have {num_samples:,} samples; a plan can have at most {MAX_SAMPLES:,}: request fewer"
        )
    total = sum(values)
    return Shares(tuple(Fraction(value) / total for value in values), num_samples)


def _enough(source: Source, unit: str, amount: Fraction, needed: int) -> str:
    """What to set so that a source given as an amount of tokens has at least one sample."""
    if unit == "tokens":
        return f"set `tokens: {needed}` or more for it, or `tokens: 0`"
    epochs = _rounded_up((source.epochs or Fraction(0)) * needed / amount)
    return f"set `epochs: {epochs}` or more for it, or `epochs: 0`"


def _set_length(config: Config, split: str, samples: int, tokens: int) -> str:
    """What to set so that a split has at least `samples` samples, in the unit of its configured length."""
    if split != "train":
        return f"set `{split}_samples: {samples}` or more"
    if config.tokens is not None:
        return f"set `tokens: {samples * config.sequence_length}` or more"
    if config.epochs is not None and tokens:
        extra = int(config.add_extra_token_to_sequence)
        return f"set `epochs: {_rounded_up(Fraction(samples * config.sequence_length + extra, tokens))}` or more"
    return f"set `samples: {samples}` or more"


def _rounded_up(number: Fraction) -> str:
    """The number with up to six decimals, rounded up."""
    return f"{-(-number * 10**6 // 1) / 10**6:f}".rstrip("0").rstrip(".")


def _length(config: Config, split: str, tokens: int, extra: int) -> int | None:
    if split != "train":
        samples: int | None = getattr(config, f"{split}_samples")
        return samples
    if config.samples is not None:
        return config.samples
    if config.tokens is not None:
        return config.tokens // config.sequence_length
    if config.epochs is not None:
        return samples_in(config.epochs * tokens, config.sequence_length, extra)
    return None


def check_totals(
    config: Config,
    split: str,
    sources: Sequence[Source],
    weights: Sequence[Fraction],
    totals: Sequence[int],
    tokens: Sequence[int],
) -> None:
    """Refuse a blend in which a source with a share gets no samples, or one exceeds its max_epochs.

    Args:
        totals: samples of each source over the whole run.

    Raises: PlanError that names the source, its numbers, and a length that fits all sources.
    """
    length, extra = config.sequence_length, int(config.add_extra_token_to_sequence)
    weighted = [each for each in zip(sources, weights, tokens, strict=True) if each[1]]
    # From 1 / weight samples on, a source's share is at least one sample before rounding.
    needed = max((-(-1 // weight) for _, weight, _ in weighted), default=1)
    fits = min(
        (
            int(samples_in(source.max_epochs * source_tokens, length, extra) / weight)
            for source, weight, source_tokens in weighted
            if source.max_epochs
        ),
        default=None,
    )
    for source, weight, total, source_tokens in zip(sources, weights, totals, tokens, strict=True):
        if weight > 0 and total == 0:
            raise PlanError(
                f"source {source.name!r} gets none of {sum(totals):,} samples: its share is {float(weight):.3g}. "
                f"{_longer(config, split, needed, fits, sum(tokens))}"
            )
        if source.max_epochs is None:
            continue
        cap = samples_in(source.max_epochs * source_tokens, length, extra)
        if total > cap:
            epochs = _rounded_up(Fraction(total * length + extra, source_tokens))
            raise PlanError(
                f"source {source.name!r} would be read {total * length / source_tokens:.2f} times ({total:,} samples of "
                f"{length} tokens from its {source_tokens:,} tokens), more than its max_epochs "
                f"{float(source.max_epochs):g} ({cap:,} samples). "
                f"{_shorter(config, split, needed, fits or 0)}set `max_epochs: {epochs}` for it, or give it a smaller share"
            )


def _longer(config: Config, split: str, needed: int, fits: int | None, tokens: int) -> str:
    """How to give every source at least one sample, where the caps allow it."""
    unshared = "give it a larger share, or a share of 0"
    if needed > MAX_SAMPLES:
        return f"All sources get at least one from {needed:,} samples on, but a plan can have at most {MAX_SAMPLES:,}: {unshared}"
    if fits is not None and fits < needed:
        return (
            f"No length fits: all sources get at least one from {needed:,} samples on, but max_epochs allow {fits:,}: "
            f"{unshared}"
        )
    return f"All sources get at least one from {needed:,} samples on: {_set_length(config, split, needed, tokens)}; or {unshared}"


def _shorter(config: Config, split: str, needed: int, fits: int) -> str:
    """How to respect all caps, where every source would still get at least one sample."""
    if fits < needed:
        return "No length fits all sources: "
    if split == "train" and config.tokens is not None:
        return f"At most {fits:,} samples fit all caps: set `tokens: {fits * config.sequence_length}` or less, "
    key = "samples" if split == "train" else f"{split}_samples"
    instead = (
        f" instead of `epochs: {float(config.epochs):g}`" if split == "train" and config.epochs is not None else ""
    )
    return f"At most {fits:,} samples fit all caps: set `{key}: {fits}` or less{instead}, "
