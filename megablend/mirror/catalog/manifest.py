"""The files of a dataset at a moment: its revision.

A manifest is a line of JSON [path, location, etag, size] for each file, sorted by path, compressed.
Its digest is the name of the revision: the same files have the same one on every machine.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from megablend.errors import ConfigError, DataError
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.node.source_reads import make_key
from megablend.storage.base import Storage
from megablend.storage.location import find_root, has_wildcard, join, make_relative
from megablend.storage.objects.urls import split_query
from megablend.system.limited_json import parse_json

_MOST_NAME_BYTES = 100
_MOST_PATH_BYTES = 4000
_MOST_PART_BYTES = 255
_APART = "give one pattern that covers both, such as s3://bucket/**/*.parquet, or make two datasets"
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class DataFile(NamedTuple):
    """A file of a revision."""

    path: str
    """Within the dataset, with slashes."""
    key: FileKey


def check_name(name: str) -> None:
    """Raises: ConfigError if a dataset cannot have this name."""
    size = len(name.encode("utf-8", "surrogateescape"))
    if (
        not 0 < size <= _MOST_NAME_BYTES
        or name in (".", "..")
        or set(name) & set("/@")
        or _CONTROLS.search(name)
    ):
        raise ConfigError(
            f"{name!r} cannot be a dataset's name\n"
            f"choose 1 to {_MOST_NAME_BYTES} bytes without `/`, `@` and control characters"
        )


def list_files(
    storage: Storage, sources: Sequence[str], check: Callable[[str], None]
) -> list[DataFile]:
    """The files of some patterns, sorted by path: each relative to what its pattern has before the
    first wildcard.

    Args:
        sources: patterns, files, and folders, with all that is in them.
        check: raises ConfigError for a location that may not be read.

    Raises: ConfigError if a pattern matches nothing, or two files have the same path; DataError if
        the source cannot be read.
    """
    found: dict[str, DataFile] = {}
    view = storage.for_reading()
    for source in sources:
        pattern = source
        check(split_query(source)[0] if not has_wildcard(source) else find_root([source]))
        if source.endswith("/") or (not has_wildcard(source) and view.is_folder(source)):
            pattern = join(source.rstrip("/"), "**/*")
        root = find_root([pattern])
        listed = view.find(pattern)
        for folder, problem in listed.unreadable.items():
            raise DataError(folder, f"cannot be listed: {problem}")
        if not listed.files:
            raise ConfigError(
                f"{source}: matches no files\ncheck the spelling, and that a folder ends with `/`"
            )
        for match in listed.files:
            location = split_query(match.path)[0]
            check(location)
            file = DataFile(
                make_relative(location, root), make_key(location, view.stat(match.path))
            )
            check_path(file)
            other = found.setdefault(file.path, file)
            if other.key != file.key:
                raise ConfigError(
                    f"{location}: would have the path {file.path!r} in the dataset, as does {other.key.location}\n"
                    f"{_APART}"
                )
    for path, file in found.items():
        if any(str(parent) in found for parent in PurePosixPath(path).parents):
            raise ConfigError(
                f"{file.key.location}: lies below another file of the dataset\n{_APART}"
            )
    return [found[path] for path in sorted(found)]


def check_path(file: DataFile) -> None:
    """Raises: ConfigError if a file of a folder cannot have its path."""
    parts = file.path.split("/")
    sizes = [len(part.encode("utf-8", "surrogateescape")) for part in parts]
    if (
        {"", ".", ".."} & set(parts)
        or _CONTROLS.search(file.path)
        or max(sizes) > _MOST_PART_BYTES
        or sum(sizes) > _MOST_PATH_BYTES
    ):
        raise ConfigError(
            f"{file.key.location}: its path in the dataset would be {file.path!r}\n"
            "rename it: each part between slashes must have 1 to 255 bytes, must not be `.` or `..`, and must not "
            "contain control characters"
        )


def pack_manifest(files: Sequence[DataFile]) -> tuple[str, bytes]:
    """The revision, 32 hex digits; what `unpack_manifest` reads."""
    lines = [json.dumps([path, *key]) for path, key in files]
    text = "\n".join(["1", *lines]).encode()
    return _digest(text), zlib.compress(text)


def unpack_manifest(revision: str, data: bytes) -> list[DataFile]:
    """The files of a revision. Raises: ValueError if it is another one, or damaged."""
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
