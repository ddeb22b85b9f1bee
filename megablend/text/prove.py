"""Whether gigatoken gives the tokens that `tokenizers` gives: tried once for each tokenizer and
pair of versions, on every code point and on strings made to break it, and watched in every part."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from megablend.distributed.base import Communicator
from megablend.system.log import LOG
from megablend.text.engine import Engine, GigatokenEngine, Tokens, find_version, without_threads
from megablend.text.token_folder import TokenFolder
from megablend.text.tokenizer import TokenizerFile

MIN_PROVED_BYTES = 32 << 20
"""Less text is tokenised by `tokenizers` in the time that proving gigatoken takes."""
CODE_POINTS = (*range(0x32000), *range(0xE0000, 0xE0200))
"""All that are assigned, and those around them, but for private use; the tags of plane 14."""
CONTEXTS = ("{}", "a{}", "{}a", " {}{} ", "1{}\n{}b")
ADDED_CONTEXTS = ("{}", "a{}", "{}a", " {} ", "{}{}", "é{}\n")
NUM_STRINGS = 20_000
MIN_CHECKED = 16
"""Documents of a part that are tokenised by both."""
CHECKED_SHARE = 1000
"""One byte of so many is in them, at least."""
_SLOWER = "tokenising takes about 30 times as long"
"""See docs/text.md."""
_PROOF = 2
"""Version of what is tried, and of `GigatokenEngine`."""
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
    if np.array_equal(found.counts, expected.counts) and np.array_equal(found.ids, expected.ids):
        return None
    texts = range(len(expected.counts))
    pairs = zip(found.of(texts), expected.of(texts), strict=True)
    return next(i for i, (one, other) in enumerate(pairs) if not np.array_equal(one, other))


def choose_checked(texts: Sequence[str], seed: int, num: int) -> list[int]:
    """The texts of a batch that are tokenised by both, as the seed says: at least `num`, the first
    among them, and a thousandth of the characters; sorted."""
    drawn = random.Random(seed)
    needed = sum(map(len, texts)) // CHECKED_SHARE
    chosen = {0} if num else set[int]()
    length = len(texts[0]) if num else 0
    while len(chosen) < min(num, len(texts)) or length < needed:
        i = drawn.randrange(len(texts))
        if i not in chosen:
            chosen.add(i)
            length += len(texts[i])
    return sorted(chosen)


def choose_engine(
    tokenizer: TokenizerFile, folder: TokenFolder, num_bytes: int, launch: Communicator
) -> tuple[str, str]:
    """The engine for all of a config's text, and what users should know of it. It depends on the
    text and what is installed, not on what is done already. Called by all ranks.

    Args:
        folder: in which the outcome of a proof is kept.
        num_bytes: of the text.
    """
    version = find_version("gigatoken")
    if num_bytes < MIN_PROVED_BYTES:
        return "tokenizers", ""
    if not tokenizer.is_listed:
        reason = f"{tokenizer.path}: gigatoken is not known to read this kind of tokenizer"
        return "tokenizers", f"{reason}: {_SLOWER}"
    if not version:
        reason = "gigatoken is not installed"
        return "tokenizers", f"{reason}: {_SLOWER} (pip install 'megablend[text]')"
    reference = find_version("tokenizers")
    name = f"{tokenizer.digest}/.proof{_PROOF}-{version}-{reference}.json"
    outcome: Any = None
    if launch.rank == 0 and (data := folder.read(name)) is not None:
        with contextlib.suppress(ValueError):
            outcome = json.loads(data)
    outcome = launch.bcast(outcome)
    if not isinstance(outcome, dict) or "difference" not in outcome:
        shares = launch.allgather(_prove(tokenizer, launch))
        outcome = {"difference": next((each for each in shares if each is not None), None)}
        if launch.rank == 0:
            folder.replace(name, json.dumps(outcome).encode())
    difference = outcome["difference"]
    if difference is None:
        return "gigatoken", ""
    reason = f"gigatoken {version} gives other tokens than tokenizers {reference}"
    return "tokenizers", f"{tokenizer.path}: {reason} (for {difference[:80]!r}): {_SLOWER}"


def _prove(tokenizer: TokenizerFile, launch: Communicator) -> str | None:
    """What is wrong with gigatoken in this rank's share of the probes; None if nothing is."""
    if launch.rank == 0:
        LOG.info("%s: proving that gigatoken gives the same tokens, once", tokenizer.path)
    try:
        fast = GigatokenEngine(tokenizer)
    except Exception as error:  # of the library: whatever it is, it refuses the tokenizer
        return f"it refuses it: {error}"
    with without_threads():
        return find_difference(fast, Engine(tokenizer), tokenizer, launch.rank, launch.size)
