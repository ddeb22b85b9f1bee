"""What megatron-cache did or would do, as a table and as JSON."""

from __future__ import annotations

from typing import Any

from megablend.cli.lines import print_line
from megablend.cli.tables import new_console, new_table
from megablend.megatron.cache_builder.build_cache import CacheReport
from megablend.megatron.cache_builder.work_plan import Job, SplitPlan


def summary(report: CacheReport, *, cache: str, dry_run: bool) -> dict[str, Any]:
    """The report as a dict for JSON."""
    return {
        "cache": cache,
        "dry_run": dry_run,
        "splits": [_split(split, report.missing) for split in report.splits],
        "artefacts": [_artefact(job, report.missing) for split in report.splits for job in split.jobs],
        "notes": list(report.notes),
        "ranks": report.forecast.ranks,
        "memory_bytes": report.forecast.memory,
        "expected_seconds": report.forecast.seconds,
        "seconds": report.seconds,
    }


def print_report(found: dict[str, Any]) -> None:
    """Print a line for each split, and the total cost."""
    console = new_console()
    columns = ("split", "datasets", "samples", "least epochs", "most epochs", "blended", "MB", "missing", "missing MB")
    table = new_table(f"cache {found['cache']}", *columns)
    for split in found["splits"]:
        table.add_row(
            split["split"],
            f"{split['datasets']:,}",
            f"{split['samples']:,}",
            f"{split['epochs'][0]:,}",
            f"{split['epochs'][1]:,}",
            "yes" if split["blended"] else "no",
            f"{split['bytes'] / 1e6:,.1f}",
            f"{split['missing']:,}",
            f"{split['missing_bytes'] / 1e6:,.1f}",
        )
    console.print(table)
    for note in found["notes"]:
        print_line(f"note: {note}")
    missing = sum(split["missing"] for split in found["splits"])
    if not missing:
        done = "nothing is missing"
    elif found["dry_run"]:
        done = (
            f"{missing:,} are missing; building them takes at most {found['memory_bytes'] / 1e6:,.0f} MB of memory per node "
            f"and about {found['expected_seconds']:,.0f} s, not counting writing (ranks: {found['ranks']})"
        )
    else:
        done = f"{missing:,} were missing and have been built: {found['seconds']:.1f} s (ranks: {found['ranks']})"
    print_line(done)


def _split(split: SplitPlan, missing: frozenset[str]) -> dict[str, Any]:
    epochs = [job.num_epochs for job in split.datasets]
    lacking = [job.artefact.nbytes for job in split.jobs if job.artefact.base in missing]
    return {
        "split": split.name,
        "datasets": len(split.datasets),
        "samples": split.num_samples,
        "epochs": [min(epochs), max(epochs)],
        "blended": split.blend is not None,
        "bytes": sum(job.artefact.nbytes for job in split.jobs),
        "missing": len(lacking),
        "missing_bytes": sum(lacking),
    }


def _artefact(job: Job, missing: frozenset[str]) -> dict[str, Any]:
    return {
        "name": job.name,
        "base": job.artefact.base,
        "samples": job.num_samples,
        "bytes": job.artefact.nbytes,
        "missing": job.artefact.base in missing,
    }
