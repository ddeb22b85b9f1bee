"""Results of the race of loaders as Markdown, and as a plot where matplotlib is there."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def of(rows: Sequence[Row], state: str, key: str) -> float | None:
    """Median over rounds; None where there is none."""
    values = [row[key] for row in rows if row.get("state") == state and row.get(key) is not None]
    return statistics.median(values) if values else None


def shown(value: float | None, scale: float, digits: int) -> str:
    """A number, or a dash."""
    return "-" if value is None else f"{value / scale:,.{digits}f}"


def contenders_table(rows: Sequence[Row], names: Sequence[str]) -> str:
    """A line a contender."""
    lines = [
        "| loader | M tokens/s, warm | cold | CPU-s per 1e9 tokens, warm | cold | read / used, cold "
        "| batch p50 / p99, ms, warm | cold | first batch, s, warm | cold | peak PSS (of it not of files), MB | extra disk, MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        mine = [row for row in rows if row["contender"] == name]
        failures = [row["failed"] for row in mine if "failed" in row]
        measured = [row for row in mine if "failed" not in row]
        if not measured:
            if failures:
                lines.append(f"| {name} | {failures[-1]} |" + " |" * 10)
            continue
        cells = [name]
        for key, scale, digits in (("tokens_per_s", 1e6, 1), ("cpu_s_per_1e9", 1, 1)):
            cells += [shown(of(measured, state, key), scale, digits) for state in ("warm", "cold")]
        cells.append(shown(of(measured, "cold", "read_per_used"), 1, 2))
        for state in ("warm", "cold"):
            waits = [shown(of(measured, state, key), 1, 2) for key in ("p50_ms", "p99_ms")]
            cells.append(" / ".join(waits))
        cells += [shown(of(measured, state, "first_s"), 1, 2) for state in ("warm", "cold")]
        peaks = [
            max((row[key] for row in measured), default=0) / 1e6
            for key in ("pss_bytes", "own_bytes")
        ]
        cells.append(f"{peaks[0]:,.0f} ({peaks[1]:,.0f})")
        cells.append(f"{max(row['disk_bytes'] for row in measured) / 1e6:,.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def variants_table(rows: Sequence[Row], names: Sequence[str]) -> str:
    """A line for each page size and codec: what each of the contenders that read Parquet reach, warm / cold."""
    lines = ["| pages, codec | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for page, codec in dict.fromkeys((row["page"], row["codec"]) for row in rows):
        cells = []
        for name in names:
            mine = [
                row
                for row in rows
                if (row["contender"], row["page"], row["codec"]) == (name, page, codec)
            ]
            rates = [shown(of(mine, state, "tokens_per_s"), 1e6, 0) for state in ("warm", "cold")]
            cells.append(f"{' / '.join(rates)}; {shown(of(mine, 'warm', 'cpu_s_per_1e9'), 1, 1)}")
        lines.append(f"| {page}, {codec} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(rows: Sequence[Row], names: Sequence[str], path: Path) -> bool:
    """Bars of tokens/s, warm and cold; gives whether matplotlib is there."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    found = {name: [row for row in rows if row["contender"] == name] for name in names}
    found = {
        name: mine for name, mine in found.items() if any("tokens_per_s" in row for row in mine)
    }
    figure, axes = pyplot.subplots(figsize=(9, 0.5 * len(found) + 1.5), layout="constrained")
    for shift, state in ((-0.2, "warm"), (0.2, "cold")):
        rates = [(of(mine, state, "tokens_per_s") or 0) / 1e6 for mine in found.values()]
        axes.barh([place + shift for place in range(len(found))], rates, height=0.4, label=state)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel("million tokens/s")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
