"""Assign jobs to ranks, based on the memory and time that the jobs need, and on the memory of the
ranks' nodes."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megablend.distributed.assign import assign_longest_first
from megablend.errors import ConfigError
from megablend.megatron.cache_builder.free_memory import free_memory
from megablend.megatron.cache_builder.work_plan import BlendJob, Job

_PIECE_BYTES = 1 << 24
"""Maximum number of bytes of a sample index that are computed before they are written."""
_DRAWN_BYTES = 40 << 20
"""Number of bytes of a blend's arrays that are computed before they are written."""
_NS = {
    "document": 10.0,
    "length": 10.0,
    "row": 5.0,
    "sample": 15.0,
    "blended": 70.0,
    "artefact": 2e6,
}
"""Time in nanoseconds that one thread takes for an entry of a document index, for looking up a
document's length, for a row of a sample index, for an entry of a shuffle index, for a sample of a
blend, and for creating the files of an artefact. These are rough values, used to
sort jobs and for the estimate of a dry run."""
_USABLE = 0.8
"""The fraction of a node's free memory that is used if no limit is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEstimate:
    """The estimated memory and time of a job."""

    memory: int
    """Number of bytes of arrays."""
    cost: int
    """Time in nanoseconds if one thread does all the work."""


def estimate_cost(job: Job) -> CostEstimate:
    """Estimate the memory and time of a job. The memory is accurate to within a few percent."""
    if isinstance(job, BlendJob):
        memory = min(job.artefact.nbytes, _DRAWN_BYTES)
        return CostEstimate(
            memory=memory,
            cost=round(_NS["artefact"] + _NS["blended"] * job.num_samples),
        )
    documents, samples, shuffle = job.artefact.arrays
    lengths = 4 * (job.size.end - job.size.begin)
    gathering = lengths + documents.nbytes + min(samples.nbytes, _PIECE_BYTES)
    return CostEstimate(
        memory=max(gathering, shuffle.nbytes),
        cost=round(
            _NS["artefact"]
            + (_NS["document"] + _NS["length"]) * documents.shape[0]
            + (_NS["sample"] + _NS["row"]) * job.num_samples
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResources:
    """The resources of a rank's node."""

    host: str
    memory: int
    """Number of bytes of memory that arrays may take."""
    cores: frozenset[int]
    """The CPU cores that this rank may use. Depending on the launcher, each rank has its own cores,
    or all ranks may use all cores."""


def node_resources(max_memory: int | None) -> NodeResources:
    """Return the resources of this process's node.

    Args:
        max_memory: limit in bytes for the arrays on the node; None for most of the memory that is
            free now.
    """
    memory = round(_USABLE * free_memory()) if max_memory is None else max_memory
    return NodeResources(
        host=socket.gethostname(), memory=memory, cores=frozenset(os.sched_getaffinity(0))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The work that is assigned to one rank."""

    jobs: tuple[int, ...]
    """The numbers of the rank's jobs, most expensive first. Empty for a rank that stays idle
    because its node lacks memory."""
    memory: int
    """Number of bytes of memory for the jobs."""
    threads: int
    """Number of threads for all jobs together."""

    @property
    def workers(self) -> int:
        """The number of jobs that run at the same time: one more than there are threads, since one
        job may be waiting for a flush."""
        return self.threads + 1


def assign_jobs(
    estimates: Sequence[CostEstimate], names: Sequence[str], nodes: Sequence[NodeResources]
) -> list[Assignment]:
    """Assign jobs to ranks. Returns the assignment of each rank.

    The ranks of a node share its memory equally. If the largest job does not fit into such a share,
    some ranks of the node stay idle.

    Args:
        estimates: the cost of each job.
        names: the name of each job, for messages.
        nodes: for each rank, the resources of its node.

    Raises: ConfigError if a job does not fit into the memory of a node.
    """
    largest = max(range(len(estimates)), key=lambda job: estimates[job].memory, default=None)
    if largest is None:
        return [Assignment(jobs=(), memory=0, threads=1) for _ in nodes]
    max_memory = estimates[largest].memory
    workers: list[int] = []
    working = Counter[str]()
    cores: defaultdict[str, set[int]] = defaultdict(set)
    # The ranks of a node found different amounts of free memory, since they did not check at the
    # same time: the smallest amount counts
    memory: dict[str, int] = {}
    for node in nodes:
        memory[node.host] = min(node.memory, memory.get(node.host, node.memory))
    for rank, node in enumerate(nodes):
        free = memory[node.host]
        if max_memory > free:
            raise ConfigError(
                f"{names[largest]}: its arrays need {max_memory:,} bytes of memory, but {node.host} has only {free:,} "
                "for them (--max-memory, or free memory); raise --max-memory, free memory, or request fewer "
                "samples"
            )
        cores[node.host] |= node.cores
        if working[node.host] < free // max(1, max_memory):
            working[node.host] += 1
            workers.append(rank)
    costs = [estimate.cost for estimate in estimates]
    assigned = dict(zip(workers, assign_longest_first(costs, len(workers)), strict=True))
    return [
        Assignment(
            jobs=tuple(assigned.get(rank, ())),
            memory=memory[node.host] // working[node.host],
            threads=max(1, len(cores[node.host]) // working[node.host]),
        )
        for rank, node in enumerate(nodes)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The estimated memory and time of a build."""

    ranks: int
    """The number of ranks with work to do."""
    memory: int
    """An upper limit for the number of bytes of arrays on any node."""
    seconds: float
    """The expected time in seconds, without compiling kernels."""


def forecast(
    estimates: Sequence[CostEstimate],
    assignments: Sequence[Assignment],
    nodes: Sequence[NodeResources],
) -> Forecast:
    """Estimate the memory and time of a whole build.

    Args:
        estimates: the cost of each job.
        assignments: the assignment of each rank.
        nodes: for each rank, the resources of its node.
    """
    memory = Counter[str]()
    seconds = 0.0
    for assignment, node in zip(assignments, nodes, strict=True):
        on_rank = [estimates[job] for job in assignment.jobs]
        by_memory = sorted((estimate.memory for estimate in on_rank), reverse=True)
        memory[node.host] += min(assignment.memory, sum(by_memory[: assignment.workers]))
        costs = [estimate.cost for estimate in on_rank]
        seconds = max(seconds, sum(costs) / assignment.threads / 1e9, max(costs, default=0) / 1e9)
    return Forecast(
        ranks=sum(bool(assignment.jobs) for assignment in assignments),
        memory=max(memory.values()),
        seconds=seconds,
    )


class MemoryGate:
    """A limit on the memory of all jobs that run at the same time. A job waits until enough memory
    is free."""

    def __init__(self, memory: int) -> None:
        self._free = memory
        self._change = threading.Condition()

    @contextmanager
    def held(self, memory: int) -> Iterator[None]:
        """Wait until `memory` bytes are free, and reserve them while the context lasts. `memory`
        must not be more than the limit."""
        with self._change:
            self._change.wait_for(lambda: memory <= self._free)
            self._free -= memory
        try:
            yield
        finally:
            with self._change:
                self._free += memory
                self._change.notify_all()
