"""A description of a run as one HTML page with charts, for the browser:
`write_html(megablend.describe(config), "run.html")`.

page       the page: facts, charts, and a table of all sources that can be searched and sorted
charts     the charts of a split, each with a text that describes it, as SVG elements of the page
drawings   the contents of charts, drawn on matplotlib's axes

The columns of the table are in megablend.inspect.figures.

matplotlib draws SVG without a browser or JavaScript: the charts are text and shapes in the page
itself, sharp at any size, and small. Libraries that draw in the browser would add megabytes of
their own to each page, and most draw to a canvas, which screen readers cannot read.
"""

from megablend.inspect.html.page import write_html

__all__ = ["write_html"]
