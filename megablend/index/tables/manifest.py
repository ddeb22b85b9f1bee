"""The manifest of a snapshot: its contents, its format version, and the checksums of its tables."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from types import NoneType
from typing import Any

from megablend.errors import CacheError, DamagedCacheError
from megablend.system.atomic_write import checksum, reading
from megablend.system.digest import digest_json
from megablend.system.limited_json import fits, is_count, missing_field, parse_json
from megablend.system.safe_open import get_file_size, read_regular

FORMAT_VERSION = 1
BLOCKS = "blocks.arrow"
CHUNKS = "chunks.arrow"
FILES = "files.arrow"
MANIFEST = "manifest.json"
ROOTS = "roots.json"
SEEN = "seen"
"""File name of the versions of a snapshot's files at the last build; see `file_versions`."""
TOKEN_RANGES = "token_ranges"
"""File name of the smallest and largest token of each file; see `file_table.read_ranges`."""
TABLES = (BLOCKS, CHUNKS, FILES)
_FIELDS = {"format_version": int, "tables": dict}
_TABLE_FIELDS = {"bytes": int, "blake2b": str}
_SNAPSHOT_FIELDS = {"sources": list, "num_files": int, "num_blocks": int, "num_chunks": int}
_COUNTED_TABLES = {"num_files": FILES, "num_blocks": BLOCKS, "num_chunks": CHUNKS}
"""For each count in the manifest, the table that has one row for each counted item."""
_SOURCE_FIELDS = {
    "name": str,
    "format": str,
    "column": (str, NoneType),
    "documents": bool,
    "first_file": int,
    "num_files": int,
    "rows": int,
}
_MAX_SHOWN = 60
"""Maximum number of characters of a wrong value that a message shows."""


def _is_path(value: object) -> bool:
    """Return whether a value is a text that can be a path or URL."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        os.fsencode(value)
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


_ROOTS_FIELDS: dict[str, tuple[str, Any]] = {
    "arrival": ("a whole number", is_count),
    "roots": ("an object of paths", {str: _is_path}),
    "columns": ("an object of text or null", {str: (str, NoneType)}),
    "skipped": ("an object of lists of text", {str: [str]}),
}
"""For each field of roots.json, a description of its content and the expected shape (see
`limited_json.fits`). Releases before 0.2 wrote neither `columns` nor `skipped`."""


def _wrong(path: Path, name: str, value: object, expected: str) -> CacheError:
    text = json.dumps(value)
    shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    return DamagedCacheError.of(f"{path}: damaged (it has {name} {shown}, expected {expected})")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a snapshot. Raises: CacheError if the manifest is missing or damaged, or
    has a newer format version."""
    path = f"{folder}/{MANIFEST}"
    manifest = _parse_json(path, _read_bytes(path))
    version = manifest.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CacheError(
            f"{folder}: written in format version {version} by {manifest.get('written_by', 'a newer megablend')}; "
            f"this megablend reads up to version {FORMAT_VERSION}: upgrade megablend, or build into another cache"
        )
    if manifest.pop("checksum", None) != digest_json(manifest, as_stored=True):
        raise DamagedCacheError.of(f"{folder / MANIFEST}: damaged (its checksum is wrong)")
    _check_fields(folder, manifest, _FIELDS)
    if manifest["format_version"] != FORMAT_VERSION:
        raise DamagedCacheError.of(f"{folder / MANIFEST}: damaged (format version {version})")
    for entry in manifest["tables"].values():
        _check_fields(folder, entry, _TABLE_FIELDS)
    return manifest


def read_snapshot_manifest(folder: Path) -> dict[str, Any]:
    """Read and validate the manifest of a snapshot of the index. Raises: see read_manifest."""
    manifest = read_manifest(folder)
    _check_fields(folder, manifest, _SNAPSHOT_FIELDS)
    _check_fields(folder, manifest["tables"], dict.fromkeys(TABLES, dict))
    for name, table in _COUNTED_TABLES.items():
        # Each row takes more than a byte
        max_rows = manifest["tables"][table]["bytes"]
        if not 0 <= manifest[name] <= max_rows:
            raise _wrong(
                folder / MANIFEST,
                name,
                manifest[name],
                f"0 to {max_rows}, since {table} has {max_rows} bytes",
            )
    first_file = 0
    _check_sources(folder, manifest["sources"])
    for source in manifest["sources"]:
        if source["first_file"] != first_file or source["num_files"] < 0:
            raise DamagedCacheError.of(
                f"{folder / MANIFEST}: damaged (the files of its sources overlap)"
            )
        first_file += source["num_files"]
    if first_file != manifest["num_files"]:
        raise DamagedCacheError.of(
            f"{folder / MANIFEST}: damaged (its sources list {first_file} files, but num_files is "
            f"{manifest['num_files']})"
        )
    return manifest


def _check_sources(folder: Path, sources: Sequence[Any]) -> None:
    """Check the fields of all sources. There may be thousands of sources, so types are checked only
    once for all sources whose fields have the same types."""
    checked = set[tuple[type, ...]]()
    get_fields = itemgetter(*_SOURCE_FIELDS)
    for source in sources:
        types: tuple[type, ...] = ()
        with contextlib.suppress(KeyError, TypeError):
            types = tuple(map(type, get_fields(source)))
        if types not in checked:
            _check_fields(folder, source, _SOURCE_FIELDS)
            checked.add(types)
        owner = source.get("extra_of")
        if not isinstance(owner, str | None):
            raise _wrong(
                folder / MANIFEST, f"extra_of of source {source['name']!r}", owner, "text or null"
            )
        if not is_count(source["rows"]) or source["rows"] >= 1 << 63:
            raise _wrong(
                folder / MANIFEST,
                f"rows of source {source['name']!r}",
                source["rows"],
                "a whole number",
            )


def _check_fields(folder: Path, value: object, fields: Mapping[str, Any]) -> None:
    missing = missing_field(value, fields)
    if missing is not None:
        raise DamagedCacheError.of(f"{folder / MANIFEST}: damaged (it lacks {missing})")


def dump_with_checksum(manifest: Mapping[str, Any]) -> bytes:
    """Serialize a manifest, and add its own checksum."""
    return json.dumps(
        {**manifest, "checksum": digest_json(manifest)}, sort_keys=True, indent=1
    ).encode()


def read_roots(folder: Path) -> dict[str, Any]:
    """Read roots.json: {"arrival": number of the build, "roots": {source name: folder}}. Raises:
    CacheError.

    Release 0.2 and newer also write "columns": {source name: token column, if known} and "skipped":
    {source name: [path: reason]}.
    """
    return parse_roots(folder, _read_bytes(f"{folder}/{ROOTS}"))


def parse_roots(folder: Path, data: bytes) -> dict[str, Any]:
    """Parse the content of a snapshot's roots.json. Raises: CacheError."""
    roots = _parse_json(f"{folder}/{ROOTS}", data)
    stored_checksum = roots.pop("checksum", None)
    has_known_fields = {"arrival", "roots"} <= set(roots) <= set(_ROOTS_FIELDS)
    # Version 0.1.0 wrote no checksum
    if not has_known_fields or stored_checksum not in (None, digest_json(roots, as_stored=True)):
        raise DamagedCacheError.of(f"{folder / ROOTS}: damaged (its checksum is wrong)")
    for name, (expected, shape) in _ROOTS_FIELDS.items():
        if name in roots and not fits(roots[name], shape):
            raise _wrong(folder / ROOTS, name, roots[name], expected)
    return roots


def _read_bytes(path: str) -> bytes:
    try:
        with reading(path, apart_from=(FileNotFoundError,)):
            return read_regular(path)
    except FileNotFoundError as error:
        raise DamagedCacheError.of(f"{path}: cannot be read ({error})") from error


def _parse_json(path: str, data: bytes) -> dict[str, Any]:
    try:
        value = parse_json(data.decode("utf-8"))
    except ValueError as error:
        raise DamagedCacheError.of(f"{path}: cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise DamagedCacheError.of(f"{path}: damaged (not a JSON object)")
    return value


def check_sizes(folder: Path, tables: Mapping[str, Any]) -> None:
    """Check that the sizes of a folder's files agree with its manifest. Raises: CacheError."""
    for name, entry in tables.items():
        with reading(folder):
            size = get_file_size(f"{folder}/{name}") or 0
        if size != entry["bytes"]:
            raise DamagedCacheError.of(
                f"{folder / name}: has {size} bytes, but {entry['bytes']} were committed"
            )


def damaged_tables(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Compare all tables of a folder with its manifest, and return one line for each table that
    differs from the manifest."""
    problems = []
    for name, entry in manifest["tables"].items():
        if Path(name).name != name:
            problems.append(f"{folder / MANIFEST}: damaged: it names {name!r} as a table")
            continue
        path = folder / name
        size = get_file_size(f"{path}")
        if size is None:
            problems.append(
                f"{path}: damaged table: the file is missing ({entry['bytes']} bytes were committed)"
            )
        elif size != entry["bytes"]:  # the file need not be read, however large it is
            problems.append(
                f"{path}: damaged table: it has {size} bytes, but {entry['bytes']} were committed"
            )
        else:
            digest = checksum(path)
            if digest != entry["blake2b"]:
                problems.append(
                    f"{path}: damaged table: its blake2b is {digest}, but {entry['blake2b']} was committed"
                )
    return problems
