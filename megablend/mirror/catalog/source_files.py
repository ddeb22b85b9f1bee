"""The files of a dataset's sources: where they are, their states, and their paths in the dataset."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit

from megablend.errors import ConfigError, DataError, MissingFileError
from megablend.mirror.catalog.manifest import DataFile, Manifest, pack_line, unpack_line
from megablend.mirror.node.source_reads import make_key
from megablend.storage.base import FileStat, Storage
from megablend.storage.find import Match
from megablend.storage.location import find_root, has_wildcard, join, make_relative
from megablend.storage.objects.urls import is_web, split_query

_MAX_NAME_BYTES = 100
_MAX_PATH_BYTES = 4000
_MAX_PART_BYTES = 255
_COLLISION_REMEDY = (
    "give one pattern that covers both, such as s3://bucket/**/*.parquet, or make two datasets"
)
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_USUAL_PATH = re.compile(r"(?:/(?!\.{1,2}(?:/|\Z))[ -.0-~]{1,255})+")
"""A slash, and a path that certainly can be in a folder, unless it is too long."""


def check_name(name: str) -> None:
    """Check a dataset's name. Raises: ConfigError if it is not valid."""
    size = len(name.encode("utf-8", "surrogateescape"))
    if (
        not 0 < size <= _MAX_NAME_BYTES
        or name in (".", "..")
        or set(name) & set("/@")
        or _CONTROLS.search(name)
    ):
        raise ConfigError(
            f"{name!r} cannot be a dataset's name\n"
            f"choose 1 to {_MAX_NAME_BYTES} bytes without `/`, `@` and control characters"
        )


def list_files(
    storage: Storage,
    sources: Sequence[str],
    check: Callable[[str], None],
    paths: Mapping[str, str] = MappingProxyType({}),
) -> Manifest:
    """List the files that patterns match. The path of a file is relative to the folder of its
    pattern before the first wildcard. Web servers cannot be listed: the path of a URL is relative
    to the folder that it shares with the other URLs of its server, and is decoded.

    Args:
        sources: patterns, files, folders (of which all files are listed), and URLs.
        check: raises ConfigError for a location that may not be read.
        paths: paths of files that were listed by other patterns, by their locations.

    Raises: ConfigError if a pattern matches nothing, or two files have the same path; DataError if
        the source cannot be read.
    """
    lines: dict[str, bytes] = {}  # the line of each file, by its path in the dataset
    view = storage.for_reading()
    web_roots = _find_web_roots(sources)
    for source in sources:
        pattern = source
        plain = split_query(source)[0]
        # A web server's URL names one file, even if it has characters of a wildcard
        check(find_root([source]) if has_wildcard(source) and not is_web(source) else plain)
        if plain.endswith("/") or (not has_wildcard(source) and view.is_folder(source)):
            pattern = join(source.rstrip("/"), "**/*")
        root = web_roots.get(source) or find_root([pattern])
        is_url = is_web(source)
        folders: dict[str, _Folder] = {}
        for match, state in _find_files(view, pattern):
            location = split_query(match.path)[0] if is_url else match.path
            place, _, name = location.rpartition("/")
            folder = folders.get(place)
            if folder is None:
                folder = folders[place] = _Folder.of(place, root, check)
            # A prefix may name a file, a link may lead elsewhere, and some names are never allowed
            if not folder.is_allowed or match.links or "?" in name or "\0" in name:
                check(location)
            path = paths.get(location) or folder.path + name
            if is_url and location not in paths:
                path = unquote_to_bytes(path).decode("utf-8", "surrogateescape")
            key = make_key(location, state)
            if len(path) > _MAX_PATH_BYTES or not _USUAL_PATH.fullmatch(f"/{path}"):
                check_path(DataFile(path, key))
            line = pack_line(path, key)
            other = lines.setdefault(path, line)
            if other != line:
                raise ConfigError(
                    f"{location}: would have the path {path!r} in the dataset, as does "
                    f"{unpack_line(other).key.location}\n{_COLLISION_REMEDY}"
                )
        if not folders:
            raise ConfigError(
                f"{source}: matches no files\ncheck the spelling, and that a folder ends with `/`"
            )
    _check_nesting(lines)
    # Taken out one by one, so that there are never two copies of all lines
    return Manifest.of_lines(lines.pop(path) for path in sorted(lines))


class _Folder(NamedTuple):
    """The properties that all files of a folder of a source have in common."""

    path: str
    """The beginning of the files' paths in the dataset: empty, or ends with a slash."""
    is_allowed: bool
    """Whether files may be read, as far as that depends on the folder."""

    @classmethod
    def of(cls, place: str, root: str, check: Callable[[str], None]) -> _Folder:
        """Return the folder at a location, for paths relative to `root`."""
        try:
            check(f"{place}/")
            is_allowed = True
        except ConfigError:
            is_allowed = False
        return cls(make_relative(f"{place}/x", root)[:-1], is_allowed)


def _find_files(view: Storage, pattern: str) -> Iterator[tuple[Match, FileStat]]:
    """Find the files that a pattern matches, and their states. Raises: DataError if a folder cannot
    be read."""
    if is_web(pattern) and not has_wildcard(urlsplit(pattern).path):
        # `find` would also read the file's head and tail, which its other callers need
        with contextlib.suppress(MissingFileError):
            yield Match(0, pattern, pattern), view.for_checking().stat(pattern)
        return
    found = view.find(pattern)
    for folder, problem in found.unreadable.items():
        raise DataError(folder, f"cannot be listed: {problem}")
    # Taken out one by one: a million matches take as much memory as the lines made of them
    matches = found.files[::-1]
    found.files.clear()
    while matches:
        match = matches.pop()
        yield match, view.stat(match.path)


def _check_nesting(lines: Mapping[str, bytes]) -> None:
    """Check that no file has the path of another one's folder. Raises: ConfigError.

    Args:
        lines: the line of each file, by its path.
    """
    folders = set[str]()
    inner = {path.rpartition("/")[0] for path in lines}
    while inner:
        folders |= inner
        inner = {folder.rpartition("/")[0] for folder in inner} - folders
    for folder in sorted(folders & lines.keys()):
        path = next(each for each in lines if each.startswith(f"{folder}/"))
        location = unpack_line(lines[path]).key.location
        raise ConfigError(
            f"{location}: lies below another file of the dataset\n{_COLLISION_REMEDY}"
        )


def _find_web_roots(sources: Sequence[str]) -> dict[str, str]:
    """Return for each URL of a web server the folder that it shares with the server's other URLs."""
    by_server: dict[str, list[str]] = {}
    for source in filter(is_web, sources):
        server = "/".join(source.split("/", 3)[:3])
        by_server.setdefault(server, []).append(source)
    roots = dict[str, str]()
    for urls in by_server.values():
        root = find_root([split_query(url)[0] for url in urls])
        roots |= dict.fromkeys(urls, root)
    return roots


def check_path(file: DataFile) -> None:
    """Check a file's path in the dataset. Raises: ConfigError if no file of a folder can have
    it."""
    parts = file.path.split("/")
    sizes = [len(part.encode("utf-8", "surrogateescape")) for part in parts]
    if (
        {"", ".", ".."} & set(parts)
        or _CONTROLS.search(file.path)
        or max(sizes) > _MAX_PART_BYTES
        or sum(sizes) > _MAX_PATH_BYTES
    ):
        raise ConfigError(
            f"{file.key.location}: its path in the dataset would be {file.path!r}\n"
            "rename it: each part between slashes must have 1 to 255 bytes, must not be `.` or `..`, and must not "
            "contain control characters"
        )
