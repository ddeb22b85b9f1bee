"""Formats the status page of a node: a single HTML document, which reloads itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from typing import Any

_MAX_ROWS = 1000
_MAX_NAMES = 50
_HEAD = """<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="10">
<meta name="viewport" content="width=device-width"><style>:root{color-scheme:light dark}
body{font:15px/1.4 sans-serif;margin:2em auto;max-width:75em;padding:0 1em}
table{border-collapse:collapse;margin:1em 0}
td,th{text-align:left;padding:.25em 1em .25em 0;border-bottom:1px solid #8884;vertical-align:top}
td:not(:last-child){white-space:nowrap}
.bad{color:#c22;font-weight:bold}progress{width:8em}code{font-size:.95em}</style>
"""


def format_page(status: Mapping[str, Any], datasets: Mapping[str, Any] | None) -> str:
    """Format the status page as HTML.

    Args:
        status: the result of `Node.get_status`.
        datasets: the results of `Datasets.list_all` and `get_status`, merged; None without
            datasets.
    """
    cluster = status["cluster"]
    name = escape(cluster["own"] if cluster else status["folder"])
    start = "a service" if status["service"] else "started by a job"
    about = f"megablend {status['version']}, process {status['pid']}, {start}, since {_time(status['started'])}"
    parts = [_HEAD, f"<title>megablend: {name}</title><h1>{name}</h1><p>{about}"]
    facts = _list_facts(status)
    if cluster:
        facts |= _list_facts_of_cluster(cluster)
    if datasets:
        facts |= _list_facts_of_datasets(datasets)
    parts.append(_table(_row(map(escape, fact)) for fact in facts.items()))
    if datasets:
        rows = sorted(_list_rows(datasets["revisions"], datasets["goals"]))
        head = _row(["dataset", "files", "size", "added", "held", ""], "th")
        parts.append(_table([head, *(row for _, _, row in rows[:_MAX_ROWS])]))
        if len(rows) > _MAX_ROWS:
            num_more = len(rows) - _MAX_ROWS
            parts.append(f"<p>and {num_more:,} more: <code>megablend datasets list</code>")
    return "\n".join(parts)


def _list_facts(status: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts about the node that the page shows, as texts by label."""
    return {
        "held": f"{_gb(status['held_bytes'])} of {status['files']:,} files",
        "evicted": _gb(status["evicted_bytes"]),
        "read from the source": _gb(status["source_bytes"]),
        "read from other nodes": _gb(status["peer_bytes"]),
        "clients": f"{status['clients']:,}",
    }


def _list_facts_of_cluster(cluster: Mapping[str, Any]) -> dict[str, str]:
    facts = {"nodes": f"{cluster['nodes']:,}, view {cluster['view']}"}
    away = cluster["away_nodes"]
    if away:
        num_more = len(away) - _MAX_NAMES
        more = f" and {num_more:,} more" if num_more > 0 else ""
        facts["away"] = f"{len(away):,} nodes: {', '.join(away[:_MAX_NAMES])}{more}"
    if not cluster["formed"]:
        facts["nodes do not work together"] = cluster["trouble"] or "some are missing"
    facts["copies yet to be fetched"] = _gb(cluster.get("bytes_to_copy", 0))
    return facts


def _list_facts_of_datasets(datasets: Mapping[str, Any]) -> dict[str, str]:
    facts = {"capacity": _gb(datasets["capacity"])}
    if datasets["trouble"]:
        facts["datasets are not being held"] = datasets["trouble"]
    troubles = {name: source["trouble"] for name, source in datasets["listed"].items()}
    failing = sorted(name for name, trouble in troubles.items() if trouble)
    return facts | {f"source of {name}": troubles[name] for name in failing[:_MAX_NAMES]}


def _list_rows(
    revisions: Sequence[Mapping[str, Any]], goals: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[int, str, str]]:
    """Yield a triple of rank, name and HTML for the row of each revision. Rows are sorted by rank:
    revisions with problems come first, then incomplete ones, complete ones, and unwanted ones."""
    goal_of = {(goal["want"].partition("@")[0], goal["revision"]): goal for goal in goals}
    for revision in revisions:
        name = f"{revision['dataset']}@{revision['digest'][:12]}"
        origin = ", found by listing again" if revision["is_found"] else ""
        cells = [
            f"<code>{escape(name)}</code>",
            f"{revision['num_files']:,}",
            _gb(revision["num_bytes"]),
            _time(revision["added"]) + origin,
        ]
        goal = goal_of.get((revision["dataset"], revision["digest"]))
        if goal is None:
            yield 3, name, _row([*cells, "", "not wanted"])
            continue
        troubles = []
        if goal["short"]:
            troubles.append(f"does not fit: {_gb(goal['short'])} too large")
        if goal["trouble"]:
            troubles.append(escape(goal["trouble"]))
        if troubles:
            rank = 0
            state = f"<span class=bad>{'; '.join(troubles)}</span>"
        else:
            rank = 1 if goal["missing"] else 2
            state = "pinned" if goal["pinned"] else ""
        yield rank, name, _row([*cells, _progress(goal["bytes"], goal["missing"]), state])


def _progress(needed: int, missing: int) -> str:
    held = needed - missing
    limits = f"max={needed} value={held}" if needed else "max=1 value=1"
    return f"<progress {limits}></progress> {_gb(held)} of {_gb(needed)}"


def _table(rows: Iterable[str]) -> str:
    return f"<table>{''.join(rows)}</table>"


def _row(cells: Iterable[str], tag: str = "td") -> str:
    return f"<tr>{''.join(f'<{tag}>{cell}' for cell in cells)}\n"


def _gb(size: int) -> str:
    return f"{size / 1e9:,.3f} GB"


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M} UTC"
