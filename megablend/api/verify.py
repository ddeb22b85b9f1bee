"""verify: is a cache what was built, and is the data what was indexed?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megablend.api.runs import ConfigLike, resolve_cache
from megablend.errors import CacheError
from megablend.index.build import Progress
from megablend.index.list_snapshots import list_snapshots
from megablend.index.verify import verify as verify_index
from megablend.plan.ledger_file import load_ledger, run_names
from megablend.storage.by_scheme import make_storage
from megablend.system.failures import translating


@translating("verify")
def verify(cache: ConfigLike, *, data: bool = False, progress: Callable[[Progress], None] | None = None) -> list[str]:
    """Check all of a cache: the index's fragments and generations, and the runs' ledgers.

    Args:
        cache: its folder, or a config that names it.
        progress: with `data`, called as files are read.
        data: read every block of every data file too, and compare counts and checksums.

    Returns: a line a problem, naming file and place; none where all is sound.
    Raises: CacheError where there is no cache.
    """
    folder = resolve_cache(cache)
    return [*verify_index(folder, data=data, storage=make_storage(), progress=progress), *_run_problems(folder)]


def _run_problems(cache: str) -> Iterator[str]:
    indices = list_snapshots(cache)
    for name in run_names(cache):
        try:
            ledger = load_ledger(cache, name)
        except CacheError as error:
            yield str(error)
            continue
        if ledger is not None and ledger.index not in indices:
            yield f"{cache}: run {name!r} stands on index {ledger.index}, which is not there: build it from the same data"
