"""The available formats, of megablend and of other packages; and detection of a file's format.

Another package adds a format by an entry point of the group `megablend.formats`, whose name is the
format's name and whose value is a `Format` object:

    [project.entry-points."megablend.formats"]
    tfrecord = "my_package:TFRECORD"
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterable

import numpy as np

from megablend.errors import ConfigError, DataError, did_you_mean
from megablend.formats.arrow import ARROW
from megablend.formats.arrow_stream import ARROW_STREAM
from megablend.formats.base import BaseFormat, Format
from megablend.formats.megatron import MEGATRON
from megablend.formats.parquet import PARQUET
from megablend.formats.raw import RAW
from megablend.storage.base import Storage
from megablend.storage.head_and_tail import read_ends
from megablend.storage.prefetched import PrefetchedStorage

ENTRY_POINTS = "megablend.formats"
BUILT_IN: tuple[Format, ...] = (PARQUET, ARROW, ARROW_STREAM, MEGATRON, RAW)
FORMATS: dict[str, Format] = {built_in.name: built_in for built_in in BUILT_IN}
"""Formats by name; formats of other packages are added when they are first needed."""
TEXT_SUFFIXES = tuple(
    name + packed
    for name in (".jsonl", ".ndjson", ".json", ".txt", ".csv", ".tsv")
    for packed in ("", ".gz", ".zst", ".xz")
)
"""Suffixes of text files, which contain no tokens."""
_HEAD_BYTES = 64
"""Number of bytes of a file that are read ahead, once for all formats that share its suffix."""


def find_format(name: str) -> Format | None:
    """Return the format with this name, or None if there is none.

    Raises: ConfigError if a package provides one that cannot be loaded.
    """
    if name not in FORMATS:
        for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=name):
            FORMATS[name] = _load(entry)
            break
    return FORMATS.get(name)


def get_format(name: str) -> Format:
    """Return the format with this name. Raises: ConfigError if there is none (the message lists the
    known names); the errors of `find_format`."""
    known_format = find_format(name)
    if known_format is not None:
        return known_format
    known = list_names()
    hint = did_you_mean(name, known, before="; ") or ";"
    raise ConfigError(f"unknown format {name!r}{hint} known: {', '.join(known)}")


def list_names() -> list[str]:
    """List the names of all formats, including those that are not loaded yet."""
    others = sorted(importlib.metadata.entry_points(group=ENTRY_POINTS).names)
    return list(dict.fromkeys([*FORMATS, *others]))


def list_suffixes() -> list[str]:
    """List the file name suffixes by which formats are recognized, each once.
    Raises: see `find_format`."""
    return list(
        dict.fromkeys(suffix for name in list_names() for suffix in get_format(name).suffixes)
    )


def find_suffix(path: str, suffixes: Iterable[str]) -> str | None:
    """Return the first of `suffixes` with which a path ends, or None if it ends with none of them.
    Callers with many paths should call `list_suffixes` only once, because it looks for installed
    packages each time."""
    return next((suffix for suffix in suffixes if path.endswith(suffix)), None)


def format_of(path: str, storage: Storage) -> Format:
    """Detect the format of a path or glob pattern: by its suffix and, if several formats share this
    suffix, by its content; or as the prefix of a Megatron pair.

    Raises: ConfigError if no format matches (the message lists the known suffixes); the errors of
    `find_format` and `Format.recognizes`.
    """
    candidates = _with_suffix(path, list(FORMATS)) or _with_suffix(path, list_names())
    if len(candidates) > 1:
        # The error is raised for a pattern, or a file that does not exist
        with contextlib.suppress(DataError):
            # Indexing also begins with the file's ends: over a network, they are read only once
            read_ends(storage, path)
            fetched = PrefetchedStorage(storage)
            head_bytes = min(_HEAD_BYTES, storage.stat(path).size)
            fetched.request(path, np.array([0]), np.array([head_bytes]))
            recognizing = [
                candidate for candidate in candidates if candidate.recognizes(path, fetched)
            ]
            candidates = recognizing or candidates
    if candidates:
        return candidates[0]
    missing = [name for name in MEGATRON.files(path) if not storage.glob(name)]
    if not missing:
        return MEGATRON
    half_a_pair = ""
    if len(missing) == 1:
        half_a_pair = f"; {missing[0]} does not exist, but the other file of the pair does"
        remedy = MEGATRON.describe_missing_remedy(missing[0])
        if remedy:
            half_a_pair += f": {remedy}"
    if path.lower().endswith(TEXT_SUFFIXES):
        raise ConfigError(
            f"{path}: contains text, not tokens; for JSON Lines, set `text` to the key that holds the text, and "
            "`tokenizer` (docs/text.md); for other text, write its tokens to Parquet (docs/parquet.md)"
        )
    raise ConfigError(
        f"{path}: unknown kind of file{half_a_pair}; set `format` to one of {', '.join(list_names())}, or use a known "
        f"suffix ({', '.join(list_suffixes())}) or the prefix of a .bin/.idx pair"
    )


def _with_suffix(path: str, names: list[str]) -> list[Format]:
    formats = map(get_format, names)
    return [candidate for candidate in formats if path.lower().endswith(tuple(candidate.suffixes))]


def _load(entry: importlib.metadata.EntryPoint) -> Format:
    try:
        loaded: Format = entry.load()
        if not isinstance(loaded, BaseFormat):
            raise TypeError("it is not an instance of a subclass of BaseFormat")
        if loaded.name != entry.name:
            raise ValueError(f"its name is {loaded.name!r}")
    # Code of another package may raise anything
    except Exception as error:
        raise ConfigError(
            f"format {entry.name!r}: {entry.value!r} cannot be loaded ({type(error).__name__}: {error}); "
            "fix the package that provides it, or uninstall it if no file has this format"
        ) from error
    return loaded
