"""Which rank builds what: memory and time of the jobs,
and the ranks and threads that a node's memory allows."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from megablend.distributed.assign import assign_longest_first
from megablend.errors import ConfigError
from megablend.megatron.cache_builder.work_plan import BlendJob, Job
from megablend.megatron.request.request import GREEDY, LARGEST_REMAINDER

_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that are free for this process. `root` is the folder that contains /proc and /sys."""
    (available,) = _numbers(root / "proc/meminfo", "MemAvailable:")
    return min([1024 * available, *_left_in_groups(root)])


def _left_in_groups(root: Path) -> Iterator[int]:
    """Bytes that each control group with a bound still has."""
    with contextlib.suppress(OSError):  # a kernel without control groups
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                base = root / "sys/fs/cgroup"
                names = _V2
            elif "memory" in controllers.split(","):
                base = root / "sys/fs/cgroup/memory"
                names = _V1
            else:
                continue
            own = PurePosixPath(path)
            for group in (own, *own.parents):
                # inside a container the groups above it are not to be seen, and its own may lie at
                # the top
                with contextlib.suppress(OSError, ValueError):  # "max" means no limit
                    yield _left(base / str(group).lstrip("/"), *names)


def _left(group: Path, limit: str, usage: str, inactive: str) -> int:
    bound, used = (int((group / name).read_text(encoding="ascii")) for name in (limit, usage))
    (idle,) = _numbers(group / "memory.stat", inactive)
    return max(0, bound - max(0, used - idle))


def _numbers(path: Path, name: str) -> list[int]:
    """The numbers of the lines that begin with this word."""
    lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    return [int(words[1]) for words in lines if words and words[0] == name]


PIECE_BYTES = 1 << 24
"""Sample indices go to the disk in pieces of about this size for each thread that makes them."""
_DRAWN_BYTES = 40 << 20
"""Blends are built in pieces of this size."""
_NS = {
    "document": 10.0,
    "length": 10.0,
    "row": 5.0,
    "sample": 15.0,
    GREEDY: 70.0,
    LARGEST_REMAINDER: 20.0,
    "artefact": 2e6,
}
"""Nanoseconds of one thread for each entry of a document index, its length, a row of a sample
index, an entry of a shuffle index and of a blend; for an artefact's files. Rough: they order the
jobs and make the estimate of a dry run."""
_USABLE = 0.8
"""Usable fraction of a node's free memory if no limit is given."""
DIVIDED_NS = 5e8
"""Minimum cost of a sample index that all ranks make together: below it, communication takes
longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEstimate:
    """The estimated cost of a job, and of one whose sample index all ranks make together;
    0 for a job that cannot be divided."""

    memory: int
    """Bytes of arrays, on one thread, with its two shuffles one after the other."""
    overlapped: int
    """Bytes of arrays if the shuffle index is built at the same time as the sample index."""
    cost: int
    """Nanoseconds of one thread."""
    parts_cost: int = 0
    """Nanoseconds of all parts together, of `cost`."""
    owner_memory: int = 0
    """Bytes of the arrays on the rank that owns the divided job."""
    lengths: int = 0
    """Bytes on each rank, while it counts its part."""
    gathered: int = 0
    """Bytes of all parts together, from when they are gathered until they are written."""


def estimate_cost(job: Job) -> CostEstimate:
    """Estimate the cost of a job, to within some per cent."""
    if isinstance(job, BlendJob):
        memory = min(job.artefact.nbytes, _DRAWN_BYTES)
        return CostEstimate(
            memory=memory,
            overlapped=memory,
            cost=round(_NS["artefact"] + _NS[job.interleaving] * job.num_samples),
        )
    documents, samples, shuffle = job.artefact.arrays
    # Those of short documents in bytes, too
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
    """A rank's node, and what the node has."""

    host: str
    memory: int
    cores: frozenset[int]
    """Those that this rank may use; launchers give each rank its own, or all ranks all."""


def node_resources(max_memory: int | None) -> NodeResources:
    """The resources of this process's node. `max_memory` limits the node's arrays;
    by default most of what is free now does."""
    memory = round(_USABLE * free_memory()) if max_memory is None else max_memory
    return NodeResources(
        host=socket.gethostname(), memory=memory, cores=frozenset(os.sched_getaffinity(0))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One rank's part of the work."""

    jobs: tuple[int, ...]
    """Most expensive first; empty for a rank that stays idle because its node lacks memory."""
    memory: int
    """Bytes of memory for the jobs."""
    threads: int
    """Number of threads for all of them."""
    divided: frozenset[int] = frozenset()
    """Jobs whose sample index is built by all ranks that have work."""
    part: int = -1
    """This rank's part of each of those; -1 for an idle rank."""
    num_parts: int = 0
    reserved: int = 0
    """Bytes of memory for the parts."""

    def takes(self, number: int, estimate: CostEstimate) -> CostEstimate:
        """Cost of a job on the rank that owns it."""
        if number not in self.divided:
            return estimate
        own = estimate.owner_memory
        return CostEstimate(memory=own, overlapped=own, cost=estimate.cost - estimate.parts_cost)

    @property
    def workers(self) -> int:
        """How many jobs run at once: one more than threads, which works while files are flushed."""
        return self.threads + 1


def assign_jobs(
    estimates: Sequence[CostEstimate], names: Sequence[str], nodes: Sequence[NodeResources]
) -> list[Assignment]:
    """Assign jobs to the ranks at `nodes`.

    The ranks of a node share its memory equally;
    if the largest job does not fit a share, fewer of them work.

    Raises: ConfigError if a job does not fit a whole node.
    """
    largest = max(range(len(estimates)), key=lambda job: estimates[job].memory, default=None)
    if largest is None:
        return [Assignment(jobs=(), memory=0, threads=1) for _ in nodes]
    most = estimates[largest].memory
    workers: list[int] = []
    working = Counter[str]()
    cores: defaultdict[str, set[int]] = defaultdict(set)
    memory: dict[
        str, int
    ] = {}  # a node's ranks look at what is free one after the other: the least counts
    for node in nodes:
        memory[node.host] = min(node.memory, memory.get(node.host, node.memory))
    for rank, node in enumerate(nodes):
        free = memory[node.host]
        if most > free:
            raise ConfigError(
                f"{names[largest]}: its arrays take {most:,} bytes of memory, but {node.host} may use {free:,} "
                "(--max-memory, or what is free there); raise --max-memory or free memory there, or request fewer "
                "samples"
            )
        cores[node.host] |= node.cores
        if working[node.host] < free // max(1, most):
            working[node.host] += 1
            workers.append(rank)
    spare = min(memory[host] // working[host] for host in memory) - most
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
    """The jobs whose sample index all ranks make, since one rank would be long over it while others
    are done; bytes for it.

    Args:
        num_parts: ranks that work.
        spare: bytes that a rank has in addition to its largest job.
    """
    fair = sum(estimate.cost for estimate in estimates) / num_parts
    large = [number for number, estimate in enumerate(estimates) if estimate.cost > fair / 2]
    chosen: list[int] = []
    lengths = 0
    gathered = 0
    reserved = 0
    for number in (
        sorted(large, key=lambda number: -estimates[number].cost) if num_parts > 1 else ()
    ):
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
    """The estimated cost of the work."""

    ranks: int
    """Number of ranks with work to do."""
    memory: int
    """Bytes of arrays on the node that holds most, at most."""
    seconds: float
    """Expected seconds, not counting the compilation of kernels."""


def forecast(
    estimates: Sequence[CostEstimate],
    assignments: Sequence[Assignment],
    nodes: Sequence[NodeResources],
) -> Forecast:
    """What `assignments` of the jobs will take at their `nodes`."""
    memory = Counter[str]()
    seconds = 0.0
    for assignment, node in zip(assignments, nodes, strict=True):
        own = [assignment.takes(job, estimates[job]) for job in assignment.jobs]
        at_once = sorted((estimate.overlapped for estimate in own), reverse=True)[
            : assignment.workers
        ]
        memory[node.host] += min(assignment.memory, sum(at_once))
        costs = [estimate.cost for estimate in own]
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
    """Admits jobs as long as what they need together fits."""

    def __init__(self, memory: int) -> None:
        self._free = memory
        self._change = threading.Condition()

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
