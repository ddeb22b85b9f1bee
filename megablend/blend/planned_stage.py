"""The stages of a plan, before their plans are made: ranges of samples with their requests, and
what a cut leaves of each."""

from __future__ import annotations

from dataclasses import dataclass

from megablend.arrays import Int64s
from megablend.blend.interleavings.base import Plan, StageRequest
from megablend.blend.interleavings.registry import find_interleaving


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """A stage as its plan is made."""

    request: StageRequest
    """`first_sample` continues from the stages before it."""
    cursor: Int64s
    """int64 [num_sources], where each source's first sample of the stage begins: a position, see
    `Epochs`."""
    interleaving: str
    """A name of `INTERLEAVINGS`."""
    number: int
    """Number of the stage in the ledger: what is left of a stage that was cut may be a planned
    stage of its own."""
    length: int
    """Samples of the stage: fewer than the request's where it was cut."""
    plan: Plan | None = None
    """Its plan, if made already."""
    cut_edges: Int64s | None = None
    """int64 [3, num_sources] of a stage that was cut: `first`, `read` and `stop` of its tails; see
    `Tails`. None of others."""
    dropped: Int64s | None = None
    """int64 [num_sources], of sources that are read no more, the end of the samples that stages
    before it have begun; 0 of others. None where there are none."""

    @property
    def read(self) -> Int64s:
        """int64 [num_sources], samples of each source that the stage reads."""
        return self.request.totals if self.cut_edges is None else self.cut_edges[1]

    @property
    def has_tails(self) -> bool:
        """Whether a cut leaves ordinals, for stages after it, of periods that it began."""
        return self.cut_edges is not None and bool((self.cut_edges[2] > self.cut_edges[1]).any())

    def make_plan(self) -> Plan:
        """The stage's plan. Raises: PlanError where it cannot be planned."""
        return self.plan or find_interleaving(self.interleaving).plan(self.request)
