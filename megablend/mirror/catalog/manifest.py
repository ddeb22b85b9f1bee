"""Manifests: the files that a dataset has at one moment, which make up a revision.

A manifest has a line of JSON [path, location, etag, size] for each file, sorted by path, and is
compressed. Its digest is the name of the revision, which is the same on every machine for the same
files.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit

from megablend.errors import ConfigError, DataError, MissingFileError
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.node.source_reads import make_key
from megablend.storage.base import FileStat, Storage
from megablend.storage.location import find_root, has_wildcard, join, make_relative
from megablend.storage.objects.urls import is_web, split_query
from megablend.system.limited_json import parse_json

_MAX_NAME_BYTES = 100
_MAX_PATH_BYTES = 4000
_MAX_PART_BYTES = 255
_COLLISION_REMEDY = (
    "give one pattern that covers both, such as s3://bucket/**/*.parquet, or make two datasets"
)
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class DataFile(NamedTuple):
    """A file of a revision."""

    path: str
    """Path in the dataset, with slashes."""
    key: FileKey


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
) -> list[DataFile]:
    """List the files that patterns match, sorted by path. A path is relative to the folders of its
    pattern before the first wildcard. Web servers cannot be listed: the path of a URL is relative
    to the folder that it shares with the other URLs of its server, and it is decoded.

    Args:
        sources: patterns, files, folders (of which all files are listed), and URLs.
        check: raises ConfigError for a location that may not be read.
        paths: paths of files that were listed by other patterns, by their locations.

    Raises: ConfigError if a pattern matches nothing, or two files have the same path; DataError if
        the source cannot be read.
    """
    found: dict[str, DataFile] = {}
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
        states = _find_states(view, pattern)
        if not states:
            raise ConfigError(
                f"{source}: matches no files\ncheck the spelling, and that a folder ends with `/`"
            )
        for found_path, state in states:
            location = split_query(found_path)[0]
            check(location)
            path = paths.get(location)
            if path is None:
                path = make_relative(location, root)
                if is_web(location):
                    path = unquote_to_bytes(path).decode("utf-8", "surrogateescape")
            file = DataFile(path, make_key(location, state))
            check_path(file)
            other = found.setdefault(file.path, file)
            if other.key != file.key:
                raise ConfigError(
                    f"{location}: would have the path {file.path!r} in the dataset, as does {other.key.location}\n"
                    f"{_COLLISION_REMEDY}"
                )
    for path, file in found.items():
        if any(str(parent) in found for parent in PurePosixPath(path).parents):
            raise ConfigError(
                f"{file.key.location}: lies below another file of the dataset\n{_COLLISION_REMEDY}"
            )
    return [found[path] for path in sorted(found)]


def _find_states(view: Storage, pattern: str) -> list[tuple[str, FileStat]]:
    """List the files that a pattern matches, and their states."""
    if is_web(pattern) and not has_wildcard(urlsplit(pattern).path):
        # Not by `find`, which also reads the file's head and tail, as other callers need them
        try:
            return [(pattern, view.for_checking().stat(pattern))]
        except MissingFileError:
            return []
    listed = view.find(pattern)
    for folder, problem in listed.unreadable.items():
        raise DataError(folder, f"cannot be listed: {problem}")
    return [(match.path, view.stat(match.path)) for match in listed.files]


def _find_web_roots(sources: Sequence[str]) -> dict[str, str]:
    """For each URL of a web server the folder that it shares with the other URLs of that server."""
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


def pack_manifest(files: Sequence[DataFile]) -> tuple[str, bytes]:
    """Pack files for `unpack_manifest`. Returns: the revision, 32 hex digits; the packed bytes."""
    lines = [json.dumps([path, *key]) for path, key in files]
    text = "\n".join(["1", *lines]).encode()
    return _digest(text), zlib.compress(text)


def unpack_manifest(revision: str, data: bytes) -> list[DataFile]:
    """Unpack the files of a revision. Raises: ValueError if the bytes are damaged, or of another
    revision."""
    try:
        text = zlib.decompress(data)
    except zlib.error as error:
        raise ValueError(f"is damaged: {error}") from None
    if _digest(text) != revision:
        raise ValueError("is damaged: its digest differs from the one in its name")
    files = []
    for line in text.decode().split("\n")[1:]:
        path, location, etag, size = parse_json(line)
        files.append(DataFile(path, FileKey(location, etag, size)))
    return files


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=16).hexdigest()
