"""Determine the data-parallel rank that a loader reads for. It is given explicitly or by a process
group, and never guessed from the world size.

Ranks of tensor and pipeline parallelism read the same samples, so the number of processes does not
imply data parallelism.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch.distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megablend.config.numbers import whole_number
from megablend.distributed.launch import LauncherInfo, detect_launcher, read_count
from megablend.errors import ConfigError

DataParallelGroup: TypeAlias = ProcessGroup | DeviceMesh

_ADVICE = (
    "pass data_parallel_rank= and data_parallel_size=, or data_parallel_group= (a torch ProcessGroup, or one "
    "dimension of a DeviceMesh, such as mesh['dp']), from which both are taken"
)


def resolve_rank(
    data_parallel_rank: int | None,
    data_parallel_size: int | None,
    data_parallel_group: DataParallelGroup | None,
    environ: Mapping[str, str] = os.environ,
    *,
    replicas: int = 1,
) -> tuple[int, int]:
    """Return the data-parallel (rank, size). In a job of a single process, the default is (0, 1),
    and any other rank and size may be given.

    Args:
        data_parallel_rank, data_parallel_size: given together, or both None.
        data_parallel_group: given instead of both, or None.
        environ: the environment in which launchers set their variables.
        replicas: number of jobs that read the run together, each with as many processes as this
            one.

    Warns: if the number of processes is not a multiple of the size.
    Raises: ConfigError if both are missing in a job of several processes, if one is given without
        the other or together with a group, if they are out of range, or if there are fewer
        processes than ranks; LaunchError if a launcher's variable is not a number.
    """
    rank = data_parallel_rank
    size = data_parallel_size
    if data_parallel_group is not None:
        if rank is not None or size is not None:
            raise ConfigError(
                "data_parallel_group: found together with data_parallel_rank or data_parallel_size; pass only the "
                "group"
            )
        return _place_in(data_parallel_group)
    job = _find_launcher(environ)
    if size is None and job is not None:
        missing = (
            "data_parallel_size is"
            if rank is not None
            else "data_parallel_rank and data_parallel_size are"
        )
        raise ConfigError(
            f"{missing} missing, and this process is one of {job.count} ({job.variable}), which would all read the same "
            f"samples; {_ADVICE}"
        )
    size = 1 if size is None else whole_number("data_parallel_size", size, least=1)
    replicas = whole_number("replicas", replicas, least=1)
    if rank is None and size > 1:
        raise ConfigError(f"found data_parallel_size {size} without data_parallel_rank; {_ADVICE}")
    rank = 0 if rank is None else whole_number("data_parallel_rank", rank)
    if not 0 <= rank < size:
        expected = "0" if size == 1 else f"0 to {size - 1}"
        raise ConfigError(
            f"found data_parallel_rank {rank}, expected {expected}: data_parallel_size is {size}"
        )
    if job is not None:
        _check_size(size, job, replicas)
    return rank, size


def _place_in(group: Any) -> tuple[int, int]:
    """Return the (rank, size) of this process in a group. Raises: ConfigError if the group is
    invalid, or does not include this process."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = ", ".join(map(repr, group.mesh_dim_names or ())) or "unnamed"
            raise ConfigError(
                f"data_parallel_group: found a DeviceMesh of {group.ndim} dimensions ({names}), expected one dimension of it, "
                "such as mesh['dp']; to flatten several data-parallel ones: mesh['dp_replicate', 'dp_shard']._flatten('dp')"
            )
        if group.get_coordinate() is None:
            raise _not_a_member()
        return group.get_local_rank(), group.size()
    if not isinstance(group, ProcessGroup):
        if group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
            raise _not_a_member()
        raise ConfigError(
            f"data_parallel_group: found {type(group).__name__}, expected a torch.distributed.ProcessGroup or a DeviceMesh"
        )
    rank = torch.distributed.get_rank(group)
    if rank < 0:
        raise _not_a_member()
    return rank, torch.distributed.get_world_size(group)


def _not_a_member() -> ConfigError:
    return ConfigError(
        "data_parallel_group: this process is not in the group; pass the group of data-parallel ranks that this "
        "process belongs to"
    )


def _find_launcher(environ: Mapping[str, str]) -> LauncherInfo | None:
    """Return the library or launcher that started the processes of the job; None for a single
    process. Raises: LaunchError for a variable that is not a number."""
    started: LauncherInfo | None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size = torch.distributed.get_world_size()
        started = LauncherInfo(by="torch", variable="torch.distributed", size=size, exact=True)
    elif "WORLD_SIZE" in environ:
        size = read_count(environ, "WORLD_SIZE")
        started = LauncherInfo(by="torchrun", variable="WORLD_SIZE", size=size, exact=True)
    else:
        started = detect_launcher(environ)
    if started is None or (started.exact and started.size <= 1):
        return None
    return started


def _check_size(size: int, job: LauncherInfo, replicas: int) -> None:
    """Check that there are at least as many processes as data-parallel ranks; otherwise, some
    samples would never be read. Raises: ConfigError."""
    processes = job.size * replicas
    jobs = f", and {replicas} jobs make up the run" if replicas > 1 else ""
    if size > processes and job.exact:
        raise ConfigError(
            f"found data_parallel_size {size}, expected at most {processes}: this job has {job.count} processes "
            f"({job.variable}){jobs}, so some samples would never be read; if other jobs read them, pass the number of jobs "
            "(`replicas=`)"
        )
    if processes % size and job.exact:
        warnings.warn(
            f"data_parallel_size {size} does not divide the {processes} processes of the job ({job.variable}{jobs}); "
            "set it to the number of ranks that read different samples",
            RuntimeWarning,
            stacklevel=4,
        )
