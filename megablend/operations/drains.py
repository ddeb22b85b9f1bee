"""Describe drains: the first samples of a stage, which still have the settings of the previous
stage."""

from __future__ import annotations

from dataclasses import dataclass

from megablend.operations.results import Record
from megablend.run.run import Run


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DrainSource(Record):
    """The samples of a source in a drain."""

    name: str
    samples: int
    share: float
    """Fraction of the drain's samples."""
    share_before: float
    """The source's share at the end of the previous stage."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Drain(Record):
    """The samples of a stage, [start, stop), that are read with the previous stage's settings."""

    start: int
    stop: int
    sequence_length: int
    sources: tuple[DrainSource, ...]


def describe_drain(run: Run, number: int) -> Drain | None:
    """Return the drain at the start of stage `number` of the ledger; None if there is none."""
    # The plan has a stage of its own for each drain
    planned = run.plan.stages
    start = run.ledger.starts[number]
    first = next((i for i, stage in enumerate(planned) if stage.start >= start), 0)
    drain = planned[first]
    if drain.number == number:  # the stage begins with its own settings
        return None
    blend = run.ledger.stages[drain.number].blend
    # The shares of the last step of a schedule follow only from its totals
    request = planned[first - 1].request
    shares = (request.totals / request.num_samples).tolist()
    if blend.schedule is None:
        shares[: len(blend.sources)] = map(float, blend.shares)
    samples = drain.read.tolist()
    total = drain.stop - drain.start
    return Drain(
        start=drain.start,
        stop=drain.stop,
        sequence_length=drain.request.sample_tokens,
        sources=tuple(
            DrainSource(name=source.name, samples=count, share=count / total, share_before=share)
            for source, count, share in zip(run.sources, samples, shares, strict=True)
        ),
    )
