"""Finds the processes that open a dataset together: the ranks of torch.distributed, or else those
of an MPI launcher, or else this process alone.

torch is imported only if the process has imported it already or was started by torchrun, since
caches can be prepared without torch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from megablend.distributed.base import (
    REPORT_SECONDS,
    Communicator,
    SingleProcess,
    on_failure,
)
from megablend.distributed.fail_together import FailTogether, Job
from megablend.distributed.launch import detect, read_count
from megablend.errors import LaunchError


def this_job() -> Job:
    """Return the job that this process belongs to.

    Raises: LaunchError if the MPI library does not match the launcher, or if torchrun started
        several processes that have not initialized a process group.
    """
    if _is_initialized():
        from megablend.distributed.torch_job import torch_job

        return torch_job()
    launch = detect()
    if launch.size > 1:
        from megablend.distributed.mpi import MpiLaunch

        assert isinstance(launch, MpiLaunch)
        return Job(
            world=FailTogether(launch.rank, launch.size, launch.allgather),
            members=lambda ranks: _mpi_members(launch, ranks),
        )
    started = _count_torchrun_processes(os.environ)
    if started > 1:
        raise LaunchError(
            f"torchrun started {started} processes (WORLD_SIZE), but torch.distributed is not initialized: call "
            "torch.distributed.init_process_group first"
        )
    return Job(world=SingleProcess(), members=lambda ranks: nullcontext(SingleProcess()))


@contextmanager
def program_job() -> Iterator[Job]:
    """Provide the job that runs a command. Within the context, processes that torchrun started
    share a process group. An error is raised on all ranks, but only the first rank prints it as
    JSON. Raises: see `this_job` and `process_group`."""
    with _find_process_group():
        job = this_job()
        is_silent = job.rank > 0 and bool(on_failure)
        if is_silent:
            on_failure.clear()
        try:
            yield job
        except BaseException:
            # torchrun ends the others as soon as one exits
            time.sleep(REPORT_SECONDS if is_silent else 0)
            raise


def _find_process_group() -> AbstractContextManager[None]:
    """Return a context manager that creates a process group if torchrun started several processes
    that have none."""
    if _is_initialized() or _count_torchrun_processes(os.environ) < 2:
        return nullcontext()
    from megablend.distributed.torch_job import process_group

    return process_group()


@contextmanager
def program_launch() -> Iterator[Communicator]:
    """Provide the communicator of the processes that run a command together: those of an MPI
    launcher, or else those of torchrun, or else this process alone.

    This is for commands only: a training script may call Python functions on one rank alone.
    Raises: see `detect` and `program_job`.
    """
    launch = detect()
    if launch.size > 1 or _count_torchrun_processes(os.environ) < 2:
        yield launch
        return
    with program_job() as job:
        yield job.world


def _is_initialized() -> bool:
    """Return whether torch.distributed is initialized in this process."""
    module: Any = sys.modules.get("torch.distributed")
    return module is not None and bool(module.is_available()) and bool(module.is_initialized())


def _count_torchrun_processes(environ: Mapping[str, str]) -> int:
    """Return the number of processes that torchrun started; 0 if torchrun did not start this
    process. Raises: LaunchError if WORLD_SIZE is not an integer."""
    if "TORCHELASTIC_RUN_ID" not in environ or "WORLD_SIZE" not in environ:
        return 0
    return read_count(environ, "WORLD_SIZE")


@contextmanager
def _mpi_members(launch: Any, ranks: Sequence[int]) -> Iterator[FailTogether]:
    """Provide a communicator of the given MPI ranks: see `Job.members`."""
    part = launch.members(ranks)
    try:
        yield FailTogether(part.rank, part.size, part.allgather)
    finally:
        part.free()
