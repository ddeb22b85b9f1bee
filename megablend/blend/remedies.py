"""Parts of messages about impossible blends: what to set instead, in the units of the config."""

from __future__ import annotations

from fractions import Fraction

from megablend.config import Config


def set_length(config: Config, split: str, samples: int, tokens: int) -> str:
    """What to set so that a split has at least `samples` samples, in the unit of its configured
    length.

    Args:
        tokens: of all sources in the split, once.
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
    """What to set so that a split has at most `samples` samples, which its caps allow, and a comma;
    empty for 0."""
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
    """The number with up to six decimals, rounded up."""
    return f"{-(-number * 10**6 // 1) / 10**6:f}".rstrip("0").rstrip(".")
