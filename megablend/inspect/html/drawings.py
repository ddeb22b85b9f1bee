"""Draw the contents of charts on matplotlib's axes. Bars are drawn as lines, so that all bars of a
chart are one element, which keeps the page small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megablend.inspect.description import SourceDescription, SplitDescription

NAMED = 11
"""The maximum number of sources that have their own colour in a chart with a legend."""
_COLOURS = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"),
    *("#8c6d31", "#7b4173", "#637939", "#393b79", "#999999"),
)
"""The colours of sources. The first six are those of Okabe and Ito, which the colour-blind can tell
apart; the others differ from them as far as that is possible for eleven."""
_BLUE = "#0072b2"
_ORANGE = "#d55e00"
_GREY = "#bbbbbb"
_BAR = 11
"""Width of a bar, in points."""
TALL = 40
"""The number of rows above which a chart has its numbers at the top."""


def draw_shares(split: SplitDescription, sources: Sequence[SourceDescription], axes: Any) -> None:
    """Draw the shares of the samples, stage by stage: one for each of the largest sources, and one
    for all other sources together."""
    if split.stages is None:
        edges = [0, split.samples]
        parts = [{source.name: source.actual_share for source in split.sources}]
    else:
        edges = [0, *(stage.stop for stage in split.stages)]
        parts = [
            {source.name: source.actual_share for source in stage.sources} for stage in split.stages
        ]
    named = [source.name for source in sources[: NAMED - (len(split.sources) > NAMED)]]
    bands = [[part[name] for part in parts] for name in named]
    num_others = len(split.sources) - len(named)
    if num_others:
        named.append(f"{num_others} others")
        bands.append([max(0.0, 1 - sum(band[i] for band in bands)) for i in range(len(parts))])
    axes.stackplot(
        edges,
        [[*band, band[-1]] for band in bands],
        labels=[_shorten(name) for name in named],
        colors=_COLOURS,
        step="post",
        edgecolor="white",
        linewidth=0.5,
    )
    axes.set(xlim=(0, split.samples), ylim=(0, 1), xlabel="sample", ylabel="share")
    _shorten_counts(axes)
    axes.locator_params(axis="x", nbins=8)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def draw_requested(sources: Sequence[SourceDescription], axes: Any) -> None:
    """Draw actual shares as bars, requested ones as marks."""
    values = [source.actual_share for source in sources]
    _draw_bars(axes, sources, values, "share of the samples")
    _draw_marks(axes, [(source.requested_share, row) for row, source in enumerate(sources)])
    axes.set_xlim(
        0, 1.05 * max(max(source.requested_share, source.actual_share) for source in sources)
    )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.4g}")


def draw_tokens(sources: Sequence[SourceDescription], axes: Any) -> None:
    """Draw the number of tokens that are read from each source."""
    values = [source.tokens_read for source in sources]
    _draw_bars(axes, sources, values, "tokens read")
    _shorten_counts(axes)


def draw_epochs(sources: Sequence[SourceDescription], axes: Any) -> None:
    """Draw how often each source is read, with a line at one epoch."""
    values = [source.epochs for source in sources]
    _draw_bars(axes, sources, values, "epochs")
    axes.axvline(1, color=_ORANGE, linewidth=1.5)
    axes.set_xlim(0, 1.05 * max(1.0, *values))


def draw_exhaustion(samples: int, sources: Sequence[SourceDescription], axes: Any) -> None:
    """Draw a line from each source's first sample to its last one, with marks where epochs end."""
    firsts = [source.first_sample or 0 for source in sources]
    lasts = [source.last_sample or 0 for source in sources]
    axes.hlines(range(len(sources)), firsts, lasts, color=_GREY, linewidth=5)
    _draw_marks(
        axes, [(end, row) for row, source in enumerate(sources) for end in source.epoch_ends]
    )
    _name_rows(axes, sources)
    axes.set_xlim(0, samples)
    _shorten_counts(axes)
    axes.set_xlabel("sample")


def draw_means(sources: Sequence[SourceDescription], axes: Any) -> None:
    """Draw the mean length of each source's documents."""
    values = [source.tokens / max(1, source.documents) for source in sources]
    _draw_bars(axes, sources, values, "mean tokens per document")
    _shorten_counts(axes)


def _draw_bars(
    axes: Any,
    sources: Sequence[SourceDescription],
    values: Sequence[float],
    label: str,
) -> None:
    """Draw a row with a bar for each source.

    Args:
        label: the label of the values.
    """
    axes.hlines(range(len(sources)), 0, values, color=_BLUE, linewidth=_BAR)
    _name_rows(axes, sources)
    axes.set_xlim(0, 1.05 * max(values) or 1)
    axes.set_xlabel(label)


def _draw_marks(axes: Any, points: Sequence[tuple[float, int]]) -> None:
    """Draw a mark at each place, which is a pair (x, row)."""
    rows = [row for _, row in points]
    axes.vlines(
        [x for x, _ in points],
        [row - 0.4 for row in rows],
        [row + 0.4 for row in rows],
        color=_ORANGE,
        linewidth=2,
    )


def _name_rows(axes: Any, sources: Sequence[SourceDescription]) -> None:
    """Label the rows of a chart with the names of its sources, and place the numbers of the x
    axis."""
    axes.set_yticks(range(len(sources)), [_shorten(source.name) for source in sources])
    axes.set_ylim(len(sources) - 0.5, -0.5)
    axes.tick_params(axis="y", left=False)
    axes.grid(visible=False, axis="y")
    if len(sources) > TALL:  # the page scrolls such a chart, so that its top is seen first
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        axes.spines["bottom"].set_visible(False)
    axes.locator_params(axis="x", nbins=10)


def _shorten_counts(axes: Any) -> None:
    """Write the numbers of the x axis with suffixes; see `_shorten_number`."""
    axes.xaxis.set_major_formatter(lambda value, _: _shorten_number(value))


def _shorten(name: str) -> str:
    """Return the name of a source, cut if it is long."""
    return name if len(name) <= 20 else f"{name[:19]}\N{HORIZONTAL ELLIPSIS}"


def _shorten_number(value: float) -> str:
    """Return a number with a suffix: 1.5k, 20M, 3B, 1.2T."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:g}"
