"""The data-parallel rank that a loader reads for: given explicitly or by a process group, never guessed from the world size.

Ranks of tensor and pipeline parallelism read the same samples, so the number of processes does not imply data parallelism.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch.distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megablend.config.numbers import whole_number
from megablend.distributed.launch import detect_launcher
from megablend.errors import ConfigError

DataParallelGroup: TypeAlias = ProcessGroup | DeviceMesh

_ADVICE = (
    "give data_parallel_rank= and data_parallel_size=, or data_parallel_group= (a torch ProcessGroup, or one dimension of a "
    "DeviceMesh, such as mesh['dp']), from which both are taken"
)


def resolve_rank(
    data_parallel_rank: int | None,
    data_parallel_size: int | None,
    data_parallel_group: DataParallelGroup | None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[int, int]:
    """The data-parallel (rank, size). In a single-process job, the default is rank 0 of 1.

    Raises: ConfigError where both are missing in a job of several processes, where one is given without the other or together
        with a group, or where they are out of range; LaunchError where a launcher's variable is not a number.
    """
    rank, size = data_parallel_rank, data_parallel_size
    if data_parallel_group is not None:
        if rank is not None or size is not None:
            raise ConfigError(
                "data_parallel_group: found together with data_parallel_rank or data_parallel_size; give only the group"
            )
        return _place_in(data_parallel_group)
    if size is None and (job := _processes_of_job(environ)) is not None:
        missing = "data_parallel_size is" if rank is not None else "data_parallel_rank and data_parallel_size are"
        raise ConfigError(
            f"{missing} missing, and this process is one of {job}, all of which would read "
            f"the same samples; {_ADVICE}. They cannot be derived from the number of processes, since ranks of tensor and "
            "pipeline parallelism must read the same samples"
        )
    size = 1 if size is None else whole_number("data_parallel_size", size, least=1)
    if rank is None and size > 1:
        raise ConfigError(f"found data_parallel_size {size} without data_parallel_rank; {_ADVICE}")
    rank = 0 if rank is None else whole_number("data_parallel_rank", rank)
    if not 0 <= rank < size:
        expected = "0" if size == 1 else f"0 to {size - 1}"
        raise ConfigError(f"found data_parallel_rank {rank}, expected {expected}: data_parallel_size is {size}")
    return rank, size


def _place_in(group: Any) -> tuple[int, int]:
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
        "data_parallel_group: this process is not in it; give the group of data-parallel ranks that this process belongs to"
    )


def _processes_of_job(environ: Mapping[str, str]) -> str | None:
    """The number of processes of the job, and where it is from; None for one process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size = torch.distributed.get_world_size()
        return f"{size} (torch.distributed)" if size > 1 else None
    if "WORLD_SIZE" in environ:  # torchrun, accelerate launch
        written = environ["WORLD_SIZE"]
        return None if written.strip() == "1" else f"{written} (WORLD_SIZE)"
    started = detect_launcher(environ)
    if started is None or (started.exact and started.size == 1):
        return None
    return f"{started.size}{'' if started.exact else ' or more'} ({started.variable})"
