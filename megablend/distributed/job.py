"""This process among those that open one dataset together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from megablend.distributed.fail_together import FailTogether


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """This process and the other processes of its job."""

    world: FailTogether
    """All ranks; for short talks: a backend may give up waiting after some minutes."""
    members: Callable[[Sequence[int]], AbstractContextManager[FailTogether]]
    """A launch of some ranks, this one among them, that waits as long as work takes; entered by just these ranks."""

    @property
    def rank(self) -> int:
        """This process's."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Processes of the job."""
        return self.world.size
