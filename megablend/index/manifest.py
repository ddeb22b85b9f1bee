"""The description of a generation: what it holds, in which format version, and the checksums of its tables."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megablend.errors import CacheError
from megablend.index.disk import checksum

FORMAT_VERSION = 1
BLOCKS, CHUNKS, FILES, MANIFEST, ROOTS = "blocks.arrow", "chunks.arrow", "files.arrow", "manifest.json", "roots.json"
TABLES = (BLOCKS, CHUNKS, FILES)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a generation. Raises: CacheError where it is missing, damaged, or of a newer format version."""
    manifest = _read_json(folder / MANIFEST)
    version = manifest.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CacheError(
            f"{folder}: written in format version {version} by {manifest.get('written_by', 'a newer megablend')}; "
            f"this megablend reads up to version {FORMAT_VERSION}: upgrade it, or build into another cache"
        )
    if manifest.pop("checksum", None) != _checksum(manifest):
        raise CacheError(f"{folder / MANIFEST}: damaged (its checksum is wrong); build again to mend it")
    return manifest


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """A manifest as it is stored: with its own checksum."""
    return json.dumps({**manifest, "checksum": _checksum(manifest)}, sort_keys=True, indent=1).encode()


def _checksum(manifest: Mapping[str, Any]) -> str:
    """Hex digest of a manifest without its own checksum."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_roots(folder: Path) -> dict[str, Any]:
    """roots.json: {"arrival": number of the build, "roots": {source name: folder}}. Raises: CacheError.

    Since 0.2 also "columns": {source name: token column, as far as known}, "skipped": {source name: [path: reason]}.
    """
    roots = _read_json(folder / ROOTS)
    if not isinstance(roots.get("arrival"), int) or not isinstance(roots.get("roots"), dict):
        raise CacheError(f"{folder / ROOTS}: damaged; build again to mend it")
    return roots


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CacheError(f"{path}: cannot be read ({error}); build again to mend it") from error
    if not isinstance(value, dict):
        raise CacheError(f"{path}: damaged (not a JSON object); build again to mend it")
    return value


def damaged_tables(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Reads all tables of a generation; one line for each that is not what was committed."""
    problems = []
    for name, entry in manifest["tables"].items():
        path = folder / name
        found = checksum(path) if path.is_file() else "no file"
        if found != entry["blake2b"]:
            problems.append(f"{path}: damaged table: its blake2b is {found}, {entry['blake2b']} was committed")
    return problems
