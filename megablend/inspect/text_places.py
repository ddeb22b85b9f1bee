"""Find the places of samples' tokens in the text that was tokenised."""

from __future__ import annotations

import numpy as np

from megablend.inspect.match_files import locate_file
from megablend.lazy import cached_property
from megablend.operations.check_tokens import read_rows
from megablend.run.run import Run
from megablend.text.places import TextPart, TextPlace, list_parts, locate_rows, parse_path


class TextPlaces:
    """Finds documents of text of a run; there are none for sources whose files have tokens."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @cached_property
    def paths(self) -> list[str]:
        """The paths of the files of the run's index."""
        store = self._run.store
        names = store.snapshot.file_names()
        return [store.snapshot.path(i, store.roots) for i in range(len(names))]

    @cached_property
    def _parts(self) -> dict[tuple[str, str], list[TextPart]]:
        """See `list_parts`, of all files."""
        return list_parts(self.paths)

    def list_documents(self, path: str, block: int, start: int, stop: int) -> tuple[TextPlace, ...]:
        """The documents that have tokens [start, stop) of a block, counted with the tokens that
        `append_eod` adds. Raises: DataError if the token file is damaged."""
        part = parse_path(path)
        if part is None or start >= stop:
            return ()
        snapshot = self._run.store.snapshot
        number = int(snapshot.file_of(np.array([block]))[0])
        store, number_in_store = locate_file(self._run, number)
        file = store.snapshot.file(number_in_store)
        entry = store.snapshot.sources[file.column]
        first_block = snapshot.file(number).first_block
        storage = self._run.store.storage
        before = store.snapshot.tokens_before
        tokens = int(before[file.first_block + file.num_blocks] - before[file.first_block])
        row, offsets = read_rows(path, entry, block - first_block, tokens, storage)
        lengths = np.diff(offsets)
        eods = dict(zip(store.snapshot.sources.names, store.source_eods, strict=True))
        if eods.get(entry.name) is not None:  # each document has one more token
            lengths = lengths + (lengths > 0)
        ends = np.cumsum(lengths)
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(ends, stop - 1, side="right"))
        rows = [row + i for i in range(first, min(last, len(ends) - 1) + 1) if lengths[i]]
        parts = self._parts[part.folder, part.text]
        return tuple(locate_rows(path, rows, parts, storage))
