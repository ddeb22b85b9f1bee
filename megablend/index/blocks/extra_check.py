"""Checking that extra columns match their source's tokens, as far as the index determines it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megablend.errors import ConfigError
from megablend.formats.flat import is_flat
from megablend.index.blocks.block_store import BlockStore
from megablend.index.blocks.document_lengths import count_documents
from megablend.index.blocks.extra_columns import ExtraColumn
from megablend.index.tables.file_table import FileEntry
from megablend.index.tables.source_entry import ColumnEntry, SourceEntry


def extra_columns(store: BlockStore, name: str, columns: Sequence[str]) -> tuple[ExtraColumn, ...]:
    """The extra columns of a source, by its name.

    Raises: ConfigError if a column's type differs between files, or it has no value for some token
        or row of a file.
    """
    if not columns:  # as for most of thousands of sources
        return ()
    snapshot = store.snapshot
    source = next(entry for entry in snapshot.sources if entry.name == name)
    found = []
    for column in columns:
        entry = source.find_extra(column)
        assert entry is not None, column
        kinds = {
            (file.opened.token_dtype, is_flat(file.opened.meta)): snapshot.path(i)
            for i, file in ((i, snapshot.file(i)) for i in reversed(entry.files))
        }
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
        found.append(ExtraColumn(column=column, entry=entry, dtype=np.dtype(dtype), flat=flat))
    return tuple(found)


def _check_counts(
    store: BlockStore, tokens: SourceEntry, extra: ColumnEntry, column: str, *, flat: bool
) -> None:
    snapshot = store.snapshot
    for number, other in zip(tokens.files, extra.files, strict=True):
        file = snapshot.file(number)
        column_file = snapshot.file(other)
        if flat and column_file.tokens != column_file.rows:
            problem = f"has {column_file.rows - column_file.tokens:,} rows without a value; every row needs one"
        elif column_file.rows != file.rows:
            problem = f"has {column_file.rows:,} rows, but the tokens have {file.rows:,}"
        elif not flat and column_file.tokens != file.tokens:
            found = _first_difference(store, file, column_file)
            problem = f"{found}; each list must have as many values as its row has tokens, nulls not counted"
        else:
            continue
        raise ConfigError(
            f"{snapshot.path(number, store.roots)}: extra column {column!r} {problem}"
        )


def _first_difference(store: BlockStore, file: FileEntry, column_file: FileEntry) -> str:
    """The first row of a file in which two columns have different numbers of values. Raises as
    BlockStore.read does."""
    lengths = [
        np.concatenate(
            [
                part
                for _, part, _ in count_documents(
                    store, each.first_block, each.first_block + each.num_blocks
                )
            ]
        )
        for each in (file, column_file)
    ]
    row = int(np.flatnonzero(lengths[0] != lengths[1])[0])
    return f"has {lengths[1][row]:,} values in row {row} for {lengths[0][row]:,} tokens"
