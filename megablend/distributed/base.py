"""The protocol of communicators between processes, and the communicator of a single process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeVar

from megablend.distributed.fail_together import FailTogether
from megablend.errors import MegablendError

T = TypeVar("T")
on_failure: list[Callable[[BaseException, int | None], None]] = []
"""Functions that are called before a failing command exits, with the error and the rank that raised
it as the arguments; the rank may be unknown. With `--json`, one of them prints the error as
JSON."""
REPORT_SECONDS = 3.0
"""Seconds that other ranks wait after an error, so that only the first rank prints it as JSON."""


class Communicator(Protocol):
    """A communicator of the processes that run a build together. All ranks must call the collective
    methods (`barrier`, `bcast`, `gather` and `allgather`) in the same order."""

    rank: int
    """The rank of this process, 0 to size - 1."""
    size: int
    """The number of processes."""

    def barrier(self, on_wait: Callable[[], None] | None = None) -> None:
        """Wait until all ranks have called this method and all posts have arrived. Call `on_wait`
        at intervals."""
        ...

    def bcast(self, value: T) -> T:
        """Return rank 0's value, on every rank; the argument of other ranks is ignored."""
        ...

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on rank 0; an empty list on other
        ranks."""
        ...

    def allgather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank."""
        ...

    def post(self, value: object) -> None:
        """Send `value` to rank 0 without waiting."""
        ...

    def posts(self) -> list[tuple[int, Any]]:
        """Return, on rank 0, a pair (rank, value) for each post that has arrived since the last
        call."""
        ...

    def abort(self, error: BaseException) -> NoReturn:
        """Terminate all ranks with this error's message and exit code."""
        ...


class SingleProcess(FailTogether):
    """A communicator of one process."""

    def __init__(self) -> None:
        super().__init__(0, 1, lambda value: [value])


def exit_code(error: BaseException) -> int:
    """Return the exit code of a program that fails with an error: the error's own exit code, which
    click's errors have, too; 130 for a keyboard interrupt, or 70 for any other error, which is a
    bug."""
    code = 130 if isinstance(error, KeyboardInterrupt) else MegablendError.exit_code
    return int(getattr(error, "exit_code", code))
