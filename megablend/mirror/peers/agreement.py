"""Whether the nodes of a cluster work together: not yet, they do, too few are there, or they cannot."""

from __future__ import annotations

import asyncio
import contextlib

from megablend.errors import ConfigError, MegablendError, ResourceError
from megablend.mirror.members.launchers import Pace
from megablend.storage.mirror_options import MirrorOptions
from megablend.system.log import LOG


class Agreement:
    """What a node knows of whether the others work together with it.

    Args:
        options: of the mirror: whether missing nodes are an error.
        size: number of nodes.
        pace: how long news are waited for.
    """

    def __init__(self, options: MirrorOptions, size: int, pace: Pace) -> None:
        self._is_strict = options.strict
        self._size = size
        self._pace = pace
        self._decided = asyncio.Event()
        self._failure: MegablendError | None = None
        self._too_few = ""
        self._news = asyncio.Event()

    @property
    def is_reached(self) -> bool:
        """Whether they do."""
        return self._decided.is_set() and not self._too_few and self._failure is None

    @property
    def is_open(self) -> bool:
        """Whether others are waited for: also for those that were at fault, until they are mended."""
        return not self.is_reached

    @property
    def has_failed(self) -> bool:
        """Whether they cannot work together as they are."""
        return self._failure is not None

    @property
    def lacks_nodes(self) -> bool:
        """Whether too few nodes are there for now."""
        return bool(self._too_few)

    @property
    def trouble(self) -> str:
        """Why they do not; empty if nothing is known."""
        return str(self._failure or self._too_few)

    async def wait(self) -> None:
        """Return when they work together. Raises: ResourceError while too few are there; ConfigError if
        they cannot."""
        await self._decided.wait()
        if self._failure is not None:
            raise self._failure
        if self._too_few:
            raise ResourceError(self._too_few)

    def reach(self) -> None:
        """They work together from now on."""
        self._too_few = ""
        self._failure = None
        self._decided.set()
        LOG.info("mirror: %d nodes work together", self._size)

    def fail(self, error: MegablendError) -> None:
        """They cannot. Once they do, what one of them says ends nothing."""
        LOG.warning("mirror: %s", error)
        if not self._decided.is_set():
            self._failure = error
            self._decided.set()

    def is_enough(self, missing: list[str]) -> bool:
        """Whether a majority is there, which goes on. Raises: ConfigError with `strict`."""
        text = f"{len(missing)} of {self._size} nodes are missing: {', '.join(missing[:8])}"
        if 2 * (self._size - len(missing)) <= self._size:
            self.fall_short(f"{text}: the others are no majority")
            return False
        if self._is_strict:
            self.fall_short(text)
        LOG.warning("mirror: %s: going on without them", text)
        return True

    def fall_short(self, text: str) -> None:
        """Reads fail, so that ranks read through, until more nodes have come.
        Raises: ConfigError with `strict`."""
        if self._is_strict:
            raise ConfigError(f"{text}\nstart them, or leave out `strict` of `mirror`")
        if not self._too_few:
            LOG.warning("mirror: %s", text)
        self._too_few = text
        self._decided.set()

    def note_news(self) -> None:
        """Something has changed for those who wait for nodes."""
        self._news.set()

    async def wait_for_news(self) -> None:
        """Return when something has changed, or after a while."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._news.wait(), self._pace.ping / 4)
        self._news.clear()
