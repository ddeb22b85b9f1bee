"""Interleave samples evenly in lanes. The source and the ordinal of a sample are computed from its
number by totals, tree, cycles and lanes, without long arrays.

The tree gives C_d(n), the number of samples of source d among a stage's first n samples. The stage
is divided into cycles of `lanes` * `window` samples; within a cycle megablend.kernels.blend.lanes
assigns positions to lanes. So `counts` equals C_d at the end of every cycle, within 2 samples of
the share, and deviates by a few samples in between.

A stage that is not a multiple of full cycles ends with a short cycle of fewer slots, and a tail of
fewer than `lanes` samples in the tree's own order: unequal numbers of slots would break the even
spread over lanes, and the tail is too short for lanes.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int32s, Int64s
from megablend.blend.interleavings.base import (
    LocatesMany,
    StageRequest,
    check_places,
    prefix_length,
    sample_numbers,
)
from megablend.blend.interleavings.cycle_counts import count_below
from megablend.blend.interleavings.lane_schedule import LaneSchedule, make_lane_schedule
from megablend.blend.interleavings.tails import Tails
from megablend.errors import PlanError
from megablend.kernels.blend.inverse import find_samples
from megablend.kernels.blend.keyed_hash import MASK
from megablend.kernels.blend.lanes import cycle_shift, locate
from megablend.kernels.blend.periods import PART_FIELDS, PERIOD_FIELDS
from megablend.kernels.blend.tails import find_tails
from megablend.kernels.blend.tree import all_counts, call_leaf_counts, call_least_multiple, huffman
from megablend.lazy import cached_property


class Tree(NamedTuple):
    """A stage's sources with their totals, as arrays; sources without samples are left out."""

    left_leaves: npt.NDArray[np.int32]
    """Number of leaves below the heavier child of each inner node, in preorder: int32 [num_leaves];
    the last entry is unused."""
    left_samples: npt.NDArray[np.int64]
    """Number of samples of these leaves: int64 [num_leaves]; the last entry is unused."""
    sources: npt.NDArray[np.int32]
    """The source of each leaf: int32 [num_leaves]. The index of a leaf in this array is its
    rank."""
    samples: npt.NDArray[np.int64]
    """The total of each leaf, by rank: int64 [num_leaves]."""

    def counts(self, n: int) -> npt.NDArray[np.int64]:
        """Return the number of samples that each leaf has among the first n: int64 [num_leaves], in
        order of rank; 0 <= n <= sum of the totals."""
        counts = np.empty(len(self.sources), np.int64)
        all_counts(self.left_leaves, self.left_samples, int(self.samples.sum()), n, counts)
        return counts


def build_tree(totals: npt.NDArray[np.int64]) -> Tree:
    """Build the tree of a stage with D sources in O(D log D). `totals`, int64 [D], are not
    negative, at least one is positive, and their sum is below 2^50."""
    order = np.argsort(totals, kind="stable")
    order = order[totals[order] > 0]
    left_leaves = np.zeros(len(order), np.int32)
    left_samples = np.zeros(len(order), np.int64)
    leaves = np.empty(len(order), np.int32)
    huffman(totals[order], left_leaves, left_samples, leaves)
    sources = order[leaves]
    return Tree(left_leaves, left_samples, sources.astype(np.int32), totals[sources])


MAX_LANES = 1 << 20
MAX_WINDOW = 1 << 20
LISTED = 1 << 18
"""Number of a cycle's samples that are listed to count or find one among them; of more, the slots
are counted by a formula."""
MAX_LISTED = 1 << 24
"""Number of samples that are listed where the formula takes longer, with many sources."""


class LanePlan(LocatesMany):
    """A stage with exact totals, interleaved evenly in lanes. Runs of ordinals end at epoch ends if
    the request has `epoch_tokens`.

    Raises: PlanError, naming the source, if a number is out of range.
    """

    def __init__(self, stage: StageRequest) -> None:
        lanes = stage.lanes
        window = stage.shuffle_window
        if not (1 <= lanes <= MAX_LANES and 1 <= window <= MAX_WINDOW):
            raise PlanError(
                f"found {lanes} lanes of {window} samples per cycle; expected 1 to {MAX_LANES} lanes and 1 to {MAX_WINDOW} "
                "samples"
            )
        if (stage.cycles < 1).any():
            source = int(np.flatnonzero(stage.cycles < 1)[0])
            raise PlanError(
                f"source {source} has {stage.cycles[source]} cycles per run; expected at least 1"
            )
        self.num_sources = len(stage.totals)
        self.num_samples = stage.num_samples
        self._lanes = lanes
        self._window = window
        self._seed = stage.seed & MASK
        self._start = stage.first_sample
        self._cycle_samples = lanes * window
        self._dealt = self.num_samples // lanes * lanes
        """Number of samples in the full cycles and the short cycle. The tail comes after them."""
        tree = self._tree = build_tree(stage.totals)
        self._leaf_tokens = stage.first_tokens[tree.sources]
        self._leaf_cycles = stage.cycles[tree.sources]
        self._leaf_epochs = (
            np.zeros_like(tree.samples)
            if stage.epoch_tokens is None
            else stage.epoch_tokens[tree.sources]
        )
        self._sample_tokens = stage.sample_tokens
        short_window = self._dealt % self._cycle_samples // lanes
        self._schedules = [make_lane_schedule(lanes, window)]
        """The schedule of a full cycle, and, if there is a short cycle, its schedule."""
        if short_window:
            self._schedules.append(make_lane_schedule(lanes, short_window))
        self._firsts = np.stack(list(map(attrgetter("firsts"), self._schedules)))
        self._strides = np.array(list(map(attrgetter("stride"), self._schedules)), np.int64)

    def locate_many(self, ks: npt.ArrayLike) -> tuple[Int32s, Int64s]:
        """Return the sources and the ordinals of samples `ks`, [n], as int32 [n] and int64 [n].
        Raises: IndexError."""
        return self._locate(sample_numbers(ks, self.num_samples), self._leaf_cycles)

    def counts(self, n: int) -> Int64s:
        """Return how many of the first n samples come from each source: int64 [num_sources]. Raises
        IndexError."""
        n = prefix_length(n, self.num_samples)
        # The tree counts up to the end of the last full cycle, and within the tail
        low = n if n >= self._dealt else n - n % self._cycle_samples
        counts = np.zeros(self.num_sources, np.int64)
        counts[self._tree.sources] = self._tree.counts(low)
        slots = (n - low) // self._lanes
        # The formula takes a step for each lane and source, listing takes one for each sample
        if (slots > 2 * len(self._tree.sources) and n - low > LISTED) or n - low > MAX_LISTED:
            counts[self._tree.sources] += self._count_slots(low // self._cycle_samples, slots)
            low += slots * self._lanes
        return counts + np.bincount(self._sources(low, n), minlength=self.num_sources)

    def nth_sample(self, source: int, n: int) -> int:
        """See Plan.nth_sample."""
        rank = int(self._ranks[source])
        cycle = self._cycle_of(rank, n)
        low = min(cycle * self._cycle_samples, self._dealt)
        high = min(low + self._cycle_samples, self._dealt)
        _, seen = self._counts_of(rank, low)
        _, seen_high = self._counts_of(rank, high)
        if n <= seen_high:
            return low + self._nth_in_cycle(rank, cycle, n - 1 - seen)
        in_tail = np.flatnonzero(self._sources(self._dealt, self.num_samples) == source)
        return self._dealt + int(in_tail[n - 1 - seen_high])

    def samples_of(self, sources: Int32s, ordinals: Int64s) -> Int64s:
        """See Plan.samples_of."""
        sources, ordinals = check_places(sources, ordinals, self._totals)
        ks = np.empty(len(ordinals), np.int64)
        find_samples(
            self._ranks[sources],
            ordinals,
            self._tree.left_leaves,
            self._tree.left_samples,
            self._tree.sources,
            self._tree.samples,
            self._leaf_tokens,
            self._leaf_cycles,
            self._leaf_epochs,
            self._sample_tokens,
            self._firsts,
            *self._inverse_schedules,
            self._window,
            self._seed,
            self._start,
            ks,
        )
        return ks

    def round_up(self, n: int) -> int:
        """Return the first sample at or after n at which a cycle begins. After the last full cycle,
        return the stage's end."""
        full = self.num_samples - self.num_samples % self._cycle_samples
        rounded = -(-n // self._cycle_samples) * self._cycle_samples
        return rounded if rounded <= full else self.num_samples

    def find_tails(self, n: int) -> Tails:
        """Return the unread rest of each source's period after the first n samples, which must be
        whole cycles."""
        tree = self._tree
        size = len(self._tree.sources)
        periods = np.zeros((1, size, PERIOD_FIELDS), np.int64)
        edges = np.empty((3, size), np.int64)
        parts = np.zeros((1, size, int(self._leaf_cycles.max()), PART_FIELDS), np.int64)
        cut = n // self._cycle_samples
        find_tails(
            tree.left_leaves,
            tree.left_samples,
            tree.samples,
            self._leaf_tokens,
            self._leaf_cycles,
            self._leaf_epochs,
            self._sample_tokens,
            self._lanes,
            self._window,
            cut,
            periods,
            parts,
            edges,
        )
        by_source = np.zeros((3, self.num_sources), np.int64)
        by_source[:, tree.sources] = edges
        first, read, stop = by_source
        return Tails(
            first=first,
            read=read,
            stop=stop,
            ranks=self._ranks,
            lanes=self._lanes,
            cut=cut,
            periods=periods,
            parts=parts,
        )

    @cached_property
    def _ranks(self) -> Int64s:
        """The rank of each source in the tree, int64 [num_sources]; -1 if it has no samples."""
        ranks = np.full(self.num_sources, -1, np.int64)
        ranks[self._tree.sources] = np.arange(len(self._tree.sources))
        return ranks

    @cached_property
    def _totals(self) -> Int64s:
        """Number of samples of each source: int64 [num_sources]."""
        totals = np.zeros(self.num_sources, np.int64)
        totals[self._tree.sources] = self._tree.samples
        return totals

    @cached_property
    def _inverse_schedules(self) -> tuple[Int64s, Int64s]:
        """The inverses of the schedules: for each schedule, the lane with each residue, int64 [1 or
        2, K], and the inverse of the stride, int64 [1 or 2]."""
        owners = np.argsort(self._firsts % self._lanes, axis=1)
        return owners, np.array(
            [pow(schedule.stride, -1, schedule.slots) for schedule in self._schedules], np.int64
        )

    def _nth_in_cycle(self, rank: int, cycle: int, index: int) -> int:
        """Return the number, within a cycle, of the sample with this index among a leaf's."""
        schedule, shift = self._schedule_of(cycle)
        low = cycle * self._cycle_samples
        others_low, leaf_low = self._counts_of(rank, low)
        others_high, leaf_high = self._counts_of(rank, low + schedule.slots * self._lanes)
        # A leaf's positions in a cycle follow those of the leaves of lower rank
        first = others_high - others_low
        stop = first + leaf_high - leaf_low
        if stop - first <= LISTED:
            samples = schedule.samples(np.arange(first, stop), shift)
            return int(np.partition(samples, index)[index])

        def count(slots: int) -> int:
            below = count_below(schedule, shift, slots, np.array([first, stop]))
            return int(below[1] - below[0])

        slot = bisect_right(range(schedule.slots + 1), index, key=count) - 1
        positions = schedule.positions(slot, shift)
        lanes = np.flatnonzero((first <= positions) & (positions < stop))
        return slot * self._lanes + int(lanes[index - count(slot)])

    def _count_slots(self, cycle: int, slots: int) -> Int64s:
        """Return the number of samples that each leaf has in the first slots of a cycle: int64
        [num_leaves]."""
        schedule, shift = self._schedule_of(cycle)
        low = cycle * self._cycle_samples
        high = low + schedule.slots * self._lanes
        ends = np.cumsum(self._tree.counts(high) - self._tree.counts(low))
        return np.diff(count_below(schedule, shift, slots, ends), prepend=0)

    def _schedule_of(self, cycle: int) -> tuple[LaneSchedule, int]:
        """Return the schedule of a cycle, and its shift."""
        is_full = (cycle + 1) * self._cycle_samples <= self._dealt
        schedule = self._schedules[0 if is_full else -1]
        return schedule, int(cycle_shift(self._seed, self._start, cycle, schedule.slots))

    def _cycle_of(self, rank: int, count: int) -> int:
        """Return the cycle in which a leaf reaches `count` samples. Its samples in the stage's tail
        count as part of the short cycle."""
        tree = self._tree
        shape = tree.left_leaves, tree.left_samples, self.num_samples
        samples = int(tree.samples[rank])
        return int(call_least_multiple(*shape, samples, rank, count, self._cycle_samples)) - 1

    def _counts_of(self, rank: int, n: int) -> tuple[int, int]:
        """Count the first n samples: return the number of samples of leaves of lower ranks, and of
        the leaf with this rank."""
        return call_leaf_counts(
            self._tree.left_leaves, self._tree.left_samples, self.num_samples, n, rank
        )

    def _sources(self, start: int, stop: int) -> Int32s:
        """Return the sources of samples [start, stop): int32 [stop - start]."""
        # Sources do not depend on how many cycles share a run, and one cycle is fastest
        return self._locate(np.arange(start, stop), np.ones_like(self._leaf_cycles))[0]

    def _locate(self, ks: Int64s, leaf_cycles: Int64s) -> tuple[Int32s, Int64s]:
        """Locate samples as `locate_many` does, where `leaf_cycles` is the number of cycles that
        share each run of a leaf's ordinals."""
        sources = np.empty(ks.shape, np.int32)
        ordinals = np.empty(ks.shape, np.int64)
        locate(
            ks,
            self._tree.left_leaves,
            self._tree.left_samples,
            self._tree.sources,
            self._tree.samples,
            self._leaf_tokens,
            leaf_cycles,
            self._leaf_epochs,
            self._sample_tokens,
            self._firsts,
            self._strides,
            self._window,
            self._seed,
            self._start,
            sources,
            ordinals,
        )
        return sources, ordinals
