"""The files that a run reads, and until when: a later snapshot of its index may lack some."""

from __future__ import annotations

from typing import NamedTuple

from megablend.index.check_files import files_of
from megablend.index.joined_snapshot import JoinedSnapshot
from megablend.plan.run import Run


class RunFile(NamedTuple):
    """A file that a run reads."""

    number: int
    """Of the run's index, which may join several snapshots."""
    stop: int | None = None
    """The first sample from which on nothing is read from it; None where it is read to the end."""

    def is_needed(self, position: int) -> bool:
        """Whether samples from a position on may read it."""
        return self.stop is None or position < self.stop


def list_files(run: Run) -> list[RunFile]:
    """The files of a split's sources: first those of its last snapshot, then, for train, those that
    only earlier ones have."""
    snapshot = run.store.snapshot
    names = run.data.index_names
    if not isinstance(snapshot, JoinedSnapshot):
        return [RunFile(number) for number in files_of(snapshot, names)]
    last = len(snapshot.snapshots) - 1
    if run.split != "train":  # it reads one snapshot
        number = snapshot.snapshots.index(run.data.snapshots[0].snapshot)
        return [RunFile(file) for file in snapshot.files_of(number, names)]
    stops = _find_stops(run)
    listed = [RunFile(number) for number in snapshot.files_of(last, names)]
    gone = (
        (number, which) for number, which in snapshot.list_gone(names).items() if which < len(stops)
    )
    return [*listed, *(RunFile(number, stops[which]) for number, which in gone)]


def _find_stops(run: Run) -> list[int]:
    """For each snapshot but the last one of a run, the first sample that stages of the next one
    read in their own settings."""
    ledger = run.ledger
    firsts = dict[int, int]()
    for each in run.plan.list_stretches():
        firsts.setdefault(each.stage, each.start)
    indices = [stage.index for stage in ledger.stages]
    return [firsts[i] for i in range(1, len(indices)) if indices[i] != indices[i - 1]]
