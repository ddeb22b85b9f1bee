"""Find the places of samples' tokens in the text that was tokenised."""

from __future__ import annotations

import numpy as np

from megablend.arrays import Int64s
from megablend.index.blocks.block_store import BlockStore
from megablend.index.tables.file_table import FileEntry
from megablend.inspect.match_files import locate_file
from megablend.lazy import cached_property
from megablend.operations.token_rows import read_rows
from megablend.run.run import Run
from megablend.text.places import ReadFooter, TextPlace, locate_rows, reader_of_footers
from megablend.text.token_names import TokenPath, group_by_folder, parse_path


class TextPlaces:
    """A finder of the text documents from which the blocks of a run's token files were made.
    Sources whose files were given as tokens have no text documents."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @cached_property
    def paths(self) -> list[str]:
        """The paths of the files of the run's index."""
        store = self._run.store
        names = store.snapshot.file_names()
        return [store.snapshot.path(i, store.roots) for i in range(len(names))]

    @cached_property
    def _token_files(self) -> dict[str, list[TokenPath]]:
        """The token files by their folders; see `group_by_folder`."""
        return group_by_folder(self.paths)

    @cached_property
    def _read_footer(self) -> ReadFooter:
        return reader_of_footers(self._run.store.storage)

    def list_documents(self, path: str, block: int, start: int, stop: int) -> tuple[TextPlace, ...]:
        """Return the documents that have tokens [start, stop) of a block of the run's index.

        The positions [start, stop) also count the tokens that `append_eod` adds.

        Args:
            path: the path of the block's file.

        Raises: DataError if the token file is damaged.
        """
        token_file = parse_path(path)
        if token_file is None or start >= stop:
            return ()
        storage = self._run.store.storage
        store, file, block_in_file = self._find_file_of_block(block)
        entry = store.snapshot.sources[file.column]
        first_row, offsets = read_rows(path, entry, block_in_file, file.tokens, storage)
        eods = dict(zip(store.snapshot.sources.names, store.source_eods, strict=True))
        lengths = _count_tokens(offsets, has_eod=eods.get(entry.name) is not None)
        ends = np.cumsum(lengths)
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(ends, stop - 1, side="right"))
        # Rows without tokens between the first and the last one are not part of the sample
        rows = [first_row + i for i in range(first, min(last, len(ends) - 1) + 1) if lengths[i]]
        in_folder = self._token_files[token_file.folder]
        return tuple(locate_rows(path, rows, in_folder, storage, self._read_footer))

    def _find_file_of_block(self, block: int) -> tuple[BlockStore, FileEntry, int]:
        """Find the snapshot that has a block of the run's index. Returns the blocks of this
        snapshot, the block's file in it, and the number of the block within the file."""
        snapshot = self._run.store.snapshot
        number = int(snapshot.file_of(np.array([block]))[0])
        store, number_in_store = locate_file(self._run, number)
        file = store.snapshot.files.entry(number_in_store)
        return store, file, block - snapshot.files.entry(number).first_block


def _count_tokens(offsets: Int64s, *, has_eod: bool) -> Int64s:
    """Return the number of tokens of each row of a block, int64 [n], given the offsets of the rows
    in the stored tokens, int64 [n + 1]. An end-of-document token is added to rows with tokens."""
    lengths: Int64s = np.diff(offsets)
    return lengths + (lengths > 0) if has_eod else lengths
