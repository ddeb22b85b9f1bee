"""The blend: sample number -> (source, ordinal) by totals, trees, cycles and lanes; no array a sample long.

Each stage has exact totals. The tree says how many of a stage's first n samples are each source's, C_d(n); cycles of `lanes` *
`slots` samples are cut out of it, and within a cycle megablend.kernels.plan.lanes deals positions to lanes. So `counts` is C_d at
every cycle's end, within 2 samples of the share, and strays from the share in between by a few samples.

What a stage has beyond full cycles is a cut cycle of fewer slots and, of less than `lanes` samples, a tail in the tree's own
order: unequal numbers of slots would break the even spread of the lanes, and the tail is too short to keep lanes apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megablend.errors import PlanError
from megablend.kernels.plan.inverse import find_samples
from megablend.kernels.plan.keyed_hash import MASK
from megablend.kernels.plan.lanes import cycle_shift, locate
from megablend.kernels.plan.periods import period_of
from megablend.kernels.plan.tree import first_multiple
from megablend.plan.base import MAX_SAMPLES, prefix_length, sample_numbers
from megablend.plan.tree import Tree, build_tree
from megablend.plan.weave import weave

MAX_LANES = MAX_SLOTS = 1 << 20
_MAX_TOKENS = (1 << 63) - 1


class BlendPlan:
    """Stages of exact totals, interleaved evenly, in lanes.

    Args:
        totals: samples of every source in every stage, [stages][D]; no stage without samples; below 2^50 in all.
        lanes: K, independent streams that together make the run.
        slots: B, samples of a lane in a cycle.
        spans: cycles over which a source's ordinals are dealt in runs, [D], each at least 1.
        seed: chooses the order; taken modulo 2^63.
        epoch_tokens: tokens of an epoch of each source, [D]; runs then end where its epochs do. Where absent they do not.
        sample_tokens: tokens by which samples advance.

    Raises: PlanError, naming the stage or source.
    """

    def __init__(
        self,
        totals: Sequence[Sequence[int]],
        *,
        lanes: int,
        slots: int,
        spans: Sequence[int],
        seed: int,
        epoch_tokens: Sequence[int] | None = None,
        sample_tokens: int = 1,
    ) -> None:
        _check(totals, lanes, slots, spans)
        if epoch_tokens is not None:
            _check_epochs(totals, epoch_tokens, sample_tokens)
        self.num_sources = len(spans)
        self._lanes, self._slots, self._seed = lanes, slots, seed & MASK
        self._cycle_samples = lanes * slots
        self._spans = np.array(spans, np.int64)
        self._epoch_tokens = np.array(epoch_tokens or [0] * len(spans), np.int64)
        self._sample_tokens = sample_tokens
        self._trees = [build_tree(np.array(stage, np.int64)) for stage in totals]
        self._starts = _offsets([sum(stage) for stage in totals])
        self._leaf_offsets = _offsets([len(tree.sources) for tree in self._trees])
        self.num_samples = int(self._starts[-1])

        columns = [np.concatenate(column) for column in zip(*self._trees, strict=True)]
        self._left_leaves, self._left_samples, self._leaf_sources, self._leaf_samples = columns
        self._leaf_ordinals = _running_ordinals(self._trees, self.num_sources)

        cuts = [sum(stage) % self._cycle_samples // lanes for stage in totals]
        lengths = [slots, *sorted({*cuts} - {0})]
        self._kinds = [weave(lanes, length) for length in lengths]
        self._firsts = np.stack([kind.firsts for kind in self._kinds])
        self._strides = np.array([kind.stride for kind in self._kinds], np.int64)
        self._weaves = np.array([lengths.index(cut) if cut else 0 for cut in cuts], np.int64)

    def locate(self, k: int) -> tuple[int, int]:
        """(source, ordinal over all stages and epochs) of sample k. Raises IndexError outside [0, num_samples)."""
        sources, ordinals = self.locate_many([k])
        return int(sources[0]), int(ordinals[0])

    def locate_many(self, ks: npt.ArrayLike) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Sources int32 [n] and ordinals int64 [n] of samples ks [n]. Raises IndexError."""
        return self._locate(sample_numbers(ks, self.num_samples), self._spans)

    def counts(self, n: int) -> npt.NDArray[np.int64]:
        """How many of the first n samples are of each source: int64 [num_sources]. Raises IndexError."""
        prefix_length(n, self.num_samples)
        counts = np.zeros(self.num_sources, np.int64)
        if n == 0:
            return counts
        stage = bisect_right(self._starts, n - 1) - 1
        past = int(self._leaf_offsets[stage])
        np.add.at(counts, self._leaf_sources[:past], self._leaf_samples[:past])
        start, low = self._cycle_before(stage, n)
        tree = self._trees[stage]
        counts[tree.sources] += tree.counts(low)
        return counts + np.bincount(self._sources(start + low, n), minlength=self.num_sources)

    def first_sample_from(self, source: int, ordinal: int) -> int | None:
        """The first sample that is one of a source's ordinals from `ordinal` on; None where the plan has none of these."""
        leaves = np.flatnonzero(self._leaf_sources == source)  # one a stage at most
        ends = self._leaf_ordinals[leaves] + self._leaf_samples[leaves]
        which = int(np.searchsorted(ends, ordinal, side="right"))
        if which == len(leaves):
            return None
        for ks in self._samples_about(int(leaves[which]), max(0, ordinal)):
            sources, ordinals = self.locate_many(ks)
            hits = ks[(sources == source) & (ordinals >= ordinal)]
            if len(hits):
                return int(hits[0])
        return None

    def samples_of(self, sources: npt.NDArray[np.int32], ordinals: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The samples of (sources, ordinals), int32 and int64 [n]: int64 [n]; -1 where the plan has none.

        The inverse of `locate_many`; fastest where neighbours are of one source and ascend.
        """
        ks = np.empty(len(ordinals), np.int64)
        sources = np.ascontiguousarray(sources, np.int32)
        if len(sources) and not 0 <= sources.min() <= sources.max() < self.num_sources:
            raise IndexError(f"sources are numbered from 0 to {self.num_sources - 1}")
        find_samples(
            sources,
            np.ascontiguousarray(ordinals, np.int64),
            *self._leaves_by_source,
            self._starts,
            self._leaf_offsets,
            self._left_leaves,
            self._left_samples,
            self._leaf_ordinals,
            self._leaf_samples,
            self._weaves,
            self._firsts,
            *self._inverse_weaves,
            self._spans,
            self._epoch_tokens,
            self._sample_tokens,
            self._slots,
            self._seed,
            ks,
        )
        return ks

    @cached_property
    def _leaves_by_source(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """int64 [num_sources + 1] into int64 [leaves of all stages]: the leaves of each source, stage after stage."""
        counts = np.bincount(self._leaf_sources, minlength=self.num_sources)
        return _offsets(counts.tolist()), np.argsort(self._leaf_sources, kind="stable")

    @cached_property
    def _inverse_weaves(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Of each weave, which lane has each residue, int64 [num_weaves, K]; and its stride's inverse, int64 [num_weaves]."""
        owners = np.argsort(self._firsts % self._lanes, axis=1)
        return owners, np.array([pow(kind.stride, -1, kind.slots) for kind in self._kinds], np.int64)

    def _samples_about(self, leaf: int, ordinal: int) -> Iterator[npt.NDArray[np.int64]]:
        """Samples int64 [n], ascending: a leaf's in each cycle of the period that has its `ordinal`, then the stage's tail."""
        stage = bisect_right(self._leaf_offsets, leaf) - 1
        tree, (start, stop) = self._trees[stage], self._starts[stage : stage + 2].tolist()
        rank, first, total = leaf - int(self._leaf_offsets[stage]), int(self._leaf_ordinals[leaf]), stop - start
        dealt = total - total % self._lanes
        shape = tree.left_leaves, tree.left_samples
        missing = ordinal - first + 1
        cycle = first_multiple(*shape, total, int(tree.samples[rank]), rank, missing, self._cycle_samples) - 1
        if cycle * self._cycle_samples < dealt:
            source = tree.sources[rank]
            of_source = int(self._spans[source]), ordinal, int(self._epoch_tokens[source]), self._sample_tokens
            begin, end = period_of(*shape, tree.samples, rank, first, self._cycle_samples, cycle, *of_source)
            for each in range(begin, end):
                yield start + self._samples_in_cycle(stage, rank, each, dealt)
        yield np.arange(start + dealt, stop)

    def _samples_in_cycle(self, stage: int, rank: int, cycle: int, dealt: int) -> npt.NDArray[np.int64]:
        """Samples of a leaf in a cycle, counted from the stage's start: int64 [n], ascending."""
        low, high = cycle * self._cycle_samples, min((cycle + 1) * self._cycle_samples, dealt)
        counts = self._trees[stage].counts(high) - self._trees[stage].counts(low)
        kind = self._kinds[0 if high - low == self._cycle_samples else self._weaves[stage]]
        shift = cycle_shift(self._seed, int(self._starts[stage]), cycle, kind.slots)
        left = int(counts[:rank].sum())
        return low + np.sort(kind.samples(np.arange(left, left + int(counts[rank])), shift))

    def _cycle_before(self, stage: int, n: int) -> tuple[int, int]:
        """(start of the stage, samples of the stage in whole cycles among the first n, those of the tail included)."""
        start, stop = self._starts[stage : stage + 2].tolist()
        j = n - start
        dealt = (stop - start) // self._lanes * self._lanes
        return start, j if j >= dealt else j - j % self._cycle_samples

    def _sources(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Sources of samples [start, stop), int32; which source it is does not depend on the spans."""
        return self._locate(np.arange(start, stop), np.ones_like(self._spans))[0]

    def _locate(
        self, ks: npt.NDArray[np.int64], spans: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        sources, ordinals = np.empty(ks.shape, np.int32), np.empty(ks.shape, np.int64)
        locate(
            ks,
            self._starts,
            self._leaf_offsets,
            self._left_leaves,
            self._left_samples,
            self._leaf_sources,
            self._leaf_ordinals,
            self._leaf_samples,
            self._weaves,
            self._firsts,
            self._strides,
            spans,
            self._epoch_tokens,
            self._sample_tokens,
            self._slots,
            self._seed,
            sources,
            ordinals,
        )
        return sources, ordinals


def _check(totals: Sequence[Sequence[int]], lanes: int, slots: int, spans: Sequence[int]) -> None:
    if not 1 <= lanes <= MAX_LANES or not 1 <= slots <= MAX_SLOTS:
        raise PlanError(f"{lanes} lanes of {slots} slots: expected from 1 to {MAX_LANES} lanes and {MAX_SLOTS} slots")
    for source, span in enumerate(spans):
        if span < 1:
            raise PlanError(f"source {source} is dealt over {span} cycles; expected at least 1")
    if not totals:
        raise PlanError("a plan has at least one stage")
    for number, stage in enumerate(totals):
        if len(stage) != len(spans):
            raise PlanError(f"stage {number} has totals of {len(stage)} sources; expected {len(spans)}")
        if min(stage, default=0) < 0:
            raise PlanError(
                f"stage {number} gives source {stage.index(min(stage))} {min(stage)} samples; expected 0 or more"
            )
        if sum(stage) == 0:
            raise PlanError(f"stage {number} has no samples; expected at least one")
    if (samples := sum(map(sum, totals))) > MAX_SAMPLES:
        raise PlanError(f"{samples} samples; a plan holds at most {MAX_SAMPLES}")


def _check_epochs(totals: Sequence[Sequence[int]], epoch_tokens: Sequence[int], sample_tokens: int) -> None:
    if sample_tokens < 1:
        raise PlanError(f"samples advance by {sample_tokens} tokens; expected at least 1")
    samples = np.sum(np.array(totals, np.int64), axis=0).tolist()
    for source, (tokens, read) in enumerate(zip(epoch_tokens, samples, strict=True)):
        if tokens < (read > 0):
            raise PlanError(f"source {source} has epochs of {tokens} tokens; expected at least 1")
        if (read + 4) * sample_tokens + tokens > _MAX_TOKENS:  # estimates go beyond the end by less
            raise PlanError(
                f"source {source} has {read} samples of {sample_tokens} tokens and epochs of {tokens}; a plan counts at most "
                f"{_MAX_TOKENS} tokens of a source, and an epoch beyond its end"
            )


def _offsets(sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(sizes, np.int64))])


def _running_ordinals(trees: Sequence[Tree], num_sources: int) -> npt.NDArray[np.int64]:
    """The ordinal with which each leaf begins: int64 [leaves of all stages]."""
    given = np.zeros(num_sources, np.int64)
    ordinals = []
    for tree in trees:
        ordinals.append(given[tree.sources])
        given[tree.sources] += tree.samples
    return np.concatenate(ordinals)
