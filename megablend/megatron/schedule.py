"""Who builds what: costs, memory, and the ranks and threads that a node's memory allows."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megablend.errors import ConfigError
from megablend.index.share import share
from megablend.megatron.plan import BlendJob, Job
from megablend.megatron.request import GREEDY, LARGEST_REMAINDER

PIECE_BYTES = 1 << 24
"""Sample indices go to the disk in pieces of about this size for each thread that makes them."""
_DRAWN_BYTES = 40 << 20
"""And blends in pieces of this size."""
_USABLE = 0.8
"""Of a node's free memory, where no bound is given."""
_NS = {"document": 20.0, "sample": 20.0, GREEDY: 70.0, LARGEST_REMAINDER: 20.0, "artefact": 2e6}
"""Nanoseconds of one thread for each entry of a document index (shuffled and gathered), of the sample and shuffle index, and of a
blend; for an artefact's files. Rough: they order the jobs and make the estimate of a dry run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a job takes."""

    memory: int
    """Bytes of arrays, on one thread, with its two shuffles one after the other."""
    overlapped: int
    """The same with the shuffle index made while the sample index is."""
    cost: int
    """Nanoseconds of one thread."""


def need_of(job: Job) -> Need:
    """What a job takes, to within some per cent."""
    if isinstance(job, BlendJob):
        memory = min(job.artefact.nbytes, _DRAWN_BYTES)
        return Need(
            memory=memory, overlapped=memory, cost=round(_NS["artefact"] + _NS[job.interleaving] * job.num_samples)
        )
    documents, samples, shuffle = job.artefact.arrays
    lengths = 4 * (job.size.end - job.size.begin)
    gathering = lengths + documents.nbytes + min(samples.nbytes, PIECE_BYTES)
    return Need(
        memory=max(gathering, shuffle.nbytes),
        overlapped=gathering + shuffle.nbytes,
        cost=round(_NS["artefact"] + _NS["document"] * documents.shape[0] + _NS["sample"] * job.num_samples),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank's node, and what the node has."""

    host: str
    memory: int
    cores: frozenset[int]
    """Those that this rank may use; launchers give each rank its own, or all ranks all."""


def this_place(max_memory: int | None) -> Place:
    """The place of this process. `max_memory` bounds its node's arrays; without it most of what is free now does."""
    memory = round(_USABLE * _free_memory()) if max_memory is None else max_memory
    return Place(host=socket.gethostname(), memory=memory, cores=frozenset(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of the work."""

    jobs: tuple[int, ...]
    """Dearest first; none for a rank that rests, so that its node's memory suffices."""
    memory: int
    threads: int
    """For all of it."""

    @property
    def workers(self) -> int:
        """Jobs at once: some more than threads, which go on while files are flushed."""
        return self.threads + 2


def deal(needs: Sequence[Need], names: Sequence[str], places: Sequence[Place]) -> list[Share]:
    """Deal jobs to the ranks at `places`.

    The ranks of a node share its memory equally; where the largest job does not fit a share, fewer of them work.

    Raises: ConfigError where a job does not fit a whole node.
    """
    largest = max(range(len(needs)), key=lambda job: needs[job].memory, default=None)
    if largest is None:
        return [Share(jobs=(), memory=0, threads=1) for _ in places]
    most = needs[largest].memory
    workers, working = [], Counter[str]()
    cores: defaultdict[str, set[int]] = defaultdict(set)
    for rank, place in enumerate(places):
        if most > place.memory:
            raise ConfigError(
                f"{names[largest]}: its arrays take {most:,} bytes of memory, where {place.host} may use {place.memory:,} "
                "(--max-memory, or what is free there); allow as much, or ask for fewer samples"
            )
        cores[place.host] |= place.cores
        if working[place.host] < place.memory // max(1, most):
            working[place.host] += 1
            workers.append(rank)
    dealt = dict(zip(workers, share([need.cost for need in needs], len(workers)), strict=True))
    return [
        Share(
            jobs=tuple(dealt.get(rank, ())),
            memory=place.memory // working[place.host],
            threads=max(1, len(cores[place.host]) // working[place.host]),
        )
        for rank, place in enumerate(places)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What the work will take."""

    ranks: int
    """That have something to do."""
    memory: int
    """Bytes of arrays on the node that holds most, at most."""
    seconds: float
    """Roughly, once the kernels are compiled."""


def forecast(needs: Sequence[Need], shares: Sequence[Share], places: Sequence[Place]) -> Forecast:
    """What `shares` of the jobs will take at their `places`."""
    memory, seconds = Counter[str](), 0.0
    for share_, place in zip(shares, places, strict=True):
        mine = [needs[job] for job in share_.jobs]
        at_once = sorted((need.overlapped for need in mine), reverse=True)[: share_.workers]
        memory[place.host] += min(share_.memory, sum(at_once))
        costs = [need.cost for need in mine]
        seconds = max(seconds, sum(costs) / share_.threads / 1e9, max(costs, default=0) / 1e9)
    return Forecast(ranks=sum(bool(s.jobs) for s in shares), memory=max(memory.values()), seconds=seconds)


class MemoryGate:
    """Lets jobs in as long as what they need together fits."""

    def __init__(self, memory: int) -> None:
        self._free, self._change = memory, threading.Condition()

    @contextmanager
    def held(self, memory: int) -> Iterator[None]:
        """Hold `memory` bytes, which must fit by themselves; waits until they are free."""
        with self._change:
            self._change.wait_for(lambda: memory <= self._free)
            self._free -= memory
        try:
            yield
        finally:
            with self._change:
                self._free += memory
                self._change.notify_all()


def _free_memory() -> int:
    """Bytes that this node, or this process's control group, still has."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text(encoding="ascii").strip()).isdigit():
        free = min(free, int(text))
    return free
