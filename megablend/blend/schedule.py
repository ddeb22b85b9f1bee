"""Schedules: shares that change step by step from those of one stage to those of the next.

Step i of n has the shares at (2i + 1) / 2n of the way. A cosine is rounded once, to 12 decimals,
and stored in the ledger, since machines differ in its last digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megablend.blend.allocate import divide_residuals

_DIGITS = 10**12
CYCLES_PER_STEP = 4
"""The fewest cycles of a step, in periods of the source whose periods are longest, where the stage
is long enough."""
MIN_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How the shares of a stage change."""

    kind: str
    """`linear` or `cosine`."""
    start: tuple[Fraction, ...]
    """[num_sources], sum 1: the shares that the schedule begins at; it ends at those of the stage's
    blend."""
    samples: int
    """Length of the stage that it was made for."""
    cycle: int
    """Samples of a cycle; a step consists of whole ones."""
    done: tuple[Fraction, ...]
    """How far, from 0 to 1, the shares have come in each step."""

    def __str__(self) -> str:
        shares = ", ".join(map(str, self.start))
        return f"{self.kind} in {len(self.done)} steps over {self.samples:,} samples from shares {shares}"

    @property
    def ends(self) -> list[int]:
        """Where each step ends, counted from the stage's start."""
        cycles = self.samples // self.cycle
        steps = len(self.done)
        return [*(cycles * (i + 1) // steps * self.cycle for i in range(steps - 1)), self.samples]

    def shares(self, target: Sequence[Fraction]) -> list[list[Fraction]]:
        """The shares in each step: [steps][num_sources]."""
        pairs = list(zip(self.start, target, strict=True))
        return [[a + (b - a) * done for a, b in pairs] for done in self.done]

    def totals(self, target: Sequence[Fraction]) -> list[list[int]]:
        """Samples of each source in each step: each corrects the rounding of those before it,
        [steps][num_sources]."""
        due = [Fraction(0)] * len(target)
        given = [0] * len(target)
        before = 0
        found = list[list[int]]()
        for end, shares in zip(self.ends, self.shares(target), strict=True):
            due = [had + share * (end - before) for had, share in zip(due, shares, strict=True)]
            found.append(divide_residuals(due, given, end - before))
            given = [had + more for had, more in zip(given, found[-1], strict=True)]
            before = end
        return found


def make_schedule(
    kind: str, steps: int, start: Sequence[Fraction], *, samples: int, cycle: int, longest: int
) -> Schedule | None:
    """Divide a stage into at most `steps` steps of whole cycles; None if it is too short for two.

    Args:
        cycle: samples of a cycle; a step is at least CYCLES_PER_STEP * `longest` of them if that
            leaves two steps.
    """
    cycles = samples // cycle
    number = min(steps, cycles, max(MIN_STEPS, cycles // (CYCLES_PER_STEP * longest)))
    if number < MIN_STEPS:
        return None
    return Schedule(
        kind=kind,
        start=tuple(start),
        samples=samples,
        cycle=cycle,
        done=tuple(_done(kind, i, number) for i in range(number)),
    )


def _done(kind: str, step: int, steps: int) -> Fraction:
    way = Fraction(2 * step + 1, 2 * steps)
    if kind == "linear":
        return way
    return Fraction(round((1 - math.cos(math.pi * float(way))) / 2 * _DIGITS), _DIGITS)


def schedule_record(schedule: Schedule) -> dict[str, object]:
    """A schedule as a JSON-serializable dict."""
    return {
        "kind": schedule.kind,
        "start": _numerators(schedule.start),
        "samples": schedule.samples,
        "cycle": schedule.cycle,
        "done": _numerators(schedule.done),
    }


def parse_schedule(record: object) -> Schedule:
    """Raises: KeyError, TypeError, ValueError, ZeroDivisionError if the record is not one."""
    if not isinstance(record, dict):
        raise ValueError("not a schedule")
    return Schedule(
        kind=str(record["kind"]),
        start=_fractions(record["start"]),
        samples=_whole(record["samples"]),
        cycle=max(1, _whole(record["cycle"])),
        done=_fractions(record["done"]),
    )


def _numerators(values: Sequence[Fraction]) -> list[int]:
    """Their common denominator, and the numerators."""
    scale = math.lcm(*(value.denominator for value in values))
    return [scale, *(value.numerator * (scale // value.denominator) for value in values)]


def _fractions(record: Sequence[object]) -> tuple[Fraction, ...]:
    scale, *numerators = map(_whole, record)
    return tuple(Fraction(each, scale) for each in numerators)


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("not a whole number")
    return value
