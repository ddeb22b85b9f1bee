"""The job of this process: all processes that open one dataset together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from megablend.distributed.fail_together import FailTogether


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """This process and the other processes of its job."""

    world: FailTogether
    """All ranks. For short exchanges only: a backend may time out after some minutes."""
    members: Callable[[Sequence[int]], AbstractContextManager[FailTogether]]
    """A communicator of some ranks, including this one, without a short time-out; only these ranks
    enter the context."""

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of processes of the job."""
        return self.world.size
