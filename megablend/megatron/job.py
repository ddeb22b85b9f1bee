"""The processes that open one dataset together: those of torch.distributed, else of an MPI launcher, else this one alone."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed

from megablend.errors import LaunchError
from megablend.index.launch import detect
from megablend.megatron.agree import AgreedLaunch

_PATIENCE = datetime.timedelta(days=1)
"""How long a rank waits for others that work. Ranks that die are noticed at once: their connections close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """This process among those of its job."""

    everyone: AgreedLaunch
    """All ranks; for short talks: a backend may give up waiting after some minutes."""
    members: Callable[[Sequence[int]], AbstractContextManager[AgreedLaunch]]
    """A launch of some ranks, this one among them, that waits as long as work takes; entered by just these ranks."""

    @property
    def rank(self) -> int:
        """This process's."""
        return self.everyone.rank

    @property
    def size(self) -> int:
        """Processes of the job."""
        return self.everyone.size


def this_job() -> Job:
    """The job that this process belongs to.

    Raises: LaunchError where the MPI library does not fit the launcher.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return Job(everyone=AgreedLaunch(rank, size, _torch_exchange(None, size)), members=_torch_members)
    launch = detect()
    if launch.size == 1:
        return Job(everyone=_alone(), members=lambda ranks: _only(_alone()))
    from megablend.index.mpi import MpiLaunch

    assert isinstance(launch, MpiLaunch)
    return Job(
        everyone=AgreedLaunch(launch.rank, launch.size, launch.allgather),
        members=lambda ranks: _mpi_members(launch, ranks),
    )


def _alone() -> AgreedLaunch:
    return AgreedLaunch(0, 1, lambda value: [value])


@contextmanager
def _only(launch: AgreedLaunch) -> Iterator[AgreedLaunch]:
    yield launch


@contextmanager
def _torch_members(ranks: Sequence[int]) -> Iterator[AgreedLaunch]:
    """A gloo group whatever the job's own backend is: it waits without a device, and without a watchdog."""
    rank = torch.distributed.get_rank()
    if len(ranks) == 1:
        yield _alone()
        return
    group = torch.distributed.new_group(list(ranks), timeout=_PATIENCE, backend="gloo", use_local_synchronization=True)
    try:
        yield AgreedLaunch(list(ranks).index(rank), len(ranks), _torch_exchange(group, len(ranks)))
    finally:
        torch.distributed.destroy_process_group(group)


def _torch_exchange(group: Any, size: int) -> Callable[[Any], list[Any]]:
    def exchange(value: Any) -> list[Any]:
        found: list[Any] = [None] * size
        try:
            torch.distributed.all_gather_object(found, value, group=group)
        except RuntimeError as error:
            raise LaunchError(
                f"another rank of the job ended while all were to open the dataset ({error}); see its own last words, then "
                "start the job anew: what was built is kept"
            ) from error
        return found

    return exchange


@contextmanager
def _mpi_members(launch: Any, ranks: Sequence[int]) -> Iterator[AgreedLaunch]:
    part = launch.members(ranks)
    try:
        yield AgreedLaunch(part.rank, part.size, part.allgather)
    finally:
        part.free()
