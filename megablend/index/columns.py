"""Which column of each source's files holds the tokens: where the config names none, each file is looked at by itself."""

from __future__ import annotations

from megablend.index.sources import SourceFile, SourceListing


class ColumnsTaken:
    """Columns as the files of a build are merged.

    Attributes:
        by_source: column of each source (by its name) of which it is known.
    """

    def __init__(self) -> None:
        self.by_source: dict[str, str | None] = {}
        self._first: dict[str, str] = {}

    def add(self, listing: SourceListing, file: SourceFile, column: str | None) -> None:
        """Note a file's column. Raises: ConfigError where another file of its source has another one."""
        source = listing.spec.name
        if column is None:  # its format has no columns, or an older version indexed it
            return
        known = self.by_source.setdefault(source, column)
        first = self._first.setdefault(source, file.path)
        if known != column:
            raise listing.spec.complaint(
                f"the tokens are in column {known!r} of {first}, but in {column!r} of {file.path}: name one by `column:`, "
                "or make a source of each"
            )
