"""Make the page: facts, warnings, charts of each split, and tables of all sources that can be
searched and sorted.

The file contains everything that the page needs; the page's content security policy forbids all
requests. Without JavaScript, the tables are complete but cannot be searched.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from megablend.inspect.description import RunDescription, SplitDescription
from megablend.inspect.figures import list_figures
from megablend.inspect.html.charts import Chart, list_charts, require_matplotlib
from megablend.prefetch.memory_budget import format_bytes
from megablend.system.atomic_write import check_target, replace_file


def write_html(described: RunDescription, path: str | Path) -> None:
    """Write a description of a run as one HTML page with charts, which needs no network. The file
    is replaced atomically.

    Args:
        described: the result of `megablend.describe`.

    Raises: ConfigError if matplotlib is not installed, or the path is a folder; CacheError if the
        file cannot be written.
    """
    require_matplotlib()
    target = Path(path).absolute()
    check_target(target)
    charts = {name: list_charts(split) for name, split in described.splits.items() if split.blended}
    replace_file(target, make_page(described, charts).encode(), "the page")


def make_page(described: RunDescription, charts: Mapping[str, Sequence[Chart]]) -> str:
    """Return the page's HTML.

    Args:
        charts: the charts of each split, by its name.
    """
    title = f"Run {described.run}"
    folder = files(__package__)
    style = folder.joinpath("page.css").read_text(encoding="utf-8")
    script = folder.joinpath("page.js").read_text(encoding="utf-8")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src '{_hash_of(script)}'"
    body = [
        '<a class="skip" href="#sources-train">Skip to the table of sources</a>',
        f"<header><h1>{escape(title)}</h1></header>",
        "<main>",
        *_facts(described),
        *_notes("Warnings", described.warnings),
        *_notes("Problems", described.problems),
        *(
            line
            for name, split in described.splits.items()
            for line in _split(name, split, charts.get(name, ()))
        ),
        "</main>",
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            *body,
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _hash_of(script: str) -> str:
    """Return the hash of a script, by which the page's content security policy allows it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _facts(described: RunDescription) -> Iterator[str]:
    """Yield the lines of a list of facts about the run."""
    facts = {
        "State": "committed" if described.committed else "not committed",
        "Note": described.note,
        "Cache": described.cache,
        "Plan": described.plan,
        "Stages end at sample": ", ".join(f"{end:,}" for end in described.stages),
        "Order": f"{described.order}, {described.lanes:,} lanes",
        "Sequence length": f"{described.sequence_length:,} tokens",
        "Index": f"{described.index.digest}: {described.index.files:,} files, {described.index.tokens:,} tokens",
    }
    if described.read_amplification is not None:
        facts["Read amplification"] = f"{described.read_amplification:.3f}"
    if described.memory_per_rank is not None and described.memory_limit_per_rank is not None:
        needed = format_bytes(described.memory_per_rank, up=True)
        limit = format_bytes(described.memory_limit_per_rank)
        facts["Memory of a rank"] = f"at least {needed}, of {limit} that the config allows"
    for number, skipped in enumerate(described.skips, 1):
        facts[f"Skipped range {number}"] = (
            f"samples {skipped.start:,} to {skipped.stop:,}; {skipped.tokens:,} tokens are not read"
        )
    yield "<dl>"
    for name, text in facts.items():
        if text:
            yield f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>"
    yield "</dl>"


def _notes(title: str, lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a section of warnings or problems, if there are any."""
    if lines:
        yield f"<section><h2>{title}</h2><div class='notes'><ul>"
        yield from (f"<li>{escape(line)}</li>" for line in lines)
        yield "</ul></div></section>"


def _split(name: str, split: SplitDescription, charts: Sequence[Chart]) -> Iterator[str]:
    """Yield the lines of the section on a split."""
    scope = "blended" if split.blended else "one unblended pass"
    yield f'<section aria-labelledby="split-{name}"><h2 id="split-{name}">Split {name}</h2>'
    if split.problem is not None:
        yield f"<p>{escape(split.problem)}</p></section>"
        return
    yield f"<p>{split.samples:,} samples, {split.tokens:,} tokens, {scope}.</p>"
    repeat = split.first_repeated_source
    if repeat is not None:
        explanation = "is the first source to begin epoch 1, which reads its tokens again"
        yield f"<p>{escape(repeat.source)} {explanation}, at about sample {repeat.sample:,}.</p>"
    for number, chart in enumerate(charts):
        yield f"<figure><h3>{escape(chart.title)}</h3><figcaption>{escape(chart.text)}</figcaption>"
        yield f'<div class="drawing" tabindex="0" role="group" aria-label="{escape(chart.title)}">'
        yield f"{chart.to_svg(f'{name}-{number}')}</div></figure>"
    yield from _table(name, split)
    yield "</section>"


def _table(name: str, split: SplitDescription) -> Iterator[str]:
    """Yield the lines of the table of a split's sources."""
    count = f"{len(split.sources):,} sources"
    figures = list_figures(split)
    yield f'<div data-table id="sources-{name}">'
    yield f'<div class="search" hidden><label for="search-{name}">Search sources of {name}</label>'
    yield f'<input id="search-{name}" type="search" autocomplete="off"><span role="status">{count}</span></div>'
    yield f'<div class="scroll" tabindex="0" role="region" aria-label="Sources of {name}"><table>'
    yield f"<caption>All {count} of {name}</caption><thead><tr>"
    yield "".join(
        f'<th scope="col">{title}</th>'
        for title in ("source", *(figure.title for figure in figures))
    )
    yield "</tr></thead><tbody>"
    for source in split.sources:
        title = escape(source.name, quote=True)
        cells = "".join(_cell(figure.find(source), figure.write(source)) for figure in figures)
        yield f'<tr><th scope="row" title="{title}">{title}</th>{cells}</tr>'
    yield "</tbody></table></div></div>"


def _cell(number: float | None, text: str) -> str:
    """Return a cell of the table; `number` is the value by which the column is sorted."""
    return "<td></td>" if number is None else f'<td data-value="{number:.12g}">{text}</td>'
