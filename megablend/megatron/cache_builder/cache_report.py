"""The result of preparing a cache for Megatron's builder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megablend.megatron.cache_builder.schedule import Forecast
from megablend.megatron.cache_builder.work_plan import Job, SplitPlan
from megablend.operations.results import Record


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CacheReport(Record):
    """A report about the artefacts that were built, or would be built in a dry run. It is the same
    on all ranks, except for the location of the cache."""

    cache: str
    """The folder, as it was given."""
    dry_run: bool
    splits: tuple[SplitPlan, ...]
    """The splits of the cache."""
    missing: frozenset[str]
    """The base names of the artefacts that were missing or outdated. They were built, except in a
    dry run."""
    notes: tuple[str, ...]
    """Non-fatal warnings: damaged files, changed data, a file system without locks."""
    forecast: Forecast
    """The estimated cost of the missing files."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the report as `megablend megatron-cache --json` prints it."""
        return {
            "cache": self.cache,
            "dry_run": self.dry_run,
            "splits": [self._describe_split(split) for split in self.splits],
            "artefacts": [
                self._describe_artefact(job) for split in self.splits for job in split.jobs
            ],
            "notes": list(self.notes),
            "ranks": self.forecast.ranks,
            "memory_bytes": self.forecast.memory,
            "expected_seconds": self.forecast.seconds,
            "seconds": self.seconds,
        }

    def _describe_split(self, split: SplitPlan) -> dict[str, Any]:
        """Return the description of a split for JSON."""
        epochs = [job.num_epochs for job in split.datasets]
        missing_sizes = [
            job.artefact.nbytes for job in split.jobs if job.artefact.base in self.missing
        ]
        return {
            "split": split.name,
            "datasets": len(split.datasets),
            "samples": split.num_samples,
            "epochs": [min(epochs), max(epochs)],
            "blended": split.blend is not None,
            "bytes": sum(job.artefact.nbytes for job in split.jobs),
            "missing": len(missing_sizes),
            "missing_bytes": sum(missing_sizes),
        }

    def _describe_artefact(self, job: Job) -> dict[str, Any]:
        """Return the description of an artefact for JSON."""
        return {
            "name": job.name,
            "base": job.artefact.base,
            "samples": job.num_samples,
            "bytes": job.artefact.nbytes,
            "missing": job.artefact.base in self.missing,
        }
