"""Detects whether an MPI launcher started this process, and returns the communicator for a build:
of all ranks of the launcher, or of this process alone.

A process started alone never imports mpi4py: MPI_Init outside a launcher hangs on some systems, and
makes fork unsafe. If the launcher belongs to another MPI library than the one that mpi4py is bound
to, every process sees itself as rank 0 of 1, and N builds of the same cache would race silently. So
the launcher's process count is compared with MPI's, and a difference is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megablend.distributed.base import Communicator, SingleProcess
from megablend.errors import LaunchError

_OPEN_MPI = "OMPI_COMM_WORLD_SIZE"
_OTHER_LIBRARIES = ("MPICH", "Intel", "MVAPICH")
"""Words in the names of MPI libraries that are not Open MPI."""
_SIZE_VARIABLES = {_OPEN_MPI: "Open MPI's mpirun", "PMI_SIZE": "mpirun (MPICH, Intel MPI) or srun"}
"""The environment variables that contain the number of processes of a job, and the name of the
launcher that sets each variable."""
_RANK_VARIABLES = {
    _OPEN_MPI: "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "SLURM_STEP_ID": "SLURM_PROCID",
    "TORCHELASTIC_RUN_ID": "RANK",
}
"""The environment variables that contain a process's rank, by a variable that the same launcher
sets."""
_SLURM_VARIABLES = {"SLURM_STEP_NUM_TASKS": "srun", "SLURM_NTASKS": "srun"}
"""Like _SIZE_VARIABLES, for variables that are used only inside a job step of Slurm."""
_REINSTALL = "python -m pip install --force-reinstall --no-binary mpi4py mpi4py"


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherInfo:
    """A launcher, as described by environment variables."""

    by: str
    """The name of the launcher, as shown in messages."""
    variable: str
    """The name of the environment variable that contains the number of processes."""
    size: int
    """The number of processes that the launcher has started."""
    exact: bool
    """Whether `size` is the exact number of processes; if False, it is a lower bound."""

    @property
    def count(self) -> str:
        """The number of processes, as shown in messages: "8", or "8 or more"."""
        return f"{self.size}{'' if self.exact else ' or more'}"

    def __str__(self) -> str:
        return f"{self.by} started {self.count} processes ({self.variable})"


def detect_launcher(environ: Mapping[str, str]) -> LauncherInfo | None:
    """Return the launcher that started this process; None if there is none.

    Slurm's variables are used only inside a job step (SLURM_STEP_ID), since batch scripts have them
    too. They are checked last, since mpirun is often run in a shell that is itself a step of one
    task. torchrun, which srun or mpirun often start on each machine, is nearer than both; its
    processes are not those of an MPI launcher.

    Raises: LaunchError if the number of processes in a variable is not an integer.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return None
    sizes = _SIZE_VARIABLES | (_SLURM_VARIABLES if "SLURM_STEP_ID" in environ else {})
    for variable, by in sizes.items():
        if variable in environ:
            return LauncherInfo(
                by=by, variable=variable, size=read_count(environ, variable), exact=True
            )
    if "MPI_LOCALNRANKS" in environ:
        size = read_count(environ, "MPI_LOCALNRANKS")
        return LauncherInfo(by="mpirun", variable="MPI_LOCALNRANKS", size=size, exact=False)
    if "PMIX_RANK" in environ:
        size = read_count(environ, "PMIX_RANK") + 1
        return LauncherInfo(by="a PMIx launcher", variable="PMIX_RANK", size=size, exact=False)
    return None


def is_later_rank(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher started this process as another rank than the first. No other rank
    is asked."""
    ranks = {environ.get(rank) for by, rank in _RANK_VARIABLES.items() if by in environ}
    return not ranks <= {None, "0"}


def detect(environ: Mapping[str, str] = os.environ) -> Communicator:
    """Return the communicator of this process, after initialising MPI if an MPI launcher started
    several processes.

    Raises: LaunchError if mpi4py or its MPI library is missing, or reports another number of
        processes than the launcher.
    """
    started = detect_launcher(environ)
    if started is None or (started.exact and started.size == 1):
        return SingleProcess()
    if started.variable == "PMI_SIZE" and not _is_open(environ.get("PMI_FD")):
        raise LaunchError(
            f"{started}, but not this one, which cannot reach the launcher (PMI_FD); start it without {started.variable}, "
            "or call the Python function instead"
        )
    try:
        from megablend.distributed import mpi
    except (ImportError, RuntimeError) as error:
        # mpi4py's wheel raises RuntimeError if it finds no libmpi
        raise LaunchError(
            f"{started} but MPI cannot be loaded ({error}); install mpi4py for the launcher's MPI library (`pip install "
            "'megablend[mpi]'`) or together with MPICH (`pip install 'megablend[mpich]'`), or start a single process"
        ) from error
    library = mpi.library()
    is_other = started.variable == _OPEN_MPI and any(name in library for name in _OTHER_LIBRARIES)
    if is_other or ("PMIX_NAMESPACE" in environ and mpi.lacks_pmix()):
        raise LaunchError(f"{started} but {_say_needs(library, environ)}")
    launch = mpi.MpiLaunch()
    if launch.size < started.size or (started.exact and launch.size != started.size):
        raise LaunchError(f"{started} but MPI sees {launch.size}: {_say_needs(library, environ)}")
    return launch


def _is_open(file: str | None) -> bool:
    """Return whether a launcher's connection is open in this process; true if there is none. A
    process that a rank starts does not inherit it."""
    try:
        return file is None or os.fstat(int(file)) is not None
    except OSError:
        return False


def _say_needs(library: str, environ: Mapping[str, str]) -> str:
    """Return the part of an error message that says that mpi4py's MPI library cannot use the
    launcher, and how to fix that."""
    if "SLURM_STEP_ID" in environ:
        plugin = "pmix" if library.startswith("Open MPI") else "pmi2"
        return (
            f"mpi4py's MPI library ({library}) needs `srun --mpi={plugin}` (`srun --mpi=list` says whether this Slurm has it) "
            "or that library's own mpirun"
        )
    return (
        f"mpi4py is bound to another MPI library ({library}); start the job with that library's own mpirun, or reinstall "
        f"mpi4py for the launcher's library ({_REINSTALL})"
    )


def read_count(environ: Mapping[str, str], variable: str) -> int:
    """Return the integer in an environment variable of a launcher. Raises: LaunchError if the
    variable is missing or not an integer."""
    value = environ.get(variable)
    if value is None:
        raise LaunchError(
            f"{variable} is not set, but other variables of a launcher are; unset them, or start the job with the launcher"
        )
    try:
        return int(value)
    except ValueError:
        raise LaunchError(
            f"{variable}: expected an integer, got {value!r}: unset it, or restart the job"
        ) from None
