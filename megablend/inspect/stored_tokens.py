"""Find the stored tokens of a source that belong to a file, or to one of its rows.

Stored tokens are counted from the source's first one in the split, in the order of the files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from megablend.errors import ConfigError
from megablend.formats.base import DecodedBlock
from megablend.index.blocks.block_store import BlockStore
from megablend.index.blocks.splits import SplitBlocks, find_document
from megablend.index.tables.file_table import FileEntry
from megablend.inspect.match_files import locate_file
from megablend.run.run import Run


def list_stored_ranges(
    run: Run, source: int, files: Sequence[int], row: int | None
) -> list[range | None]:
    """Return the positions of a file, or of one of its rows, among the stored tokens of the split.
    There is a range for each of the source's readings (see `locator.Reading`), or None if the
    reading's snapshot does not have the file.

    Args:
        files: the numbers of the file in the run's index, one for each snapshot that has it.

    Raises: see `find_stored_range`.
    """
    located = [locate_file(run, file) for file in files]
    by_snapshot = {store.snapshot.digest: (store, number) for store, number in located}
    ranges = list[range | None]()
    for reading in run.locator.readings(source):
        digest = reading.blocks.snapshot.digest
        if digest not in by_snapshot:
            ranges.append(None)
            continue
        store, number = by_snapshot[digest]
        entry = store.snapshot.files.entry(number)
        read = partial(_read_block, run, store)
        ranges.append(find_stored_range(store, reading.blocks, entry, row, read))
    return ranges


def find_stored_range(
    store: BlockStore,
    blocks: SplitBlocks,
    entry: FileEntry,
    row: int | None,
    read: Callable[[int], DecodedBlock],
) -> range:
    """Return the range of positions of a file, or of one of its rows, among the stored tokens of
    the split. The range is empty if none of the tokens are in the split.

    Args:
        store, blocks, entry: all from the same snapshot of the index.
        read: decodes a block; as for `find_document`.

    Raises: the errors of BlockStore.read; ConfigError if there is no such row, or the index has not
        counted rows.
    """
    if row is None:
        edges = np.array([entry.first_block, entry.first_block + entry.num_blocks])
        return range(*blocks.before(blocks.local_blocks(edges)).tolist())
    document = _find_document_number(store, entry, row)
    # The row ends where the document after it begins
    edges = np.array(
        [
            blocks.stored_position(*find_document(store, entry.column, number, read))
            for number in (document, document + 1)
        ]
    )
    return range(*np.clip(edges, 0, blocks.num_tokens).tolist())


def _find_document_number(store: BlockStore, entry: FileEntry, row: int) -> int:
    """Return the number of a file's row among all documents of its source. Raises: ConfigError if
    there is no such row, or the index has not counted rows."""
    snapshot = store.snapshot
    source = snapshot.sources[entry.column]
    if not source.documents:
        raise ConfigError(
            f"{entry.name}: the index has no row counts for source {source.name!r} (rows are counted only if the "
            "config uses append_eod, split, extra_columns or a document order); omit the row to search the whole file"
        )
    if not 0 <= row < entry.rows:
        raise ConfigError(f"{entry.name}: found row {row:,}, expected 0 to {entry.rows - 1:,}")
    before_source, before_file = snapshot.running(
        "rows_before", [source.blocks.start, entry.first_block]
    )
    return int(before_file - before_source) + row


def _read_block(run: Run, store: BlockStore, block: int) -> DecodedBlock:
    """Decode a block of one of the run's snapshots. It is read as a block of the run, since its
    file may have been renamed in a later snapshot."""
    first = run.store.first_blocks[run.store.stores.index(store)]
    decoded: DecodedBlock = run.store.read([first + block])[0]
    return decoded
