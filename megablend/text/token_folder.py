"""Where token files are: a folder that all ranks share, or a prefix of an object store. What has its
final name is complete, and is never written again."""

from __future__ import annotations

import contextlib
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
"""Temporary files that nothing was written to for so long are a killed process's: a part takes
seconds."""
_WHAT = "tokens"


class TokenFolder:
    """Files by their names below a location. Picklable."""

    def __init__(self, location: str, options: ObjectOptions) -> None:
        self.location = location
        self._options = options
        self._prefix = ObjectPrefix(location, options) if find_scheme(location) else None

    def __reduce__(self) -> tuple[type[TokenFolder], tuple[str, ObjectOptions]]:
        return TokenFolder, (self.location, self._options)

    def path(self, name: str) -> str:
        """The location of a file."""
        return join(self.location, name)

    def list_files(self, folder: str = "") -> dict[str, ObjectEntry]:
        """The complete files below a folder by name, sorted. Raises: CacheError."""
        if self._prefix is not None:
            return {each.key: each for each in self._prefix.list_objects(folder)}
        found = dict[str, ObjectEntry]()
        with translate_os_errors(Path(self.location), _WHAT):
            for above, _, names in os.walk(Path(self.location, folder)):
                for path in (Path(above, name) for name in names):
                    if not path.name.startswith(TEMPORARY):
                        name = path.relative_to(self.location).as_posix()
                        state = path.stat()
                        found[name] = ObjectEntry(name, state.st_size, state.st_mtime, "")
        return dict(sorted(found.items()))

    def remove_leftovers(self, folder: str) -> None:
        """Remove what killed processes left unfinished below a folder."""
        before = time.time() - _LEFTOVER_SECONDS
        for path in () if self._prefix else Path(self.location, folder).rglob(f"{TEMPORARY}*"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    path.unlink()

    @contextmanager
    def writing(self, folder: str) -> Iterator[Path]:
        """A file to write before its name is known; removed unless it was committed.
        Raises: CacheError for what the system refuses."""
        above = Path(tempfile.gettempdir()) if self._prefix else Path(self.location, folder)
        path = temp_sibling(above / "part")
        with translate_os_errors(path, _WHAT):
            above.mkdir(parents=True, exist_ok=True)
            try:
                yield path
            finally:
                path.unlink(missing_ok=True)

    def commit(self, written: Path, name: str) -> None:
        """Give a file that was written its final name; one that is there already is kept."""
        if self._prefix is not None:
            self._prefix.create(name, written.read_bytes())
            return
        final = Path(self.location, name)
        with written.open("rb+") as file:
            flush(file)
        if final.exists():
            return  # of the same bytes; an index may know its inode
        try:
            os.link(written, final)  # does not replace what another process has just committed
        except FileExistsError:
            return
        except OSError:  # a file system without hard links
            written.rename(final)
        flush_folder(final.parent)

    def read(self, name: str) -> bytes | None:
        """All of a file; None if there is none."""
        if self._prefix is not None:
            return self._prefix.read(name)
        with contextlib.suppress(FileNotFoundError):
            return Path(self.location, name).read_bytes()
        return None

    def replace(self, name: str, data: bytes) -> None:
        """Write a small file, which may be written again."""
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
        """Bytes that are free where files are written; None where that has no limit."""
        if self._prefix is not None:
            return None
        folder = Path(self.location)
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free
