"""The results of `build` and `build_index`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megablend.index.blocks.build_document_tables import TablesReport
from megablend.index.build.build import BuildReport
from megablend.operations.results import Record
from megablend.run.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BuiltIndex(Record):
    """The result of building an index without a run."""

    index: BuildReport
    documents: TablesReport | None
    """The report on building document tables; None if the run's orders need none."""
    ranks: int = 1
    """Number of processes that took part in the build."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BuildResult(BuiltIndex):
    """The result of building a run."""

    ledger: Ledger
    """The run's ledger after the build."""
    stages_before: int
    """Number of stages that the run had before; 0 for a new run."""
    problems: tuple[str, ...]
    """A line for each file of the older index that is missing or changed, if the run is `pinned`.
    The run cannot be read to its end without these files."""
    warnings: tuple[str, ...]
    """Warnings about properties of the plan that are probably not intended; see `find_warnings`."""

    @property
    def pinned(self) -> bool:
        """Whether the run keeps reading an older snapshot of the index, on which its committed
        order depends."""
        return self.ledger.index != self.index.digest

    def to_dict(self) -> dict[str, Any]:
        """Return the dict that `--json` prints."""
        run = {
            "name": self.ledger.run,
            "index": self.ledger.index,
            "plan": self.ledger.digest,
            "stages": list(self.ledger.ends),
            "stages_before": self.stages_before,
            "pinned": self.pinned,
            "problems": list(self.problems),
            "warnings": list(self.warnings),
        }
        built = BuiltIndex(index=self.index, documents=self.documents, ranks=self.ranks)
        return built.to_dict() | {"run": run}
