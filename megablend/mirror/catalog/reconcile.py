"""Pure functions that determine which revisions a node must hold, and which of them fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from megablend.arrays import Int64s, Uint64s
from megablend.mirror.catalog.catalog import Revision, Want


class Goal(NamedTuple):
    """A revision that a node must hold because of a want."""

    want: Want
    revision: Revision
    is_pinned: bool
    """Whether the revision must never be evicted, because the want is pinned, or programs may have
    mapped files in the revision's folder."""


def list_goals(
    wants: Iterable[tuple[Want, Sequence[Revision]]],
    complete: Collection[tuple[str, str]],
    has_folder: Callable[[Revision], bool],
) -> list[Goal]:
    """Return the revisions that must be held, the most important first. Pinned revisions come
    before others, and earlier wants before later ones. If a dataset's latest revision is wanted but
    not complete yet, the last complete one before it must also be held.

    Args:
        wants: pairs of a want and the revisions that may have to be held for it, the latest last.
        complete: pairs of the name of a want and the digest of a revision that is held completely
            for this want.
        has_folder: returns whether a revision has a folder, whose files programs may have mapped.
    """
    goals = list[Goal]()
    for want, revisions in wants:
        held = [revision for revision in revisions if (want.name, revision.digest) in complete]
        # The last complete one, and the latest one, which are usually the same
        chosen = dict.fromkeys([*held[-1:], *revisions[-1:]])
        goals += [
            Goal(want, revision, want.is_pinned or has_folder(revision)) for revision in chosen
        ]
    return sorted(goals, key=lambda goal: (not goal.is_pinned, goal.want.since))


class FileSizes(NamedTuple):
    """A table of files and their sizes."""

    ids: Uint64s
    """The first eight bytes of each file's digest, ascending and unique (uint64 [files])."""
    sizes: Int64s
    """The number of bytes of each file (int64 [files])."""

    @classmethod
    def of(cls, ids: Uint64s, sizes: Int64s) -> FileSizes:
        """Make a sorted table of files. If a file is repeated, its largest size is kept."""
        order = np.lexsort((sizes, ids))
        ids = ids[order]
        is_last = np.ones(len(ids), np.bool_)
        is_last[:-1] = ids[1:] != ids[:-1]
        return cls(ids[is_last], sizes[order][is_last])

    def unite(self, other: FileSizes) -> FileSizes:
        """Return the union of two tables. A file that is in both has the larger of its sizes."""
        ids = np.concatenate([self.ids, other.ids])
        return FileSizes.of(ids, np.concatenate([self.sizes, other.sizes]))

    @property
    def num_bytes(self) -> int:
        """The total size of all files in bytes."""
        return int(self.sizes.sum())


NO_SIZES = FileSizes(np.empty(0, np.uint64), np.empty(0, np.int64))


def find_short(
    goals: Sequence[Goal], sizes: Sequence[FileSizes], capacity: int, needed_by_jobs: int
) -> list[int]:
    """Return the number of bytes by which each goal is too large for the mirror; 0 if it fits. A
    goal must fit as a whole, together with the goals before it. Unless it is pinned, it must also
    leave room for the pages that jobs need. Goals that do not fit take no room, except pinned ones.

    Args:
        goals: the most important goal first.
        sizes: a table of the files of each goal.
        capacity: the number of bytes that the mirror can hold.
        needed_by_jobs: the number of bytes that jobs need.
    """
    reserved = NO_SIZES  # the files of the goals that have room
    short = list[int]()
    for goal, files in zip(goals, sizes, strict=True):
        united = reserved.unite(files)
        extra = united.num_bytes - reserved.num_bytes
        room = capacity - reserved.num_bytes - (0 if goal.is_pinned else needed_by_jobs)
        short.append(max(0, extra - max(0, room)))
        if goal.is_pinned or not short[-1]:
            reserved = united
    return short
