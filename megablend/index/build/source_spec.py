"""A source during indexing: what the config requests, which files were found, and which columns to
index."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megablend.config.read_spec import ReadSpec
from megablend.errors import ConfigError, MissingFileError
from megablend.formats import get_format
from megablend.formats.base import Format
from megablend.index.tables.file_versions import join_etags
from megablend.storage import location
from megablend.storage.base import Storage
from megablend.storage.parallel_map import parallel_map

SEPARATOR = "//"
"""Separates the source's name and the column's name in the full name of an extra column. Source
names contain no slash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A data file that was found."""

    name: str
    """The file's name, relative to the source's root."""
    path: str
    size: int
    """Size of the data file in bytes."""
    etag: str
    """A text that identifies the version of the file. It differs whenever the data file, or another
    file that belongs to it, may have changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """A source, or one of its extra columns, during indexing: what the config requests, and the
    files once they have been found."""

    name: str
    patterns: tuple[str, ...]
    """Absolute paths, globs, or Megatron prefixes; empty if the files are known from an index."""
    read: ReadSpec
    """How the tokens, or the numbers of the extra column, are read. The format is None until
    `find_source` has determined it."""
    extra_columns: tuple[str, ...] = ()
    """Names of the extra columns, which have a number for each token."""
    skip_unreadable: bool | None = None
    """Whether to leave out paths that cannot be read, and report them: folders that cannot be
    listed, dangling links, pipes, sockets, devices, and files without read permission. None if the
    caller has no such setting."""
    place: str = ""
    """The source's place in the config (`demo.yaml:12: sources[1]`), for messages."""
    root: str = ""
    """The folder to which the names of the files are relative."""
    paths: tuple[str, ...] = ()
    """Paths of the source's files, sorted; empty until they are found."""
    files: tuple[SourceFile, ...] = ()
    """The source's files, sorted by name; empty until `with_files` is called."""
    skipped: tuple[str, ...] = ()
    """Paths that are left out because they cannot be read, each with the reason."""
    note: str | None = None
    """A note about files that were found under several names, if any."""
    is_extra: bool = False
    """Whether this object describes an extra column of the source; see `list_columns`."""

    @property
    def column_name(self) -> str:
        """The name of the column in the cache: the source's name for the tokens, `source//column`
        for an extra column."""
        return f"{self.name}{SEPARATOR}{self.read.column}" if self.is_extra else self.name

    def complaint(self, problem: object) -> ConfigError:
        """Return an error for the source, with its place in the config."""
        prefix = f"{self.place}: " if self.place else ""
        return ConfigError(f"{prefix}source {self.name!r}: {problem}")

    @property
    def kind(self) -> Format:
        """The format of the source's files. Raises: see `get_format`."""
        assert self.read.format is not None
        return get_format(self.read.format)

    def stat(self, path: str, storage: Storage) -> SourceFile:
        """Return the size and version of one of the source's files. Raises: MissingFileError,
        ConfigError."""
        try:
            return stat_file(self.kind.files(path), self.root, storage)
        except MissingFileError as error:
            remedy = self.kind.describe_missing_remedy(error.path)
            if remedy:
                raise MissingFileError(error.path, f"{error.problem}; {remedy}") from error
            raise

    def stat_files(self, paths: Sequence[str], storage: Storage) -> list[SourceFile]:
        """Return the sizes and versions of files of the source. Over a network, many files are
        requested at a time. Raises: see `stat`."""
        threads = storage.limits(paths[0]).max_files if paths else 1
        return parallel_map(lambda path: self.stat(path, storage), paths, threads)

    def with_files(self, files: Iterable[SourceFile]) -> SourceSpec:
        """Return the source with its files. `files` are the results of `stat` for all paths, in any
        order."""
        by_name = {file.name: file for file in files}
        return dataclasses.replace(self, files=tuple(by_name[name] for name in sorted(by_name)))


def list_columns(sources: Sequence[SourceSpec]) -> list[SourceSpec]:
    """Return all columns to index, in the order of the index: the tokens of each source, then the
    extra columns of each source, sorted by name."""
    columns = list(sources)
    for source in sources:
        for name in sorted(source.extra_columns):
            read = dataclasses.replace(
                source.read, column=name, count_documents=True, allow_float=True
            )
            columns.append(dataclasses.replace(source, read=read, is_extra=True))
    return columns


def stat_file(paths: Sequence[str], root: str, storage: Storage) -> SourceFile:
    """Return the size and version of a data file, the first of `paths`. The other paths are files
    that belong to it. Raises: MissingFileError, ConfigError."""
    name = location.make_relative(paths[0], root)
    # Bytes that are not valid UTF-8 are not printable either
    if not name.isprintable():
        raise ConfigError(
            f"{paths[0]!r}: its name has characters that are not printable or not valid UTF-8; rename it"
        )
    stats = [storage.stat(path) for path in paths]
    return SourceFile(name=name, path=paths[0], size=stats[0].size, etag=join_etags(stats))
