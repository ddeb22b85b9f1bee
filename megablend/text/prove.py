"""Proofs that gigatoken gives the same tokens as `tokenizers`. Once for each tokenizer and each
pair of package versions, both tokenise every code point and many mixed strings (`choose_engine`).
In addition, both tokenise some documents of every part (`choose_checked`)."""

from __future__ import annotations

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
"""The minimum size of the text for which gigatoken is used. With less text, `tokenizers` would
finish before the proof does."""
CODE_POINTS = (*range(0x32000), *range(0xE0000, 0xE0200))
"""The code points of all planes that have assigned code points, except the planes for private use.
Of plane 14, only the first 512 are included."""
CONTEXTS = ("{}", "a{}", "{}a", " {}{} ", "1{}\n{}b")
ADDED_CONTEXTS = ("{}", "a{}", "{}a", " {} ", "{}{}", "é{}\n")
NUM_STRINGS = 20_000
MIN_CHECKED = 16
"""The minimum number of documents of each part that both packages tokenise."""
CHECKED_SHARE = 1000
"""The inverse of the minimum share of characters that both packages tokenise."""
_SLOWER = "tokenizers is used instead, which takes about 30 times as long"  # see docs/text.md
_PROOF = 2
"""The version of `list_probes` and `GigatokenEngine`. Proofs of other versions are ignored."""
_BATCH = 4096
_SEED = 20
_FRAGMENTS = (
    *("a", "the", "The", "THE", "don't", "we'LL", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000"),
    *("1", "12345", "3.14", "...", "!?", "'s", "_", "é", "e\u0301", "\u0338", ">", "中文", "かな", "한글"),
    *("\u0915\u094d\u0937", "\u200d", "\ufeff", "🙂", "👩\u200d👩\u200d👧", "\ufe0f", "\u0000", "\ud7a3", "Ⅷ", "²"),
    *("ß", "İ", "\u017f", "ﬁ", "\u0378", "\U000e0041", "\u0627", "\u0651", "▁", "Ġ", "<0x0A>", "<s>", "\\", "def f(x):\n    "),
)  # fmt: skip


def list_probes(tokenizer: TokenizerFile) -> Iterator[str]:
    """Yield the texts of the proof: each code point in 5 contexts, each added token in 6 contexts,
    and random strings. The strings consist of fragments that tokenizers split by different rules,
    and are the same in each call."""
    added = [
        token["content"] for token in json.loads(tokenizer.definition).get("added_tokens") or ()
    ]
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
    """Return the first probe in this rank's share for which two engines give different tokens; None
    if there is no difference."""
    probes = list_probes(tokenizer)
    batches = iter(lambda: list(islice(probes, _BATCH)), [])
    for batch in islice(batches, rank, None, num_ranks):
        at = first_difference(fast.encode(batch), reference.encode(batch))
        if at is not None:
            return batch[at]
    return None


def first_difference(found: Tokens, expected: Tokens) -> int | None:
    """Return the number of the first text whose tokens differ; None if all are equal.

    Args:
        found, expected: the tokens of the same texts from two engines.
    """
    if np.array_equal(found.counts, expected.counts) and np.array_equal(found.ids, expected.ids):
        return None
    texts = range(len(expected.counts))
    pairs = zip(found.of(texts), expected.of(texts), strict=True)
    return next(i for i, (ids, other) in enumerate(pairs) if not np.array_equal(ids, other))


def choose_checked(texts: Sequence[str], seed: int, num: int) -> list[int]:
    """Choose the texts of a portion that both packages tokenise: at least `num` texts, including
    the first one, and at least a thousandth of the characters.

    Returns: the numbers of the texts, ascending. They are the same for the same seed.
    """
    generator = random.Random(seed)
    min_length = sum(map(len, texts)) // CHECKED_SHARE
    chosen = {0} if num else set[int]()
    length = len(texts[0]) if num else 0
    while len(chosen) < min(num, len(texts)) or length < min_length:
        i = generator.randrange(len(texts))
        if i not in chosen:
            chosen.add(i)
            length += len(texts[i])
    return sorted(chosen)


def choose_engine(
    tokenizer: TokenizerFile, folder: TokenFolder, num_bytes: int, launch: Communicator
) -> tuple[str, str]:
    """Choose the engine for all of a config's text. The choice depends on the text and the
    installed packages, not on which parts are tokenised already. Called by all ranks.

    Args:
        folder: the folder in which the outcome of a proof is stored.
        num_bytes: the size of the text.

    Returns: the name of the engine, and a note for users that explains why it is not gigatoken; ""
        if no note is needed.
    """
    obstacle = find_obstacle(tokenizer, num_bytes)
    if obstacle is not None:
        return "tokenizers", obstacle
    version = find_version("gigatoken")
    reference = find_version("tokenizers")
    name = f"{tokenizer.digest}/.proof{_PROOF}-{version}-{reference}.json"
    proof = launch.bcast(_read_proof(folder, name) if launch.rank == 0 else None)
    if proof is None:
        differences = [answer for answer in launch.allgather(_prove(tokenizer, launch)) if answer]
        proof = {"difference": differences[0] if differences else None}
        if launch.rank == 0:
            folder.replace(name, json.dumps(proof).encode())
    difference = proof["difference"]
    if difference is None:
        return "gigatoken", ""
    reason = f"gigatoken {version} does not give the same tokens as tokenizers {reference}"
    return "tokenizers", f"{tokenizer.path}: {reason} ({difference[:80]!r}); {_SLOWER}"


def find_obstacle(tokenizer: TokenizerFile, num_bytes: int) -> str | None:
    """Return the reason why gigatoken cannot be used for a tokenizer. It is "" if there is so
    little text that the proof would take too long, and None if the proof may begin."""
    if num_bytes < MIN_PROVED_BYTES:
        return ""
    if not tokenizer.is_listed:
        reason = f"{tokenizer.path}: gigatoken is not known to support this kind of tokenizer"
        return f"{reason}; {_SLOWER}"
    if not find_version("gigatoken"):
        return f"gigatoken is not installed; {_SLOWER}; run `pip install 'megablend[text]'` to install it"
    return None


def _read_proof(folder: TokenFolder, name: str) -> dict[str, Any] | None:
    """Return the stored result of a proof; None if it does not exist, or is damaged."""
    try:
        proof = json.loads(folder.read(name) or b"")
    except ValueError:
        return None
    return proof if isinstance(proof, dict) and "difference" in proof else None


def _prove(tokenizer: TokenizerFile, launch: Communicator) -> str | None:
    """Prove that gigatoken gives the same tokens for this rank's share of the probes.

    Returns: a text for which it gives other tokens, or its reason for refusing the tokenizer; None
        if the proof succeeds.
    """
    if launch.rank == 0:
        LOG.info("%s: checking that gigatoken gives the same tokens", tokenizer.path)
    try:
        fast = GigatokenEngine(tokenizer)
    except Exception as error:  # raised by the library: whatever it is, it refuses the tokenizer
        return f"gigatoken refuses the tokenizer: {error}"
    with without_threads():
        return find_difference(fast, Engine(tokenizer), tokenizer, launch.rank, launch.size)
