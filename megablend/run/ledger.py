"""A run's ledger: its committed stages. Samples that were committed never change; a run is extended
by appending stages."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from itertools import groupby, pairwise
from operator import attrgetter, itemgetter

from megablend.errors import PlanError
from megablend.lazy import cached_property
from megablend.run.compare_blends import find_change
from megablend.run.ledger_format import chain_digests
from megablend.run.links import Link
from megablend.run.stage import Blend, Stage
from megablend.run.state import State


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The committed stages of a run."""

    run: str
    stages: tuple[Stage, ...]
    """The stages, at least one, in order; their ends increase."""
    request: str | None = dataclasses.field(default=None, compare=False)
    """`Config.request_digest` of the last build's config; None if it is not known, and for splits
    other than train."""
    skips: int | None = dataclasses.field(default=None, compare=False)
    """Number of skipped ranges of samples according to the ledger's record. None if the record does
    not contain the number, or if the ledger was not loaded."""
    stored_digests: InitVar[tuple[str, ...] | None] = None
    """`digests`, if they are known and need not be computed."""

    def __post_init__(self, stored_digests: tuple[str, ...] | None) -> None:
        if stored_digests is not None:
            object.__setattr__(self, "digests", stored_digests)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The sample number at which each stage ends, or was cut."""
        return tuple(stage.stop for stage in self.stages)

    @property
    def starts(self) -> tuple[int, ...]:
        """The number of each stage's first sample."""
        return (0, *self.ends[:-1])

    @property
    def num_samples(self) -> int:
        """Number of samples of the run."""
        return self.stages[-1].stop

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """The plan's digest after each stage."""
        return chain_digests(self.stages)

    @property
    def digest(self) -> str:
        """The plan's digest."""
        return self.digests[-1]

    @property
    def links(self) -> tuple[Link, ...]:
        """The chain of stages, as a state stores it."""
        digests = self.digests
        return tuple(
            Link(stage.end, digest, stage.cut, stage.drain, stage.whole_epochs)
            for stage, digest in zip(self.stages, digests, strict=True)
        )

    def stage_at(self, sample: int) -> Stage:
        """Return the stage that contains a sample; the last stage for samples beyond the run."""
        number = bisect_right(self.ends, sample)
        return self.stages[min(number, len(self.stages) - 1)]

    @property
    def indices(self) -> tuple[str, ...]:
        """Digests of the index snapshots that the stages read, in order."""
        return tuple(map(itemgetter(0), groupby(self.stages, attrgetter("index"))))

    @property
    def index_changes(self) -> list[int]:
        """The first samples of the stages that read another index than the stage before."""
        pairs = zip(pairwise(self.stages), self.ends, strict=False)
        return [end for (before, stage), end in pairs if stage.index != before.index]

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
        """Return a copy of the ledger with other blends, one per stage."""
        stages = zip(self.stages, blends, strict=True)
        return dataclasses.replace(
            self, stages=tuple(dataclasses.replace(stage, blend=blend) for stage, blend in stages)
        )

    def in_version(self, version: int) -> Ledger:
        """Return a copy with another version of the plan; unchanged if the split is not blended."""
        if version == self.plan_version or not self.blend.is_blended:
            return self
        return self.with_blends(
            [dataclasses.replace(stage.blend, plan_version=version) for stage in self.stages]
        )

    def with_cycles_of(self, committed: Ledger) -> Ledger:
        """Return a copy with the cycles that a committed ledger has fixed for its sources, not
        those that would be chosen now."""
        blends = []
        for stage, start in zip(self.stages, self.starts, strict=True):
            fixed = committed.stage_at(start).blend if start < committed.num_samples else None
            blends.append(stage.blend if fixed is None else _with_cycles(stage.blend, fixed))
        return self.with_blends(blends)

    def until(self, num_samples: int) -> Ledger:
        """Return the ledger as it was when it had `num_samples` samples; unchanged if it never had
        exactly that many."""
        if num_samples == self.num_samples or num_samples not in self.ends:
            return self
        return dataclasses.replace(self, stages=self.stages[: self.ends.index(num_samples) + 1])

    def extend(self, requested: Ledger) -> Ledger:
        """Return the ledger, with stages appended if more samples are requested.

        Args:
            requested: what the config requests, from the first sample on.

        Raises: PlanError if the blend of a committed sample differs, or fewer samples are
            requested.
        """
        self.check_past(requested, min(self.num_samples, requested.num_samples))
        if requested.num_samples < self.num_samples:
            raise PlanError(
                f"run {self.run!r} was built for {self.num_samples:,} samples, but {requested.num_samples:,} are now "
                f"requested; a run can only be extended: {self._remedy}"
            )
        added = requested.list_after(self.num_samples)
        return dataclasses.replace(self, stages=(*self.stages, *added)) if added else self

    def with_links(self, links: Sequence[Link]) -> Ledger:
        """Return a copy in which the stages of a chain replace those up to the chain's end. Blends
        and later stages are kept."""
        starts = [0, *(link.stop for link in links)]
        within = [
            link for link, start in zip(links, starts, strict=False) if start < self.num_samples
        ]
        stages = self._follow(within)
        start = stages[-1].stop if stages else 0
        return dataclasses.replace(self, stages=(*stages, *self.list_after(start)))

    def list_after(self, sample: int) -> list[Stage]:
        """Return the stages that end after a sample. A stage that began before the sample is
        returned without the settings that only apply to its start (`drain`, `whole_epochs`)."""
        return [
            stage if start >= sample else dataclasses.replace(stage, drain=None, whole_epochs=False)
            for stage, start in zip(self.stages, self.starts, strict=True)
            if stage.stop > sample
        ]

    def of_state(self, state: State) -> Ledger:
        """Return a ledger of the stages that a state names, with the blends of this ledger."""
        return Ledger(run=state.run, stages=self._follow(state.stages))

    def check_past(self, requested: Ledger, stop: int) -> None:
        """Refuse a request in which the blend of a sample before `stop` differs from the committed
        one.
        Raises: PlanError."""
        for number, (stage, start) in enumerate(zip(self.stages, self.starts, strict=True)):
            if start >= stop:
                return
            reason = find_change(stage.blend, requested.stage_at(start).blend)
            if reason is not None:
                where = f"in stage {number}, from sample {start:,} on, " if number else ""
                raise PlanError(
                    f"run {self.run!r} has already started, so its order is fixed: {where}{reason}; {self._remedy}"
                    f"{self._explain_amending(reason)}"
                )
            last_sample = min(stop, stage.stop) - 1
            reason = find_change(stage.blend, requested.stage_at(last_sample).blend)
            if reason is not None:
                raise PlanError(
                    f"run {self.run!r} has already started, so its order is fixed: its stage {number} ends at sample "
                    f"{stage.stop:,}, but the config changes before that: {reason}; restore the stage's end, `samples: "
                    f"{stage.end}`, or let the next stage begin earlier with `megablend amend CONFIG --at SAMPLE`"
                )

    def check_indices(self, requested: Ledger, stop: int) -> None:
        """Refuse a request that sets `new_data` before `stop` where the committed stages do not
        have it, or that does not set it where they have it, so that later stages would read an
        earlier index. Raises: PlanError."""
        changes = self.index_changes
        committed = changes[: bisect_left(changes, stop)]
        wanted = requested.index_changes
        past = wanted[: bisect_left(wanted, stop)]
        wanted = wanted[: bisect_right(wanted, stop)]
        added = sorted(set(past).difference(committed))
        # A start that no committed stage has may be a committed one that is rounded otherwise now
        if len(past) > len(committed) or not set(self.starts).isdisjoint(added):
            raise PlanError(
                f"run {self.run!r} has already started and reads no new data from sample {added[0]:,} on, but the "
                "config sets `new_data` there; remove it there, and set it in a stage at the end, or in one that "
                "`megablend amend CONFIG --at SAMPLE` adds"
            )
        if len(wanted) < len(committed) and requested.num_samples > stop:
            lost = next(sample for sample in committed if sample not in wanted)
            raise PlanError(
                f"run {self.run!r} has already started, and its stage {self.starts.index(lost)}, from sample {lost:,} on, reads "
                "new data, but the config does not set `new_data` there; put `new_data: true` back in that stage"
            )

    def _follow(self, links: Sequence[Link]) -> tuple[Stage, ...]:
        """Return the stages that a chain names, with the blends of this ledger."""
        starts = [0, *(link.stop for link in links)]
        return tuple(
            dataclasses.replace(
                self.stage_at(start),
                end=link.end,
                cut=link.cut,
                drain=link.drain,
                whole_epochs=link.whole_epochs,
            )
            for link, start in zip(links, starts, strict=False)
        )

    @property
    def _remedy(self) -> str:
        return (
            "restore the config, give the new run another name (`run:`), or plan this one again (`megablend runs reset "
            "CONFIG`)"
        )

    def _explain_amending(self, reason: str) -> str:
        """Return a hint on how an amendment can make a change; empty if none can.

        Args:
            reason: the result of `find_change`; it begins with the name of the setting.
        """
        setting = reason.partition(" ")[0]
        if setting not in ("share", "lanes", "shuffle_window", "sequence_length"):
            return ""
        change = "sources: {NAME: {weight: NUMBER}}" if setting == "share" else f"{setting}: NUMBER"
        # A config that lists stages already may do so in terms that the ledger does not know
        stages = "the change as a further stage"
        if len(self.stages) == 1:
            stages = f"`stages: [{{samples: {self.stages[0].end}}}, {{{change}}}]`"
        return (
            f"; to change it during training, restore the config, add {stages} and run "
            "`megablend amend CONFIG --at SAMPLE`"
        )


def _with_cycles(blend: Blend, fixed: Blend) -> Blend:
    """Return a blend with the cycles that another blend has for sources of the same names."""
    cycles = {source.name: source.cycles for source in fixed.sources}
    if all(cycles.get(source.name, source.cycles) == source.cycles for source in blend.sources):
        return blend
    sources = (
        dataclasses.replace(source, cycles=cycles.get(source.name, source.cycles))
        for source in blend.sources
    )
    return dataclasses.replace(blend, sources=tuple(sources))
