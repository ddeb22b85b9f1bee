"""The place where token files are stored: a folder that all ranks share, or a prefix of an object
store. A token file under its final name is complete, and is never written again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megablend.storage.location import find_scheme, join
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects.prefix import ObjectEntry, ObjectPrefix
from megablend.system.atomic_write import (
    TEMPORARY,
    flush,
    flush_folder,
    replace_file,
    temp_sibling,
    translate_os_errors,
)

_LEFTOVER_SECONDS = 3600
"""The age in seconds at which a temporary file is assumed to belong to a killed process, since
writing a part takes only seconds."""
_WHAT = "tokens"
"""What is written, for messages about errors of the file system."""


class TokenFolder:
    """A folder, or a prefix of an object store, that stores files by name. It can be pickled."""

    def __init__(self, location: str, options: ObjectOptions) -> None:
        self.location = location
        self._options = options
        self._prefix = ObjectPrefix(location, options) if find_scheme(location) else None
        """The object store; None for a folder of the file system."""

    def __reduce__(self) -> tuple[type[TokenFolder], tuple[str, ObjectOptions]]:
        return TokenFolder, (self.location, self._options)

    def path(self, name: str) -> str:
        """Return the location of a file, given its name."""
        return join(self.location, name)

    def list_files(self, folder: str = "") -> dict[str, ObjectEntry]:
        """Return the complete files below a folder as a dict, sorted by name. Raises: CacheError if
        the folder cannot be read."""
        if self._prefix is not None:
            return {entry.key: entry for entry in self._prefix.list_objects(folder)}
        entries = dict[str, ObjectEntry]()
        with translate_os_errors(Path(self.location), _WHAT):
            for parent, _, names in os.walk(Path(self.location, folder)):
                for path in (Path(parent, name) for name in names):
                    if not path.name.startswith(TEMPORARY):
                        name = path.relative_to(self.location).as_posix()
                        state = path.stat()
                        entries[name] = ObjectEntry(name, state.st_size, state.st_mtime, "")
        return dict(sorted(entries.items()))

    def remove_leftovers(self, folder: str) -> None:
        """Remove the unfinished files of killed processes below a folder. An object store has no
        such files."""
        if self._prefix is not None:
            return
        oldest = time.time() - _LEFTOVER_SECONDS
        for path in Path(self.location, folder).rglob(f"{TEMPORARY}*"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < oldest:
                    path.unlink()

    @contextmanager
    def writing(self, folder: str) -> Iterator[Path]:
        """Provide a temporary local path for a file whose final name depends on its contents. After
        writing the file, call `commit` to store it. The path is removed at the end. Raises:
        CacheError if the file cannot be written."""
        parent = Path(tempfile.gettempdir()) if self._prefix else Path(self.location, folder)
        path = temp_sibling(parent / "part")
        with translate_os_errors(path, _WHAT):
            parent.mkdir(parents=True, exist_ok=True)
            try:
                yield path
            finally:
                path.unlink(missing_ok=True)

    def commit(self, written: Path, name: str) -> None:
        """Store a written file under its final name, unless there is a file with that name
        already."""
        if self._prefix is not None:
            data = written.read_bytes()
            # If the requests of several ranks collide, the store may carry out none of them
            if not self._prefix.create(name, data) and self._prefix.describe_all([name]) == [None]:
                self._prefix.write(name, data)
            return
        final = Path(self.location, name)
        with written.open("rb+") as file:
            flush(file)
        parent = os.open(final.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with contextlib.suppress(OSError):  # not supported by some network file systems
                fcntl.flock(parent, fcntl.LOCK_EX)
            # A file that exists has the same bytes; an index may have recorded its inode and times
            if not final.exists():
                written.rename(final)
        finally:
            os.close(parent)
        flush_folder(final.parent)

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a file; None if it does not exist."""
        if self._prefix is not None:
            return self._prefix.read(name)
        with contextlib.suppress(FileNotFoundError):
            return Path(self.location, name).read_bytes()
        return None

    def replace(self, name: str, data: bytes) -> None:
        """Write a small file, replacing an existing file with the same name."""
        if self._prefix is not None:
            self._prefix.write(name, data)
            return
        path = Path(self.location, name)
        with translate_os_errors(path, _WHAT):
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data, _WHAT)

    def remove(self, name: str) -> None:
        """Remove a file."""
        if self._prefix is not None:
            self._prefix.remove([name])
        else:
            Path(self.location, name).unlink(missing_ok=True)

    def count_free_bytes(self) -> int | None:
        """Return the number of free bytes of the file system; None for an object store."""
        if self._prefix is not None:
            return None
        folder = Path(self.location)
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free
