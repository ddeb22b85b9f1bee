"""The interleavings by name, with the properties that other code depends on.

Megatron's greedy interleaving is not among them: it needs an array as long as the run, and its
weights are doubles. It is in megablend.megatron.exact, for Megatron's cache files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megablend.blend.interleavings.base import Plan, StageRequest
from megablend.blend.interleavings.lanes import LanePlan
from megablend.blend.interleavings.sequential import SequentialPlan
from megablend.blend.interleavings.tails import Tails


@dataclass(frozen=True, slots=True)
class InterleavingKind:
    """An interleaving, and the properties that other code depends on."""

    plan: Callable[[StageRequest], Plan]
    """A function that makes the plan of a stage. It raises PlanError for a stage that it cannot
    arrange."""
    has_lanes: bool = False
    """Whether sample k belongs to lane k % lanes, whose samples of a source are neighbours: a
    reader then keeps the blocks that its lanes are reading."""
    find_tails: Callable[[Any, int], Tails | None] | None = None
    """A function that returns the tails of a plan after its first n samples, or None if there are
    no tails since each source's ordinals ascend. The field itself is None for an interleaving whose
    stages cannot be cut."""
    round_up: Callable[[Any, int], int] = lambda plan, n: n
    """A function that returns the smallest number of samples, at least n, after which a plan's
    stage can be cut."""


INTERLEAVINGS: dict[str, InterleavingKind] = {
    "lanes": InterleavingKind(
        LanePlan, has_lanes=True, find_tails=LanePlan.find_tails, round_up=LanePlan.round_up
    ),
    "sequential": InterleavingKind(SequentialPlan, find_tails=lambda plan, n: None),
}


def find_interleaving(name: str) -> InterleavingKind:
    """Return an interleaving by name. Raises: ValueError for an unknown name."""
    if name not in INTERLEAVINGS:
        raise ValueError(f"found {name!r}, expected one of {', '.join(INTERLEAVINGS)}")
    return INTERLEAVINGS[name]
