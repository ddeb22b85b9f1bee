"""A node's page for browsers, as pure text. It loads nothing else, and reloads itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    """Format a page as HTML.

    Args:
        status: what `Node.get_status` returns.
        datasets: what `Datasets.list_all` and `get_status` return, merged; None without datasets.
    """
    cluster = status["cluster"]
    name = cluster["own"] if cluster else status["folder"]
    kind = "a service" if status["service"] else "started by a job"
    about = f"megablend {status['version']}, process {status['pid']}, {kind}, since {_time(status['started'])}"
    parts = [_HEAD, f"<title>megablend: {escape(name)}</title><h1>{escape(name)}</h1><p>{about}"]
    facts = {
        "held": f"{_gb(status['held_bytes'])} of {status['files']:,} files",
        "evicted": _gb(status["evicted_bytes"]),
        "read from the source": _gb(status["source_bytes"]),
        "read from other nodes": _gb(status["peer_bytes"]),
        "clients": f"{status['clients']:,}",
    }
    if cluster:
        away = cluster["away_nodes"]
        facts["nodes"] = f"{cluster['nodes']:,}, view {cluster['view']}"
        if away:
            more = f" and {len(away) - _MAX_NAMES:,} more" if len(away) > _MAX_NAMES else ""
            facts["away"] = f"{len(away):,} nodes: {', '.join(away[:_MAX_NAMES])}{more}"
        if not cluster["formed"]:
            facts["nodes do not work together"] = cluster["trouble"] or "some are missing"
        facts["copies owed"] = _gb(cluster.get("bytes_to_copy", 0))
    if datasets:
        facts["room"] = _gb(datasets["capacity"])
        if datasets["trouble"]:
            facts["datasets are not looked after"] = datasets["trouble"]
        bad = {
            name: each["trouble"] for name, each in datasets["listed"].items() if each["trouble"]
        }
        facts |= {f"source of {name}": bad[name] for name in sorted(bad)[:_MAX_NAMES]}
    parts.append(_table(_row(map(escape, fact)) for fact in facts.items()))
    if datasets:
        rows = sorted(_list_rows(datasets["revisions"], datasets["goals"]))
        head = _row(["dataset", "files", "size", "added", "held", ""], "th")
        parts.append(_table([head, *(row for _, _, row in rows[:_MAX_ROWS])]))
        if len(rows) > _MAX_ROWS:
            parts.append(
                f"<p>and {len(rows) - _MAX_ROWS:,} more: <code>megablend datasets list</code>"
            )
    return "\n".join(parts)


def _list_rows(
    revisions: Sequence[Mapping[str, Any]], goals: Iterable[Mapping[str, Any]]
) -> Iterable[tuple[int, str, str]]:
    """A row for each revision, after its rank and name, by which rows are sorted. Revisions in
    trouble come first, then incomplete ones, complete ones, and those that nobody wants."""
    wanted = {(goal["want"].partition("@")[0], goal["revision"]): goal for goal in goals}
    for each in revisions:
        goal = wanted.get((each["dataset"], each["digest"]))
        name = f"{each['dataset']}@{each['digest'][:12]}"
        cells = [f"<code>{escape(name)}</code>", f"{each['num_files']:,}", _gb(each["num_bytes"])]
        cells.append(_time(each["added"]) + ", found by listing again" * each["is_found"])
        if goal is None:
            yield 3, name, _row([*cells, "", "not wanted"])
            continue
        needed = goal["bytes"]
        held = needed - goal["missing"]
        bar = f"<progress max={max(1, needed)} value={held if needed else 1}></progress>"
        bad = [f"does not fit: {_gb(goal['short'])} too much"] if goal["short"] else []
        bad += [escape(goal["trouble"])] if goal["trouble"] else []
        state = f"<span class=bad>{'; '.join(bad)}</span>" if bad else "pinned" * goal["pinned"]
        rank = 2
        if bad:
            rank = 0
        elif goal["missing"]:
            rank = 1
        yield rank, name, _row([*cells, f"{bar} {_gb(held)} of {_gb(needed)}", state])


def _table(rows: Iterable[str]) -> str:
    return f"<table>{''.join(rows)}</table>"


def _row(cells: Iterable[str], kind: str = "td") -> str:
    return f"<tr>{''.join(f'<{kind}>{cell}' for cell in cells)}\n"


def _gb(size: int) -> str:
    return f"{size / 1e9:,.3f} GB"


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M} UTC"
