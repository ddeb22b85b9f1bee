"""The figures of a source as tables show them, on the page and in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megablend.api.description import SourceDescription, SplitDescription


class Figure(NamedTuple):
    """A column of a table of sources."""

    title: str
    find: Callable[[SourceDescription], float | None]
    """The number; None if the source has none."""
    digits: str = ","
    """How `format` writes it."""
    of_blends: bool = False
    """Whether only blended splits have it: in others nobody requested shares, and the sources follow one another."""

    def write(self, source: SourceDescription) -> str:
        """The number as text; empty if there is none."""
        number = self.find(source)
        return "" if number is None else format(number, self.digits)


_FIGURES = (
    Figure("requested share", lambda source: source.requested_share, ".6f", of_blends=True),
    Figure("actual share", lambda source: source.actual_share, ".6f"),
    Figure("samples", lambda source: source.samples),
    Figure("tokens read", lambda source: source.tokens_read),
    Figure("epochs", lambda source: source.epochs, ",.3f"),
    Figure("cap (samples)", lambda source: source.most_samples),
    Figure("documents", lambda source: source.documents),
    Figure("tokens", lambda source: source.tokens),
    Figure("tokens left in epoch", lambda source: source.tokens_left_in_epoch),
    Figure("first sample", lambda source: source.first_sample),
    Figure("last sample", lambda source: source.last_sample),
    Figure("epoch 0 ends", lambda source: next(iter(source.epoch_ends), None)),
    Figure("worst prefix error", lambda source: source.worst_prefix_error, ".2f", of_blends=True),
    Figure("stored MB", lambda source: source.stored_bytes / 1e6, ",.1f"),
)


def list_figures(split: SplitDescription) -> list[Figure]:
    """The figures that the sources of a split have."""
    return [figure for figure in _FIGURES if split.blended or not figure.of_blends]
