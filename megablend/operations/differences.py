"""List the differences between two ledgers, in the terms of configs: their indices, the blends of
their stages, and where stages end."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from megablend.operations.results import Record
from megablend.run.compare_blends import compare_blends
from megablend.run.ledger import Ledger
from megablend.run.links import Link
from megablend.run.state import State


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Difference(Record):
    """A setting, or another property, in which two runs differ."""

    what: str
    """The name of the setting or property."""
    a: Any
    """The value in the first run; None if the run does not have the setting."""
    b: Any
    """The value in the second run; None if the run does not have the setting."""


def list_differences(a: Ledger | State, b: Ledger | State) -> list[Difference]:
    """Return the differences between two ledgers. A state has only the indices and the chain of
    stages, so only these are compared."""
    compared = [Difference(what="index", a=", ".join(a.indices), b=", ".join(b.indices))]
    if isinstance(a, Ledger) and isinstance(b, Ledger):
        blends = None
        stop = min(a.num_samples, b.num_samples)
        starts = sorted({*a.starts, *b.starts})
        # Where the blend of either changes, up to the end of the shorter one
        for start in starts[: bisect_left(starts, stop)]:
            blends_before = blends
            blends = a.stage_at(start).blend, b.stage_at(start).blend
            if blends != blends_before:
                from_sample = f" from sample {start:,} on" if start else ""
                compared += [
                    Difference(what=what + from_sample, a=before, b=after)
                    for what, before, after in compare_blends(*blends)
                ]
        compared.append(Difference(what="stage ends", a=list(a.ends), b=list(b.ends)))
    else:
        ends_a = [[link.stop, link.digest] for link in links_of(a)]
        ends_b = [[link.stop, link.digest] for link in links_of(b)]
        compared.append(Difference(what="stages", a=ends_a, b=ends_b))
    return [value for value in compared if value.a != value.b]


def links_of(which: Ledger | State) -> tuple[Link, ...]:
    """Return the chain of stages of a ledger or a state."""
    return which.links if isinstance(which, Ledger) else which.stages
