"""How `memory`, what a process may hold for reading a split, is divided: the only table of it.

Batches and the order of the sources' blocks are counted first, as they are. Sources with extra columns take EXTRA_PART of
`memory` for these. What is left is divided by SHARES.
"""

from __future__ import annotations

EXTRA_PART = 16
"""One part in so many of `memory`: decoded pages of extra columns, kept for the other blocks that need them."""
SHARES = {"dictionaries": 1, "planning": 1, "window": 1, "reads": 2, "blocks": 11}
"""Parts of what is left; see `prefetch.memory_budget.Budget`."""
NUM_SHARES = sum(SHARES.values())


def get_extra_bytes(memory: int) -> int:
    """Bytes of `memory` for decoded pages of extra columns, where a source has some."""
    return memory // EXTRA_PART


def divide_rest(rest: int) -> dict[str, int]:
    """Bytes of each of SHARES; none is below 0."""
    return {name: max(0, rest) * part // NUM_SHARES for name, part in SHARES.items()}
