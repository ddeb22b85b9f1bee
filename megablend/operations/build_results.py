"""What `build` and `build_index` return."""

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
    """How the document tables were built; None where the order needs none."""
    ranks: int = 1
    """Number of processes that built."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BuildResult(BuiltIndex):
    """What a build did."""

    ledger: Ledger
    """What the run is committed to now."""
    stages_before: int
    """Number of stages that the run had before; 0 for a new run."""
    problems: tuple[str, ...]
    """With `pinned`, the files of the older index that are missing or changed: the run cannot be
    read to its end."""
    warnings: tuple[str, ...] = ()
    """Numbers of the plan that deserve a second look; see `find_warnings`."""

    @property
    def pinned(self) -> bool:
        """Whether the run keeps reading an older snapshot of the index,
        which its committed order depends on."""
        return self.ledger.index != self.index.digest

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
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
