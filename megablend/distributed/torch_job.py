"""Ranks that meet through torch.distributed, whatever its backend is."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed

from megablend.distributed.fail_together import FailTogether
from megablend.distributed.job import Job
from megablend.errors import LaunchError

_PATIENCE = datetime.timedelta(days=1)
"""How long a rank waits for others that work. Ranks that die are noticed at once: their connections close."""


def torch_job() -> Job:
    """The job whose processes torch.distributed has brought together."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return Job(world=FailTogether(rank, size, _exchange(None, size)), members=_members)


@contextmanager
def met() -> Iterator[None]:
    """Bring the processes that torchrun started together, on the CPU. Raises: LaunchError where they do not find each other."""
    try:
        torch.distributed.init_process_group("gloo")
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"the processes that torchrun started cannot reach each other ({error}); start the job again"
        ) from error
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def _members(ranks: Sequence[int]) -> Iterator[FailTogether]:
    """A gloo group whatever the job's own backend is: it waits without a device, and without a watchdog."""
    rank = torch.distributed.get_rank()
    if len(ranks) == 1:
        yield FailTogether(0, 1, lambda value: [value])
        return
    group = torch.distributed.new_group(list(ranks), timeout=_PATIENCE, backend="gloo", use_local_synchronization=True)
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
                f"another rank of the job ended while all were to open the dataset ({error}); see its own last words, then "
                "start the job again: what was built is kept"
            ) from error
        return found

    return exchange
