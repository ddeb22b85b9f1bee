"""Makes folders with the files of complete revisions, for programs that map files into memory:

    folders/<dataset>/<revision>/<path>

Files of 64 KiB or more are hard links to the mirror's copies. The mirror never makes holes in such
copies, even after the folder is removed: it deletes them as a whole, so that programs that have
mapped them keep their bytes. Smaller files are copied, since the mirror's own copies of them end
with a footer.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from megablend.errors import ResourceError
from megablend.mirror.catalog.catalog import Revision
from megablend.mirror.catalog.manifest import DataFile
from megablend.mirror.disk.disk_calls import disk_error
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.page_store import PageStore
from megablend.mirror.disk.pages import pages_of_file
from megablend.mirror.disk.stored_file import SMALL_BYTES, keep_whole


class Folders:
    """The folders of revisions in a mirror. They are used in the store's thread. Methods raise
    DataError if the disk fails."""

    def __init__(self, store: PageStore) -> None:
        self._store = store
        self._path = store.folder.path / "folders"

    def find(self, revision: Revision) -> Path:
        """Return the path of a revision's folder, whether it exists or not."""
        return self._path / revision.dataset / revision.digest

    def make(self, revision: Revision, files: Sequence[DataFile]) -> None:
        """Put files of a revision into its folder. Raises: ResourceError if a file is not held."""
        folder = self.find(revision)
        try:
            for file in files:
                path = folder / file.path
                self._make_parent(path)
                if not self._store.is_complete(file.key):
                    raise _not_held(path)
                if not self._is_made(path, file.key):
                    new = path.with_name(f".{file.key.digest}.new")
                    new.unlink(missing_ok=True)
                    if not self._make_file(new, file.key):
                        raise _not_held(path)
                    new.rename(path)
        except OSError as error:
            raise disk_error(folder, error) from error

    def _make_parent(self, path: Path) -> None:
        for parent in [*reversed(path.relative_to(self._path).parents)]:
            folder = self._path / parent
            if not folder.is_dir():
                folder.mkdir(mode=0o700)
                self._store.folder.open_to_group(folder)

    def _is_made(self, path: Path, key: FileKey) -> bool:
        """Return whether a file is in its folder, and was not truncated by a power failure."""
        if not path.exists():
            return False
        if key.size < SMALL_BYTES:
            return path.stat().st_size == key.size
        return path.samefile(self._store.folder.data_path(key.digest))

    def _make_file(self, path: Path, key: FileKey) -> bool:
        """Link or write a file. Returns: False if the file is no longer held."""
        if key.size < SMALL_BYTES:
            data = self._store.read(key, pages_of_file(key.size))
            if data is None:
                return False
            path.write_bytes(data)
            path.chmod(self._store.folder.file_mode)
            return True
        try:
            os.link(self._store.folder.data_path(key.digest), path)
        except FileNotFoundError:
            # The copy was deleted by someone else: the mirror gives it up, and fetches it again
            self._store.remove_file(key)
            return False
        return True

    def remove(self, revision: Revision, files: Sequence[DataFile]) -> None:
        """Remove a revision's files from its folder, and the folder itself unless users have put
        other files into it. The mirror keeps its copies. If `files` is empty because the manifest
        is damaged, all files are removed."""
        folder = self.find(revision)
        try:
            for parent, _, names in os.walk(folder):
                for name in names:
                    keep_whole(Path(parent, name))
            if not files and folder.exists():
                shutil.rmtree(folder)
            for file in files:
                path = Path(folder, file.path)
                if path.exists():
                    path.unlink()
            folders = [Path(subfolder) for subfolder, _, _ in os.walk(folder, topdown=False)]
            for emptied in [*folders, folder.parent]:
                with contextlib.suppress(OSError):  # not empty
                    emptied.rmdir()
        except OSError as error:
            raise disk_error(folder, error) from error

    def remove_all(self) -> None:
        """Delete the folders of all revisions."""
        if self._path.exists():
            shutil.rmtree(self._path)


def _not_held(path: Path) -> ResourceError:
    """Return the error for a file that is no longer completely held."""
    return ResourceError(f"{path}: the mirror no longer holds this file\nrequest the folder again")
