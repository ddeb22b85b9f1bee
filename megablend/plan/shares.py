"""From what a config says of its sources to weights and a length: exact, refused by name where it cannot be had."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from megablend.config import Config, Source
from megablend.errors import PlanError
from megablend.plan.base import MAX_SAMPLES


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
            raise PlanError(
                f"source {source.name!r} has no tokens in {split}: give it {unit}: 0, more data, or a larger split"
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
                        f"{config.sequence_length + extras}: give it more {unit}, or {unit}: 0"
                    )
        elif any(value.denominator != 1 for value in values):
            raise PlanError("samples of sources are counts: expected whole numbers where no length is given at the top")
        num_samples = int(sum(values))
    if num_samples < 1:
        raise PlanError(f"{split} would have no sample of {config.sequence_length} tokens: ask for more or add data")
    if num_samples > MAX_SAMPLES:
        raise PlanError(
            f"{split} would have {num_samples:,} samples; a plan holds at most {MAX_SAMPLES:,}: ask for fewer"
        )
    total = sum(values)
    return Shares(tuple(Fraction(value) / total for value in values), num_samples)


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
    config: Config, sources: Sequence[Source], weights: Sequence[Fraction], totals: Sequence[int], tokens: Sequence[int]
) -> None:
    """Refuse a blend that leaves out a source it gives a share, or reads one more often than its cap allows.

    Args:
        totals: samples of each source over the whole run.

    Raises: PlanError naming the source, its numbers and the nearest that would do.
    """
    length, extra = config.sequence_length, int(config.add_extra_token_to_sequence)
    for source, weight, total, found in zip(sources, weights, totals, tokens, strict=True):
        if weight > 0 and total == 0:
            need = int(1 / weight) + 1
            raise PlanError(
                f"source {source.name!r} gets no sample of {sum(totals):,}: its share is {float(weight):.3g}. "
                f"Ask for about {need:,} samples or more, or give it a share of 0"
            )
        if source.max_epochs is None:
            continue
        cap = samples_in(source.max_epochs * found, length, extra)
        if total > cap:
            feasible = int(cap / weight)
            raise PlanError(
                f"source {source.name!r} would be read {total * length / found:.2f} times ({total:,} samples of {length} "
                f"tokens from its {found:,} tokens), more than its max_epochs {float(source.max_epochs):g} ({cap:,} samples). "
                f"Nearest that fits: about {feasible:,} samples in all, or a share of at most {cap / sum(totals):.6g} for it"
            )
