"""The state of a goal, which is a revision that a node must hold: how many of its bytes are held,
and why the others are missing.

Goals are fetched in rounds. The problems that a round finds replace those of earlier rounds, so
that no problem is reported for longer than it exists.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from megablend.errors import (
    ChangedFileError,
    ConfigError,
    DataError,
    MegablendError,
    MissingFileError,
    RefusedFileError,
    ResourceError,
    UnsupportedFileError,
)
from megablend.mirror.catalog.catalog import Want
from megablend.mirror.catalog.reconcile import Goal
from megablend.mirror.catalog.share import Share
from megablend.mirror.node.engine import AwayError
from megablend.system.log import LOG

STUCK_SECONDS = 60.0
"""Seconds without progress after which a wait ends if user action is needed."""
_OF_PERSONS = (ConfigError, RefusedFileError, UnsupportedFileError)
"""The types of errors that last until the user changes something."""


@dataclass(slots=True, eq=False)
class State:
    """The state of a goal on this node."""

    goal: Goal
    share: Share
    needed: int
    """The number of bytes that this node must hold: its share of the revision."""
    missing: int
    """The number of bytes of the share that are not held."""
    short: int = 0
    """The number of bytes by which the share is too large for the mirror; 0 if it fits."""
    trouble: str = ""
    """Why bytes are missing, as a text; "" if no reason is known."""
    is_stuck: bool = False
    """Whether the problem in `trouble` requires user action."""
    is_noted: bool = False
    """Whether the problem in `trouble` was found in the present round of fetching."""
    gone: dict[str, type[DataError]] = field(default_factory=dict)
    """The type of error for each file that was deleted or replaced after it was listed. The keys
    are locations."""
    error: Exception | None = None
    """The error if a file was deleted or replaced, or the manifest is damaged; None otherwise."""

    @property
    def name(self) -> tuple[str, str]:
        """The name of the want, and the digest of the revision."""
        return self.goal.want.name, self.goal.revision.digest

    def keep_trouble(self, earlier: State) -> None:
        """Copy the problem of an earlier state of the same goal, until the next round ends."""
        if earlier.share:
            self.trouble = earlier.trouble
            self.is_stuck = earlier.is_stuck

    def note(self, error: Exception) -> None:
        """Record that a file could not be fetched in the present round. Deleted and replaced files
        take precedence over other problems that require user action, which take precedence over
        temporary problems."""
        is_stuck = isinstance(error, _OF_PERSONS)
        if isinstance(error, MissingFileError | ChangedFileError):
            self.gone[error.path] = type(error)
            self.error = error = self._explain()
        elif self.error is not None or (self.is_noted and self.is_stuck and not is_stuck):
            return
        if not isinstance(error, MegablendError | AwayError):
            LOG.warning("mirror: this is a bug in megablend; please report it", exc_info=error)
        self.put_trouble(str(error), is_stuck=is_stuck)

    def put_trouble(self, trouble: str, *, is_stuck: bool) -> None:
        """Record a problem of the present round, and log it unless it is the same as before."""
        if self.trouble != trouble:
            LOG.warning("mirror: %s: %s", self.goal.want.target, trouble)
        self.trouble = trouble
        self.is_stuck = is_stuck
        self.is_noted = True

    def end_round(self) -> None:
        """End a round: forget the problem if it was not found again in this round."""
        # Without a manifest nothing is fetched: the next plan finds out whether it has come
        if not self.is_noted and self.error is None and self.share:
            self.trouble = ""
            self.is_stuck = False
        self.is_noted = False

    def _explain(self) -> DataError:
        """Return the error for a goal with files that were deleted or replaced after they were
        listed."""
        path, error_class = min(self.gone.items())
        happened = "was deleted" if issubclass(error_class, MissingFileError) else "was replaced"
        others = len(self.gone) - 1
        more = f"; {others:,} more files were deleted or replaced" if others else ""
        dataset = self.goal.revision.dataset
        return error_class(
            path,
            f"{happened} at the source after it was listed{more}\n"
            f"make a revision of the files that exist now: `megablend datasets add {dataset} SOURCE...`",
        )

    def as_json(self) -> dict[str, Any]:
        """Return the state as JSON, for users and programs."""
        want = self.goal.want
        return {
            "want": want.target,
            "revision": self.goal.revision.digest,
            "pinned": want.is_pinned,
            "until": want.until,
            "bytes": self.needed,
            "missing": self.missing,
            "short": self.short,
            "trouble": self.trouble,
            "stuck": self.is_stuck,
        }


def shorten(text: str, letters: int) -> str:
    """Return a text of about `letters` characters at most. A longer text is cut after a word, and
    an ellipsis is added."""
    if len(text) <= letters:
        return text
    begin = text[:letters]
    # A single word of that length is cut
    return f"{begin.rpartition(' ')[0] or begin} ..."


class Patience:
    """Decides when a wait for a want has to end, because nothing was fetched for STUCK_SECONDS and
    user action is needed."""

    def __init__(self) -> None:
        self._missing = -1
        self._since = 0.0
        self.obstacle = ""
        """The problem that ended the wait; "" while the wait continues."""

    def look(self, missing: int, obstacle: str) -> str:
        """Decide whether the wait ends now. Returns: the problem that ends it; "" if it continues.

        Args:
            missing: the present number of missing bytes.
            obstacle: the present problem that requires user action; "" if there is none.
        """
        if not obstacle or missing != self._missing:
            self._missing = missing
            self._since = time.monotonic()
        elif time.monotonic() - self._since >= STUCK_SECONDS:
            self.obstacle = obstacle
        return self.obstacle

    def make_error(self, want: Want) -> ResourceError:
        """Return the error for a wait that has ended."""
        return ResourceError(
            f"{self.obstacle}\n"
            f"nothing was fetched for {STUCK_SECONDS:g} s; {want.target} stays wanted, and is fetched once this is fixed"
        )
