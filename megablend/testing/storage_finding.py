"""The first half of the contract of storages: finding files, their size and identity."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from megablend.errors import ChangedFileError, MissingFileError
from megablend.storage.location import escape_wildcards
from megablend.testing.expect import expect_error
from megablend.testing.storage_files import A_FILE, StorageFiles, make_content

IN_T = (
    "t/a.bin",
    "t/b.bin",
    "t/ sp ace.bin",
    "t/%20.bin",
    "t/[1].bin",
    "t/é.bin",
    "t/q?.bin",
    "t/+&#=;.bin",
)
"""Most of the names that the pattern `t/*.bin` matches."""
PATTERNS: Mapping[str, Iterable[str]] = {
    "t/*.bin": (*IN_T, "t/'\"<>.bin", "t/empty.bin"),
    "t/a.bin": ["t/a.bin"],
    "t/[ab].bin": ["t/a.bin", "t/b.bin"],
    "t/?.bin": ["t/a.bin", "t/b.bin", "t/é.bin"],
    "t/[[]1].bin": ["t/[1].bin"],
    "t/.*.bin": ["t/.hidden.bin"],
    "t*/x.bin": ["tt/x.bin"],
    "*/x.bin": ["tt/x.bin"],
    "t/*/c.bin": ["t/sub/c.bin"],
    "t/**/d.bin": ["t/sub/deep/d.bin"],
    "t/sub/**/*.bin": ["t/sub/c.bin", "t/sub/deep/d.bin"],
    "t/sub/**": ["t/sub/c.bin", "t/sub/deep/d.bin"],
    "t/s*": [],
    "t": [],
    "t/": [],
    "nothing/*.bin": [],
    "tt/x.bin/*": [],
}
"""The names that each pattern matches, as on a local disk."""


class StorageFinding(StorageFiles):
    """Tests of `find`, `glob`, `is_folder`, `is_readable` and `stat`."""

    def test_patterns_match_as_on_a_local_disk(self, tmp_path: Path) -> None:
        """Each pattern finds the expected files. Folders are not found, and hidden files are not
        found by a pattern without a dot."""
        if not self.lists_files:
            return
        root = self.write_all(tmp_path)
        storage = self.make_storage()
        for pattern, names in PATTERNS.items():
            expected = sorted(self.locate(root, name) for name in names if name in self.names)
            assert storage.glob(f"{root}/{pattern}") == expected, pattern
            listing = storage.find(f"{root}/{pattern}")
            assert [match.path for match in listing.files] == expected, pattern
            assert listing.unreadable == {}, pattern
            assert len({match.real for match in listing.files}) == len(expected), pattern

    def test_every_name_matches_itself(self, tmp_path: Path) -> None:
        """The name of an existing file matches the file, both as it is and with its wildcards
        escaped. The name of a missing file matches nothing."""
        root = self.write_all(tmp_path)
        storage = self.make_storage()
        for name in self.names:
            path = self.locate(root, name)
            assert storage.glob(path) == [path]
            assert [match.path for match in storage.find(path).files] == [path]
            if self.lists_files:
                assert storage.glob(escape_wildcards(path)) == [path]
        assert storage.glob(self.locate(root, "t/none.bin")) == []
        assert storage.find(self.locate(root, "t/none.bin")).files == []

    def test_folders_contain_files(self, tmp_path: Path) -> None:
        """A path that contains files is a folder; a file is not."""
        root = self.write_all(tmp_path)
        storage = self.make_storage()
        assert not storage.is_folder(self.locate(root, A_FILE))
        assert not storage.is_folder(self.locate(root, "none"))
        if self.lists_files:
            assert storage.is_folder(self.locate(root, "t"))
            assert storage.is_folder(self.locate(root, "t/sub"))

    def test_stat_gives_size_and_a_stable_identity(self, tmp_path: Path) -> None:
        """Size and identity of a file are the same from a second storage, a pickled copy, a storage
        for checking, and after a listing."""
        root = self.write_all(tmp_path)
        storage = self.make_storage()
        copy = pickle.loads(pickle.dumps(storage))
        for name in self.names:
            path = self.locate(root, name)
            state = storage.stat(path)
            assert state.size == len(make_content(name))
            assert state.etag
            assert storage.is_readable(path)
            for other in (storage, copy, storage.for_checking(), self.make_storage()):
                assert other.stat(path) == state, name
                assert other.stat_opened(path) == state, name
        if self.lists_files:
            listed = self.make_storage()
            for path in listed.glob(f"{root}/t/*.bin"):
                assert listed.stat(path) == storage.stat(path)

    def test_another_process_takes_over_what_is_known(self, tmp_path: Path) -> None:
        """The information that a storage has about files can be pickled, and given to another
        storage."""
        root = self.write_all(tmp_path)
        storage = self.make_storage()
        other = self.make_storage()
        path = self.locate(root, A_FILE)
        state = storage.stat(path)
        other.add_known_files(pickle.loads(pickle.dumps(storage.known_files())))
        assert other.stat(path) == state
        assert other.read(path, 0, 10) == storage.read(path, 0, 10)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        """The error for a missing file names it."""
        root = self.write_all(tmp_path)
        storage = self.make_storage()
        path = self.locate(root, "t/none.bin")
        pattern = f"{re.escape(path)}.*{self.missing}"
        expect_error(MissingFileError, pattern, storage.stat, path)
        expect_error(MissingFileError, pattern, storage.for_checking().stat, path)
        expect_error(MissingFileError, pattern, storage.stat_opened, path)
        expect_error(MissingFileError, pattern, storage.read, path, 0, 1)

    def test_a_replaced_file(self, tmp_path: Path) -> None:
        """Readers get the old bytes or an error until the file is found again; then they get the
        new bytes."""
        root = self.write_all(tmp_path)
        storage = self.make_storage()
        path = self.locate(root, A_FILE)
        content = make_content(A_FILE)
        before = storage.stat(path)
        assert storage.read(path, 0, 100) == content[:100]
        replaced = {name: make_content(name)[::-1] for name in self.names} | {
            A_FILE: content[::-1] + b"more"
        }
        assert self.write_files(tmp_path, replaced) == root
        try:
            assert storage.read(path, 0, 100) == content[:100]
        except ChangedFileError as error:
            assert path in str(error)  # noqa: PT017  (either outcome is allowed)
        for other in (storage.for_checking(), self.make_storage()):
            state = other.stat(path)
            assert state.size == before.size + 4
            assert state.etag != before.etag
        assert [match.path for match in storage.find(path).files] == [path]
        assert storage.stat(path).etag != before.etag
        assert storage.read(path, 0, 100) == content[::-1][:100]

    def test_a_view_for_reading_keeps_its_own_files(self, tmp_path: Path) -> None:
        """A view that has read a file does not read the file that replaces it, even after the
        storage has found the new one."""
        root = self.write_all(tmp_path)
        storage = self.make_storage()
        path = self.locate(root, A_FILE)
        content = make_content(A_FILE)
        view = storage.for_reading()
        before = view.stat(path)
        assert view.read(path, 0, 100) == content[:100]
        replaced = {name: make_content(name)[::-1] for name in self.names} | {
            A_FILE: content[::-1] + b"more"
        }
        assert self.write_files(tmp_path, replaced) == root
        assert [match.path for match in storage.find(path).files] == [path]
        for other in (storage, storage.for_reading()):
            assert other.stat_opened(path).etag != before.etag
            assert other.read(path, 0, 100) == content[::-1][:100]
        try:
            assert view.read(path, 0, 100) == content[:100]
        except ChangedFileError as error:
            assert path in str(error)  # noqa: PT017  (either outcome is allowed)
