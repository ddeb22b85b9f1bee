"""Orders in which training may see a corpus: each gives, for every sample, the places of its tokens.

A sample is S tokens and the one after them, so an order is int64 [num_samples, S + 1] and every one has (T - 1) // S samples of
a corpus of T tokens. What holds a part of the corpus in memory holds `buffer` samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the orders are given."""

    num_tokens: int
    sequence_length: int
    page_tokens: int
    buffer: int
    """Samples held in memory."""
    batch: int
    """Samples of a training step."""

    @property
    def num_samples(self) -> int:
        """Samples of one pass."""
        return (self.num_tokens - 1) // self.sequence_length


def sequential(setting: Setting, rng: np.random.Generator) -> Int64s:
    """As the files have it."""
    return cut(
        np.arange(setting.num_tokens), np.arange(setting.num_samples), setting.sequence_length
    )


def window(setting: Setting, rng: np.random.Generator) -> Int64s:
    """A shuffle buffer over the sequential order: one goes out at random, the next takes its place."""
    held = list(range(min(setting.buffer, setting.num_samples)))
    order = []
    for coming in range(len(held), setting.num_samples):
        place = rng.integers(len(held))
        order.append(held[place])
        held[place] = coming
    order += rng.permutation(held).tolist()
    return cut(np.arange(setting.num_tokens), np.array(order), setting.sequence_length)


def refilled(setting: Setting, rng: np.random.Generator) -> Int64s:
    """Pages in random order through a buffer that takes the next page as soon as it has room, and is shuffled each time.

    Source: Youmu (MLSys 2025), algorithm 2. Samples are cut from the pages as they come, so some lie across two.
    """
    num_pages = -(-setting.num_tokens // setting.page_tokens)
    pages = [page_places(page, setting) for page in rng.permutation(num_pages).tolist()]
    whole = (
        np.cumsum([len(page) for page in pages]) - 1
    ) // setting.sequence_length  # samples that so many pages make
    room = setting.page_tokens // setting.sequence_length
    held: list[int] = []
    order: list[int] = []
    come = taken = 0
    while len(order) < setting.num_samples:
        while taken < num_pages and (not held or len(held) + room <= setting.buffer):
            held += range(come, int(whole[taken]))
            come = int(whole[taken])
            taken = taken + 1
            rng.shuffle(held)
        order += held[: setting.batch]
        del held[: setting.batch]
    return cut(np.concatenate(pages), np.array(order), setting.sequence_length)


def full(setting: Setting, rng: np.random.Generator) -> Int64s:
    """All samples in random order."""
    return cut(
        np.arange(setting.num_tokens), rng.permutation(setting.num_samples), setting.sequence_length
    )


STRATEGIES: dict[str, Callable[[Setting, np.random.Generator], Int64s]] = {
    "sequential": sequential,
    "window": window,
    "refilled page buffer": refilled,
    "full": full,
}


def page_places(page: int, setting: Setting) -> Int64s:
    """The places of a page's tokens."""
    return np.arange(
        page * setting.page_tokens, min((page + 1) * setting.page_tokens, setting.num_tokens)
    )


def cut(places: Int64s, order: Int64s, length: int) -> Int64s:
    """Samples `order` int64 [n] of the tokens at `places`, in stretches of `length` and one more: int64 [n, length + 1]."""
    found: Int64s = places[order[:, None] * length + np.arange(length + 1)]
    return found
