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

PIECE_BYTES = 1 << 24
"""Approximate number of bytes of a sample index that a thread computes before it writes them."""
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
DIVIDED_NS = 5e8
"""Minimum cost (in nanoseconds) of a sample index that all ranks build together. For cheaper ones,
the communication would take longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEstimate:
    """The estimated memory and time of a job. The last four fields apply if all ranks build the
    job's sample index together; they are 0 if a job cannot be divided."""

    memory: int
    """Number of bytes of arrays if the sample and the shuffle index are built one after the
    other."""
    overlapped: int
    """Number of bytes of arrays if the sample and the shuffle index are built at the same time."""
    cost: int
    """Time in nanoseconds if one thread does all the work."""
    parts_cost: int = 0
    """The part of `cost` that is divided among the ranks."""
    owner_memory: int = 0
    """Number of bytes of arrays on the rank that owns the job."""
    lengths: int = 0
    """Number of bytes of lengths on each rank while it counts its part."""
    gathered: int = 0
    """Number of bytes that the lengths, in the order of the document index, take on all ranks
    together. They are in memory from counting until the rows are written."""


def estimate_cost(job: Job) -> CostEstimate:
    """Estimate the memory and time of a job. The memory is accurate to within a few percent."""
    if isinstance(job, BlendJob):
        memory = min(job.artefact.nbytes, _DRAWN_BYTES)
        return CostEstimate(
            memory=memory,
            overlapped=memory,
            cost=round(_NS["artefact"] + _NS["blended"] * job.num_samples),
        )
    documents, samples, shuffle = job.artefact.arrays
    # The copy of the lengths as bytes (see `exact.samples`) is also counted
    lengths = 4 * (job.size.end - job.size.begin) + job.size.num_sequences
    gathering = lengths + documents.nbytes + min(samples.nbytes, PIECE_BYTES)
    own = round(
        _NS["artefact"] + _NS["document"] * documents.shape[0] + _NS["sample"] * job.num_samples
    )
    parts = round(_NS["length"] * documents.shape[0] + _NS["row"] * job.num_samples)
    return CostEstimate(
        memory=max(gathering, shuffle.nbytes),
        overlapped=gathering + shuffle.nbytes,
        cost=own + parts,
        parts_cost=parts,
        owner_memory=max(documents.nbytes, shuffle.nbytes),
        lengths=lengths,
        gathered=documents.nbytes,
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
    divided: frozenset[int] = frozenset()
    """The numbers of the jobs whose sample index is built by all ranks that have work."""
    part: int = -1
    """The number of this rank's part of each divided job; -1 for an idle rank."""
    num_parts: int = 0
    reserved: int = 0
    """Number of bytes of memory for this rank's parts of divided jobs."""

    def takes(self, number: int, estimate: CostEstimate) -> CostEstimate:
        """Return the memory and time that a job takes on the rank that owns it.

        Args:
            number: the number of the job.
            estimate: the cost of the whole job.
        """
        if number not in self.divided:
            return estimate
        own = estimate.owner_memory
        return CostEstimate(memory=own, overlapped=own, cost=estimate.cost - estimate.parts_cost)

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
    spare = min(memory[host] // working[host] for host in memory) - max_memory
    divided, reserved = _choose_divided(estimates, len(workers), spare)
    costs = [
        estimate.cost - estimate.parts_cost * (number in divided)
        for number, estimate in enumerate(estimates)
    ]
    assigned = dict(zip(workers, assign_longest_first(costs, len(workers)), strict=True))
    return [
        Assignment(
            jobs=tuple(assigned.get(rank, ())),
            memory=memory[node.host] // working[node.host] - reserved,
            threads=max(1, len(cores[node.host]) // working[node.host]),
            divided=divided,
            part=workers.index(rank) if rank in assigned else -1,
            num_parts=len(workers),
            reserved=reserved,
        )
        for rank, node in enumerate(nodes)
    ]


def _choose_divided(
    estimates: Sequence[CostEstimate], num_parts: int, spare: int
) -> tuple[frozenset[int], int]:
    """Choose the jobs whose sample index all ranks build together. These are jobs so large that one
    rank would still be working on them when all others are finished.

    Args:
        num_parts: the number of ranks that have work.
        spare: number of bytes of memory that remain on a rank while it builds its largest job.
    Returns: the numbers of these jobs, and the number of bytes that each rank needs for its parts.
    """
    if num_parts == 1:
        return frozenset(), 0
    mean_cost = sum(estimate.cost for estimate in estimates) / num_parts
    large = [number for number, estimate in enumerate(estimates) if estimate.cost > mean_cost / 2]
    chosen: list[int] = []
    lengths = 0
    gathered = 0
    reserved = 0
    for number in sorted(large, key=lambda number: -estimates[number].cost):
        estimate = estimates[number]
        if estimate.parts_cost < DIVIDED_NS or estimate.gathered < 4 * num_parts:
            continue
        lengths = max(lengths, estimate.lengths)
        gathered += -(-estimate.gathered // num_parts)
        if lengths + gathered + 2 * PIECE_BYTES > spare:
            break
        chosen.append(number)
        reserved = lengths + gathered + 2 * PIECE_BYTES
    return frozenset(chosen), reserved


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
        on_rank = [assignment.takes(job, estimates[job]) for job in assignment.jobs]
        by_memory = sorted((estimate.overlapped for estimate in on_rank), reverse=True)
        memory[node.host] += min(assignment.memory, sum(by_memory[: assignment.workers]))
        costs = [estimate.cost for estimate in on_rank]
        if assignment.part >= 0:
            memory[node.host] += assignment.reserved
            costs += [
                estimates[job].parts_cost // assignment.num_parts for job in assignment.divided
            ]
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
