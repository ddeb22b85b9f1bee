"""verify: is a cache what was built, and is the data what was indexed?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megablend.errors import CacheError
from megablend.index.cache import list_generations
from megablend.index.verify import verify as verify_index
from megablend.plan.ledger import load_ledger, run_names
from megablend.system.failures import translating


@translating("verify")
def verify(cache: str | Path, *, data: bool = False) -> list[str]:
    """Check all of a cache: the index's fragments and generations, and the runs' ledgers.

    Args:
        data: read every block of every data file too, and compare counts and checksums.

    Returns: a line a problem, naming file and place; none where all is sound.
    Raises: CacheError where there is no cache.
    """
    return [*verify_index(str(cache), data=data), *_run_problems(str(cache))]


def _run_problems(cache: str) -> Iterator[str]:
    indices = list_generations(cache)
    for name in run_names(cache):
        try:
            ledger = load_ledger(cache, name)
        except CacheError as error:
            yield str(error)
            continue
        if ledger is not None and ledger.index not in indices:
            yield f"{cache}: run {name!r} stands on index {ledger.index}, which is not there: build it from the same data"
