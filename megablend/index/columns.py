"""Which column of each source's files contains the tokens: if the config names none, each file determines it."""

from __future__ import annotations

from megablend.index.source_spec import SourceColumn, SourceFile


class ColumnsTaken:
    """Token columns, collected while the files of a build are merged.

    Attributes:
        by_name: for each SourceColumn (by its name) the column in its files, if known.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, str | None] = {}
        self._first: dict[str, str] = {}

    def add(self, indexed: SourceColumn, file: SourceFile, column: str | None) -> None:
        """Record a file's column. Raises: ConfigError if another file of its source has a different one."""
        name = indexed.name
        if column is None:  # its format has no columns, or an older version indexed it
            return
        known = self.by_name.setdefault(name, column)
        first = self._first.setdefault(name, file.path)
        if known != column:
            raise indexed.source.spec.complaint(
                f"the tokens are in column {known!r} of {first}, but in {column!r} of {file.path}: list them as "
                "separate sources, or set `column:` to a column that each of them has"
            )
