"""A plan walked sample by sample with Python's integers, lists and fractions. It shares no code with the package.

What must never change is written down a second time here: the tree, the pattern of a cycle, keyed numbers and permutations, and
which ordinals a lane takes.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import count
from math import floor, gcd, isqrt
from typing import NamedTuple, TypedDict


class Node(NamedTuple):
    samples: int
    sources: list[int]
    """In leaf order."""
    children: tuple[Node, Node] | None
    """Heavier, lighter."""


def huffman(totals: Sequence[int]) -> Node:
    """By a heap; among equals leaves come before nodes, then whatever is older."""
    order = sorted((total, source) for source, total in enumerate(totals) if total > 0)
    heap = [
        (total, 0, age, Node(total, [source], None)) for age, (total, source) in enumerate(order)
    ]
    age = 0
    while len(heap) > 1:
        light = heapq.heappop(heap)[3]
        heavy = heapq.heappop(heap)[3]
        node = Node(light.samples + heavy.samples, heavy.sources + light.sources, (heavy, light))
        heapq.heappush(heap, (node.samples, 1, age, node))
        age += 1
    return heap[0][3]


def prefix(node: Node, n: int) -> dict[int, int]:
    """How many of the first n samples each source has."""
    counts = {}
    todo = [(node, n)]
    while todo:
        node, seen = todo.pop()
        if node.children is None:
            counts[node.sources[0]] = seen
        else:
            heavy, light = node.children
            handed = floor(Fraction(seen * heavy.samples, node.samples) + Fraction(1, 2))
            todo += [(heavy, handed), (light, seen - handed)]
    return counts


def fold(key: int, *values: int) -> int:
    """SplitMix64's finalizer, twice for each value; 63 bits are kept."""
    for value in values:
        mixed = key + 0x9E3779B97F4A7C15
        for number in (0, value):
            mixed = (mixed ^ number) % 2**64
            mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
            mixed ^= mixed >> 31
        key = mixed >> 1
    return key


def permutation(n: int, key: int) -> list[int]:
    """Fisher-Yates up to 15 entries, eight rounds of a Feistel network on a rectangle above."""
    if n <= 15:
        entries = list(range(n))
        for last in range(n - 1, 0, -1):
            other = fold(key, last) % (last + 1)
            entries[last], entries[other] = entries[other], entries[last]
        return entries
    height = isqrt(n - 1) + 1
    width = -(-n // height)

    def walk(entry: int) -> int:
        left, right = divmod(entry, width)
        for turn in range(8):
            if turn % 2:
                right = (right + fold(key ^ turn, left)) % width
            else:
                left = (left + fold(key ^ turn, right)) % height
        return left * width + right

    entries = []
    for entry in range(n):
        entry = walk(entry)
        while entry >= n:
            entry = walk(entry)
        entries.append(entry)
    return entries


def quotients(numerator: int, denominator: int) -> list[int]:
    """The partial quotients of a fraction's part below 1."""
    numerator %= denominator
    return [denominator // numerator, *quotients(denominator, numerator)] if numerator else []


def stride_of(slots: int, lanes: int) -> int:
    """Near the golden ratio of the slots, coprime with them, of the least sum of partial quotients."""
    centre = slots * 987 // 1597
    reach = min(256, max(32, slots // lanes + 1))
    near = [
        g
        for g in range(max(1, centre - reach), min(slots, centre + reach) + 1)
        if gcd(g, slots) == 1
    ]
    return min(
        near, key=lambda g: sum(quotients(g, slots)) + sum(quotients(g * lanes, slots)), default=1
    )


def spread(size: int) -> list[int]:
    """Reversed binary digits; the odd part of the size by the rank of its own."""

    def mirror(number: int, width: int) -> int:
        return int(f"{number:0{width}b}"[::-1], 2) if width else 0

    twos = (size & -size).bit_length() - 1
    odd = size >> twos
    mirrored = sorted(mirror(low, (odd - 1).bit_length()) for low in range(odd))
    return [
        mirror(high, twos) + (mirrored.index(mirror(low, (odd - 1).bit_length())) << twos)
        for high in range(1 << twos)
        for low in range(odd)
    ]


def first_positions(lanes: int, slots: int) -> list[int]:
    """Where each lane begins in a cycle: a window of `slots` positions each, and a place in it."""
    common = gcd(lanes, slots)
    order = spread(common)
    return [window * slots + order.index(window * common // lanes) for window in spread(lanes)]


class Plan(TypedDict):
    """What a plan is made of; as tests.run.plans has it."""

    totals: list[list[int]]
    lanes: int
    slots: int
    spans: list[int]
    seed: int
    epoch_tokens: list[int] | None
    sample_tokens: int


Sample = tuple[int, int]
"""(source, ordinal)"""


def walk(
    totals: Sequence[Sequence[int]],
    *,
    lanes: int,
    slots: int,
    spans: Sequence[int],
    seed: int,
    epoch_tokens: Sequence[int] | None = None,
    sample_tokens: int = 1,
) -> list[Sample]:
    """All samples of all stages."""
    samples = list[Sample]()
    given = [0] * len(spans)
    for stage in totals:
        periods = [
            Periods(
                span, given[source], epoch_tokens[source] if epoch_tokens else None, sample_tokens
            )
            for source, span in enumerate(spans)
        ]
        samples += _walk_stage(stage, lanes, slots, seed, len(samples), periods)
        given = [had + more for had, more in zip(given, stage, strict=True)]
    return samples


class Periods:
    """Deals a source's ordinals, period by period, to the lanes. A cycle's part of a lane is a list of samples by position."""

    def __init__(
        self,
        span: int,
        ordinal: int,
        epoch_tokens: int | None,
        sample_tokens: int,
        first_token: int | None = None,
    ) -> None:
        self.span = span
        self.ordinal = ordinal
        self.promised = ordinal
        self.ahead = 0 if first_token is None else first_token - ordinal * sample_tokens
        self.epoch_tokens = epoch_tokens
        self.sample_tokens = sample_tokens
        self.epoch = self._epoch_of(ordinal)
        self.waiting: list[dict[int, tuple[list[int], int]]] = []
        """Cycles of the period: residue -> (samples, key)."""
        self.dealt: list[tuple[int, int]] = []
        """(sample, ordinal)"""

    def add_cycle(self, parts: dict[int, tuple[list[int], int]], *, cut: bool) -> None:
        """The next cycle of the stage. Its first samples, lane by lane, are of the epoch that lasts; others of the next ones."""
        if cut:
            self.close()
        by_epoch: dict[int, dict[int, tuple[list[int], int]]] = {}
        for residue in sorted(parts):
            samples, key = parts[residue]
            for sample in samples:
                of_epoch = by_epoch.setdefault(self._epoch_of(self.promised), {})
                of_epoch.setdefault(residue, ([], key))[0].append(sample)
                self.promised += 1
        for epoch, lanes in sorted(by_epoch.items()) or [(self.epoch, {})]:
            if epoch != self.epoch:
                self.close()
                self.epoch = epoch
            if len(by_epoch) > 1:
                lanes = {
                    residue: (samples, fold(key, epoch))
                    for residue, (samples, key) in lanes.items()
                }
            self.waiting.append(lanes)
            if len(self.waiting) == self.span or cut:
                self.close()

    def close(self) -> None:
        """Deal what waits."""
        for residue in sorted({residue for cycle in self.waiting for residue in cycle}):
            for cycle in self.waiting:
                samples, key = cycle.get(residue, ([], 0))
                ranks = permutation(len(samples), key)
                self.dealt += [
                    (sample, self.ordinal + rank)
                    for sample, rank in zip(samples, ranks, strict=True)
                ]
                self.ordinal += len(samples)
        self.waiting = []

    def _epoch_of(self, ordinal: int) -> int:
        return (
            (self.ahead + ordinal * self.sample_tokens) // self.epoch_tokens
            if self.epoch_tokens
            else 0
        )


def _walk_stage(
    totals: Sequence[int], lanes: int, slots: int, seed: int, start: int, periods: Sequence[Periods]
) -> list[Sample]:
    tree = huffman(totals)
    total = sum(totals)
    dealt = total // lanes * lanes
    patterns: dict[int, tuple[list[int], int]] = {}
    for cycle, low in enumerate(range(0, dealt, lanes * slots)):
        turns = min(slots, (dealt - low) // lanes)
        if turns not in patterns:
            patterns[turns] = first_positions(lanes, turns), stride_of(turns, lanes)
        firsts, stride = patterns[turns]
        key = fold(seed, start, cycle)
        before = prefix(tree, low)
        after = prefix(tree, low + lanes * turns)
        layout = [source for source in tree.sources for _ in range(after[source] - before[source])]
        where = dict[int, tuple[int, int]]()  # position -> sample of the stage, lane
        for slot in range(turns):
            for lane in range(lanes):
                turn = (stride * slot + fold(key, 0)) % turns
                where[(firsts[lane] + lanes * turn) % len(layout)] = low + slot * lanes + lane, lane
        found: dict[int, dict[int, tuple[list[int], int]]] = defaultdict(dict)
        for position, source in enumerate(layout):
            sample, lane = where[position]
            found[source].setdefault(position % lanes, ([], fold(key, source, lane)))[0].append(
                sample
            )
        for source in tree.sources:
            periods[source].add_cycle(found[source], cut=turns < slots)
    samples = dict[int, Sample]()
    for source in tree.sources:
        periods[source].close()
        samples |= {sample: (source, ordinal) for sample, ordinal in periods[source].dealt}
    for j in range(dealt, total):
        now = prefix(tree, j)
        after = prefix(tree, j + 1)
        source = next(source for source in now if after[source] > now[source])
        samples[j] = source, periods[source].ordinal
        periods[source].ordinal += 1
    return [samples[j] for j in range(total)]


class EpochEnd(NamedTuple):
    """What was read of a source when an epoch's worth of samples was read of it."""

    source: int
    early: int
    """Samples of later epochs among them; as many of this epoch or earlier ones were not yet read."""
    cycle_samples: int
    """Samples that the source has in the cycle in which the last of them comes."""
    is_full: bool
    """Whether that cycle is a full one, not the shorter last one of a stage."""
    epoch_samples: float

    @property
    def measured(self) -> int:
        """The most samples of later epochs that were found in 9 million ends of epochs in random plans; half is proved."""
        more = 2 if self.epoch_samples >= self.cycle_samples else 3 if self.is_full else 8
        return -(-self.cycle_samples // 4) + more


def epoch_ends(plan: Plan, samples: Sequence[Sample]) -> Iterator[EpochEnd]:
    """All ends of epochs within the run, source by source."""
    assert plan["epoch_tokens"] is not None
    cycle_of = list[tuple[int, int]]()
    for number, stage in enumerate(plan["totals"]):
        cycle_of += [(number, j // (plan["lanes"] * plan["slots"])) for j in range(sum(stage))]
    for source, tokens in enumerate(plan["epoch_tokens"]):
        of_source = [k for k, (which, _) in enumerate(samples) if which == source]
        for epoch in count(1):
            worth = -(-epoch * tokens // plan["sample_tokens"])
            if worth > len(of_source):
                break
            early = sum(samples[k][1] >= worth for k in of_source[:worth])
            here = cycle_of[of_source[worth - 1]]
            is_full = (here[1] + 1) * plan["lanes"] * plan["slots"] <= sum(plan["totals"][here[0]])
            of_cycle = sum(cycle_of[k] == here for k in of_source)
            yield EpochEnd(source, early, of_cycle, is_full, tokens / plan["sample_tokens"])


def draw_plan(rng: random.Random, *, most_samples: int) -> Plan:
    """A random plan: few or many sources, stages, lanes; epochs from parts of a sample to longer than the run."""
    num_sources = rng.choice([1, 2, 3, 7, 20])
    num_stages = rng.choice([1, 1, 2, 3])
    lanes = rng.choice([1, 2, 3, 4, 6, 8, 12, 32, 64])
    slots = rng.choice([1, 2, 5, 8, 16, 20, 64])
    weights = [rng.random() ** 3 + 0.001 for _ in range(num_sources)]
    totals = list[list[int]]()
    for _ in range(num_stages):
        samples = rng.randrange(1, min(most_samples, 12 * lanes * slots) // num_stages + 2)
        totals.append([floor(samples * weight / sum(weights) + rng.random()) for weight in weights])
        totals[-1][rng.randrange(num_sources)] += not sum(totals[-1])
    sample_tokens = rng.choice([1, 7, 64, 2048])
    tokens = [
        sum(stage[source] for stage in totals) * sample_tokens for source in range(num_sources)
    ]
    return {
        "totals": totals,
        "lanes": lanes,
        "slots": slots,
        "spans": [rng.choice([1, 2, 3, 5, 32]) for _ in range(num_sources)],
        "seed": rng.randrange(2**63),
        "epoch_tokens": [
            max(1, floor(n * rng.choice([0.03, 0.2, 0.5, 1, 2]) * rng.random())) for n in tokens
        ],
        "sample_tokens": sample_tokens,
    }
