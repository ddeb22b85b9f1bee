"""A run's ledger: its stages. Committed stages never change; a run is extended by appending stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megablend.errors import PlanError
from megablend.plan.ledger_format import chain_digests
from megablend.plan.stage import Blend, SourceShare, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The committed stages of a run."""

    run: str
    stages: tuple[Stage, ...]
    """At least one; their ends increase."""

    @classmethod
    def of_blend(cls, *, run: str, index: str, blend: Blend, ends: Sequence[int]) -> Ledger:
        """A ledger whose stages all have the same blend."""
        return cls(run=run, stages=tuple(Stage(end=end, index=index, blend=blend) for end in ends))

    @property
    def ends(self) -> tuple[int, ...]:
        """The sample number at which each stage ends."""
        return tuple(stage.end for stage in self.stages)

    @property
    def num_samples(self) -> int:
        """Number of samples of the run."""
        return self.stages[-1].end

    @property
    def digests(self) -> tuple[str, ...]:
        """The plan's digest after each stage."""
        return chain_digests(self.stages)

    @property
    def digest(self) -> str:
        """The plan's digest."""
        return self.digests[-1]

    @property
    def links(self) -> tuple[tuple[int, str], ...]:
        """(end of the stage, the plan's digest after it) of each stage, as a state stores them."""
        return tuple(zip(self.ends, self.digests, strict=True))

    @property
    def index(self) -> str:
        """Digest of the index snapshot that the last stage reads."""
        return self.stages[-1].index

    @property
    def blend(self) -> Blend:
        """The blend of the last stage."""
        return self.stages[-1].blend

    @property
    def plan_version(self) -> int:
        """The version of the plan, the same in all stages; 1 for an unblended split."""
        return self.blend.plan_version

    def with_blends(self, blends: Sequence[Blend]) -> Ledger:
        """A copy of the ledger with other blends, one per stage."""
        stages = zip(self.stages, blends, strict=True)
        return dataclasses.replace(
            self, stages=tuple(dataclasses.replace(stage, blend=blend) for stage, blend in stages)
        )

    def in_version(self, version: int) -> Ledger:
        """A copy of the ledger with another version of the plan; unchanged where the split is not blended."""
        blends = [stage.blend for stage in self.stages]
        return self.with_blends(
            [dataclasses.replace(blend, plan_version=version) if blend.is_blended else blend for blend in blends]
        )

    def with_cycles_of(self, committed: Ledger) -> Ledger:
        """A copy with the cycles of a committed ledger's sources, which are fixed, whatever would be chosen for them now."""
        cycles = {source.name: source.cycles for stage in committed.stages for source in stage.blend.sources}

        def with_cycles(source: SourceShare) -> SourceShare:
            return dataclasses.replace(source, cycles=cycles.get(source.name, source.cycles))

        return self.with_blends(
            [
                dataclasses.replace(stage.blend, sources=tuple(map(with_cycles, stage.blend.sources)))
                for stage in self.stages
            ]
        )

    def until(self, num_samples: int) -> Ledger:
        """The ledger as it was when it had `num_samples` samples; unchanged where it never had exactly that many."""
        if num_samples not in self.ends:
            return self
        return dataclasses.replace(self, stages=self.stages[: self.ends.index(num_samples) + 1])

    def extend(self, requested: Ledger) -> Ledger:
        """The ledger, with a stage appended where more samples are requested.

        Args:
            requested: what the config requests, from the first sample on, with a single blend.

        Raises: PlanError where the blend differs, or fewer samples are requested.
        """
        remedy = (
            f"give the new one another name (`run:`), restore the config that run {self.run!r} was built with, or let the next "
            "build plan it again (`megablend runs reset CONFIG`)"
        )
        for stage in self.stages:
            if reason := describe_difference(stage.blend, requested.blend):
                changed = self.with_blends([requested.blend] * len(self.stages)).digest
                raise PlanError(
                    f"run {self.run!r} has already started, so its order is fixed: {reason} (plan {self.digest} would become "
                    f"{changed}); {remedy}"
                )
        if requested.num_samples < self.num_samples:
            raise PlanError(
                f"run {self.run!r} was built for {self.num_samples:,} samples, now {requested.num_samples:,} are requested; a "
                f"run can only be extended: {remedy}"
            )
        if requested.num_samples == self.num_samples:
            return self
        last = dataclasses.replace(self.stages[-1], end=requested.num_samples)
        return dataclasses.replace(self, stages=(*self.stages, last))


def describe_difference(old: Blend, new: Blend) -> str | None:
    """The first difference between two blends, in words; None where they are the same."""
    for field in dataclasses.fields(Blend):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if field.name != "sources" and before != after:
            return f"{field.name} was {before}, is now {after}"
    sources, others = ({source.name: source for source in blend.sources} for blend in (old, new))
    for name in sources.keys() - others.keys():
        return f"source {name!r} was removed"
    for name in others.keys() - sources.keys():
        return f"source {name!r} was added"
    for name, source in sources.items():
        for field in dataclasses.fields(SourceShare):
            before, after = getattr(source, field.name), getattr(others[name], field.name)
            if before != after:
                return f"{field.name} of source {name!r} was {before}, is now {after}"
    return None if old == new else "the sources are in another order"
