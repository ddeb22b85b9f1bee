"""The ranks of an MPI job. Imported only by `launch.detect`, under an MPI launcher."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import mpi4py

from megablend.distributed.base import REPORT_SECONDS, exit_code, on_failure
from megablend.errors import MegablendError
from megablend.system.failures import translate

# Only MpiLaunch initialises MPI, not the import: under the launcher of another MPI library,
# initialising may end the process without an error message.
mpi4py.rc.initialize = False
mpi4py.rc.finalize = True

from mpi4py import MPI  # noqa: E402

T = TypeVar("T")

_FIRST_POLL_SECONDS = 0.0002
"""The first pause between two polls, in seconds. It is short, so that ranks that arrive together do
not wait long."""
_POLL_SECONDS = 0.005
"""The longest pause between two polls, in seconds."""
_ABORT_SECONDS = 0.3
"""The pause between a rank's last message and its call of MPI_Abort, in seconds: launchers may lose
lines that are written just before the abort."""
_POST_TAG = 1
"""The tag of the MPI messages that carry posts."""


def library() -> str:
    """Return the name and the version of the MPI library that mpi4py is bound to. MPI need not be
    initialised."""
    return " ".join(MPI.Get_library_version().partition("\n")[0].partition(",")[0].split())


def lacks_pmix() -> bool:
    """Return whether the MPI library is an MPICH that was built without PMIx. Under a PMIx launcher,
    initialising it ends the process."""
    version = MPI.Get_library_version()
    return version.startswith("MPICH Version") and "pmix" not in version


class MpiLaunch:
    """A communicator of all MPI ranks (COMM_WORLD), or of a group of them. It waits by polling,
    since MPI's own calls busy-wait, which takes cores from ranks that are still working."""

    def __init__(self, comm: Any = None) -> None:
        if not MPI.Is_initialized():
            MPI.Init()
        self._comm = MPI.COMM_WORLD if comm is None else comm
        self.rank = int(self._comm.Get_rank())
        self.size = int(self._comm.Get_size())
        self._sent: list[Any] = []
        self._inbox: list[tuple[int, Any]] = []
        self._has_aborted = False

    def barrier(self, on_wait: Callable[[], None] | None = None) -> None:
        """Wait until all ranks have called this method and all posts have arrived. Call `on_wait`
        at intervals.

        A post is a synchronous send, which is complete only when it has been received. A rank
        enters the MPI barrier once its own posts are complete, so no post is in flight after the
        barrier.

        Source: Hoefler, Siebert, Lumsdaine, "Scalable communication protocols for dynamic sparse
            data exchange", 2010.
        """
        pauses = _pauses()
        while self._has_unreceived_posts():
            self._pause(on_wait, next(pauses))
        request = self._comm.Ibarrier()
        while not request.Test():
            self._pause(on_wait, next(pauses))
        if on_wait is not None:
            on_wait()

    def bcast(self, value: T) -> T:
        """Return rank 0's value, on every rank."""
        self.barrier()
        result: T = self._comm.bcast(value, root=0)
        return result

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on rank 0; an empty list on other
        ranks."""
        self.barrier()
        return self._comm.gather(value, root=0) or []

    def allgather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank."""
        return self.bcast(self.gather(value))

    def members(self, ranks: Sequence[int]) -> MpiLaunch:
        """Return a communicator of the given ranks, in the given order. Exactly these ranks must
        call this method, and must later call `free` of the returned communicator."""
        return MpiLaunch(self._comm.Create_group(self._comm.Get_group().Incl(list(ranks))))

    def free(self) -> None:
        """Free this communicator, which `members` has returned."""
        self._comm.Free()

    def post(self, value: object) -> None:
        """Send `value` to rank 0 without waiting."""
        if self.rank == 0:
            self._inbox.append((0, value))
        else:
            self._has_unreceived_posts()  # forgets posts that were received
            self._sent.append(self._comm.issend(value, dest=0, tag=_POST_TAG))

    def posts(self) -> list[tuple[int, Any]]:
        """Return, on rank 0, a pair (rank, value) for each post that has arrived since the last
        call."""
        self._receive()
        arrived = self._inbox
        self._inbox = []
        return arrived

    def abort(self, error: BaseException) -> NoReturn:
        """Print "rank r: message" to stderr and terminate all ranks with the error's exit code."""
        if self._has_aborted:  # within another `abort` of this rank, which waits to be terminated
            raise error
        self._has_aborted = True
        error = translate(error, "this rank") or error
        try:
            self._report(error)
        finally:  # a full or closed stderr must not leave the other ranks waiting
            self._comm.Abort(exit_code(error))
        raise SystemExit(exit_code(error))

    def _report(self, error: BaseException) -> None:
        """Print "rank r: message" to stderr, unless a lower rank terminates this one first."""
        # If all ranks fail for the same reason, the lowest rank reports it and terminates the
        # others before they repeat it.
        time.sleep(4 * _ABORT_SECONDS * min(self.rank, 4))
        if on_failure and self.rank > 0:
            time.sleep(REPORT_SECONDS)
        expected = isinstance(error, MegablendError | KeyboardInterrupt)
        trace = "" if expected else "".join(traceback.format_exception(error))
        with contextlib.suppress(OSError):
            print(
                f"{trace}rank {self.rank}: {str(error) or type(error).__name__}",
                file=sys.stderr,
                flush=True,
            )
        for report in on_failure:
            report(error, self.rank)
        time.sleep(_ABORT_SECONDS)

    def _has_unreceived_posts(self) -> bool:
        """Return whether rank 0 has yet to receive posts of this rank. Forget posts that have been
        received."""
        self._sent = [request for request in self._sent if not request.test()[0]]
        return bool(self._sent)

    def _receive(self) -> None:
        """Receive the posts that have arrived, on rank 0."""
        status = MPI.Status()
        while self.rank == 0 and self._comm.iprobe(
            source=MPI.ANY_SOURCE, tag=_POST_TAG, status=status
        ):
            source = int(status.Get_source())
            self._inbox.append((source, self._comm.recv(source=source, tag=_POST_TAG)))

    def _pause(self, on_wait: Callable[[], None] | None, seconds: float) -> None:
        """Pause between two polls: receive posts, call `on_wait`, and sleep."""
        self._receive()
        if on_wait is not None:
            on_wait()
        time.sleep(seconds)


def _pauses() -> Iterator[float]:
    """Yield the lengths of successive pauses in seconds, which double up to _POLL_SECONDS."""
    seconds = _FIRST_POLL_SECONDS
    while True:
        yield seconds
        seconds = min(2 * seconds, _POLL_SECONDS)
