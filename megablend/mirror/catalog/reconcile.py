"""Which revisions a node is to hold, and for which of them there is room: pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from megablend.mirror.catalog.catalog import Revision, Want


class Goal(NamedTuple):
    """A revision that is to be held, and why."""

    want: Want
    revision: Revision
    is_pinned: bool
    """Never evicted: that was asked for, or programs map its files."""


def list_goals(
    wants: Iterable[tuple[Want, Sequence[Revision]]],
    is_complete: Callable[[Want, Revision], bool],
    has_folder: Callable[[Revision], bool],
) -> list[Goal]:
    """What is to be held, the most important first: pinned revisions, then others, the longest
    wanted first. Where a dataset's latest revision is wanted, until it is complete also the last
    one before it which is.

    Args:
        wants: each with the revisions that it is about, the latest last.
    """
    goals = list[Goal]()
    for want, known in wants:
        chosen = list(known[-1:])
        if not all(is_complete(want, each) for each in chosen):
            chosen = [*[each for each in known[:-1] if is_complete(want, each)][-1:], *chosen]
        goals += [Goal(want, each, want.is_pinned or has_folder(each)) for each in chosen]
    return sorted(goals, key=lambda each: (not each.is_pinned, each.want.since))


def find_short(
    goals: Sequence[Goal], sizes: Sequence[Mapping[str, int]], capacity: int, needed_by_jobs: int
) -> list[int]:
    """For each goal the bytes that it lacks to fit as a whole beside those before it, and, unless it
    is pinned, beside what jobs need; 0 if it fits. What does not fit, and is not pinned, takes no
    room.

    Args:
        sizes: for each goal, bytes by file.
    """
    held: dict[str, int] = {}
    short = list[int]()
    for goal, files in zip(goals, sizes, strict=True):
        both = {name: max(size, held.get(name, 0)) for name, size in files.items()}
        more = sum(both.values()) - sum(held.get(name, 0) for name in files)
        room = capacity - sum(held.values()) - (0 if goal.is_pinned else needed_by_jobs)
        short.append(max(0, more - max(0, room)))
        if goal.is_pinned or not short[-1]:
            held |= both
    return short
