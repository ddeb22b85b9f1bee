"""Check that extra columns fit the tokens of their source, as far as the index allows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megablend.errors import ConfigError
from megablend.formats.flat import is_flat
from megablend.index.blocks.block_store import BlockStore
from megablend.index.blocks.document_lengths import count_documents
from megablend.index.blocks.extra_columns import ExtraColumn
from megablend.index.tables.file_table import FileEntry
from megablend.index.tables.source_entry import ColumnEntry, SourceEntry


def extra_columns(store: BlockStore, name: str, columns: Sequence[str]) -> tuple[ExtraColumn, ...]:
    """Return the extra columns of a source, given the source's name and the columns' names.

    Raises: ConfigError if a column's type differs between files, or if the column lacks values for
        tokens or rows of a file.
    """
    # Most sources have no extra columns; with thousands of sources, do not make entries for them
    if not columns:
        return ()
    snapshot = store.snapshot
    source = snapshot.sources[snapshot.sources.numbers[name]]
    checked = []
    for column in columns:
        entry = source.find_extra(column)
        assert entry is not None, column
        # Each kind of column, with the path of the first file that has it
        kinds = dict[tuple[str, bool], str]()
        for i in reversed(entry.files):
            opened = snapshot.files.entry(i).opened
            kinds[opened.token_dtype, is_flat(opened.meta)] = snapshot.path(i)
        if len(kinds) > 1:
            listed = ", ".join(
                f"{'' if flat else 'lists of '}{dtype} ({path})"
                for (dtype, flat), path in kinds.items()
            )
            raise ConfigError(
                f"source {name!r}: extra column {column!r} has different types: {listed}; write it with one type in all files"
            )
        ((dtype, flat),) = kinds
        _check_counts(store, source, entry, column, flat=flat)
        checked.append(ExtraColumn(column=column, entry=entry, dtype=np.dtype(dtype), flat=flat))
    return tuple(checked)


def _check_counts(
    store: BlockStore, tokens: SourceEntry, extra: ColumnEntry, column: str, *, flat: bool
) -> None:
    """Check that an extra column has one value for each token of its source, or for each row if the
    column is flat. Raises: ConfigError."""
    snapshot = store.snapshot
    for number, extra_number in zip(tokens.files, extra.files, strict=True):
        file = snapshot.files.entry(number)
        column_file = snapshot.files.entry(extra_number)
        if flat and column_file.tokens != column_file.rows:
            problem = f"has {column_file.rows - column_file.tokens:,} rows without a value; every row needs one"
        elif column_file.rows != file.rows:
            problem = f"has {column_file.rows:,} rows, but the tokens have {file.rows:,}"
        elif not flat and column_file.tokens != file.tokens:
            difference = _first_difference(store, file, column_file)
            problem = f"{difference}; each list must have as many values as its row has tokens, nulls not counted"
        else:
            continue
        raise ConfigError(
            f"{snapshot.path(number, store.roots)}: extra column {column!r} {problem}"
        )


def _first_difference(store: BlockStore, file: FileEntry, column_file: FileEntry) -> str:
    """Describe the first row of a file in which two columns have different numbers of values.
    Raises: see BlockStore.read."""

    def count_lengths(entry: FileEntry) -> npt.NDArray[np.int64]:
        batches = count_documents(store, entry.first_block, entry.first_block + entry.num_blocks)
        return np.concatenate([lengths for _, lengths, _ in batches])

    tokens = count_lengths(file)
    values = count_lengths(column_file)
    row = int(np.flatnonzero(tokens != values)[0])
    return f"has {values[row]:,} values in row {row} for {tokens[row]:,} tokens"
