"""Describe drains: the samples that a stage reads first, in the settings of the stage before."""

from __future__ import annotations

from dataclasses import dataclass

from megablend.operations.results import Record
from megablend.run.run import Run


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DrainSource(Record):
    """A source in a drain."""

    name: str
    samples: int
    share: float
    """Fraction of the drain's samples."""
    share_before: float
    """The source's share when the stage before stopped."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Drain(Record):
    """The samples at a stage's start that are read in the settings of the stage before: samples
    [start, stop)."""

    start: int
    stop: int
    sequence_length: int
    sources: tuple[DrainSource, ...]


def describe_drain(run: Run, number: int) -> Drain | None:
    """The drain at the start of stage `number` of the ledger; None if there is none."""
    parts = run.plan.stages
    start = run.ledger.starts[number]
    first = next((i for i, part in enumerate(parts) if part.start >= start), 0)
    drain = parts[first]
    if drain.number == number:  # the stage begins in its own settings
        return None
    blend = run.ledger.stages[drain.number].blend
    # The shares of a schedule's last step are known by its totals only
    request = parts[first - 1].request
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
