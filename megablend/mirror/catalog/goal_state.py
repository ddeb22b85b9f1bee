"""The state of a goal: how much of it is held, and why the rest is not.

Goals are fetched in rounds. What a round finds out about a goal replaces what earlier rounds found,
so that no trouble outlasts its cause.
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
"""The time without progress after which nobody waits any longer for what only a person can change."""
_OF_PERSONS = (ConfigError, RefusedFileError, UnsupportedFileError)
"""Errors that last until a person changes something."""


@dataclass(slots=True, eq=False)
class State:
    """The state of a goal."""

    goal: Goal
    share: Share
    needed: int
    """The number of bytes of the share."""
    missing: int
    """The number of bytes of the share that are not held."""
    short: int = 0
    """The number of bytes of room that the share lacks; 0 if it fits."""
    trouble: str = ""
    """Why bytes are missing; empty if no reason is known."""
    is_stuck: bool = False
    """Whether only a person can change that."""
    is_noted: bool = False
    """Whether the present round has found the trouble; otherwise an earlier one did."""
    gone: dict[str, type[DataError]] = field(default_factory=dict)
    """The kind of error for each file that was deleted or replaced since it was listed, by
    location."""
    error: Exception | None = None
    """An error that waiting does not mend: a file was deleted or replaced, or the manifest is
    damaged."""

    @property
    def name(self) -> tuple[str, str]:
        """The name of the want, and the digest of the revision."""
        return self.goal.want.name, self.goal.revision.digest

    def keep_trouble(self, earlier: State) -> None:
        """Take the trouble that fetching the same goal had before, until the next round ends."""
        if earlier.share:
            self.trouble = earlier.trouble
            self.is_stuck = earlier.is_stuck

    def note(self, error: Exception) -> None:
        """Record that a file could not be fetched in the present round. Files that are gone outweigh
        what else a person has to change, and this outweighs what may pass."""
        is_stuck = isinstance(error, _OF_PERSONS)
        if isinstance(error, MissingFileError | ChangedFileError):
            self.gone[error.path] = type(error)
            self.error = error = self._explain()
        elif self.error is not None or (self.is_noted and self.is_stuck and not is_stuck):
            return
        if not isinstance(error, MegablendError | AwayError):
            LOG.warning("mirror: this is a bug in megablend", exc_info=error)
        self.put_trouble(str(error), is_stuck=is_stuck)

    def put_trouble(self, trouble: str, *, is_stuck: bool) -> None:
        """Record a trouble of the present round, and log it unless it is the same as before."""
        if self.trouble != trouble:
            LOG.warning("mirror: %s: %s", self.goal.want.target, trouble)
        self.trouble = trouble
        self.is_stuck = is_stuck
        self.is_noted = True

    def end_round(self) -> None:
        """Forget a trouble that the round that ends now has not found again."""
        # Without a manifest nothing is fetched: the next plan finds out whether it has come
        if not self.is_noted and self.error is None and self.share:
            self.trouble = ""
            self.is_stuck = False
        self.is_noted = False

    def _explain(self) -> DataError:
        """Return the error for a goal some of whose files were deleted or replaced after listing."""
        path, kind = min(self.gone.items())
        happened = "was deleted" if issubclass(kind, MissingFileError) else "was replaced"
        others = len(self.gone) - 1
        more = f"; {others:,} more changed" if others else ""
        dataset = self.goal.revision.dataset
        return kind(
            path,
            f"{happened} at the source after it was listed{more}\n"
            f"`megablend datasets add {dataset} SOURCE...` makes a revision of the files that exist now",
        )

    def as_json(self) -> dict[str, Any]:
        """Return the state for people and programs."""
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
    """Return a text of about so many letters at most: a longer one ends after a word, with an
    ellipsis."""
    if len(text) <= letters:
        return text
    begin = text[:letters]
    # A single word of that length is cut
    return f"{begin.rpartition(' ')[0] or begin} ..."


class Patience:
    """The end of a wait for a want: for STUCK_SECONDS nothing has come, because of what only a person
    can change."""

    def __init__(self) -> None:
        self._missing = -1
        self._since = 0.0
        self.obstacle = ""
        """Why the wait has ended; empty while it goes on."""

    def look(self, missing: int, obstacle: str) -> str:
        """Return why the wait ends now; empty if it does not.

        Args:
            missing: the number of bytes that are missing now.
            obstacle: what a person has to change at present; empty if there is nothing.
        """
        if not obstacle or missing != self._missing:
            self._missing = missing
            self._since = time.monotonic()
        elif time.monotonic() - self._since >= STUCK_SECONDS:
            self.obstacle = obstacle
        return self.obstacle

    def make_error(self, want: Want) -> ResourceError:
        """Return the error for the wait that has ended."""
        return ResourceError(
            f"{self.obstacle}\n{want.target} stays wanted, and is fetched once this is changed: nothing has come for "
            f"{STUCK_SECONDS:g} s"
        )
