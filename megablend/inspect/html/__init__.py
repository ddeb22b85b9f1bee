"""A description of a run as one HTML page with charts, for the browser:
`write_html(megablend.describe(config), "run.html")`.

charts     the charts of a split: which there are, what each says in words, and as SVG that can stand in a page
drawings   what each shows, on matplotlib's axes
figures    the columns of tables of sources
page       the page: facts, charts, and a table of all sources that can be searched and sorted

matplotlib draws SVG without a browser or JavaScript: the charts are text and shapes in the page
itself, sharp at any size, and small. Libraries that draw in the browser would add megabytes of
their own to each page, and most draw to a canvas, which screen readers cannot read.
"""

from megablend.inspect.html.page import write_html

__all__ = ["write_html"]
