"""The page of a run, written to a file."""

from __future__ import annotations

from pathlib import Path

from megablend.api.description import RunDescription
from megablend.fs.atomic_write import check_target, replace_file
from megablend.report.charts import draw_charts
from megablend.report.page import make_page
from megablend.report.svg import require_matplotlib


def write_html(described: RunDescription, path: str | Path) -> None:
    """Write a description of a run as one HTML page with charts; it replaces the file atomically and needs no network.

    Args:
        described: from `megablend.describe`; with `document_lengths=True` their distribution is drawn.

    Raises: ConfigError where matplotlib is not installed, or the path is not that of a file;
        CacheError where the file cannot be written.
    """
    require_matplotlib()
    target = Path(path).absolute()
    check_target(target)
    charts = {name: draw_charts(split, key=name) for name, split in described.splits.items() if split.blended}
    replace_file(target, make_page(described, charts).encode(), "the page")
