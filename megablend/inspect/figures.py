"""The figures of a source as tables show them, on the HTML page and in the terminal. This module
has only numbers; columns of words are in megablend.cli.describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megablend.inspect.description import SourceDescription, SplitDescription


class Figure(NamedTuple):
    """A column of a table of sources."""

    title: str
    number: str | Callable[[SourceDescription], float | None]
    """The name of an attribute of the source, or a function of the source."""
    digits: str = ","
    """Format specification of the number."""
    of_blends: bool = False
    """Whether only blended splits have the figure. In other splits, no shares are requested, and
    sources are read one after another."""

    def find(self, source: SourceDescription) -> float | None:
        """Return the number for a source, or None if the source has none."""
        number: float | None = (
            getattr(source, self.number) if isinstance(self.number, str) else self.number(source)
        )
        return number

    def write(self, source: SourceDescription) -> str:
        """Return the number for a source as text, which is empty if there is none."""
        number = self.find(source)
        return "" if number is None else format(number, self.digits)


_FIGURES = (
    Figure("requested share", "requested_share", ".6f", of_blends=True),
    Figure("actual share", "actual_share", ".6f"),
    Figure("samples", "samples"),
    Figure("tokens read", "tokens_read"),
    Figure("epochs", "epochs", ",.3f"),
    Figure("cap (samples)", "most_samples"),
    Figure("documents", "documents"),
    Figure("tokens", "tokens"),
    Figure("tokens left in epoch", "tokens_left_in_epoch"),
    Figure("first sample", "first_sample"),
    Figure("last sample", "last_sample"),
    Figure("epoch 0 ends", lambda source: next(iter(source.epoch_ends), None)),
    Figure("worst prefix error", "worst_prefix_error", ".2f", of_blends=True),
    Figure("stored MB", lambda source: source.stored_bytes / 1e6, ",.1f"),
)


def list_figures(split: SplitDescription) -> list[Figure]:
    """Return the columns of figures that the sources of a split have."""
    return [figure for figure in _FIGURES if split.blended or not figure.of_blends]
