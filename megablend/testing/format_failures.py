"""The second half of the contract of formats: files that differ from what was indexed, and invalid
requests."""

from __future__ import annotations

import os
import re
from pathlib import Path

from megablend.errors import (
    ChangedFileError,
    ConfigError,
    CorruptFileError,
    DataError,
    MissingFileError,
)
from megablend.formats.base import Array
from megablend.formats.fetch import read_blocks
from megablend.storage.by_scheme import make_storage
from megablend.testing.documents import MIXED
from megablend.testing.expect import expect_error
from megablend.testing.format_files import FormatFiles


class FormatFailures(FormatFiles):
    """Tests that every kind of invalid file raises the right error, with the name of the file."""

    def test_a_missing_file(self, tmp_path: Path) -> None:
        """Indexing and opening fail if any file that belongs to the path is missing."""
        path = self.write_mixed(tmp_path)
        index = self.index(path)
        size = path.stat().st_size
        for name in self.format.files(str(path)):
            hidden = Path(name).rename(f"{name}.hidden")
            expect_error(MissingFileError, f"{re.escape(name)}: no such file", self.index, path)
            expect_error(
                MissingFileError, f"{re.escape(name)}: no such file", self.open, path, index, size
            )
            hidden.rename(name)

    def test_a_truncated_file(self, tmp_path: Path) -> None:
        """Opening fails if any file that belongs to the path was truncated after it was indexed;
        indexing fails if a file's content shows that it was truncated."""
        path = self.write_mixed(tmp_path)
        index = self.index(path)
        size = path.stat().st_size
        for name in self.format.files(str(path)):
            whole = Path(name).read_bytes()
            for share in (0.0, 0.01, 0.5, 0.99):
                Path(name).write_bytes(whole[: int(len(whole) * share)])
                if self.truncation_is_visible:
                    expect_error(CorruptFileError, rf"{re.escape(path.stem)}\.", self.index, path)
                expect_error(
                    ChangedFileError, f"{re.escape(name)}.*indexed", self.open, path, index, size
                )
            Path(name).write_bytes(whole)

    def test_a_file_that_was_replaced_or_grew(self, tmp_path: Path) -> None:
        """Opening fails if the file is not the one that was indexed, since its reader would return
        other tokens."""
        path = self.write_mixed(tmp_path)
        index = self.index(path)
        size = path.stat().st_size
        other = [
            document if i != 60 else [*(document or []), *range(50)]
            for i, document in enumerate(MIXED)
        ]
        (tmp_path / "other").mkdir()
        replacement = tmp_path / "other" / path.name
        self.write(replacement, other)
        for name in self.format.files(str(replacement)):
            Path(name).replace(path.parent / Path(name).name)
        expect_error(
            ChangedFileError, f"{re.escape(path.stem)}.*indexed", self.open, path, index, size
        )

    def test_a_file_that_is_cut_under_its_reader(self, tmp_path: Path) -> None:
        """Reading a file that was truncated after it was opened fails instead of returning fewer
        tokens."""
        path = self.write_mixed(tmp_path)
        storage = make_storage()
        index = self.index(path)
        reader = self.open(path, index)
        os.truncate(path, path.stat().st_size // 2)
        expect_error(
            CorruptFileError,
            rf"{re.escape(str(path))}.*truncated",
            read_blocks,
            reader,
            index.blocks,
            index.chunks,
            storage,
        )

    def test_blocks_of_another_file_are_refused(self, tmp_path: Path) -> None:
        """Reading fails if offsets, tokens or rows of blocks are wrong, as in a table of another
        version of the file."""
        path = self.write_mixed(tmp_path)
        storage = make_storage()
        index = self.index(path)
        reader = self.open(path, index)
        changes = {"offset": 4, "tokens": 1, "rows": 5}  # five more rows, some of which have tokens
        for field, change in changes.items():
            wrong: Array = index.blocks[1:2].copy()
            wrong[field] += change
            if field != "offset" or self.blocks_are_marked:
                expect_error(
                    DataError,
                    re.escape(str(path)),
                    read_blocks,
                    reader,
                    wrong,
                    index.chunks,
                    storage,
                )

    def test_the_column_is_named_or_found(self, tmp_path: Path) -> None:
        """Without `column:` the token column is found; a name that the file lacks is refused."""
        path = self.write_mixed(tmp_path)
        if self.column is None:
            expect_error(ConfigError, "column.*idz", lambda: self.index(path, column="idz"))
            return
        wrong = f"{self.column[:-1]}z"
        expect_error(ConfigError, f"{wrong}.*{self.column}", lambda: self.index(path, column=wrong))
        index = self.format.index(str(path), self.make_spec(None, True), storage=make_storage())
        assert index.tokens == self.index(path).tokens

    def test_unknown_options_are_refused(self) -> None:
        """The error for an unknown option is a ValueError that names it; the contract's own options
        are accepted."""
        self.format.check_options(self.options)
        wrong = {**self.options, "no_such_option": 1}
        expect_error(ValueError, "no_such_option", self.format.check_options, wrong)
