"""Charts of a run: for each a wide drawing and a narrow one, so that text keeps its size on small screens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megablend.api.description import SourceDescription, SplitDescription
from megablend.report import drawings
from megablend.report.svg import STYLE, render_svg

DRAWN = 200
"""Sources that charts show: those that the run reads most."""
_WIDE, _NARROW = 11.5, 3.6
"""Widths in inches, at 96 pixels each."""
_ROW, _HEIGHT = 0.24, 2.6
"""Heights in inches, without what is around the axes: of one row in a chart of sources, and of other charts."""
Drawing = Callable[[Any, bool], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart of the page."""

    title: str
    text: str
    """What it shows, in words."""
    wide: str
    narrow: str
    """SVG elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sketch:
    """A chart before it is drawn."""

    title: str
    text: str
    draw: Drawing
    rows: int | None
    """Rows of sources; None for a chart of another kind, which has a legend."""


def draw_charts(split: SplitDescription, *, key: str) -> list[Chart]:
    """The charts of a split's sources.

    Args:
        key: what the ids of their elements begin with.
    """
    sources = sorted((each for each in split.sources if each.samples), key=lambda each: -each.tokens_read)[:DRAWN]
    if not sources:
        return []
    return [
        Chart(
            title=sketch.title,
            text=sketch.text,
            wide=_draw(sketch, key=f"{key}-{number}-wide", narrow=False),
            narrow=_draw(sketch, key=f"{key}-{number}-narrow", narrow=True),
        )
        for number, sketch in enumerate(_sketch(split, sources))
    ]


def _sketch(split: SplitDescription, sources: Sequence[SourceDescription]) -> Iterator[_Sketch]:
    first, most, rows = sources[0], max(sources, key=lambda each: each.epochs), len(sources)
    of = f"all {rows} sources"
    if rows < len(split.sources):
        of = f"the {rows} most read of {len(split.sources)} sources"
    stages = "one stage" if split.stages is None else f"{len(split.stages)} stages"
    yield _Sketch(
        title="Shares over the run",
        text=f"Shares of the samples from the first to sample {split.samples:,}, in {stages}. The largest over the run is that "
        f"of {first.name}, {first.actual_share:.1%}.",
        draw=lambda axes, narrow: drawings.draw_shares(axes, split, sources, narrow=narrow),
        rows=None,
    )
    yield _Sketch(
        title="Requested and actual shares",
        text=f"Shares of {of}: bars show the run's shares, marks those that the config requests.",
        draw=lambda axes, narrow: drawings.draw_requested(axes, sources, narrow=narrow),
        rows=rows,
    )
    yield _Sketch(
        title="Tokens read",
        text=f"Tokens that the run reads from {of}; {first.name} has the most, {first.tokens_read:,}.",
        draw=lambda axes, narrow: drawings.draw_tokens(axes, sources, narrow=narrow),
        rows=rows,
    )
    yield _Sketch(
        title="Epochs",
        text=f"How often the run reads {of}; {most.name} most often, {most.epochs:.2f} times. The line marks one epoch.",
        draw=lambda axes, narrow: drawings.draw_epochs(axes, sources, narrow=narrow),
        rows=rows,
    )
    yield _Sketch(
        title="Exhaustion",
        text=f"First and last sample of {of}. Marks show where epochs end, up to 32 for each source.",
        draw=lambda axes, narrow: drawings.draw_exhaustion(axes, sources, split.samples, narrow=narrow),
        rows=rows,
    )
    if listed := [each for each in sources if each.document_lengths]:
        yield _Sketch(
            title="Lengths of documents",
            text=f"Documents of {len(listed)} sources by their number of tokens, as fractions of each source's documents.",
            draw=lambda axes, narrow: drawings.draw_lengths(axes, listed, narrow=narrow),
            rows=None,
        )
    else:
        yield _Sketch(
            title="Mean lengths of documents",
            text=f"Mean number of tokens per document of {of}. With document tables (`order: document`), all lengths are known.",
            draw=lambda axes, narrow: drawings.draw_means(axes, sources, narrow=narrow),
            rows=rows,
        )


def _draw(sketch: _Sketch, *, key: str, narrow: bool) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = STYLE
    width = _NARROW if narrow else _WIDE
    top, bottom = 0.1, 0.55
    if sketch.rows is None:
        height, left, right = _HEIGHT, 0.7, 0.25 if narrow else 2.2
        bottom += 1.3 if narrow else 0.0  # for the legend
    else:
        height, left, right = _ROW * sketch.rows, 1.2 if narrow else 1.7, 0.25
        if sketch.rows > drawings.TALL:
            top, bottom = bottom, top
    full = top + height + bottom
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, full), dpi=96)
        axes = figure.add_axes((left / width, bottom / full, 1 - (left + right) / width, height / full))
        sketch.draw(axes, narrow)
        return render_svg(figure, key=key, title=sketch.title, description=sketch.text)
