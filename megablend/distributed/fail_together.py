"""A communicator whose ranks fail together: an error on one rank is raised on all ranks, in the
next collective call of each rank.

Each collective call exchanges envelopes (a value or an error) between all ranks; `abort` is the
same exchange. So a rank that fails takes part in the call in which the others are waiting, and no
rank waits forever. No process is terminated: the training script may handle the error.

If groups of ranks work separately (`Subgroup`), each collective call of a group begins with an
exchange between all ranks. Ranks whose group has finished keep exchanging until all groups have
finished. So an error reaches all groups, while values stay within their group.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from megablend.errors import LaunchError, MegablendError
from megablend.system.failures import translate

T = TypeVar("T")


class RankError(LaunchError):
    """The cause of an error that another rank raised."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(f"raised on rank {rank} of {size}")
        self.rank = rank


class FailTogether:
    """A communicator that exchanges errors along with values. Implements
    megablend.distributed.base.Communicator.

    Args:
        rank: the number of this process among the ranks.
        size: the number of ranks.
        exchange: a collective call that returns every rank's value, in rank order.
    """

    def __init__(self, rank: int, size: int, exchange: Callable[[Any], list[Any]]) -> None:
        self.rank = rank
        self.size = size
        self._exchange = exchange
        self._failure: BaseException | None = None
        """The error that was raised on all ranks. Each later call raises it again. None before the
        first error."""
        self._inbox: list[tuple[int, Any]] = []

    def allgather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank. Raises: the error with
        which a rank called `abort`."""
        if self._failure is not None:
            raise self._failure
        try:
            envelopes = self._exchange((value, None))
        except BaseException as error:  # a rank has exited and cannot be notified
            self._failure = error
            raise
        for rank, (_, failure) in enumerate(envelopes):
            if failure is not None:
                self._failure = failure
                raise failure from RankError(rank, self.size)
        return [received for received, _ in envelopes]

    def barrier(self, on_wait: Callable[[], None] | None = None) -> None:
        """Wait for all ranks, then call `on_wait` once."""
        self.allgather(None)
        if on_wait is not None:
            on_wait()

    def bcast(self, value: T) -> T:
        """Return rank 0's value, on every rank."""
        return self.allgather(value if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on rank 0; an empty list on other
        ranks."""
        values = self.allgather(value)
        return values if self.rank == 0 else []

    def post(self, value: object) -> None:
        """Store the value on rank 0, for `posts`. On other ranks the value is dropped, since their
        progress is not shown."""
        if self.rank == 0:
            self._inbox.append((0, value))

    def posts(self) -> list[tuple[int, Any]]:
        """Return, on rank 0, a pair (0, value) for each post of this rank since the last call."""
        arrived = self._inbox
        self._inbox = []
        return arrived

    def finish(self) -> None:
        """Wait until all ranks have called this method. Some may still be working in a
        `Subgroup`."""
        while not all(self.allgather(True)):
            pass

    def abort(self, error: BaseException) -> NoReturn:
        """Raise the error on this rank, and on all others that have not raised an error yet."""
        process = f"rank {self.rank}" if self.size > 1 else "this process"
        error = translate(error, process) or error
        if self._failure is None:
            self._failure = error
            # If another rank has exited, the present error is more informative than the LaunchError
            with contextlib.suppress(LaunchError):
                self._exchange((None, _portable(error)))
        raise error


class Subgroup(FailTogether):
    """A communicator of a group of ranks. An error on any rank, of this group or another one, is
    raised on all ranks. When the group has finished, its ranks must call `world.finish()`.

    Args:
        group: the communicator through which the ranks of the group exchange values.
        world: the communicator of all ranks, including those of other groups and of no group.
    """

    def __init__(self, group: FailTogether, world: FailTogether) -> None:
        super().__init__(group.rank, group.size, group.allgather)
        self._world = world

    def allgather(self, value: T) -> list[T]:
        """Return the values of the group's ranks, in rank order, on every rank of the group.
        Raises: the error with which a rank of any group called `abort`."""
        self._world.allgather(False)
        return self._exchange(value)

    def abort(self, error: BaseException) -> NoReturn:
        """Raise the error on all ranks of all groups."""
        self._world.abort(error)


def _portable(error: BaseException) -> BaseException:
    """Return the error itself if it can be pickled and sent to another process; otherwise a
    RuntimeError with the same text."""
    if isinstance(error, MegablendError):
        return error
    substitute = RuntimeError(f"{type(error).__name__}: {error}")
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # an error from any library, with any constructor
        return substitute
    is_same = type(copy) is type(error) and str(copy) == str(error)
    return copy if is_same else substitute


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The processes of a job, as one of these processes sees them."""

    world: FailTogether
    """The communicator of all ranks. It is for short exchanges only, since a call that waits for
    several minutes may time out."""
    members: Callable[[Sequence[int]], AbstractContextManager[FailTogether]]
    """Returns a context manager that provides a communicator of the given ranks. Its calls may wait
    for hours. Exactly these ranks enter the context."""

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self.world.rank

    @property
    def size(self) -> int:
        """The number of processes of the job."""
        return self.world.size
