"""Estimates the memory and time of jobs."""

from __future__ import annotations

from dataclasses import dataclass

from megablend.megatron.cache_builder.work_plan import BlendJob, Job
from megablend.megatron.request.request import GREEDY, LARGEST_REMAINDER

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
"""Nanoseconds of one thread for each entry of a document index, its length, a row of a sample index, an entry of a shuffle index
and of a blend; for an artefact's files. Rough: they order the jobs and make the estimate of a dry run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedCost:
    """What a dataset takes whose sample index all ranks make."""

    memory: int
    """Bytes of the arrays on the rank that owns the job."""
    cost: int
    """Time of the rank that owns the job, in nanoseconds."""
    parts_cost: int
    """Cost of all parts together."""
    lengths: int
    """Bytes on each rank, while it counts its part."""
    gathered: int
    """Bytes of all parts together, from when they are gathered until they are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEstimate:
    """The estimated cost of a job."""

    memory: int
    """Bytes of arrays, on one thread, with its two shuffles one after the other."""
    overlapped: int
    """Bytes of arrays if the shuffle index is built at the same time as the sample index."""
    cost: int
    """Nanoseconds of one thread."""
    divided: DividedCost | None = None
    """None if it cannot be built in parts."""

    def owners(self, *, divided: bool) -> CostEstimate:
        """Cost of the job on the rank that owns it."""
        own = self.divided if divided else None
        return self if own is None else CostEstimate(memory=own.memory, overlapped=own.memory, cost=own.cost)


def estimate_cost(job: Job) -> CostEstimate:
    """Estimate the cost of a job, to within some per cent."""
    if isinstance(job, BlendJob):
        memory = min(job.artefact.nbytes, _DRAWN_BYTES)
        return CostEstimate(
            memory=memory, overlapped=memory, cost=round(_NS["artefact"] + _NS[job.interleaving] * job.num_samples)
        )
    documents, samples, shuffle = job.artefact.arrays
    lengths = 4 * (job.size.end - job.size.begin) + job.size.num_sequences  # those of short documents in bytes, too
    gathering = lengths + documents.nbytes + min(samples.nbytes, PIECE_BYTES)
    own = round(_NS["artefact"] + _NS["document"] * documents.shape[0] + _NS["sample"] * job.num_samples)
    parts = round(_NS["length"] * documents.shape[0] + _NS["row"] * job.num_samples)
    return CostEstimate(
        memory=max(gathering, shuffle.nbytes),
        overlapped=gathering + shuffle.nbytes,
        cost=own + parts,
        divided=DividedCost(
            memory=max(documents.nbytes, shuffle.nbytes),
            cost=own,
            parts_cost=parts,
            lengths=lengths,
            gathered=documents.nbytes,
        ),
    )
