"""Plan what a loader's coming steps need: the samples, where their tokens are stored, which blocks
contain them, and when each block is used. Nothing is read here.

Future reads are known, since the number of a sample determines the blocks that the sample needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s, running_totals
from megablend.formats.base import Array
from megablend.formats.parquet.decoding.values import is_by_dictionary
from megablend.order.base import Spans
from megablend.run.run import Run, Section

DICTIONARY_GROWTH = 3
"""Memory for reading a dictionary, as a multiple of its stored bytes: once for the stored bytes,
and an estimated twice for the decompressed bytes, whose number is not in the index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSequence:
    """The steps of a loader, or those of one of its workers."""

    first: int
    """First sample of the first step."""
    micro_batch_size: int
    stride: int
    """Number of samples from the start of a step to the start of the next one: samples per step
    over all ranks, times the number of workers."""
    stop: int
    """Number of samples in the run; the last step may be shorter."""

    @property
    def begins(self) -> range:
        """The first sample of each process, if the steps of all processes have this stride."""
        stop = min(self.first + self.stride, self.stop)
        return range(self.first, stop, self.micro_batch_size)

    def within(self, section: Section, begin: int) -> StepSequence:
        """Return the steps that start in a section. Steps are `stride` samples apart, counted from
        sample `begin`."""
        steps_before = -(-max(0, section.start - begin) // self.stride)
        return replace(
            self, first=begin + steps_before * self.stride, stop=min(section.stop, self.stop)
        )

    def samples(self, step: int, num_steps: int) -> tuple[Int64s, Int64s]:
        """Return the samples of `num_steps` steps from `step` on. Steps beyond the end of the run
        are omitted.

        Returns: sample numbers, int64 [n]; and the offsets of the steps in them, int64 [steps + 1].
        """
        # Stay within the run from here on, since a loader's sizes may exceed 64 bits, and all
        # memory
        begin = min(self.stop, self.first + step * self.stride)
        end = min(self.stop, begin + num_steps * self.stride)
        first_samples = np.arange(begin, end, min(self.stride, max(1, end - begin)))
        step_size = min(self.micro_batch_size, self.stop - begin)
        # [steps, samples per step]
        numbers = first_samples[:, np.newaxis] + np.arange(step_size)
        is_inside = numbers < self.stop
        step_sizes = is_inside.sum(axis=1)
        return numbers[is_inside], running_totals(step_sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSchedule:
    """Steps, and the blocks that they need."""

    samples: Int64s
    """int64 [n], sample numbers, step after step."""
    step_offsets: Int64s
    """int64 [num_steps + 1], offsets of the steps in `samples`."""
    sources: npt.NDArray[np.int32]
    """int32 [n], the samples' sources."""
    spans: Spans
    """[m], the spans in which the samples' tokens are stored."""
    span_offsets: Int64s
    """int64 [num_steps + 1], offsets of the steps in `spans`."""
    ids: Int64s
    """int64 [num_blocks], the blocks that the steps need, ascending."""
    rows: Array
    """PLACED_BLOCK_DTYPE [num_blocks], the blocks' rows of the block table."""
    span_blocks: Int64s
    """int64 [m], index into `ids` of each span's block."""
    sizes: Int64s
    """int64 [num_blocks], bytes that each block takes in memory."""
    reading: Int64s
    """int64 [num_blocks], additional bytes that are needed while each block is read."""
    first_use: Int64s
    """int64 [num_blocks], first step that uses the block, from 0."""
    last_use: Int64s
    """int64 [num_blocks], last step that uses the block."""
    used: Int64s
    """int64 [num_blocks], number of tokens of each block that the samples use, without the samples'
    extra tokens."""
    pending_boundary_tokens: Int64s
    """int64 [num_blocks], number of samples that begin in each block minus number of samples that
    end in it; 0 without extra tokens. The first token of a sample is also the extra token of the
    source's previous sample, which may be read in a later window and needs the block again."""

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return len(self.step_offsets) - 1


class LocatedSteps(NamedTuple):
    """Steps, and where the tokens of their samples are stored; fields as in ReadSchedule."""

    samples: Int64s
    step_offsets: Int64s
    sources: npt.NDArray[np.int32]
    ordinals: Int64s
    """int64 [n], the samples' numbers within their sources."""
    spans: Spans

    def until(self, step: int) -> LocatedSteps:
        """Return the steps before `step`."""
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
    """Locate the samples of steps (`samples`: int64 [n]; `step_offsets`: int64 [num_steps + 1],
    offsets of the steps in them)."""
    sources, ordinals = run.plan.locate_many(samples)
    return LocatedSteps(
        samples, step_offsets, sources, ordinals, run.locate_spans(sources, ordinals)
    )


def step_needs(run: Run, located: LocatedSteps) -> tuple[Int64s, Int64s]:
    """Compute the memory that each step needs if it is read alone.

    Returns: the bytes of the step's blocks; and these plus the bytes needed to read the largest of
        the blocks, as in ReadSchedule (int64 [num_steps] each).
    """
    spans = located.spans
    num_steps = len(located.step_offsets) - 1
    ids, span_blocks = np.unique(spans.blocks, return_inverse=True)
    # Pairs of a step and a block that it needs: [pairs], by step, then by block
    pairs = np.unique(_steps_of_spans(located) * len(ids) + span_blocks)
    pair_steps, pair_blocks = np.divmod(pairs, len(ids))
    rows = run.store.snapshot.blocks(ids)
    sizes, reading = _memory_bytes(run, ids, rows)
    dictionaries = _dictionary_bytes(run, ids[pair_blocks], rows[pair_blocks], pair_steps)
    first_pairs = np.searchsorted(pair_steps, np.arange(num_steps))
    step_bytes = np.add.reduceat(sizes[pair_blocks], first_pairs)
    largest_read = np.maximum.reduceat(reading[pair_blocks] + dictionaries, first_pairs)
    return step_bytes, step_bytes + largest_read


def schedule_reads(run: Run, located: LocatedSteps) -> ReadSchedule:
    """Find the blocks that steps need, and the first and last step that uses each."""
    spans = located.spans
    ids, firsts, span_blocks = np.unique(spans.blocks, return_index=True, return_inverse=True)
    rows = run.store.snapshot.blocks(ids)
    sizes, reading = _memory_bytes(run, ids, rows)
    steps = _steps_of_spans(located)
    first_use = steps[firsts]
    order = np.argsort(first_use, kind="stable")
    reading[order] += _dictionary_bytes(run, ids[order], rows[order], np.zeros_like(ids))
    last_use = np.zeros(len(ids), np.int64)
    last_use[span_blocks] = steps  # steps ascend, so the last assignment wins
    # Where samples begin and end among the spans
    begins = np.flatnonzero(np.diff(spans.rows, prepend=-1))
    ends = np.flatnonzero(np.diff(spans.rows, append=-1))
    extra = run.extra_token
    used_of_spans = spans.stops - spans.starts
    used_of_spans[ends] -= extra
    # The first sample of a source has no previous sample
    pending = np.bincount(span_blocks[begins], extra * (located.ordinals > 0), minlength=len(ids))
    pending -= np.bincount(span_blocks[ends], np.full(len(ends), extra), minlength=len(ids))
    return ReadSchedule(
        samples=located.samples,
        step_offsets=located.step_offsets,
        sources=located.sources,
        spans=spans,
        span_offsets=np.searchsorted(spans.rows, located.step_offsets),
        ids=ids,
        rows=rows,
        span_blocks=span_blocks,
        sizes=sizes,
        reading=reading,
        first_use=first_use,
        last_use=last_use,
        used=np.bincount(span_blocks, used_of_spans, minlength=len(ids)).astype(np.int64),
        pending_boundary_tokens=pending.astype(np.int64),
    )


def _steps_of_spans(located: LocatedSteps) -> Int64s:
    """Return the step of each span, int64 [m], ascending."""
    span_offsets = np.searchsorted(located.spans.rows, located.step_offsets)
    return np.repeat(np.arange(len(span_offsets) - 1), np.diff(span_offsets))


def _memory_bytes(run: Run, ids: Int64s, rows: Array) -> tuple[Int64s, Int64s]:
    """Return BlockStore.memory_bytes for blocks of the run."""
    has_documents = run.settings.masks.inter_document_masking
    return run.store.memory_bytes(ids, rows, documents=has_documents)


def _dictionary_bytes(run: Run, ids: Int64s, rows: Array, groups: Int64s) -> Int64s:
    """Return the memory for the dictionary that is read along with each block; 0 if no dictionary
    is read. In each group of blocks, a dictionary is read with the first block that needs it.

    Args:
        ids: int64 [n], the blocks.
        rows: rows of the blocks in the block table, [n].
        groups: int64 [n], number of each block's group.

    Returns: int64 [n].
    """
    counted = np.zeros(len(ids), np.int64)
    if is_by_dictionary(rows["encoding"]).any():
        dictionaries, stored_bytes = run.store.dictionaries(ids)
        needed = np.flatnonzero(stored_bytes)
        keys = groups[needed] * (dictionaries.max() + 1) + dictionaries[needed]
        firsts = needed[np.unique(keys, return_index=True)[1]]
        counted[firsts] = DICTIONARY_GROWTH * stored_bytes[firsts]
    return counted
