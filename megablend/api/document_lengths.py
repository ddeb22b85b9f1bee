"""Documents of a source by length, out of the index's table of documents."""

from __future__ import annotations

import numpy as np

from megablend.index.document_table import open_table, table_bytes
from megablend.plan.run import Run

COUNTED = 1 << 20
"""Documents that are counted; of more, evenly spaced ones."""


def count_lengths(run: Run, source: int) -> tuple[int, ...] | None:
    """Documents of a source in the split by length: [0] those of no token, [i] those of 2^(i-1) to 2^i - 1 tokens.

    Returns: None where the index has no table of the source's documents. With more than COUNTED documents the numbers are
        estimates.

    Raises: CacheError where the table is damaged.
    """
    part = run.parts[source]
    if part["documents"] == 0:
        return None
    blocks = run.blocks(source)
    name = run.data.index_names[source]
    number = next(i for i, entry in enumerate(blocks.snapshot.sources) if entry.name == name)
    documents = int(part["documents"])
    if table_bytes(blocks.snapshot, number) is None:
        return None
    counted = min(COUNTED, documents)
    which = blocks.documents.index_blocks(np.arange(counted) * documents // counted)
    lengths = open_table(blocks.snapshot, number).lengths(which, has_eod=run.sources[source].append_eod is not None)
    bins = np.bincount(np.frexp(lengths.astype(np.float64))[1])
    return tuple((bins * documents // counted).tolist())
