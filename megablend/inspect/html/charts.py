"""Charts of a run."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any

from megablend.errors import ConfigError
from megablend.inspect.description import SourceDescription, SplitDescription
from megablend.inspect.html import drawings

DRAWN = 200
"""The maximum number of sources that a chart shows, which are those that the run reads most."""
_WIDTH = 11.5
"""Width of a drawing in inches, of 96 pixels each."""
_ROW = 0.24
"""Height of a row in a chart of sources, in inches."""
_HEIGHT = 2.6
"""Height of the axes of other charts, in inches."""
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: small, sharp, searchable
    "svg.hashsalt": "megablend",  # the same page for the same run
    "text.parse_math": False,  # names may have dollar signs
    "font.family": "DejaVu Sans",  # comes with matplotlib; the page names others, for browsers that lack it
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#dddddd",
}
_ID = re.compile(r'(\bid="|url\(#|href="#)')
"""Matches the text before an id in SVG."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart of the page."""

    title: str
    text: str
    """A description of what the chart shows."""
    draw: Callable[..., None]
    """A function of `drawings` whose remaining parameter is matplotlib's axes."""
    rows: int | None
    """Number of rows of a chart of sources; None for other charts, which have a legend."""

    def to_svg(self, key: str) -> str:
        """Return the drawing as an `<svg>` element, with names for screen readers.

        Args:
            key: a prefix of the ids in the element, unique in the page.
        """
        import matplotlib as mpl
        from matplotlib.figure import Figure

        style: Any = _STYLE
        height = _HEIGHT if self.rows is None else _ROW * self.rows
        # Margins around the axes, in inches
        left = 1.7  # names of sources
        right = 0.25
        top = 0.1
        bottom = 0.55  # numbers and name of the x axis
        if self.rows is None:
            left = 0.7
            right = 2.2  # the legend
        elif self.rows > drawings.TALL:
            top, bottom = bottom, top  # the x axis is at the top
        full = top + height + bottom
        with mpl.rc_context(style):
            figure = Figure(figsize=(_WIDTH, full), dpi=96)
            axes = figure.add_axes(
                (left / _WIDTH, bottom / full, 1 - (left + right) / _WIDTH, height / full)
            )
            self.draw(axes)
            svg = io.StringIO()
            figure.savefig(
                svg,
                format="svg",
                metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
            )
        return self._name(svg.getvalue(), key)

    def _name(self, svg: str, key: str) -> str:
        """Return the `<svg>` element of matplotlib's file with the chart's title and text, and with
        ids that begin with `key`."""
        element = _ID.sub(rf"\g<1>{key}-", svg[svg.index("<svg") :])
        head, _, body = element.partition(">")
        names = f'role="img" aria-labelledby="{key}-title {key}-desc"'
        labels = f'<title id="{key}-title">{escape(self.title)}</title><desc id="{key}-desc">{escape(self.text)}</desc>'
        return f"{head} {names}>{labels}{body}"


def require_matplotlib() -> None:
    """Check that matplotlib is installed. Raises: ConfigError with the command that installs it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("charts need matplotlib: pip install 'megablend[html]'") from None


def list_charts(split: SplitDescription) -> list[Chart]:
    """Return the charts of a split; an empty list if the split has no samples."""
    sources = sorted(
        (source for source in split.sources if source.samples),
        key=lambda source: -source.tokens_read,
    )[:DRAWN]
    return list(_list_charts(split, sources)) if sources else []


def _list_charts(split: SplitDescription, sources: Sequence[SourceDescription]) -> Iterator[Chart]:
    """Yield the charts of a split. `sources`: the sources to show, the most read first."""
    most_read = sources[0]
    most_repeated = max(sources, key=lambda source: source.epochs)
    rows = len(sources)
    shown = f"all {rows} sources"
    if rows < len(split.sources):
        shown = f"the {rows} most read of {len(split.sources)} sources"
    stages = "one stage" if split.stages is None else f"{len(split.stages)} stages"
    yield Chart(
        title="Shares over the run",
        text=f"Shares of the samples from the first to sample {split.samples:,}, in {stages}. The largest over the run is that "
        f"of {most_read.name}, {most_read.actual_share:.1%}.",
        draw=partial(drawings.draw_shares, split, sources),
        rows=None,
    )
    yield Chart(
        title="Requested and actual shares",
        text=f"Shares of {shown}: bars show the run's shares, marks those that the config requests.",
        draw=partial(drawings.draw_requested, sources),
        rows=rows,
    )
    yield Chart(
        title="Tokens read",
        text=f"Tokens that the run reads from {shown}; {most_read.name} has the most, {most_read.tokens_read:,}.",
        draw=partial(drawings.draw_tokens, sources),
        rows=rows,
    )
    yield Chart(
        title="Epochs",
        text=f"How often the run reads {shown}; {most_repeated.name} most often, {most_repeated.epochs:.2f} times. "
        "The line marks one epoch.",
        draw=partial(drawings.draw_epochs, sources),
        rows=rows,
    )
    yield Chart(
        title="Exhaustion",
        text=f"First and last sample of {shown}. Marks show where epochs end, up to 32 for each source.",
        draw=partial(drawings.draw_exhaustion, split.samples, sources),
        rows=rows,
    )
    yield Chart(
        title="Mean lengths of documents",
        text=f"Mean number of tokens per document of {shown}.",
        draw=partial(drawings.draw_means, sources),
        rows=rows,
    )
