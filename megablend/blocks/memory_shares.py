"""How `memory`, the limit per process for reading a split, is divided; defined only here.

Batches and the order of the sources' blocks are counted first, at their actual size. Sources with extra columns take
1 / EXTRA_PART of `memory` for these. The rest is divided by SHARES.
"""

from __future__ import annotations

EXTRA_PART = 16
"""1 / EXTRA_PART of `memory` is for decoded pages of extra columns, cached for other blocks that need them."""
SHARES = {"dictionaries": 1, "planning": 1, "window": 1, "reads": 2, "blocks": 11}
"""Parts of the rest; see `prefetch.memory_budget.Budget`."""
NUM_SHARES = sum(SHARES.values())


def get_extra_bytes(memory: int) -> int:
    """Bytes of `memory` for decoded pages of extra columns, if a source has any."""
    return memory // EXTRA_PART


def divide_rest(rest: int) -> dict[str, int]:
    """Bytes of each of SHARES; none is below 0."""
    return {name: max(0, rest) * part // NUM_SHARES for name, part in SHARES.items()}
