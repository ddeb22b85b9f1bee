"""A thread that announces a loader's coming reads to a storage that keeps copies of files.

Reads are announced up to the end of the next epoch. Later reads do not affect which bytes are kept.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import weakref

from megablend.errors import MegablendError
from megablend.prefetch.due_ranges import find_mirror, plan_due
from megablend.prefetch.read_schedule import StepSequence
from megablend.run.run import Run
from megablend.storage.hints import HintedStorage
from megablend.system.log import LOG

MAX_SAMPLES = 1 << 22
"""Maximum number of a loader's samples in one announcement; later announcements cover the rest."""
FIRST_SECONDS = 0.2
"""Time between steps that is assumed until it can be measured. A wrong value does little harm,
since mainly the order in which bytes are due matters."""
_FIRST_STEPS = 64
"""Number of steps in the first announcement: so few that they are planned immediately."""
_FEWEST_STEPS = 16
"""Minimum number of steps from which the time between steps is measured."""
_REPEAT_SECONDS = 60.0
"""Time after which an announcement is repeated even if steps are taken as expected."""
_TURN_SECONDS = 1.0
"""Time between two checks of the loader's progress."""
_OFF_SECONDS = 1.0
_OFF_STEPS = 1.5
"""An announcement is corrected if the loader is ahead of it or behind it by more than _OFF_SECONDS
plus _OFF_STEPS steps."""
_QUIET_FACTOR = 20
"""After an announcement, no correction is made for _QUIET_FACTOR times as long as the announcement
took, so that planning takes at most about a twentieth of a CPU."""
_reader_numbers = itertools.count()


def report_due(run: Run, sequence: StepSequence) -> DueReporter | None:
    """Start announcing a loader's coming reads to the run's storage; return None if the storage
    keeps no copies of the run's files.

    Args:
        sequence: the loader's steps from now on.
    """
    storage = find_mirror(run)
    return None if storage is None else DueReporter(_Announcer(run, sequence, storage))


class DueReporter:
    """Announces a loader's coming reads to a storage, in a thread that ends when this object is
    closed or garbage-collected."""

    def __init__(self, announcer: _Announcer) -> None:
        end = threading.Event()
        # If the thread referred to this object, the object could not be garbage-collected
        thread = threading.Thread(
            target=announcer.announce_until, args=(end,), name="megablend-due", daemon=True
        )
        thread.start()
        self._announcer = announcer
        self._finalizer = weakref.finalize(self, end.set)

    def take_step(self, num_ahead: int) -> None:
        """Record that the loader has taken another step, and has submitted all reads of the
        `num_ahead` steps that follow."""
        self._announcer.num_taken += 1
        self._announcer.num_ahead = num_ahead

    def close(self) -> None:
        """Tell the thread to end, without waiting for it."""
        self._finalizer()


class _Announcer:
    """The code that the thread of a DueReporter runs.

    Args:
        run: the run that is read.
        sequence: the loader's steps from now on.
        storage: the storage that announcements go to.
    """

    def __init__(self, run: Run, sequence: StepSequence, storage: HintedStorage) -> None:
        self.num_taken = 0
        """Number of steps of `sequence` that have been taken, updated by the loader's thread."""
        self.num_ahead = 0
        """Number of steps after the `num_taken` steps whose reads have all been submitted."""
        self._run = run
        self._sequence = sequence
        self._storage = storage
        self._reader = f"reader-{next(_reader_numbers)}"
        self._step_seconds = FIRST_SECONDS
        self._has_failed = False

    def announce_until(self, end: threading.Event) -> None:
        """Announce the first steps, then all steps. Repeat the announcement every minute, even
        after a failure, and whenever steps are taken earlier or later than announced. When `end` is
        set, announce that nothing more will be read."""
        sequence = self._sequence
        horizon = min(
            count_horizon(self._run, sequence.first),
            MAX_SAMPLES * sequence.stride // sequence.micro_batch_size,
        )
        num_steps = max(1, horizon // sequence.stride)
        started = time.monotonic()
        self._announce(0, _FIRST_STEPS)
        announced_at = started
        num_taken_then = 0
        quiet_until = -math.inf
        repeat_at = -math.inf
        while True:
            num_taken = self.num_taken
            num_ahead = self.num_ahead
            now = time.monotonic()
            num_since = num_taken - num_taken_then
            delay = now - announced_at - self._step_seconds * num_since
            is_off = abs(delay) > _OFF_SECONDS + _OFF_STEPS * self._step_seconds
            if now > repeat_at or (is_off and now > quiet_until):
                if num_since >= _FEWEST_STEPS:
                    self._step_seconds = (now - announced_at) / num_since
                elif num_taken >= _FEWEST_STEPS:
                    self._step_seconds = (now - started) / num_taken
                # What was requested already is not waited for
                self._announce(num_taken + num_ahead, num_steps)
                announced_at = now
                num_taken_then = num_taken
                quiet_until = now + _QUIET_FACTOR * (time.monotonic() - now)
                repeat_at = now + _REPEAT_SECONDS
            if end.wait(_TURN_SECONDS):
                break
        self._announce(0, 0)

    def _announce(self, step: int, num_steps: int) -> None:
        """Announce the reads of `num_steps` steps from `step` on; this replaces the previous
        announcement. Only the first failure is logged: if its cause matters, reading fails as
        well."""
        began = time.monotonic()
        try:
            planned = plan_due(self._run, self._sequence, step, self._step_seconds, num_steps)
            took = time.monotonic() - began
            ranges = [file_ranges._replace(due=file_ranges.due - took) for file_ranges in planned]
            self._storage.set_due(self._reader, ranges)
        except MegablendError as error:
            if not self._has_failed:
                LOG.warning("cannot announce coming reads to the mirror: %s", error)
            self._has_failed = True


def count_horizon(run: Run, position: int) -> int:
    """Count the samples of all ranks from `position` to the end of the next epoch. This is at most
    the number of samples in two epochs of all sources."""
    epoch = int(run.data.parts["tokens"].sum()) // run.sequence_length + 1
    return min(run.num_samples - position, 2 * epoch)
