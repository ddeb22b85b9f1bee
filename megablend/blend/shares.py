"""Compute exact weights and a length from the weights or amounts of a config. Impossible blends are
refused; errors name the source."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import MAX_EMAX, MIN_EMIN, ROUND_HALF_EVEN, Context, Decimal, localcontext
from fractions import Fraction
from typing import NamedTuple

from megablend.blend.caps import capped_shares
from megablend.blend.epochs import Epochs, ReadBefore
from megablend.blend.interleavings.base import MAX_SAMPLES
from megablend.config import SPLITS, Config, Source
from megablend.config.values import SIZE
from megablend.errors import PlanError


def set_length(config: Config, split: str, samples: int, tokens: int) -> str:
    """Return advice on the length to set so that a split has at least `samples` samples, in the
    unit that the config uses.

    Args:
        tokens: number of tokens of one epoch of all sources in the split.
    """
    if split != "train":
        return f"set `{split}_samples: {samples}` or more"
    if config.tokens is not None:
        return f"set `tokens: {samples * config.sequence_length}` or more"
    if config.epochs is not None and tokens:
        extra = int(config.add_extra_token_to_sequence)
        return f"set `epochs: {round_up(Fraction(samples * config.sequence_length + extra, tokens))}` or more"
    return f"set `samples: {samples}` or more"


def fit_all_caps(config: Config, split: str, samples: int) -> str:
    """Return advice on the length to set so that a split has at most `samples` samples, as many as
    its caps allow. The text ends with a comma; it is empty for 0 samples."""
    if samples < 1:
        return ""
    if split == "train" and config.tokens is not None:
        return f"set `tokens: {samples * config.sequence_length}` or less, "
    key = "samples" if split == "train" else f"{split}_samples"
    instead = (
        f" instead of `epochs: {float(config.epochs):g}`"
        if split == "train" and config.epochs is not None
        else ""
    )
    return f"set `{key}: {samples}` or less{instead}, "


def round_up(number: Fraction) -> str:
    """Return a number rounded up to six decimals, as text."""
    return f"{-(-number * 10**6 // 1) / 10**6:f}".rstrip("0").rstrip(".")


DIGITS = 12
"""Significant digits of computed weights, which the ledger stores as exact shares."""
_PRECISION = 50
"""Significant digits of the computation."""


def compute_weights(weights: Sequence[Fraction], temperature: Fraction | None) -> list[Fraction]:
    """Divide the weights by their sum, and raise each to the power 1 / temperature, rounded to
    DIGITS digits.

    Args:
        weights: [num_sources], 0 or more, not all 0; 0 stays 0.
        temperature: None stands for 1.
    """
    total = sum(weights)
    with localcontext(
        Context(prec=_PRECISION, rounding=ROUND_HALF_EVEN, Emin=MIN_EMIN, Emax=MAX_EMAX)
    ):
        return [
            _power(weight / total, temperature or Fraction(1)) if weight else Fraction(0)
            for weight in weights
        ]


def _power(number: Fraction, temperature: Fraction) -> Fraction:
    """Return a number to the power 1 / temperature, rounded to DIGITS digits."""
    value = Decimal(number.numerator) / Decimal(number.denominator)
    if temperature != 1:
        value = (value.ln() * temperature.denominator / temperature.numerator).exp()
    return Fraction(
        Context(prec=DIGITS, rounding=ROUND_HALF_EVEN, Emin=MIN_EMIN, Emax=MAX_EMAX).create_decimal(
            value
        )
    )


class Shares(NamedTuple):
    """The weights and the length of a requested blend."""

    weights: tuple[Fraction, ...]
    """The share of each source, [num_sources], sum 1; with `on_exhausted: redistribute`, no source
    exceeds its cap."""
    requested: tuple[Fraction, ...]
    """The shares that the config requests, without regard to caps, [num_sources], sum 1."""
    num_samples: int


def samples_in(tokens: Fraction | int, sequence_length: int, extra: int) -> int:
    """Return the number of complete samples in `tokens` tokens: sample i has tokens [i *
    sequence_length, (i + 1) * sequence_length + extra)."""
    return max(0, int((Fraction(tokens) - extra) // sequence_length))


def cap_of(
    source: Source,
    tokens: int,
    sequence_length: int,
    extra: int,
    *,
    read: int = 0,
    most: int | None = None,
) -> int | None:
    """Return the maximum number of samples that a source may give, by its max_epochs and
    max_tokens; None if the source has neither.

    Args:
        tokens: number of tokens of the source in the split, in one epoch.
        read: number of tokens of the source that were read before, over all epochs.
        most: number of tokens in the source's first max_epochs epochs; by default, all epochs have
            the same number of tokens.
    """
    caps = []
    if source.max_epochs is not None:
        limit = source.max_epochs * tokens if most is None else most
        caps.append(samples_in(limit - read, sequence_length, extra))
    if source.max_tokens is not None:
        caps.append(samples_in(source.max_tokens - read, sequence_length, 0))
    return min(caps, default=None)


def find_most_tokens(
    sources: Sequence[Source], epochs: Epochs, before: Sequence[int] | None = None
) -> list[int | None]:
    """Return the number of tokens in the first max_epochs epochs of each source; None for a source
    without max_epochs.

    Args:
        before: [num_sources], positions of the sources; see `Epochs.find_position`.
    """
    stops = [None] * len(sources) if before is None else before
    return [
        None
        if source.max_epochs is None
        else epochs.find_position(number, source.max_epochs, before=stop)
        for number, (source, stop) in enumerate(zip(sources, stops, strict=True))
    ]


def shares_of(
    config: Config,
    split: str,
    sources: Sequence[Source],
    tokens: Sequence[int],
    read: ReadBefore | None = None,
) -> Shares:
    """Return the weights and length of a blended split.

    If the config sets a length, the sources' numbers are relative weights; otherwise they are
    amounts, and their sum is the length.

    Args:
        tokens: number of tokens of each source in this split, including end-of-document tokens.
        read: the tokens of each source that were read before; by default, none were read.

    Raises: PlanError if a source with a share has no tokens or less than one sample, or the
        split would have no samples, more than MAX_SAMPLES, or more than all caps together allow.
    """
    extra = int(config.add_extra_token_to_sequence)
    unit = sources[0].unit or "weight"
    _refuse_empty(config, split, sources, tokens)
    values = _list_values(config, sources, unit, tokens)
    num_samples = _find_length(config, split, sum(tokens), extra)
    if num_samples is None:
        values = _amounts_in_samples(config, split, sources, unit, values)
        num_samples = int(sum(values))
    if num_samples < 1:
        # One sample of each source
        needed = max((-(-sum(values) // value) for value in values if value), default=1)
        more = ", or add data" if config.epochs is not None else ""
        raise PlanError(
            f"{split} would have fewer tokens than one sample of {config.sequence_length} tokens: "
            f"{set_length(config, split, needed, sum(tokens))}{more}"
        )
    if num_samples > MAX_SAMPLES:
        raise PlanError(
            f"{split} would have {num_samples:,} samples; a plan can have at most {MAX_SAMPLES:,}: request fewer"
        )
    total = sum(values)
    requested = tuple(Fraction(value) / total for value in values)
    weights = requested
    if config.on_exhausted == "redistribute":
        weights = _redistribute(config, split, sources, requested, tokens, num_samples, read)
    return Shares(weights, requested, num_samples)


def _refuse_empty(
    config: Config, split: str, sources: Sequence[Source], tokens: Sequence[int]
) -> None:
    """Refuse sources that must give samples, but have no tokens. Raises: PlanError."""
    for source, source_tokens in zip(sources, tokens, strict=True):
        if source_tokens == 0 and _gives_samples(source):
            remedies = _advise_tokens(config, split)
            if any(
                n > 0 and _gives_samples(other) for other, n in zip(sources, tokens, strict=True)
            ):
                remedies.append(f"leave it out with `{source.unit or 'weight'}: 0`")
            raise PlanError(
                f"source {source.name!r} has no tokens in {split}: {', or '.join(remedies)}"
            )


def _gives_samples(source: Source) -> bool:
    """Return whether a source has a share that is not 0."""
    return source.unit is None or getattr(source, source.unit) != 0


def _advise_tokens(config: Config, split: str) -> list[str]:
    """Return the remedies for a source without tokens in a split, one text each."""
    share = Fraction(1) if config.listed_by_split else config.shares[SPLITS.index(split)]
    if share == 0:
        return [f"give {split} a share in `split`"]
    larger = [f"give {split} a larger share in `split`"] if share < 1 else []
    return ["add files with tokens to it", *larger]


def _list_values(
    config: Config, sources: Sequence[Source], unit: str, tokens: Sequence[int]
) -> list[Fraction]:
    """Return the numbers that the config gives for the sources, [num_sources]: relative weights, or
    amounts in samples or tokens."""
    values = list[Fraction]()
    is_sized = False
    for source, n in zip(sources, tokens, strict=True):
        value = getattr(source, unit) if source.unit else Fraction(1)
        is_sized |= value == SIZE
        values.append(Fraction(n) if value == SIZE else value)
    if config.temperature is not None or is_sized:
        return compute_weights(values, config.temperature)
    if unit == "epochs":
        return [value * n for value, n in zip(values, tokens, strict=True)]
    return values


def _amounts_in_samples(
    config: Config, split: str, sources: Sequence[Source], unit: str, amounts: list[Fraction]
) -> list[Fraction]:
    """Return the sources' amounts in samples, [num_sources]. Raises: PlanError if one is less than
    a sample, or not an integer."""
    if unit in ("epochs", "tokens"):
        extra = int(config.add_extra_token_to_sequence) if unit == "epochs" else 0
        values = [Fraction(samples_in(amount, config.sequence_length, extra)) for amount in amounts]
        for source, amount, value in zip(sources, amounts, values, strict=True):
            if amount > 0 and value == 0:
                raise PlanError(
                    f"source {source.name!r} would give {split} {float(amount):,.0f} tokens, fewer than one sample of "
                    f"{config.sequence_length + extra}: {_advise_amount(source, unit, amount, config.sequence_length + extra)}"
                )
        return values
    if any(amount.denominator != 1 for amount in amounts):
        raise PlanError(
            "`samples` of sources are counts if the config sets no length; expected whole numbers"
        )
    return amounts


def _advise_amount(source: Source, unit: str, amount: Fraction, needed: int) -> str:
    """Return advice on the amount to set so that a source has at least one sample of `needed`
    tokens."""
    if unit == "tokens":
        return f"set `tokens: {needed}` or more for it, or `tokens: 0`"
    epochs = round_up((source.epochs or Fraction(0)) * needed / amount)
    return f"set `epochs: {epochs}` or more for it, or `epochs: 0`"


def _find_length(config: Config, split: str, tokens: int, extra: int) -> int | None:
    """Return the number of samples of a split that the config sets; None if the config sets no
    length."""
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


def _redistribute(
    config: Config,
    split: str,
    sources: Sequence[Source],
    requested: Sequence[Fraction],
    tokens: Sequence[int],
    num_samples: int,
    read: ReadBefore | None,
) -> tuple[Fraction, ...]:
    """Return the shares that are nearest to the requested ones such that no source exceeds its cap,
    [num_sources]. Raises: PlanError if the caps allow too few samples."""
    extra = int(config.add_extra_token_to_sequence)
    read_before = read.tokens if read else [0] * len(tokens)
    limits = find_most_tokens(sources, read.epochs) if read else [None] * len(tokens)
    caps = [
        cap_of(source, n, config.sequence_length, extra, read=before, most=limit)
        for source, n, before, limit in zip(sources, tokens, read_before, limits, strict=True)
    ]
    capped = [
        cap for cap, share in zip(caps, requested, strict=True) if share > 0 and cap is not None
    ]
    if sum(capped) < num_samples and len(capped) == sum(share > 0 for share in requested):
        raise PlanError(
            f"{split} would have {num_samples:,} samples, but the caps of its sources together allow only "
            f"{sum(capped):,}: {fit_all_caps(config, split, sum(capped))}raise a cap, or remove the cap of a source "
            "that may repeat"
        )
    return tuple(capped_shares(requested, caps, num_samples))
