"""Slow twins of the exact kernels: one element at a time, exact rationals, Python's own Mersenne Twister."""

from __future__ import annotations

import random
from collections.abc import Sequence


class Generator:
    """A RandomState's words, out of the standard library's generator."""

    def __init__(self, key: Sequence[int], position: int) -> None:
        self._source = random.Random()
        self._source.setstate((3, (*key, position), None))

    def shuffle(self, entries: list[int]) -> None:
        for last in range(len(entries) - 1, 0, -1):
            other = last + 1
            while other > last:
                other = self._source.getrandbits(32) % (1 << last.bit_length())
            entries[last], entries[other] = entries[other], entries[last]

    def state(self) -> tuple[list[int], int]:
        *key, position = self._source.getstate()[1]
        return key, position


def sample_index(
    lengths: Sequence[int], documents: Sequence[int], length: int, samples: int, extra: int
) -> list[tuple[int, int]]:
    """The tokens laid out one by one: a sample begins behind `length` tokens more than the one before."""
    places = [
        (place, offset)
        for place, document in enumerate(documents)
        for offset in range(lengths[document])
    ]
    rows = [(0, 0)]
    for begin in range(length, samples * length + 1, length):
        if begin + extra > len(places):
            rows.append((len(documents) - 1, lengths[documents[-1]] - extra))
        else:
            place, offset = places[begin + extra - 1]  # the last token that the sample before reads
            rows.append((place, offset + 1 - extra))
    return rows


def blend(weights: Sequence[float], caps: Sequence[float], size: int) -> list[tuple[int, int]]:
    """(dataset, sample) of each step, by Python's floats."""
    counts = [0] * len(weights)
    drawn = []
    for step in range(size):
        errors = {
            dataset: weight * float(max(step, 1)) - float(count)
            for dataset, (weight, count, cap) in enumerate(zip(weights, counts, caps, strict=True))
            if count < cap
        }
        winner = max(errors, key=lambda dataset: (errors[dataset], -dataset))
        drawn.append((winner, counts[winner]))
        counts[winner] += 1
    return drawn
