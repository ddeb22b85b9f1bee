"""What reading a run takes of object stores: requests, bytes, and their price."""

from __future__ import annotations

import numpy as np

from megablend.plan.run import Run
from megablend.storage.transfer import Counted, Transfer, price_transfer

_SAMPLED_BLOCKS = 1 << 14


def estimate_transfer(run: Run, epochs: list[float]) -> Transfer | None:
    """Estimate what reading a split of a run requests from object stores, each block once an epoch.

    Args:
        epochs: how often each source is read.

    Returns: None where no source is in an object store.
    """
    found = None
    for part, times in zip(run.parts, epochs, strict=True):
        first, stop = int(part["first_block"]), int(part["stop_block"])
        if stop == first:
            continue
        path = run.store.generation.path(int(run.store.generation.file_of([first])[0]), run.store.roots)
        if run.store.storage.limits(path).max_files == 1:
            continue
        sampled = np.unique(np.linspace(first, stop - 1, min(stop - first, _SAMPLED_BLOCKS)).astype(np.int64))
        size = float(run.store.generation.blocks(sampled)["stored_bytes"].mean())
        requests = round(times * (stop - first))
        options = run.config.storage.find(path)
        counted = Counted(requests, requests * size)
        found = (found or Transfer()) + price_transfer(counted, counted, options)
    return found
