"""Whether gigatoken gives the tokens that `tokenizers` gives: tried once for each tokenizer and
pair of versions, on every code point and on strings made to break it, and watched in every part."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from megablend.text.engine import Engine, Tokens
from megablend.text.tokenizer import TokenizerFile

CODE_POINTS = (*range(0x32000), *range(0xE0000, 0xE0200))
"""All that are assigned, and those around them, but for private use; the tags of plane 14."""
CONTEXTS = ("{}", "a{}", "{}a", " {}{} ", "1{}\n{}b")
ADDED_CONTEXTS = ("{}", "a{}", "{}a", " {} ", "{}{}", "é{}\n")
NUM_STRINGS = 20_000
MIN_CHECKED = 16
"""Documents of a part that are tokenised by both."""
CHECKED_SHARE = 1000
"""One byte of so many is in them, at least."""
_BATCH = 4096
_SEED = 20
_FRAGMENTS = (
    *("a", "the", "The", "THE", "don't", "we'LL", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000"),
    *("1", "12345", "3.14", "...", "!?", "'s", "_", "é", "e\u0301", "\u0338", ">", "中文", "かな", "한글"),
    *("\u0915\u094d\u0937", "\u200d", "\ufeff", "🙂", "👩\u200d👩\u200d👧", "\ufe0f", "\u0000", "\ud7a3", "Ⅷ", "²"),
    *("ß", "İ", "\u017f", "ﬁ", "\u0378", "\U000e0041", "\u0627", "\u0651", "▁", "Ġ", "<0x0A>", "<s>", "\\", "def f(x):\n    "),
)  # fmt: skip


def list_probes(tokenizer: TokenizerFile) -> Iterator[str]:
    """The texts that are tried: each code point in 5 contexts, each added token in 6, and seeded
    strings of fragments that have different rules."""
    added = [each["content"] for each in json.loads(tokenizer.definition).get("added_tokens") or ()]
    for context in CONTEXTS:
        for code in CODE_POINTS:
            if not 0xD800 <= code < 0xE000:  # surrogates are no text
                yield context.replace("{}", chr(code))
    for context in ADDED_CONTEXTS:
        yield from (context.replace("{}", token) for token in added)
    chosen = random.Random(_SEED)
    fragments = (*_FRAGMENTS, *added[:50])
    for _ in range(NUM_STRINGS):
        words = [chosen.choice(fragments) for _ in range(chosen.randrange(1, 12))]
        yield "".join(
            word if chosen.random() < 0.9 else chr(chosen.randrange(0x20, 0x3000)) for word in words
        )


def find_difference(
    fast: Engine, reference: Engine, tokenizer: TokenizerFile, rank: int = 0, num_ranks: int = 1
) -> str | None:
    """The first probe of a rank's share whose tokens differ; None if none does."""
    probes = list_probes(tokenizer)
    number = 0
    while batch := list(islice(probes, _BATCH)):
        if number % num_ranks == rank:
            at = first_difference(fast.encode(batch), reference.encode(batch))
            if at is not None:
                return batch[at]
        number += 1
    return None


def first_difference(found: Tokens, expected: Tokens) -> int | None:
    """The number of the first text whose tokens differ; None if all are equal."""
    if np.array_equal(found.counts, expected.counts):
        wrong = np.flatnonzero(found.ids != expected.ids)
        if not len(wrong):
            return None
        return int(np.searchsorted(np.cumsum(expected.counts), wrong[0], side="right"))
    at = int(np.flatnonzero(found.counts != expected.counts)[0])
    before = int(expected.counts[:at].sum())  # the same in both
    wrong = np.flatnonzero(found.ids[:before] != expected.ids[:before])
    if not len(wrong):
        return at
    return int(np.searchsorted(np.cumsum(expected.counts), wrong[0], side="right"))


def choose_checked(texts: Sequence[str], seed: int, num: int) -> list[int]:
    """The texts of a batch that are tokenised by both, as the seed says: at least `num`, the first
    among them, and a thousandth of the characters; sorted."""
    order = list(range(1, len(texts)))
    random.Random(seed).shuffle(order)
    if num:
        order.insert(0, 0)
    needed = sum(map(len, texts)) // CHECKED_SHARE
    chosen = list[int]()
    length = 0
    for i in order:
        if len(chosen) >= num and length >= needed:
            break
        chosen.append(i)
        length += len(texts[i])
    return sorted(chosen)
