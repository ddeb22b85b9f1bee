"""Which files a source consists of: patterns to files, each with a name relative to the source's root.

Names are relative so that data which moved is still the same data. The root is the folder that all patterns share
before their first wildcard. Files are sorted by name: the order in which patterns are written makes no difference.
"""

from __future__ import annotations

import dataclasses
import difflib
import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megablend.errors import ConfigError
from megablend.formats import FORMATS, format_of
from megablend.formats.base import Format
from megablend.index.seen import join_etags
from megablend.storage import storage_for


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """Files to be read as one dataset, as asked for."""

    name: str
    patterns: tuple[str, ...]
    """Absolute paths, globs, or Megatron prefixes."""
    column: str | None
    """Dotted path of the token column; None takes the only one there is."""
    documents: bool
    """Documents must be counted exactly, even where that needs a scan."""
    block_bytes: int
    """Rough size of a block where the format leaves it open (`.bin`)."""
    extra_of: str | None = None
    """Name of the source whose tokens this column's numbers belong to; None where it holds tokens itself."""
    place: str = ""
    """Where it is asked for (`demo.yaml:12: sources[1]`), for messages."""

    def complaint(self, problem: object) -> ConfigError:
        """An error about what was asked for, with the place where it was."""
        return ConfigError(
            f"{f'{self.place}: ' if self.place else ''}source {(self.extra_of or self.name)!r}: {problem}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A data file as it was found."""

    name: str
    """Relative to the source's root."""
    path: str
    size: int
    """Bytes of the data file."""
    etag: str
    """Changes whenever one of the files that it stands for may have changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceListing:
    """A source and its files."""

    spec: SourceSpec
    format: str
    root: str
    files: tuple[SourceFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePaths:
    """A source and the paths of its files, of which nothing else is known yet."""

    spec: SourceSpec
    format: str
    root: str
    paths: tuple[str, ...]

    def stat(self, path: str) -> SourceFile:
        """One of the files. Raises: MissingFileError, ConfigError."""
        return stat_file(FORMATS[self.format].files(path), self.root)

    def listing(self, files: Iterable[SourceFile]) -> SourceListing:
        """The source with its files: what `stat` found of each path, in any order."""
        by_name = {file.name: file for file in files}
        return SourceListing(
            spec=self.spec, format=self.format, root=self.root, files=tuple(by_name[name] for name in sorted(by_name))
        )


def list_source(spec: SourceSpec) -> SourceListing:
    """Find and stat the files of a source. Raises: as `find_source`; MissingFileError."""
    found = find_source(spec)
    return found.listing(map(found.stat, found.paths))


def find_source(spec: SourceSpec) -> SourcePaths:
    """Find the files of a source.

    Raises: ConfigError where a pattern matches nothing, or files are of several formats.
    """
    paths: dict[str, None] = {}
    formats: dict[str, str] = {}
    for pattern in spec.patterns:
        for path in _matches(spec, pattern):
            formats.setdefault(_format(spec, path).name, path)
            paths[path] = None
    if len(formats) > 1:
        found = ", ".join(f"{name} ({path})" for name, path in sorted(formats.items()))
        raise spec.complaint(f"mixes formats: {found}; make each format a source of its own")
    kind = FORMATS[next(iter(formats))]
    return SourcePaths(
        spec=dataclasses.replace(spec, documents=spec.documents or kind.documents_known),
        format=kind.name,
        root=source_root(spec.patterns),
        paths=tuple(paths),
    )


def source_root(patterns: Sequence[str]) -> str:
    """The folder that all patterns share before their first wildcard."""
    return os.path.commonpath([_folder(pattern) for pattern in patterns])


def _folder(pattern: str) -> str:
    path = Path(pattern)
    while glob.has_magic(str(path.parent)):
        path = path.parent
    return str(path.parent)


def _matches(spec: SourceSpec, pattern: str) -> list[str]:
    storage = storage_for(pattern)
    found = storage.glob(pattern)
    if not found:  # a Megatron prefix is the name of no file, but stands for two
        stands_for = [[storage.glob(path) for path in kind.files(pattern)] for kind in FORMATS.values()]
        found = next((paths[0] for paths in stands_for if all(paths)), [])
    if not found:
        inside = [] if glob.has_magic(pattern) else storage.glob(str(Path(pattern) / "*"))
        if inside:
            raise spec.complaint(f"{pattern} is a folder; give its files, such as {pattern}/*{Path(inside[0]).suffix}")
        nearest = difflib.get_close_matches(pattern, storage.glob(str(Path(pattern).parent / "*")), n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise spec.complaint(f"{pattern} matches no file{hint}")
    return found


def _format(spec: SourceSpec, path: str) -> Format:
    try:
        return format_of(path)
    except ConfigError as error:
        raise spec.complaint(error) from error


def _relative(path: str, root: str) -> str:
    """A path relative to the root. Of a plain path below it, what is behind the root: relpath takes much longer."""
    inside = path[len(root) + 1 :]
    if path.startswith(f"{root}/") and os.path.normpath(inside) == inside and not inside.startswith(("..", "/")):
        return inside
    return os.path.relpath(path, root)


def stat_file(paths: Sequence[str], root: str) -> SourceFile:
    """A data file (first of `paths`) with all that it stands for. Raises: MissingFileError, ConfigError."""
    name = _relative(paths[0], root)
    if not name.isprintable():  # a byte that is no UTF-8 is not printable either
        raise ConfigError(f"{paths[0]!r}: its name has characters that no table can hold; rename it")
    stats = [storage_for(path).stat(path) for path in paths]
    return SourceFile(
        name=name,
        path=paths[0],
        size=stats[0].size,
        etag=join_etags(stats),
    )
