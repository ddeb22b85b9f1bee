"""Megatron's sample index: where each sample begins in the shuffled documents.

Claim: at least 2x the helper of the installed megatron-core in one thread. Where documents are shorter than samples, both mostly
wait for one cache line, a document's length, so the ratio is that of the caches; a few documents read again and again lie in a
core's own ones.

    python tools/bench/sample_index.py [--scale 0.1] [--rounds 5]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from exact_race import race, report

from megablend.megatron.exact.epochs import num_samples
from megablend.megatron.exact.samples import sample_rows

LENGTH = 2048
CASES = {
    "60 tokens": (60, 10_000_000, 1),
    "200 tokens": (200, 10_000_000, 1),
    "500 tokens": (500, 10_000_000, 1),
    "40,000 tokens": (40_000, 500_000, 1),
    "60 tokens, again and again": (60, 10_000, 300),
    "500 tokens, again and again": (500, 10_000, 300),
}
"""Tokens on average; documents; epochs."""


def contenders(mean: int, size: int, epochs: int) -> dict[str, Callable[[], Any]]:
    """Two ways to the sample index of documents of `mean` tokens on average."""
    from megatron.core.datasets import helpers_cpp

    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 2 * mean, size, dtype=np.int32)
    documents = rng.permutation(np.tile(np.arange(size, dtype=np.int32), epochs))
    tokens = int(lengths.sum(dtype=np.int64))
    samples = num_samples(tokens, epochs, LENGTH, 1, keep_tail=False)

    def ours() -> Any:
        """As a build does it: the parts are written one after the other."""
        parts = sample_rows(lengths, documents, LENGTH, samples, dtype=np.int32, extra=1)
        return np.concatenate(list(parts))

    return {
        "Megatron": lambda: helpers_cpp.build_sample_idx_int32(
            lengths, documents, LENGTH, epochs, tokens, True, 1
        ),
        "megablend": ours,
    }


def main() -> None:
    """Print a table for each length of documents."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of documents")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for name, (mean, full, epochs) in CASES.items():
        size = max(2, int(full * options.scale))
        found = race(contenders(mean, size, epochs), options.rounds)
        report(f"{size:,} documents of {name}", found, size * epochs, "document")


if __name__ == "__main__":
    main()
