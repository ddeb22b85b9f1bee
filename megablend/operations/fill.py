"""node fill: fetch the files of a run to the disks of the nodes before the run begins."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from megablend.errors import ConfigError
from megablend.index.build.build_report import Progress
from megablend.operations.open import open_dataset
from megablend.operations.session import ConfigLike
from megablend.prefetch.due_ranges import find_mirror, list_ranges
from megablend.storage.hints import Filled
from megablend.system.failures import translating

_BATCH = 1 << 16
"""Number of blocks whose byte ranges are requested together. It is exceeded only if a single file
has more blocks."""


@translating("fill")
def fill_mirror(
    config: ConfigLike,
    *,
    cache: str | None = None,
    is_dry: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Filled:
    """Make this machine's node process fetch its part of the run's files: all of the files if there
    is only one machine, otherwise a share of their pieces. Call this function on each machine.

    Args:
        cache: cache folder, instead of the config's.
        is_dry: fetch nothing, only count.
        progress: called with the number of files that are done.

    Raises: the errors of `open` and of reads; ConfigError if no file of the run is mirrored;
    ResourceError if no node process responds.
    """
    run = open_dataset(config, cache=cache).run
    storage = find_mirror(run)
    if storage is None:
        raise ConfigError(
            "nothing that this run reads is mirrored\n"
            "set `mirror` under `storage`, with `prefixes` that cover the files of its sources"
        )
    snapshot = run.store.snapshot
    filled = Filled()
    num_done = 0
    first_blocks = snapshot.files.first_block  # by file, and the end of the last one
    while num_done < snapshot.num_files:
        first = int(first_blocks[num_done])
        # As many files as fit in a batch, but at least one
        num_fitting = int(np.searchsorted(first_blocks, first + _BATCH)) - 1
        num_done = max(num_done + 1, num_fitting)
        blocks = np.arange(first, first_blocks[num_done])
        ranges = list_ranges(run, blocks, np.full(len(blocks), math.inf))
        filled = filled.plus(storage.fill(ranges, is_dry=is_dry))
        if progress is not None:
            progress(Progress(files=num_done, num_files=snapshot.num_files, bytes=0, num_bytes=0))
    return filled
