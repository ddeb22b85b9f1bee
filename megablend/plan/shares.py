"""From what a config says of its sources to weights and a length: exact, refused by name where it cannot be had."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from megablend.config import Config, Source
from megablend.errors import PlanError
from megablend.plan.interleavings.base import MAX_SAMPLES


class Shares(NamedTuple):
    """A blend asked for."""

    weights: tuple[Fraction, ...]
    """[num_sources], summing to 1."""
    num_samples: int


def samples_in(tokens: Fraction | int, sequence_length: int, extra: int) -> int:
    """Whole samples in so many tokens: sample i takes tokens [i*S, i*S + S + extra)."""
    return max(0, int((Fraction(tokens) - extra) // sequence_length))


def shares_of(config: Config, split: str, sources: Sequence[Source], tokens: Sequence[int]) -> Shares:
    """Weights and length of a blended split.

    With a length at the top, the sources' numbers are shares of it; without, they are amounts and the length is their sum.

    Args:
        tokens: of each source in this split, end-of-document tokens included.

    Raises: PlanError where a source with a share has no tokens or would give no sample, or the split would have no sample or
        more than a plan holds.
    """
    extra = int(config.add_extra_token_to_sequence)
    unit = sources[0].unit or "weight"
    values = [getattr(source, unit) if source.unit else Fraction(1) for source in sources]
    for source, value, found in zip(sources, values, tokens, strict=True):
        if value > 0 and found == 0:
            fewer = f", or leave it out by `{unit}: 0`" if len(sources) > 1 else ""
            raise PlanError(
                f"source {source.name!r} has no tokens in {split}: add files with tokens to it, or give {split} a larger share "
                f"of `split`{fewer}"
            )
    num_samples = _length(config, split, sum(tokens), extra)
    if unit == "epochs":
        values = [value * found for value, found in zip(values, tokens, strict=True)]
    if num_samples is None:
        if unit in ("epochs", "tokens"):
            extras = extra if unit == "epochs" else 0
            amounts, values = values, [Fraction(samples_in(v, config.sequence_length, extras)) for v in values]
            for source, amount, value in zip(sources, amounts, values, strict=True):
                if amount > 0 and value == 0:
                    raise PlanError(
                        f"source {source.name!r} would give {split} {float(amount):,.0f} tokens, less than a sample of "
                        f"{config.sequence_length + extras}: {_enough(source, unit, amount, config.sequence_length + extras)}"
                    )
        elif any(value.denominator != 1 for value in values):
            raise PlanError("samples of sources are counts: expected whole numbers where no length is given at the top")
        num_samples = int(sum(values))
    if num_samples < 1:
        raise PlanError(
            f"{split} would have no sample of {config.sequence_length} tokens: "
            f"{_set_length(config, split, 1, sum(tokens))}, or add data"
        )
    if num_samples > MAX_SAMPLES:
        raise PlanError(
            f"{split} would have {num_samples:,} samples; a plan holds at most {MAX_SAMPLES:,}: ask for fewer"
        )
    total = sum(values)
    return Shares(tuple(Fraction(value) / total for value in values), num_samples)


def _enough(source: Source, unit: str, amount: Fraction, needed: int) -> str:
    """How a source gets a sample that is an amount of tokens for itself."""
    if unit == "tokens":
        return f"set `tokens: {needed}` or more for it, or `tokens: 0`"
    epochs = _rounded_up((source.epochs or Fraction(0)) * needed / amount)
    return f"set `epochs: {epochs}` or more for it, or `epochs: 0`"


def _set_length(config: Config, split: str, samples: int, tokens: int) -> str:
    """What to write so that a split is at least so many samples long, in the unit that its length is given in."""
    if split != "train":
        return f"set `{split}_samples: {samples}` or more"
    if config.tokens is not None:
        return f"set `tokens: {samples * config.sequence_length}` or more"
    if config.epochs is not None and tokens:
        extra = int(config.add_extra_token_to_sequence)
        return f"set `epochs: {_rounded_up(Fraction(samples * config.sequence_length + extra, tokens))}` or more"
    return f"set `samples: {samples}` or more"


def _rounded_up(number: Fraction) -> str:
    """To six digits after the point; never less than the number."""
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
    """Refuse a blend that leaves out a source it gives a share, or reads one more often than its cap allows.

    Args:
        totals: samples of each source over the whole run.

    Raises: PlanError naming the source, its numbers, and what fits all sources at once.
    """
    length, extra = config.sequence_length, int(config.add_extra_token_to_sequence)
    given = [(source, weight, found) for source, weight, found in zip(sources, weights, tokens, strict=True) if weight]
    # With at least one over its weight, a source's share is a sample or more before anything is rounded.
    needed = max((-(-1 // weight) for _, weight, _ in given), default=1)
    fits = min(
        (
            int(samples_in(source.max_epochs * found, length, extra) / weight)
            for source, weight, found in given
            if source.max_epochs
        ),
        default=None,
    )
    for source, weight, total, found in zip(sources, weights, totals, tokens, strict=True):
        if weight > 0 and total == 0:
            raise PlanError(
                f"source {source.name!r} gets no sample of {sum(totals):,}: its share is {float(weight):.3g}. "
                f"{_longer(config, split, needed, fits, sum(tokens))}"
            )
        if source.max_epochs is None:
            continue
        cap = samples_in(source.max_epochs * found, length, extra)
        if total > cap:
            epochs = _rounded_up(Fraction(total * length + extra, found))
            raise PlanError(
                f"source {source.name!r} would be read {total * length / found:.2f} times ({total:,} samples of {length} "
                f"tokens from its {found:,} tokens), more than its max_epochs {float(source.max_epochs):g} ({cap:,} samples). "
                f"{_shorter(config, split, needed, fits or 0)}set `max_epochs: {epochs}` for it, or give it a smaller share"
            )


def _longer(config: Config, split: str, needed: int, fits: int | None, tokens: int) -> str:
    """What gives every source a sample, where no cap forbids that."""
    unshared = "give it a larger share, or a share of 0"
    if needed > MAX_SAMPLES:
        return f"All sources would get one from {needed:,} on, more than a plan holds ({MAX_SAMPLES:,}): {unshared}"
    if fits is not None and fits < needed:
        return f"No length fits: all sources get a sample from {needed:,} on, and max_epochs allow {fits:,}: {unshared}"
    return f"All sources get one from {needed:,} on: {_set_length(config, split, needed, tokens)}; or {unshared}"


def _shorter(config: Config, split: str, needed: int, fits: int) -> str:
    """What keeps all caps, where that leaves every source a sample."""
    if fits < needed:
        return "No length fits all sources: "
    if split == "train" and config.tokens is not None:
        return f"At most {fits:,} samples fit all caps: set `tokens: {fits * config.sequence_length}` or less, "
    key = "samples" if split == "train" else f"{split}_samples"
    instead = (
        f" in place of `epochs: {float(config.epochs):g}`" if split == "train" and config.epochs is not None else ""
    )
    return f"At most {fits:,} samples fit all caps: set `{key}: {fits}` or less{instead}, "
