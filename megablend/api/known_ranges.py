"""What `build` knows about token ids without reading them: the statistics stored in the files.

A file whose statistics are out of range is read, so that the error names the row; statistics that turn out to be wrong are
ignored. Files without statistics are not checked; `megablend check --data` reads everything.
"""

from __future__ import annotations

import numpy as np

from megablend.api.check_tokens import check_file
from megablend.api.vocabulary import MAX_IDS, vocab_sizes
from megablend.config import Config
from megablend.index.snapshot import Snapshot
from megablend.plan.open_store import open_block_store
from megablend.storage.base import Storage


def refuse_known_outliers(config: Config, snapshot: Snapshot, storage: Storage) -> None:
    """Refuse an index of the config's sources whose files are known to have tokens outside the vocabulary.

    Raises: DataError, which names file, row and token of the first; ConfigError where a tokenizer cannot be read.
    """
    lows, highs = snapshot.token_ranges.T
    is_known = lows <= highs
    if not is_known.any():
        return
    sizes = vocab_sizes(config)
    store = None
    for entry in snapshot.sources:
        if entry.name not in sizes:  # an extra column, of any numbers
            continue
        limit, files = sizes[entry.name] or MAX_IDS, np.arange(entry.files.start, entry.files.stop)
        for number in files[is_known[files] & ((lows[files] < 0) | (highs[files] >= limit))].tolist():
            store = store or open_block_store(config, snapshot, storage, number=0)
            if (problem := check_file(store, entry, number, sizes[entry.name]).problem) is not None:
                raise problem
