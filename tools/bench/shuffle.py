"""numpy.random.RandomState.shuffle, the same array and state afterwards.

Claim: at 100 million elements, on one thread, at least 5x numpy for 32-bit elements and 4x for int64.

    python tools/bench/shuffle.py [--sizes 1000000 100000000] [--rounds 3]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from exact_race import race, report

from megablend.megatron.exact.shuffle import Generator


def contenders(array: npt.NDArray[Any]) -> dict[str, Callable[[], Any]]:
    """Two ways to shuffle an array that goes from turn to turn: each has one of its own."""
    own = {"numpy": array.copy(), "megablend": array.copy()}
    state = np.random.RandomState(1)
    generator = Generator(1)

    def theirs() -> Any:
        state.shuffle(own["numpy"])
        return own["numpy"]

    def ours() -> Any:
        generator.shuffle(own["megablend"])
        return own["megablend"]

    return {"numpy": theirs, "megablend": ours}


def main() -> None:
    """Print a table for each size and type."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1_000_000, 10_000_000, 100_000_000]
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for size in options.sizes:
        for dtype in (np.int32, np.uint32, np.int64):
            found = race(contenders(np.arange(size, dtype=dtype)), options.rounds)
            report(f"{size:,} elements of {np.dtype(dtype)}", found, size, "element")


if __name__ == "__main__":
    main()
