"""Find the files that match a pattern, and report folders and links that could not be read.

Patterns have the same meaning as in `glob`: `*`, `?` and `[]` match within a name, `**` matches any
number of folders, and names that begin with a dot match only if the pattern has the dot. Unlike
`glob`, nothing is left out silently: folders that cannot be listed, dangling links, pipes, sockets
and devices are reported. Links are followed, but each folder is visited once per part of the
pattern, so cyclic links terminate. Folders that are reached through fewer links come first, so a
file keeps its own name if the pattern matches that name.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import heapq
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NamedTuple

SPECIAL = "a pipe, a socket or a device, not a regular file"
_ANY_FOLDERS = "**"
_MISSING = (FileNotFoundError, NotADirectoryError)
"""The errors for a path that does not exist."""
_OF_LINKS = (errno.EACCES, errno.EPERM, errno.ELOOP)
"""The errors of a link that leads to itself, or to a file that may not be looked at."""


class Match(NamedTuple):
    """A file that a pattern matches."""

    links: int
    """The number of symbolic links in the path, from the pattern's first wildcard on."""
    path: str
    real: str
    """The path with all links resolved."""


@dataclass(frozen=True, slots=True)
class Found:
    """The files and folders that a pattern matches."""

    files: list[Match]
    """The matching files, sorted by path."""
    unreadable: dict[str, str]
    """The reason why a path could not be read, by path: for folders that could not be listed,
    dangling links, pipes, sockets and devices."""
    folders: tuple[str, ...] = ()
    """Folders whose path matches a pattern for files, such as `data/*`. Their content is not
    listed."""
    links: tuple[str, ...] = ()
    """Links to folders that are listed under another name."""


def find_files(pattern: str) -> Found:
    """Find the files that match `pattern`. The path of an existing file always matches itself, even
    if it has wildcard characters.

    Raises: OSError if the file system fails, since files that cannot be seen now are not to be
        left out.
    """
    parent, name = os.path.split(pattern)
    real_parent = os.path.realpath(parent)
    with contextlib.suppress(OSError):  # quickly, since a source may list 100,000s of files
        if stat.S_ISREG(Path(pattern).lstat().st_mode):
            return Found([Match(0, pattern, _join(real_parent, name))], {})
    root, parts = _split_at_wildcard(pattern)
    walk = _Walk(parts)
    walk.look_up(_Folder(0, parent, real_parent, set()), name, {walk.last})
    if glob.has_magic(pattern) and not walk.files:
        walk = _Walk(parts)
        walk.run(root)
    return Found(
        sorted(walk.files, key=lambda match: match.path),
        walk.unreadable,
        tuple(walk.folders),
        tuple(walk.links),
    )


def _split_at_wildcard(pattern: str) -> tuple[str, list[str]]:
    """Split a pattern before the first part that has a wildcard, or before the last part if none
    has. Returns: the folder in front, and the list of the remaining parts."""
    parts = PurePath(pattern).parts
    first = 0
    while first < len(parts) - 1 and not glob.has_magic(parts[first]):
        first += 1
    root = str(PurePath(*parts[:first])) if first else ""
    return root, list(parts[first:])


def _join(folder: str, name: str) -> str:
    """Join a folder and a name. This is much faster than pathlib, which matters for hundreds of
    thousands of files."""
    return f"{folder.rstrip('/')}/{name}" if folder else name


class _Folder(NamedTuple):
    """A folder to visit. Folders with fewer links in their paths are visited first."""

    links: int
    """The number of symbolic links in the path."""
    path: str
    real: str
    """The path with all links resolved."""
    wanted: set[int]
    """The parts of the pattern, given by index, that the names in the folder have to be matched
    with."""

    def enter(self, name: str) -> tuple[str, str]:
        """Return the path of an entry of this folder, and its real path if the entry is not a
        link."""
        path = _join(self.path, name)
        # Without links, both are the same string: strings take most of the memory of a listing
        return path, path if self.path == self.real else _join(self.real, name)


class _Walk:
    """A search through folders that matches the names in each folder with parts of the pattern.
    Each part is given by its index."""

    def __init__(self, parts: list[str]) -> None:
        self.files: list[Match] = []
        self.unreadable: dict[str, str] = {}
        self.folders: list[str] = []
        self.links: list[str] = []
        self.last = len(parts) - 1
        self._parts = parts
        self._expressions = [re.compile(fnmatch.translate(part)) for part in parts]
        self._wild = {i for i, part in enumerate(parts) if glob.has_magic(part)}
        self._any_folders = {i for i, part in enumerate(parts) if part == _ANY_FOLDERS}
        self._matched: dict[str, set[int]] = {}
        """The parts that the names in a folder have been matched with, by the real path of the
        folder."""
        self._queue: list[_Folder] = []
        """A heap of the folders to visit."""
        self._linked: set[str] = set()
        """Paths of links to folders."""

    def run(self, root: str) -> None:
        """Search `root` and the folders below it."""
        self._queue.append(_Folder(0, root, os.path.realpath(root), {0}))
        while self._queue:
            self._visit(heapq.heappop(self._queue))

    def _visit(self, folder: _Folder) -> None:
        """Match the names in a folder with the wanted parts of the pattern. Each part is matched
        once."""
        wanted = self._skip_any_folders(folder.wanted)
        matched = self._matched.setdefault(folder.real, set())
        if wanted & matched and folder.path in self._linked:
            self.links.append(folder.path)
        new = wanted - matched
        matched |= new
        for number in new - self._wild:
            self.look_up(folder, self._parts[number], {number})
        if new & self._wild:
            self._list(folder, new & self._wild)

    def _skip_any_folders(self, wanted: set[int]) -> set[int]:
        """Return `wanted` together with the part after each `**` in it, since `**` also matches
        zero folders."""
        skipped = set(wanted)
        for number in wanted & self._any_folders:
            while number in self._any_folders and number < self.last:
                number += 1
                skipped.add(number)
        return skipped

    def _list(self, folder: _Folder, wild: set[int]) -> None:
        """List a folder, and match the names in it with parts that have wildcards."""
        try:
            with os.scandir(folder.path or os.curdir) as entries:
                for entry in entries:
                    matched = self._match(entry.name, wild)
                    if matched:
                        self._enter(folder, entry, matched)
        except _MISSING:
            pass
        except PermissionError as error:
            self.unreadable[folder.path] = error.strerror or str(error)

    def _match(self, name: str, wanted: Iterable[int]) -> set[int]:
        """Return the wanted parts that a name matches."""
        is_hidden = name.startswith(".")
        return {
            number
            for number in wanted
            if not (is_hidden and not self._parts[number].startswith("."))
            and (number in self._any_folders or self._expressions[number].match(name))
        }

    def _enter(self, folder: _Folder, entry: os.DirEntry[str], matched: set[int]) -> None:
        """Add a matching file to the results, or add a folder to the queue.

        Args:
            matched: the parts of the pattern that the name of the entry matches.
        """
        if entry.is_dir(follow_symlinks=False):
            self._push(folder.links, *folder.enter(entry.name), matched)
        elif not entry.is_file(follow_symlinks=False):
            self.look_up(folder, entry.name, matched)
        elif self.last in matched:
            self.files.append(Match(folder.links, *folder.enter(entry.name)))

    def look_up(self, folder: _Folder, name: str, matched: set[int]) -> None:
        """Add a matching file to the results, or add a folder to the queue, given only its name.
        This is for names that were not listed, and for links and special files."""
        path, real = folder.enter(name)
        links = folder.links
        try:
            state = Path(path).lstat()
        except _MISSING:
            return
        except PermissionError as error:
            self.unreadable[path] = error.strerror or str(error)
            return
        is_link = stat.S_ISLNK(state.st_mode)
        if is_link:
            try:
                state = Path(path).stat()
            except OSError as error:
                is_dangling = isinstance(error, _MISSING)
                if not is_dangling and error.errno not in _OF_LINKS:
                    raise
                reason = "a broken symbolic link" if is_dangling else error.strerror
                self.unreadable[path] = f"{reason} (to {Path(path).readlink()})"
                return
            real = os.path.realpath(path)
            links += 1
        if stat.S_ISDIR(state.st_mode):
            if is_link:
                self._linked.add(path)
            self._push(links, path, real, matched)
        elif self.last in matched and stat.S_ISREG(state.st_mode):
            self.files.append(Match(links, path, real))
        elif self.last in matched:
            self.unreadable[path] = SPECIAL

    def _push(self, links: int, path: str, real: str, matched: set[int]) -> None:
        """Add a folder to the queue, to match the names in it with the parts that follow
        `matched`."""
        matches_as_file = self.last in matched & self._wild
        if matches_as_file and not matched & self._any_folders:
            self.folders.append(path)
        # `**` itself continues, since it matches any number of folders
        wanted = matched & self._any_folders
        wanted |= {number + 1 for number in matched - self._any_folders if number < self.last}
        if wanted:
            heapq.heappush(self._queue, _Folder(links, path, real, wanted))
