"""Schedules: shares that change step by step from the shares of one stage to those of the next.

Step i of n has the shares at (2i + 1) / 2n of the way. A cosine is rounded once, to 12 decimals,
and stored in the ledger, since machines differ in its last digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megablend.blend.allocate import divide_residuals

_SCALE = 10**12
"""Cosines are rounded to multiples of 1 / _SCALE."""
CYCLES_PER_STEP = 4
"""Minimum length of a step, in periods of the source whose periods are longest, if the stage is
long enough."""
MIN_STEPS = 2
"""Minimum number of steps of a schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule, by which the shares of a stage change in steps."""

    kind: str
    """`linear` or `cosine`."""
    start: tuple[Fraction, ...]
    """The shares from which the change begins, [num_sources], sum 1. It ends at the shares of the
    stage's blend."""
    samples: int
    """Length of the stage that the schedule was made for."""
    cycle: int
    """Number of samples of a cycle; a step consists of whole cycles."""
    done: tuple[Fraction, ...]
    """For each step, the fraction of the change from `start` to the shares of the stage's blend:
    [steps], from 0 to 1."""

    def __str__(self) -> str:
        shares = ", ".join(map(str, self.start))
        return f"{self.kind} in {len(self.done)} steps over {self.samples:,} samples from shares {shares}"

    @property
    def ends(self) -> list[int]:
        """The sample at which each step ends, counted from the stage's start."""
        cycles = self.samples // self.cycle
        steps = len(self.done)
        return [*(cycles * (i + 1) // steps * self.cycle for i in range(steps - 1)), self.samples]

    def shares(self, target: Sequence[Fraction]) -> list[list[Fraction]]:
        """Return the shares in each step: [steps][num_sources]. `target`: shares of the stage's
        blend."""
        pairs = list(zip(self.start, target, strict=True))
        return [[a + (b - a) * done for a, b in pairs] for done in self.done]

    def totals(self, target: Sequence[Fraction]) -> list[list[int]]:
        """Return the number of samples of each source in each step: [steps][num_sources]. Each step
        corrects the rounding of earlier steps. `target`: shares of the stage's blend."""
        due = [Fraction(0)] * len(target)
        totals_so_far = [0] * len(target)
        start = 0
        totals = list[list[int]]()
        for end, shares in zip(self.ends, self.shares(target), strict=True):
            due = [
                before + share * (end - start) for before, share in zip(due, shares, strict=True)
            ]
            totals.append(divide_residuals(due, totals_so_far, end - start))
            totals_so_far = [
                before + added for before, added in zip(totals_so_far, totals[-1], strict=True)
            ]
            start = end
        return totals


def make_schedule(
    kind: str, steps: int, start: Sequence[Fraction], *, samples: int, cycle: int, longest: int
) -> Schedule | None:
    """Divide a stage into at most `steps` steps of whole cycles. Return None if the stage is too
    short for two steps.

    Args:
        samples: length of the stage.
        cycle: number of samples of a cycle.
        longest: number of cycles of the longest period of a source. A step has at least
            CYCLES_PER_STEP times this number of cycles if that allows MIN_STEPS steps.
    """
    cycles = samples // cycle
    num_steps = min(steps, cycles, max(MIN_STEPS, cycles // (CYCLES_PER_STEP * longest)))
    if num_steps < MIN_STEPS:
        return None
    return Schedule(
        kind=kind,
        start=tuple(start),
        samples=samples,
        cycle=cycle,
        done=tuple(_done_in(kind, step, num_steps) for step in range(num_steps)),
    )


def _done_in(kind: str, step: int, steps: int) -> Fraction:
    """Return the entry of `Schedule.done` for one step."""
    middle = Fraction(2 * step + 1, 2 * steps)
    if kind == "linear":
        return middle
    return Fraction(round((1 - math.cos(math.pi * float(middle))) / 2 * _SCALE), _SCALE)


def schedule_record(schedule: Schedule) -> dict[str, object]:
    """Return a schedule as a JSON-serializable dict."""
    return {
        "kind": schedule.kind,
        "start": _numerators(schedule.start),
        "samples": schedule.samples,
        "cycle": schedule.cycle,
        "done": _numerators(schedule.done),
    }


def parse_schedule(record: object) -> Schedule:
    """Parse the result of `schedule_record`. Raises: KeyError, TypeError, ValueError,
    ZeroDivisionError if the record does not describe a schedule."""
    if not isinstance(record, dict):
        raise ValueError("not a schedule")
    return Schedule(
        kind=str(record["kind"]),
        start=_fractions(record["start"]),
        samples=_parse_count(record["samples"]),
        cycle=max(1, _parse_count(record["cycle"])),
        done=_fractions(record["done"]),
    )


def _numerators(values: Sequence[Fraction]) -> list[int]:
    """Return the common denominator of fractions, followed by their numerators."""
    scale = math.lcm(*(value.denominator for value in values))
    return [scale, *(value.numerator * (scale // value.denominator) for value in values)]


def _fractions(record: Sequence[object]) -> tuple[Fraction, ...]:
    """Convert a result of `_numerators` back to fractions."""
    scale, *numerators = map(_parse_count, record)
    return tuple(Fraction(numerator, scale) for numerator in numerators)


def _parse_count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("not a whole number")
    return value
