"""Ranks that communicate through torch.distributed, with any backend."""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed
from torch.distributed.rendezvous import rendezvous

from megablend.distributed.fail_together import FailTogether
from megablend.distributed.job import Job
from megablend.distributed.launch import read_count
from megablend.errors import LaunchError
from megablend.system.log import LOG

_ARRIVING = datetime.timedelta(seconds=60)
"""How long the first rank waits for the others to run the same command."""
_FORMING = datetime.timedelta(minutes=5)
"""How long ranks wait for each other to connect."""
_WORKING = datetime.timedelta(days=365)
"""How long a rank waits for others that are working. Ranks that die are noticed at once: their connections close."""
_LOG_SECONDS = 60.0
_groups: dict[tuple[int, ...], tuple[Any, Any]] = {}
"""Gloo groups by their ranks, each with the job's group that it was made in. They are kept: torch gives a group that is made
again the name of the one before, and its ranks would read the addresses that the former ones left in the store."""


def torch_job() -> Job:
    """The job that consists of the processes of torch.distributed."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return Job(world=FailTogether(rank, size, _exchange(None, size)), members=_members)


@contextmanager
def process_group() -> Iterator[None]:
    """A gloo process group of the processes that torchrun started, for a command that all of them run.

    It uses torchrun's store, under a prefix of its own for each restart of the job and each command.

    Raises: LaunchError, naming the ranks that are missing, if not all run the command within a minute, or if they cannot reach
        each other.
    """
    rank, size = (read_count(os.environ, name) for name in ("RANK", "WORLD_SIZE"))
    try:
        store, _, _ = next(rendezvous("env://", rank, size, timeout=_ARRIVING))
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = torch.distributed.distributed_c10d.PrefixStore(f"megablend/{restart}", store)
        command = store.add(f"commands/{rank}", 1)
        store = torch.distributed.distributed_c10d.PrefixStore(str(command), store)
        _await_ranks(store, rank, size)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_FORMING)
        torch.distributed.distributed_c10d._set_pg_timeout(_WORKING, torch.distributed.group.WORLD)
    except LaunchError:
        raise
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"the processes that torchrun started cannot reach each other ({error}); restart the job"
        ) from error
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _await_ranks(store: Any, rank: int, size: int) -> None:
    """Wait until all ranks have come to this command. Raises: LaunchError."""
    keys = [f"here/{other}" for other in range(size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, _ARRIVING)
    except RuntimeError:
        missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        if missing:
            raise LaunchError(
                f"torchrun started {size} processes (WORLD_SIZE), but ranks {', '.join(missing)} did not run this command within "
                f"{_ARRIVING.seconds} s: run it on all ranks, or for one process alone call megablend's Python function, or "
                "start the command by `env -u TORCHELASTIC_RUN_ID`"
            ) from None
        raise


@contextmanager
def _members(ranks: Sequence[int]) -> Iterator[FailTogether]:
    """A gloo group, independent of the job's backend: it waits without a device, and without a watchdog."""
    rank = torch.distributed.get_rank()
    if len(ranks) == 1:
        yield FailTogether(0, 1, lambda value: [value])
        return
    group = _find_group(tuple(ranks))
    yield FailTogether(list(ranks).index(rank), len(ranks), _exchange(group, len(ranks)))


def _find_group(ranks: tuple[int, ...]) -> Any:
    """The gloo group of these ranks, made when it is first needed. Raises: LaunchError if they cannot reach each other."""
    job = torch.distributed.group.WORLD
    made_in, group = _groups.get(ranks, (None, None))
    if made_in is job:
        return group
    try:
        group = torch.distributed.new_group(
            list(ranks), timeout=_FORMING, backend="gloo", use_local_synchronization=True
        )
        torch.distributed.distributed_c10d._set_pg_timeout(_WORKING, group)
    except RuntimeError as error:
        raise LaunchError(
            f"ranks {', '.join(map(str, ranks))} did not reach each other within {_FORMING.seconds // 60} minutes ({error}): "
            "see the logs of the others, then restart the job; finished work is kept"
        ) from error
    _groups[ranks] = job, group
    return group


def _exchange(group: Any, size: int) -> Callable[[Any], list[Any]]:
    def exchange(value: Any) -> list[Any]:
        found: list[Any] = [None] * size
        try:
            with _logging_waits():
                torch.distributed.all_gather_object(found, value, group=group)
        except RuntimeError as error:
            raise LaunchError(
                f"a rank exited during dataset setup ({error}): see that rank's log, then restart the job; finished "
                "work is kept"
            ) from error
        return found

    return exchange


@contextmanager
def _logging_waits() -> Iterator[None]:
    """Log a line now and then while this rank waits for others, which may work for hours."""
    ended = threading.Event()

    def log() -> None:
        started = time.monotonic()
        while not ended.wait(_LOG_SECONDS):
            LOG.warning("waiting for %.0f s for other ranks, which are still working", time.monotonic() - started)

    logging = threading.Thread(target=log, daemon=True)
    logging.start()
    try:
        yield
    finally:
        ended.set()
