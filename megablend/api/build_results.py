"""What `build` and `build_index` return."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megablend.blocks.build_document_tables import TablesReport
from megablend.index.build import BuildReport
from megablend.plan.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """What a build did."""

    index: BuildReport
    documents: TablesReport | None
    """How the document tables were built; None where the order needs none."""
    ledger: Ledger
    """What the run is committed to now."""
    stages_before: int
    """Number of stages that the run had before; 0 for a new run."""
    problems: tuple[str, ...]
    """With `pinned`, the files of the older index that are missing or changed: the run cannot be read to its end."""
    warnings: tuple[str, ...] = ()
    """Numbers of the plan that deserve a second look; see `find_warnings`."""
    ranks: int = 1
    """Number of processes that built."""

    @property
    def pinned(self) -> bool:
        """Whether the run keeps reading an older snapshot of the index, which its committed order depends on."""
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
        documents = None if self.documents is None else asdict(self.documents)
        return {"index": asdict(self.index), "documents": documents, "run": run, "ranks": self.ranks}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIndex:
    """What building an index, without a run, did."""

    index: BuildReport
    documents: TablesReport | None
    """How the document tables were built; None where the order needs none."""
    ranks: int = 1
    """Number of processes that built."""

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return asdict(self)
