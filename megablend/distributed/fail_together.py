"""A launch whose ranks fail together: an error on one rank is raised on all of them, by the next verb that they reach.

Every verb is one exchange of envelopes, a value or an error, between all ranks; `abort` is that exchange, too. So a rank that
fails joins the others in whichever call they wait in, and no rank is left waiting. No process is ended: the training script
that called us may have other plans.

Where groups of ranks work apart, each verb of a group is a vote of all ranks first, whatever verbs the others are in; ranks
that have done their part vote on until all have. So an error reaches all groups, and values stay in their own.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from megablend.errors import LaunchError, MegablendError
from megablend.system.failures import translate

T = TypeVar("T")


class FailTogether:
    """Ranks that exchange values, and errors with them. See megablend.distributed.launch.Launch for the verbs.

    Args:
        rank, size: of this process among them.
        exchange: a collective call that returns every rank's value, in rank order.
    """

    def __init__(self, rank: int, size: int, exchange: Callable[[Any], list[Any]]) -> None:
        self.rank = rank
        self.size = size
        self._exchange = exchange
        self._failure: BaseException | None = None
        self._inbox: list[tuple[int, Any]] = []

    def allgather(self, value: T) -> list[T]:
        """Every rank's value in rank order, on every rank. Raises the error of a rank that aborted."""
        if self._failure is not None:
            raise self._failure
        try:
            envelopes = self._exchange((value, None))
        except BaseException as error:  # a rank has exited: it cannot be told
            self._failure = error
            raise
        for rank, (_, failure) in enumerate(envelopes):
            if failure is not None:
                self._failure = failure
                raise failure from LaunchError(f"raised on rank {rank} of {self.size}")
        return [found for found, _ in envelopes]

    def barrier(self, on_wait: Callable[[], None] | None = None) -> None:
        """Wait for all ranks; `on_wait` is called once."""
        self.allgather(None)
        if on_wait is not None:
            on_wait()

    def bcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        return self.allgather(value if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Every rank's value in rank order, on rank 0; an empty list elsewhere."""
        found = self.allgather(value)
        return found if self.rank == 0 else []

    def post(self, value: object) -> None:
        """Keep the value for `posts` on rank 0; the other ranks' are dropped: a plugin shows no progress."""
        if self.rank == 0:
            self._inbox.append((0, value))

    def posts(self) -> list[tuple[int, Any]]:
        """On rank 0: what it posted since the last call."""
        arrived, self._inbox = self._inbox, []
        return arrived

    def finish(self) -> None:
        """Wait for all ranks, some of which may be at work in a Subgroup."""
        while not all(self.allgather(True)):
            pass

    def abort(self, error: BaseException) -> NoReturn:
        """Raise the error on all ranks; on those that have raised one already, nothing more is said."""
        error = translate(error, f"rank {self.rank}") or error
        if self._failure is None:
            self._failure = error
            with contextlib.suppress(LaunchError):  # a rank has exited; the error at hand is more informative
                self._exchange((None, _portable(error)))
        raise error


class Subgroup(FailTogether):
    """Some of the ranks, that fail together with all. The next verb of all that they call is `finish`.

    Args:
        group: how these ranks exchange values.
        everyone: all ranks, those of other groups and of none among them.
    """

    def __init__(self, group: FailTogether, world: FailTogether) -> None:
        super().__init__(group.rank, group.size, group.allgather)
        self._everyone = world

    def allgather(self, value: T) -> list[T]:
        """Every rank's value in rank order, on every rank. Raises the error of a rank that aborted, in whatever group."""
        self._everyone.allgather(False)
        return self._exchange(value)

    def abort(self, error: BaseException) -> NoReturn:
        """Raise the error on all ranks of all groups."""
        self._everyone.abort(error)


def _portable(error: BaseException) -> BaseException:
    """The error as another process can raise it."""
    if isinstance(error, MegablendError):
        return error
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # an error of any library, with any constructor
        return RuntimeError(f"{type(error).__name__}: {error}")
    return (
        copy
        if type(copy) is type(error) and str(copy) == str(error)
        else RuntimeError(f"{type(error).__name__}: {error}")
    )
