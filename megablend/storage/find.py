"""Finding the files that match a pattern, and reporting folders and links that could not be read.

Patterns have the same meaning as in `glob`: `*`, `?` and `[]` within a name, `**` for any number of
folders, names that begin with a dot only if the pattern has one. Unlike `glob`, nothing is left out
silently: folders that cannot be listed and dangling links are reported. Links are followed, but
each folder is visited once per part of the pattern, so cyclic links terminate. Folders reached
through fewer links come first, so a file is known by its own name if the pattern matches that.
"""

from __future__ import annotations

import contextlib
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

_ANY_FOLDERS = "**"
_MISSING = (FileNotFoundError, NotADirectoryError)
"""Errors for a path that does not exist."""


class Match(NamedTuple):
    """A file that a pattern matches."""

    links: int
    """Number of symbolic links in its path, from the pattern's first wildcard on."""
    path: str
    real: str
    """The path with all links resolved."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a pattern matches."""

    files: list[Match]
    """Sorted by path."""
    unreadable: dict[str, str]
    """Folders that could not be listed and dangling links -> the reason."""
    folders: tuple[str, ...] = ()
    """Folders whose own path matches a pattern with wildcards, as if they were files; what is in
    them is not listed."""
    links: tuple[str, ...] = ()
    """Links to folders that are listed under another name."""


def find_files(pattern: str) -> Found:
    """Find the files that match `pattern`; a plain path of an existing file matches itself,
    whatever characters it has."""
    folder, name = os.path.split(pattern)
    with contextlib.suppress(OSError):  # a source may have hundreds of thousands of files
        if stat.S_ISREG(Path(pattern).lstat().st_mode):
            return Found([Match(0, pattern, _join(os.path.realpath(folder), name))], {})
    walk = _Walk(_parts_of(pattern))
    walk.look_up(0, folder, os.path.realpath(folder), name, {walk.last})
    if glob.has_magic(pattern) and not walk.files:
        walk = _Walk(_parts_of(pattern))
        walk.run(_root_of(pattern))
    return Found(
        sorted(walk.files, key=lambda match: match.path),
        walk.unreadable,
        tuple(walk.folders),
        tuple(walk.links),
    )


def _root_of(pattern: str) -> str:
    """Return the folder above the first part with a wildcard."""
    parts = PurePath(pattern).parts
    first_wild = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return str(PurePath(*parts[:first_wild])) if first_wild else ""


def _parts_of(pattern: str) -> list[str]:
    """Return the parts of a pattern below `_root_of`: names of folders, and last that of the
    files."""
    parts = PurePath(pattern).parts
    first = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return list(parts[first:])


def _join(folder: str, name: str) -> str:
    """Join a path; far faster than pathlib, for hundreds of thousands of files."""
    return f"{folder.rstrip('/')}/{name}" if folder else name


class _Walk:
    """A walk through folders, in each of which names are matched with some parts of the pattern.
    Parts are given by their numbers."""

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
        self._done: dict[str, set[int]] = {}
        """By the real path of a folder: the parts that its names were matched with."""
        self._queue: list[tuple[int, str, str, set[int]]] = []
        """A heap of folders to visit: links in the path, path, real path, parts to match."""
        self._linked: set[str] = set()
        """Paths of links to folders."""

    def run(self, root: str) -> None:
        """Visit the folders from `root` on."""
        self._queue.append((0, root, os.path.realpath(root), {0}))
        while self._queue:
            self._visit(*heapq.heappop(self._queue))

    def _visit(self, links: int, folder: str, real: str, wanted: set[int]) -> None:
        """Match the names in a folder with the parts `wanted` of the pattern."""
        for first in sorted(wanted & self._any_folders):  # `**` also matches zero folders
            part = first
            while part in self._any_folders and part < self.last:
                part += 1
                wanted = wanted | {part}
        done = self._done.setdefault(real, set())
        if wanted & done and folder in self._linked:
            self.links.append(folder)
        wanted = wanted - done
        done |= wanted
        for i in wanted - self._wild:
            self.look_up(links, folder, real, self._parts[i], {i})
        wild = wanted & self._wild
        if not wild:
            return
        try:
            with os.scandir(folder or os.curdir) as entries:
                for entry in entries:
                    matched = self._match(entry.name, wild)
                    if matched:
                        self._enter(links, folder, real, entry, matched)
        except _MISSING:
            pass
        except OSError as error:
            self.unreadable[folder] = error.strerror or str(error)

    def _match(self, name: str, wanted: Iterable[int]) -> set[int]:
        """Those of the parts `wanted` that a name matches."""
        hidden = name.startswith(".")
        return {
            i
            for i in wanted
            if not (hidden and not self._parts[i].startswith("."))
            and (i in self._any_folders or self._expressions[i].match(name))
        }

    def _enter(
        self, links: int, folder: str, real: str, entry: os.DirEntry[str], matched: set[int]
    ) -> None:
        """Add a file, or continue in a folder, whose name has matched the parts `matched`."""
        if entry.is_symlink():
            self.look_up(links, folder, real, entry.name, matched)
        elif entry.is_dir(follow_symlinks=False):
            self._push(links, _join(folder, entry.name), _join(real, entry.name), matched)
        elif self.last in matched and entry.is_file(follow_symlinks=False):
            self.files.append(Match(links, _join(folder, entry.name), _join(real, entry.name)))

    def look_up(self, links: int, folder: str, real: str, name: str, matched: set[int]) -> None:
        """Do what `_enter` does for a name that was not listed, or that is a link."""
        path = _join(folder, name)
        try:
            state = Path(path).lstat()
        except _MISSING:
            return
        except OSError as error:
            self.unreadable[path] = error.strerror or str(error)
            return
        is_link = stat.S_ISLNK(state.st_mode)
        if is_link:
            try:
                state = Path(path).stat()
            except OSError as error:
                is_dangling = isinstance(error, _MISSING)
                reason = "a symbolic link to nothing" if is_dangling else error.strerror
                self.unreadable[path] = f"{reason}: {Path(path).readlink()}"
                return
        real_path = os.path.realpath(path) if is_link else _join(real, name)
        if stat.S_ISDIR(state.st_mode):
            if is_link:
                self._linked.add(path)
            self._push(links + is_link, path, real_path, matched)
        elif self.last in matched and stat.S_ISREG(state.st_mode):
            self.files.append(Match(links + is_link, path, real_path))

    def _push(self, links: int, folder: str, real: str, matched: set[int]) -> None:
        """Continue in a folder, with the parts after those that its name matched."""
        matches_as_file = self.last in matched & self._wild
        if matches_as_file and not matched & self._any_folders:
            self.folders.append(folder)
        # `**` itself goes on, since it matches any number of folders
        wanted = matched & self._any_folders
        wanted |= {i + 1 for i in matched - self._any_folders if i < self.last}
        if wanted:
            heapq.heappush(self._queue, (links, folder, real, wanted))
