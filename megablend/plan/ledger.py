"""A run's ledger: its stages. What was promised never changes; a run is extended by appending stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megablend.errors import PlanError
from megablend.plan.ledger_format import chain_digests
from megablend.plan.stage import Blend, SourceShare, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a run has promised."""

    run: str
    stages: tuple[Stage, ...]
    """At least one; their ends ascend."""

    @classmethod
    def of_blend(cls, *, run: str, index: str, blend: Blend, ends: Sequence[int]) -> Ledger:
        """A ledger whose stages have one blend."""
        return cls(run=run, stages=tuple(Stage(end=end, index=index, blend=blend) for end in ends))

    @property
    def ends(self) -> tuple[int, ...]:
        """Sample number at which each stage ends."""
        return tuple(stage.end for stage in self.stages)

    @property
    def num_samples(self) -> int:
        """Samples promised."""
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
        """Of each stage, where it ends and the plan's digest after it: what a state keeps."""
        return tuple(zip(self.ends, self.digests, strict=True))

    @property
    def index(self) -> str:
        """Digest of the index that the last stage reads."""
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
        """The ledger with other blends, one for each stage."""
        stages = zip(self.stages, blends, strict=True)
        return dataclasses.replace(
            self, stages=tuple(dataclasses.replace(stage, blend=blend) for stage, blend in stages)
        )

    def in_version(self, version: int) -> Ledger:
        """The ledger with another version of the plan; unchanged where the split is not blended."""
        blends = [stage.blend for stage in self.stages]
        return self.with_blends(
            [dataclasses.replace(blend, plan_version=version) if blend.is_blended else blend for blend in blends]
        )

    def with_cycles_of(self, promised: Ledger) -> Ledger:
        """The ledger with the cycles that another has for the same sources: they are promised, however they are chosen now."""
        cycles = {source.name: source.cycles for stage in promised.stages for source in stage.blend.sources}

        def with_cycles(source: SourceShare) -> SourceShare:
            return dataclasses.replace(source, cycles=cycles.get(source.name, source.cycles))

        return self.with_blends(
            [
                dataclasses.replace(stage.blend, sources=tuple(map(with_cycles, stage.blend.sources)))
                for stage in self.stages
            ]
        )

    def until(self, num_samples: int) -> Ledger:
        """The ledger as it was when it promised so many samples; unchanged where it never promised exactly these."""
        if num_samples not in self.ends:
            return self
        return dataclasses.replace(self, stages=self.stages[: self.ends.index(num_samples) + 1])

    def extended(self, asked: Ledger) -> Ledger:
        """The ledger with a stage appended where more samples are asked for.

        Args:
            asked: what the config asks for, from the first sample on, in one blend.

        Raises: PlanError where the blend is another, or fewer samples are asked for.
        """
        remedy = (
            f"give the new one another name (`run:`), restore the config that run {self.run!r} was built with, or let the next "
            "build plan it again (`megablend runs reset CONFIG`)"
        )
        for stage in self.stages:
            if reason := difference(stage.blend, asked.blend):
                changed = self.with_blends([asked.blend] * len(self.stages)).digest
                raise PlanError(
                    f"run {self.run!r} has already started, so its order is fixed: {reason} (plan {self.digest} would become "
                    f"{changed}); {remedy}"
                )
        if asked.num_samples < self.num_samples:
            raise PlanError(
                f"run {self.run!r} was built for {self.num_samples:,} samples, now {asked.num_samples:,} are requested; a run "
                f"can only be extended: {remedy}"
            )
        if asked.num_samples == self.num_samples:
            return self
        last = dataclasses.replace(self.stages[-1], end=asked.num_samples)
        return dataclasses.replace(self, stages=(*self.stages, last))


def difference(old: Blend, new: Blend) -> str | None:
    """The first thing in which two blends differ, in words; None where they are the same."""
    for field in dataclasses.fields(Blend):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if field.name != "sources" and before != after:
            return f"{field.name} was {before}, is {after}"
    sources, others = ({source.name: source for source in blend.sources} for blend in (old, new))
    for name in sources.keys() - others.keys():
        return f"source {name!r} was removed"
    for name in others.keys() - sources.keys():
        return f"source {name!r} was added"
    for name, source in sources.items():
        for field in dataclasses.fields(SourceShare):
            before, after = getattr(source, field.name), getattr(others[name], field.name)
            if before != after:
                return f"{field.name} of source {name!r} was {before}, is {after}"
    return None if old == new else "the sources are in another order"
