"""Jobs whose ranks communicate through torch.distributed, with any backend."""

from __future__ import annotations

import datetime
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from torch.distributed.rendezvous import rendezvous

from megablend.distributed.base import SingleProcess
from megablend.distributed.fail_together import FailTogether, Job
from megablend.distributed.launch import read_count
from megablend.errors import LaunchError
from megablend.system.log import LOG

_C10D: Any = torch.distributed.distributed_c10d
_ARRIVAL_TIMEOUT = datetime.timedelta(seconds=60)
"""The time for which the first rank waits until all other ranks run the same command."""
_CONNECT_TIMEOUT = datetime.timedelta(minutes=5)
"""The time for which ranks wait until they are connected to each other."""
_WORK_TIMEOUT = datetime.timedelta(days=365)
"""The time for which a rank waits for other ranks that are working. If one of them dies, its
connections close, so the waiting rank fails at once."""
_LOG_SECONDS = 60.0
"""Seconds between two log lines while a rank waits."""
_groups: dict[tuple[int, ...], tuple[Any, Any]] = {}
"""The gloo groups by their ranks, each with the default process group at the time when the gloo
group was created. Groups are kept for later use, and have names of their own in the store. torch
would name a group by the number of groups that a rank belongs to. This number differs between ranks
if a program creates groups of only some ranks, such as Megatron's groups of the first and last
pipeline stages. The ranks would then not find each other. If a name were used again, ranks would
read stale addresses."""
_formed: Counter[tuple[int, ...]] = Counter()
"""For each set of ranks, the number of groups of these ranks that this process has created."""


def torch_job() -> Job:
    """Return the job whose ranks are those of the default process group of torch.distributed."""
    rank = torch.distributed.get_rank()
    size = torch.distributed.get_world_size()
    return Job(world=FailTogether(rank, size, _exchange(None, size)), members=_members)


@contextmanager
def process_group() -> Iterator[None]:
    """Provide a gloo process group of the processes that torchrun started, all of which must run
    the same command.

    The group uses torchrun's store, with a separate prefix for each restart of the job and each
    command.

    Raises: LaunchError if some ranks do not run the command within a minute (the message names
        them), or if ranks cannot reach each other.
    """
    rank = read_count(os.environ, "RANK")
    size = read_count(os.environ, "WORLD_SIZE")
    try:
        store, _, _ = next(rendezvous("env://", rank, size, timeout=_ARRIVAL_TIMEOUT))
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = _C10D.PrefixStore(f"megablend/{restart}", store)
        command = store.add(f"commands/{rank}", 1)
        store = _C10D.PrefixStore(str(command), store)
        _await_ranks(store, rank, size)
        torch.distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=_CONNECT_TIMEOUT
        )
        _C10D._set_pg_timeout(_WORK_TIMEOUT, torch.distributed.group.WORLD)
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
    """Wait until all ranks run this command. Raises: LaunchError if some do not run it in time."""
    keys = [f"here/{other}" for other in range(size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, _ARRIVAL_TIMEOUT)
    except RuntimeError:
        missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        if missing:
            raise LaunchError(
                f"torchrun started {size} processes (WORLD_SIZE), but ranks {', '.join(missing)} did not run this "
                f"command within {_ARRIVAL_TIMEOUT.seconds} s; run it on all ranks, or run a single process "
                "with `env -u TORCHELASTIC_RUN_ID`"
            ) from None
        raise


@contextmanager
def _members(ranks: Sequence[int]) -> Iterator[FailTogether]:
    """Provide a communicator of the given ranks: see `Job.members`. It uses a gloo group, whatever
    the backend of the job: gloo needs no device, and no watchdog interrupts ranks that wait."""
    rank = torch.distributed.get_rank()
    if len(ranks) == 1:
        yield SingleProcess()
        return
    group = _find_group(tuple(ranks))
    yield FailTogether(list(ranks).index(rank), len(ranks), _exchange(group, len(ranks)))


def _find_group(ranks: tuple[int, ...]) -> Any:
    """Return the gloo group of the given ranks, which is created on the first call. Raises:
    LaunchError if the ranks cannot reach each other."""
    job = torch.distributed.group.WORLD
    made_in, group = _groups.get(ranks, (None, None))
    if made_in is job:
        return group
    _formed[ranks] += 1
    name = f"megablend/{'_'.join(map(str, ranks))}/{_formed[ranks]}"
    try:
        store = _C10D.PrefixStore(name, _C10D._get_default_store())
        number = ranks.index(torch.distributed.get_rank())
        group = torch.distributed.ProcessGroupGloo(store, number, len(ranks), _CONNECT_TIMEOUT)
    except RuntimeError as error:
        raise LaunchError(
            f"ranks {', '.join(map(str, ranks))} did not reach each other within {_CONNECT_TIMEOUT.seconds // 60} minutes "
            f"({error}): see the logs of the other ranks, then restart the job; finished work is kept"
        ) from error
    _groups[ranks] = job, group
    return group


def _exchange(group: Any, size: int) -> Callable[[Any], list[Any]]:
    """Return a collective function that exchanges values between ranks: see the argument `exchange`
    of `FailTogether`.

    Args:
        group: a gloo group of `size` ranks; None for the default process group.
    """

    def exchange(value: Any) -> list[Any]:
        values: list[Any] = [None] * size
        try:
            with _logging_waits():
                if group is None:
                    torch.distributed.all_gather_object(values, value)
                else:
                    values = _gather_objects(group, size, value)
        except RuntimeError as error:
            raise LaunchError(
                f"a rank exited during dataset setup ({error}): see that rank's log, then restart the job; finished "
                "work is kept"
            ) from error
        return values

    return exchange


def _gather_objects(group: Any, size: int, value: Any) -> list[Any]:
    """Return the values of all ranks of a gloo group, in rank order. torch.distributed does not
    know the group, so its own functions cannot be used; the pickled values are padded to the same
    length."""
    options = _C10D.AllgatherOptions()
    options.timeout = _WORK_TIMEOUT
    with torch.device("cpu"):  # whatever default device the trainer has set
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
        group.allgather([lengths], [torch.tensor([len(data)])], options).wait()
        longest = max(int(length) for length in lengths)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(size)]
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = data
        group.allgather([parts], [padded], options).wait()
    return [pickle.loads(part.numpy().tobytes()) for part in parts]


@contextmanager
def _logging_waits() -> Iterator[None]:
    """Log a line every minute while this rank waits for other ranks, which may work for hours."""
    ended = threading.Event()

    def log() -> None:
        started = time.monotonic()
        while not ended.wait(_LOG_SECONDS):
            LOG.warning(
                "still waiting for other ranks, which are working (%.0f s so far)",
                time.monotonic() - started,
            )

    logging = threading.Thread(target=log, daemon=True)
    logging.start()
    try:
        yield
    finally:
        ended.set()
