"""Ranks that communicate through torch.distributed, with any backend."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed

from megablend.distributed.fail_together import FailTogether
from megablend.distributed.job import Job
from megablend.errors import LaunchError

_TIMEOUT = datetime.timedelta(days=1)
"""How long a rank waits for others that are working. Ranks that die are noticed at once: their connections close."""


def torch_job() -> Job:
    """The job that consists of the processes of torch.distributed."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return Job(world=FailTogether(rank, size, _exchange(None, size)), members=_members)


@contextmanager
def process_group() -> Iterator[None]:
    """A gloo process group of the processes that torchrun started. Raises: LaunchError if they cannot reach each other."""
    try:
        torch.distributed.init_process_group("gloo")
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"the processes that torchrun started cannot reach each other ({error}); restart the job"
        ) from error
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def _members(ranks: Sequence[int]) -> Iterator[FailTogether]:
    """A gloo group, independent of the job's backend: it waits without a device, and without a watchdog."""
    rank = torch.distributed.get_rank()
    if len(ranks) == 1:
        yield FailTogether(0, 1, lambda value: [value])
        return
    group = torch.distributed.new_group(list(ranks), timeout=_TIMEOUT, backend="gloo", use_local_synchronization=True)
    try:
        yield FailTogether(list(ranks).index(rank), len(ranks), _exchange(group, len(ranks)))
    finally:
        torch.distributed.destroy_process_group(group)


def _exchange(group: Any, size: int) -> Callable[[Any], list[Any]]:
    def exchange(value: Any) -> list[Any]:
        found: list[Any] = [None] * size
        try:
            torch.distributed.all_gather_object(found, value, group=group)
        except RuntimeError as error:
            raise LaunchError(
                f"a rank exited during dataset setup ({error}): see that rank's log, then restart the job; finished "
                "work is kept"
            ) from error
        return found

    return exchange
