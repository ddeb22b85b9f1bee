"""A matplotlib figure as SVG inside an HTML page: with a name and a description for screen readers, and ids of its own."""

from __future__ import annotations

import io
import re
from html import escape
from typing import Any

from megablend.errors import ConfigError

STYLE: dict[str, Any] = {
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


def require_matplotlib() -> None:
    """Raises: ConfigError, which says what to install, where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("charts need matplotlib: pip install 'megablend[html]'") from None


def render_svg(figure: Any, *, key: str, title: str, description: str) -> str:
    """The figure as an `<svg>` element.

    Args:
        figure: a matplotlib Figure.
        key: what ids begin with; unique in the page.
        title, description: what a screen reader says in place of the drawing.
    """
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = drawn.getvalue()
    text = _ID.sub(rf"\g<1>{key}-", text[text.index("<svg") :])
    head, _, body = text.partition(">")
    names = f'role="img" aria-labelledby="{key}-title {key}-desc"'
    labels = f'<title id="{key}-title">{escape(title)}</title><desc id="{key}-desc">{escape(description)}</desc>'
    return f"{head} {names}>{labels}{body}"
