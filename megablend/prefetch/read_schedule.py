"""What a loader's coming steps need: samples, where their tokens are stored, blocks,
and when each is used. Nothing is read here.

A sample number determines the blocks that the sample needs, so future reads are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.formats.base import Array
from megablend.formats.parquet.decoding.values import is_by_dictionary
from megablend.order.base import Spans
from megablend.run.run import Run

DICTIONARY_GROWTH = 3
"""Memory for reading a dictionary, in its stored bytes: these, and decompressed, which is not
indexed, up to twice as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSequence:
    """The steps of a loader, or those of one of its workers."""

    first: int
    """First sample of the first step."""
    micro_batch_size: int
    stride: int
    """Samples from the start of a step to the start of the next: samples of a step over all ranks,
    times workers."""
    stop: int
    """Samples of the run; the last step may be shorter."""

    def samples(self, step: int, num_steps: int) -> tuple[Int64s, Int64s]:
        """Sample numbers of `num_steps` steps from `step` on, int64 [n], and the offsets of the
        steps in them, int64 [steps + 1].

        Steps beyond the end of the run are omitted.
        """
        begin = self.first + step * self.stride
        # Not of the whole run
        firsts = np.arange(begin, min(self.stop, begin + num_steps * self.stride), self.stride)
        # [steps, samples per step]
        numbers = firsts[:, np.newaxis] + np.arange(self.micro_batch_size)
        inside = numbers < self.stop
        return numbers[inside], np.concatenate(
            [np.zeros(1, np.int64), np.cumsum(inside.sum(axis=1))]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSchedule:
    """Steps, and the blocks that they need."""

    samples: Int64s
    """int64 [n], sample numbers, step after step."""
    step_offsets: Int64s
    """int64 [num_steps + 1], into `samples`."""
    sources: npt.NDArray[np.int32]
    """int32 [n], the samples' sources."""
    spans: Spans
    """Where the samples' tokens are stored, [m]."""
    span_offsets: Int64s
    """int64 [num_steps + 1], into `spans`."""
    ids: Int64s
    """int64 [num_blocks], the blocks needed, ascending."""
    rows: Array
    """PLACED_BLOCK_DTYPE [num_blocks], their rows of the block table."""
    span_blocks: Int64s
    """int64 [m], index into `ids` of each span's block."""
    sizes: Int64s
    """int64 [num_blocks], bytes that a block takes in memory."""
    reading: Int64s
    """int64 [num_blocks], additional bytes needed while a block is read."""
    first_use: Int64s
    """int64 [num_blocks], first step that uses the block, from 0."""
    last_use: Int64s
    """int64 [num_blocks], last step that uses the block."""
    used: Int64s
    """int64 [num_blocks], tokens of each block that the samples use, without their extra tokens."""
    pending_boundary_tokens: Int64s
    """int64 [num_blocks]: samples that begin in the block minus samples that end in it. The first
    token of a sample is the extra token of the sample before it, which may be read later."""

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return len(self.step_offsets) - 1


class LocatedSteps(NamedTuple):
    """Steps of samples, and where their tokens are stored."""

    samples: Int64s
    step_offsets: Int64s
    sources: npt.NDArray[np.int32]
    ordinals: Int64s
    spans: Spans

    def until(self, step: int) -> LocatedSteps:
        """The steps before `step`."""
        num_samples = int(self.step_offsets[step])
        num_spans = int(np.searchsorted(self.spans.rows, num_samples))
        return LocatedSteps(
            self.samples[:num_samples],
            self.step_offsets[: step + 1],
            self.sources[:num_samples],
            self.ordinals[:num_samples],
            Spans(*(column[:num_spans] for column in self.spans)),
        )


def locate_steps(run: Run, samples: Int64s, step_offsets: Int64s) -> LocatedSteps:
    """Locate the samples, int64 [n], of the steps at `step_offsets`, int64 [num_steps + 1]."""
    sources, ordinals = run.plan.locate_many(samples)
    return LocatedSteps(
        samples, step_offsets, sources, ordinals, run.locate_spans(sources, ordinals)
    )


def step_needs(run: Run, located: LocatedSteps) -> tuple[Int64s, Int64s]:
    """What each step needs if it is read alone, as `schedule_reads` says of it: bytes of its
    blocks, and of these with what reading the largest takes; int64 [num_steps] each."""
    _, step_offsets, _, _, spans = located
    num_steps = len(step_offsets) - 1
    steps = np.repeat(np.arange(num_steps), np.diff(np.searchsorted(spans.rows, step_offsets)))
    ids, span_blocks = np.unique(spans.blocks, return_inverse=True)
    # [pairs], by step, then by block
    steps, indices = np.divmod(np.unique(steps * len(ids) + span_blocks), len(ids))
    rows = run.store.snapshot.blocks(ids)
    sizes, reading = run.store.memory_bytes(
        ids, rows, documents=run.settings.masks.inter_document_masking
    )
    dictionaries = _dictionary_bytes(run, ids[indices], rows[indices], steps)
    first_pairs = np.searchsorted(steps, np.arange(num_steps))
    blocks = np.add.reduceat(sizes[indices], first_pairs)
    return blocks, blocks + np.maximum.reduceat(reading[indices] + dictionaries, first_pairs)


def _dictionary_bytes(run: Run, ids: Int64s, rows: Array, groups: Int64s) -> Int64s:
    """Bytes for reading dictionaries with each of the blocks `ids`, int64 [n]: in each of `groups`,
    int64 [n], a dictionary is read with the first block that needs it."""
    found = np.zeros(len(ids), np.int64)
    if is_by_dictionary(rows["encoding"]).any():
        numbers, stored = run.store.dictionaries(ids)
        needed = np.flatnonzero(stored)
        keys = groups[needed] * (numbers.max() + 1) + numbers[needed]
        firsts = needed[np.unique(keys, return_index=True)[1]]
        found[firsts] = DICTIONARY_GROWTH * stored[firsts]
    return found


def schedule_reads(run: Run, steps_located: LocatedSteps) -> ReadSchedule:
    """The read schedule of steps of samples."""
    samples, step_offsets, sources, ordinals, spans = steps_located
    ids, firsts, span_blocks = np.unique(spans.blocks, return_index=True, return_inverse=True)
    span_offsets = np.searchsorted(spans.rows, step_offsets)
    steps = np.repeat(np.arange(len(step_offsets) - 1), np.diff(span_offsets))
    rows = run.store.snapshot.blocks(ids)
    sizes, reading = run.store.memory_bytes(
        ids, rows, documents=run.settings.masks.inter_document_masking
    )
    first_use = steps[firsts]
    order = np.argsort(first_use, kind="stable")
    reading[order] += _dictionary_bytes(run, ids[order], rows[order], np.zeros_like(ids))
    last_use = np.zeros(len(ids), np.int64)
    last_use[span_blocks] = steps  # steps ascend, so the last assignment wins
    advances = spans.stops - spans.starts
    begins, ends = (
        np.flatnonzero(np.diff(spans.rows, **edge)) for edge in ({"prepend": -1}, {"append": -1})
    )
    extra = run.extra_token
    advances[ends] -= extra
    pending_boundary_tokens = np.bincount(
        span_blocks[begins], extra * (ordinals > 0), minlength=len(ids)
    )
    pending_boundary_tokens -= np.bincount(
        span_blocks[ends], np.full(len(ends), extra), minlength=len(ids)
    )
    return ReadSchedule(
        samples=samples,
        step_offsets=step_offsets,
        sources=sources,
        spans=spans,
        span_offsets=span_offsets,
        ids=ids,
        rows=rows,
        span_blocks=span_blocks,
        sizes=sizes,
        reading=reading,
        first_use=first_use,
        last_use=last_use,
        used=np.bincount(span_blocks, advances, minlength=len(ids)).astype(np.int64),
        pending_boundary_tokens=pending_boundary_tokens.astype(np.int64),
    )
