"""Lists the files of a dataset's sources: their locations, states, and paths in the dataset."""

from __future__ import annotations

import contextlib
import operator
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress, islice, pairwise
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit

import numpy as np

from megablend.errors import ConfigError, DataError, MissingFileError
from megablend.mirror.catalog.manifest import Manifest
from megablend.storage.base import FileStat, Storage
from megablend.storage.file_table import (
    FileTable,
    count_bytes,
    drop_bytes,
    find_table,
    find_texts,
    join_tables,
    list_texts,
    make_table,
    release_memory,
)
from megablend.storage.find import Match
from megablend.storage.local import modification_time
from megablend.storage.location import (
    find_root,
    find_scheme,
    has_wildcard,
    hint_on_bucket,
    join,
    make_relative,
)
from megablend.storage.objects.urls import is_web, split_query

_MAX_NAME_BYTES = 100
_MAX_PATH_BYTES = 4000
_MAX_PART_BYTES = 255
_COLLISION_REMEDY = (
    "give one pattern that covers both, such as s3://bucket/**/*.parquet, or make two datasets"
)
_COLUMNS = ("path", "location", "etag", "size")
"""The columns of a table of files: those of a FileTable, and the path of each file in the
dataset."""
_SUSPECT = r"[\x00-\x1f\x7f]|\xC2[\x80-\x9F]|(^|/)(\.|/|$)"
"""Matches control characters in bytes of UTF-8, and parts of a path that are empty or begin with a
dot."""
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def check_name(name: str) -> None:
    """Check that the name of a dataset is valid. Raises: ConfigError."""
    size = len(name.encode("utf-8", "surrogateescape"))
    if (
        not 0 < size <= _MAX_NAME_BYTES
        or name in (".", "..")
        or set(name) & set("/@")
        or _CONTROLS.search(name)
    ):
        raise ConfigError(
            f"{name!r} is not a valid dataset name\n"
            f"choose 1 to {_MAX_NAME_BYTES} bytes without `/`, `@` and control characters"
        )


def list_files(
    storage: Storage,
    sources: Sequence[str],
    check: Callable[[str], None],
    paths: Mapping[str, str] = MappingProxyType({}),
) -> Manifest:
    """List the files of sources. The path of a file in the dataset is relative to the last folder
    of its pattern before the first wildcard. Web servers cannot be listed, so their files must be
    given as URLs. The path of such a file is decoded, and is relative to the folder that contains
    all URLs of its server.

    Args:
        sources: patterns, files, folders (all files in them are listed), and URLs.
        check: raises ConfigError for a location that may not be read.
        paths: the paths of files by location, if they are known from an earlier listing with other
            patterns.

    Raises: ConfigError if a pattern matches nothing, or two files have the same path; DataError if
        the source cannot be read.
    """
    view = storage.for_reading()
    web_roots = _find_web_roots(sources)
    parts = list[FileTable]()
    for source in sources:
        pattern = _find_pattern(source, view, check)
        root = web_roots.get(source) or find_root([pattern])
        parts.append(_list_source(view, pattern, root, check, paths))
        if not len(parts[-1]):
            raise ConfigError(
                f"{source}: matches no files\ncheck the spelling; the name of a folder must end with `/`"
                f"{hint_on_bucket(source)}"
            )
    files, texts = _sort(join_tables([make_table([], _COLUMNS), *parts]))
    _check_paths(files, texts)
    del parts, texts
    release_memory()
    manifest = Manifest.of_table(files)
    del files
    release_memory()
    return manifest


def _find_pattern(source: str, storage: Storage, check: Callable[[str], None]) -> str:
    """Check that a source may be read, and return a pattern that matches its files. For a folder,
    this matches all files in the folder; otherwise it is the source itself. Raises: see
    `list_files`."""
    plain = split_query(source)[0]
    # A web server's URL names one file, even if it has characters of a wildcard
    check(find_root([source]) if has_wildcard(source) and not is_web(source) else plain)
    if plain.endswith("/") or (not has_wildcard(source) and storage.is_folder(source)):
        return join(source.rstrip("/"), "**/*")
    return source


def _list_source(
    view: Storage,
    pattern: str,
    root: str,
    check: Callable[[str], None],
    paths: Mapping[str, str],
) -> FileTable:
    """Return a table with `_COLUMNS` of the files that a pattern matches.

    Args:
        root: the folder to which the paths of the files are relative.
        check, paths: see `list_files`.
    """
    table = None if paths else find_table(view, pattern)
    if table is None:
        return make_table(_find_each(view, pattern, root, check, paths), _COLUMNS)
    return _place_table(table, root, check)


def _find_each(
    view: Storage,
    pattern: str,
    root: str,
    check: Callable[[str], None],
    paths: Mapping[str, str],
) -> Iterator[tuple[str, str, str, int]]:
    """Find files one by one, and yield the values of `_COLUMNS` for each; see `_list_source`."""
    is_url = is_web(pattern)
    is_mounted = not find_scheme(pattern)
    folders: dict[str, _Folder] = {}
    for match, state in _find_files(view, pattern):
        location = split_query(match.path)[0] if is_url else match.path
        parent, _, name = location.rpartition("/")
        folder = folders.get(parent)
        if folder is None:
            folder = folders[parent] = _Folder.of(parent, root, check)
        # A prefix may name a file, a link may lead elsewhere, and some names are never allowed
        if not folder.is_allowed or match.links or "?" in name or "\0" in name:
            check(location)
        path = paths.get(location) or folder.path + name
        if is_url and location not in paths:
            path = unquote_to_bytes(path).decode("utf-8", "surrogateescape")
        etag = modification_time(state.etag) if is_mounted else state.etag
        yield path, location, etag, state.size


def _place_table(table: FileTable, root: str, check: Callable[[str], None]) -> FileTable:
    """Return files of a bucket with their paths relative to the folder `root`. Raises: the errors
    of `check`, for files that may not be read."""
    locations = table["location"]
    # If a folder may be read, only names with these characters may still be refused
    for location in list_texts(locations.filter(find_texts(locations, r"[?\x00]"))):
        check(location)
    skip = len(f"{root.rstrip('/')}/".encode())
    return table.append_column("path", drop_bytes(locations, skip)).select(_COLUMNS)


def _sort(files: FileTable) -> tuple[FileTable, list[str]]:
    """Sort files by path, and drop duplicates. Returns: the files, and their paths as a list.
    Raises: ConfigError if two different files have the same path."""
    texts = list_texts(files["path"])
    if all(map(operator.lt, texts, islice(texts, 1, None))):
        return files, texts
    order = sorted(range(len(texts)), key=texts.__getitem__)
    files = files.take(order)
    texts = [texts[row] for row in order]
    # If a file was listed twice, its last state counts
    is_kept = np.ones(len(texts), np.bool_)
    is_kept[:-1] = [path != following for path, following in pairwise(texts)]
    dropped = np.flatnonzero(~is_kept)
    first = list_texts(files["location"].take(dropped))
    second = list_texts(files["location"].take(dropped + 1))
    for row, location, other in zip(dropped.tolist(), first, second, strict=True):
        if location != other:
            raise ConfigError(
                f"{other}: would have the same path in the dataset as {location}, {texts[row]!r}\n"
                f"{_COLLISION_REMEDY}"
            )
    return files.filter(is_kept), list(compress(texts, is_kept))


def _check_paths(files: FileTable, texts: Sequence[str]) -> None:
    """Check that a folder can contain files with all of these paths. Raises: ConfigError.

    Args:
        texts: the paths of the files, sorted.
    """
    is_suspect = find_texts(files["path"], _SUSPECT) | (
        count_bytes(files["path"]) > _MAX_PART_BYTES
    )
    locations = list_texts(files["location"].filter(is_suspect))
    for path, location in zip(compress(texts, is_suspect), locations, strict=True):
        _check_path(path, location)
    folders = set[str]()
    inner = {text.rpartition("/")[0] for text in texts}
    while inner:
        folders |= inner
        inner = {folder.rpartition("/")[0] for folder in inner} - folders
    for folder in sorted(folders - {""}):
        row = bisect_left(texts, folder)
        if row < len(texts) and texts[row] == folder:
            below = bisect_left(texts, f"{folder}/")
            (location,) = list_texts(files["location"], below, below + 1)
            raise ConfigError(
                f"{location}: would be below {folder!r} in the dataset, where another file has that path\n{_COLLISION_REMEDY}"
            )


class _Folder(NamedTuple):
    """The properties that all files of a folder of a source have in common."""

    path: str
    """The prefix of the files' paths in the dataset. It is empty or ends with a slash."""
    is_allowed: bool
    """Whether the node's settings allow files in this folder to be read."""

    @classmethod
    def of(cls, path: str, root: str, check: Callable[[str], None]) -> _Folder:
        """Return the folder at location `path`. Paths in the dataset are relative to `root`."""
        try:
            check(f"{path}/")
            is_allowed = True
        except ConfigError:
            is_allowed = False
        return cls(make_relative(f"{path}/x", root)[:-1], is_allowed)


def _find_files(view: Storage, pattern: str) -> Iterator[tuple[Match, FileStat]]:
    """Yield each file that a pattern matches, with the file's state. Raises: DataError if the
    source cannot be read."""
    if is_web(pattern) and not has_wildcard(urlsplit(pattern).path):
        # `find` would also read the file's head and tail, which its other callers need
        with contextlib.suppress(MissingFileError):
            yield Match(0, pattern, pattern), view.for_checking().stat(pattern)
        return
    listing = view.find(pattern)
    for folder, problem in listing.unreadable.items():
        raise DataError(
            folder, f"cannot be listed: {problem}; make the folder readable for this user"
        )
    # Taken out one by one: a million matches take as much memory as the lines made of them
    matches = listing.files[::-1]
    listing.files.clear()
    while matches:
        match = matches.pop()
        yield match, view.stat(match.path)


def _find_web_roots(sources: Sequence[str]) -> dict[str, str]:
    """Return the folder of each URL in the sources. It contains all URLs of the same server."""
    by_server: dict[str, list[str]] = {}
    for source in filter(is_web, sources):
        server = "/".join(source.split("/", 3)[:3])
        by_server.setdefault(server, []).append(source)
    roots = dict[str, str]()
    for urls in by_server.values():
        root = find_root([split_query(url)[0] for url in urls])
        roots |= dict.fromkeys(urls, root)
    return roots


def _check_path(path: str, location: str) -> None:
    """Check that a file can have this path in the dataset. Raises: ConfigError."""
    parts = path.split("/")
    sizes = [len(part.encode("utf-8", "surrogateescape")) for part in parts]
    if (
        {"", ".", ".."} & set(parts)
        or _CONTROLS.search(path)
        or max(sizes) > _MAX_PART_BYTES
        or sum(sizes) > _MAX_PATH_BYTES
    ):
        raise ConfigError(
            f"{location}: would have the path {path!r} in the dataset, which is not valid\n"
            "rename it: each part between slashes must have 1 to 255 bytes, must not be `.` or `..`, and must not "
            "contain control characters"
        )
