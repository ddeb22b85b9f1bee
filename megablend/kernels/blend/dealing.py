"""Count the ordinals of a period that each lane gets, by prefix sums over residues in closed form,
and find the residue of an ordinal by bisection.

A period's ordinals are dealt to the lanes in runs of neighbours, by residue; a lane walks its run
cycle by cycle. Cycles are counted from the period's first one. See megablend.kernels.blend.periods.
"""

from __future__ import annotations

from megablend.arrays import Int64s
from megablend.jit import device
from megablend.kernels.blend.periods import ALL, BEGIN, DEALT_STOP, END, FIRST_DEALT, count_dealt


@device
def epoch_edges(period: Int64s, local_cycle: int) -> tuple[int, int]:
    """Return the range [lowest, highest) of the ordinals of the period's epoch among all ordinals
    that are dealt in cycle number `local_cycle` of the period. `highest` is ALL if the epoch does
    not end in this cycle."""
    lowest = int(period[FIRST_DEALT]) if local_cycle == 0 else 0
    highest = (
        int(period[DEALT_STOP]) if local_cycle == int(period[END] - period[BEGIN]) - 1 else ALL
    )
    return lowest, highest


@device
def dealt_below(
    period: Int64s, parts: Int64s, lanes: int, residue: int, first: int, stop: int
) -> int:
    """Return the number of ordinals of the period's cycles [first, stop) that go to residues below
    `residue` (0 to `lanes`)."""
    count = 0
    for local_cycle in range(first, stop):
        left_turn, left_residue, right_turn, right_residue = parts[local_cycle]
        before, _, _ = count_dealt(left_turn, left_residue, right_turn, right_residue, residue)
        lowest, highest = epoch_edges(period, local_cycle)
        count += min(max(before, lowest), highest) - lowest
    return count


@device
def residue_of(period: Int64s, parts: Int64s, lanes: int, place: int, first: int, stop: int) -> int:
    """Return the residue whose lane gets the ordinal at `place` among the ordinals of the period's
    cycles [first, stop)."""
    low = 0
    high = lanes
    while high - low > 1:
        middle = (low + high) // 2
        if dealt_below(period, parts, lanes, middle, first, stop) <= place:
            low = middle
        else:
            high = middle
    return low
