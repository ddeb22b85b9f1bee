"""Who builds: this process alone, or the ranks that an MPI launcher started. The same verbs serve both.

A process started alone never imports mpi4py: MPI_Init outside a launcher hangs on some systems and costs a fork its
safety. Under a launcher whose MPI is not the one that mpi4py is bound to, every process sees itself as rank 0 of 1; N
builds of the same thing would race without a word, so the launcher's own count is compared with MPI's and a difference
is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeVar

from megablend.errors import LaunchError, MegablendError
from megablend.system.failures import translate

T = TypeVar("T")

_OPEN_MPI = "OMPI_COMM_WORLD_SIZE"
_OTHERS = ("MPICH", "Intel", "MVAPICH")
_SIZES = {_OPEN_MPI: "Open MPI's mpirun", "PMI_SIZE": "mpirun (MPICH, Intel MPI) or srun"}
_SLURM_SIZES = {"SLURM_STEP_NUM_TASKS": "srun", "SLURM_NTASKS": "srun"}
_REINSTALL = "python -m pip install --force-reinstall --no-binary mpi4py mpi4py"


class Launch(Protocol):
    """The processes of one build, and what they say to each other. Collective verbs: by all, in one order."""

    rank: int
    size: int

    def barrier(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait for all ranks, and for all posts to arrive; `meanwhile` is called now and then."""
        ...

    def bcast(self, value: T) -> T:
        """Rank 0's value, on every rank (the others' argument is ignored)."""
        ...

    def gather(self, value: T) -> list[T]:
        """Every rank's value in rank order, on rank 0; an empty list elsewhere."""
        ...

    def allgather(self, value: T) -> list[T]:
        """Every rank's value in rank order, on every rank."""
        ...

    def post(self, value: object) -> None:
        """Send `value` to rank 0 without waiting."""
        ...

    def posts(self) -> list[tuple[int, Any]]:
        """On rank 0: (rank, value) of the posts that have arrived since the last call."""
        ...

    def abort(self, error: BaseException) -> NoReturn:
        """End all ranks with this error: its message, and its exit code."""
        ...


@dataclass(slots=True)
class OneProcess:
    """A launch of this process alone."""

    rank: int = 0
    size: int = 1
    _inbox: list[tuple[int, Any]] = field(default_factory=list)

    def barrier(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Nobody to wait for."""
        if meanwhile is not None:
            meanwhile()

    def bcast(self, value: T) -> T:
        """The value itself."""
        return value

    def gather(self, value: T) -> list[T]:
        """A list of the value alone."""
        return [value]

    def allgather(self, value: T) -> list[T]:
        """A list of the value alone."""
        return [value]

    def post(self, value: object) -> None:
        """Keep the value for `posts`."""
        self._inbox.append((0, value))

    def posts(self) -> list[tuple[int, Any]]:
        """What was posted since the last call."""
        arrived, self._inbox = self._inbox, []
        return arrived

    def abort(self, error: BaseException) -> NoReturn:
        """Raise the error: there is nobody else to end."""
        raise translate(error, "this process") or error


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What the environment says of the launcher."""

    by: str
    variable: str
    size: int
    exact: bool
    """False where the variable only tells the least number of processes."""

    def __str__(self) -> str:
        return f"{self.by} started {self.size}{'' if self.exact else ' or more'} processes ({self.variable})"


def launcher(environ: Mapping[str, str]) -> Started | None:
    """The launcher that started this process, or None.

    Slurm's variables count only inside a step (SLURM_STEP_ID): a batch script has them too. They come last, since
    mpirun is often typed into a shell that is itself a step of one task.

    Raises: LaunchError where a count is not a number.
    """
    sizes = _SIZES | (_SLURM_SIZES if "SLURM_STEP_ID" in environ else {})
    for variable, by in sizes.items():
        if variable in environ:
            return Started(by=by, variable=variable, size=_count(environ, variable), exact=True)
    if "MPI_LOCALNRANKS" in environ:
        size = _count(environ, "MPI_LOCALNRANKS")
        return Started(by="mpirun", variable="MPI_LOCALNRANKS", size=size, exact=False)
    if "PMIX_RANK" in environ:
        size = _count(environ, "PMIX_RANK") + 1
        return Started(by="a PMIx launcher", variable="PMIX_RANK", size=size, exact=False)
    return None


def detect(environ: Mapping[str, str] = os.environ) -> Launch:
    """The launch that this process belongs to; initialises MPI under an MPI launcher of several processes.

    Raises: LaunchError where mpi4py or its MPI library is missing, or sees another number of processes than started.
    """
    started = launcher(environ)
    if started is None or (started.exact and started.size == 1):
        return OneProcess()
    try:
        from megablend.index import mpi
    except (ImportError, RuntimeError) as error:  # mpi4py's wheel raises RuntimeError where it finds no libmpi
        raise LaunchError(
            f"{started} but MPI cannot be loaded ({error}): install mpi4py and the launcher's MPI library "
            "(python -m pip install mpi4py mpich brings both), or start one process alone"
        ) from error
    library = mpi.library()
    if started.variable == _OPEN_MPI and any(name in library for name in _OTHERS):
        raise LaunchError(f"{started} but {_bound_to(library)}")
    launch = mpi.MpiLaunch()
    if launch.size < started.size or (started.exact and launch.size != started.size):
        raise LaunchError(f"{started} but MPI sees {launch.size}: {_bound_to(library)}")
    return launch


def exit_code(error: BaseException) -> int:
    """The exit code with which `error` ends a program: the error's own, 130 for an interrupt, 70 for a bug."""
    if isinstance(error, MegablendError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else MegablendError.exit_code


def _bound_to(library: str) -> str:
    return (
        f"mpi4py is bound to another MPI library ({library}); start with that library's own mpirun, or bind mpi4py to the "
        f"launcher's ({_REINSTALL})"
    )


def _count(environ: Mapping[str, str], variable: str) -> int:
    try:
        return int(environ[variable])
    except ValueError:
        raise LaunchError(
            f"{variable} is {environ[variable]!r} where a launcher puts a number: unset it, or start anew"
        ) from None
