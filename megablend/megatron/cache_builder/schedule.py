"""Who builds what: the ranks and threads that a node's memory allows, and the share of each."""

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
from megablend.megatron.cache_builder.cost import PIECE_BYTES, CostEstimate
from megablend.megatron.cache_builder.free_memory import free_memory

_USABLE = 0.8
"""Usable fraction of a node's free memory if no limit is given."""
DIVIDED_NS = 5e8
"""Minimum cost of a sample index that all ranks make together: below it, communication takes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResources:
    """A rank's node, and what the node has."""

    host: str
    memory: int
    cores: frozenset[int]
    """Those that this rank may use; launchers give each rank its own, or all ranks all."""


def this_place(max_memory: int | None) -> NodeResources:
    """The place of this process. `max_memory` bounds its node's arrays; without it most of what is free now does."""
    memory = round(_USABLE * free_memory()) if max_memory is None else max_memory
    return NodeResources(host=socket.gethostname(), memory=memory, cores=frozenset(os.sched_getaffinity(0)))


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

    def takes(self, number: int, need: CostEstimate) -> CostEstimate:
        """Cost of a job on the rank that owns it."""
        return need.owners(divided=number in self.divided)

    @property
    def workers(self) -> int:
        """Jobs at once: one more than threads, which works while files are flushed."""
        return self.threads + 1


def assign_jobs(
    needs: Sequence[CostEstimate], names: Sequence[str], places: Sequence[NodeResources]
) -> list[Assignment]:
    """Assign jobs to the ranks at `places`.

    The ranks of a node share its memory equally; where the largest job does not fit a share, fewer of them work.

    Raises: ConfigError where a job does not fit a whole node.
    """
    largest = max(range(len(needs)), key=lambda job: needs[job].memory, default=None)
    if largest is None:
        return [Assignment(jobs=(), memory=0, threads=1) for _ in places]
    most = needs[largest].memory
    workers, working = [], Counter[str]()
    cores: defaultdict[str, set[int]] = defaultdict(set)
    memory: dict[str, int] = {}  # a node's ranks look at what is free one after the other: the least counts
    for place in places:
        memory[place.host] = min(place.memory, memory.get(place.host, place.memory))
    for rank, place in enumerate(places):
        free = memory[place.host]
        if most > free:
            raise ConfigError(
                f"{names[largest]}: its arrays take {most:,} bytes of memory, but {place.host} may use {free:,} "
                "(--max-memory, or what is free there); allow that much, or request fewer samples"
            )
        cores[place.host] |= place.cores
        if working[place.host] < free // max(1, most):
            working[place.host] += 1
            workers.append(rank)
    spare = min(memory[host] // working[host] for host in memory) - most
    divided, reserved = _choose_divided(needs, len(workers), spare)
    costs = [need.owners(divided=number in divided).cost for number, need in enumerate(needs)]
    dealt = dict(zip(workers, assign_longest_first(costs, len(workers)), strict=True))
    return [
        Assignment(
            jobs=tuple(dealt.get(rank, ())),
            memory=memory[place.host] // working[place.host] - reserved,
            threads=max(1, len(cores[place.host]) // working[place.host]),
            divided=divided,
            part=workers.index(rank) if rank in dealt else -1,
            num_parts=len(workers),
            reserved=reserved,
        )
        for rank, place in enumerate(places)
    ]


def _choose_divided(needs: Sequence[CostEstimate], num_parts: int, spare: int) -> tuple[frozenset[int], int]:
    """The jobs whose sample index all ranks make, since one rank would be long over it while others are done; bytes for it.

    Args:
        num_parts: ranks that work.
        spare: bytes that a rank has in addition to its largest job.
    """
    fair = sum(need.cost for need in needs) / num_parts
    large = sorted((-need.cost, number, need.divided) for number, need in enumerate(needs) if need.cost > fair / 2)
    chosen, lengths, gathered, reserved = list[int](), 0, 0, 0
    for _, number, divided in large if num_parts > 1 else ():
        if divided is None or divided.parts_cost < DIVIDED_NS or divided.gathered < 4 * num_parts:
            continue
        lengths, gathered = max(lengths, divided.lengths), gathered + -(-divided.gathered // num_parts)
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


def forecast(needs: Sequence[CostEstimate], shares: Sequence[Assignment], places: Sequence[NodeResources]) -> Forecast:
    """What `shares` of the jobs will take at their `places`."""
    memory, seconds = Counter[str](), 0.0
    for share_, place in zip(shares, places, strict=True):
        mine = [share_.takes(job, needs[job]) for job in share_.jobs]
        at_once = sorted((need.overlapped for need in mine), reverse=True)[: share_.workers]
        memory[place.host] += min(share_.memory, sum(at_once)) + (share_.reserved if share_.part >= 0 else 0)
        costs = [need.cost for need in mine]
        if share_.part >= 0:
            costs += [
                divided.parts_cost // share_.num_parts for job in share_.divided if (divided := needs[job].divided)
            ]
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
