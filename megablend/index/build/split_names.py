"""Use the names of files and folders to recognise splits of a dataset, copies of its rows, and old
versions of its rows. A source should contain only one of these."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice, product
from pathlib import PurePath

from megablend.errors import ConfigError, DataError
from megablend.storage import location
from megablend.storage.base import Storage

_SPLIT_WORD = re.compile(
    r"(?<![a-z0-9])(validation|valid|val|train|test|eval|dev)(?![a-z])", re.IGNORECASE
)
"""Matches the name of a split as a word in the name of a folder or file, such as `train_sft`,
`train-00000-of-00002.parquet` or `fineweb_val_000001.bin`."""
_CACHE_NAME = re.compile(r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow")
"""Matches the names of files in which Hugging Face's `map`, `filter` and `shuffle` cache their
results, in the folder of the dataset that they read."""
_TABLE_LOGS = {
    "a Delta": "_delta_log/*.json",
    "an Iceberg": "metadata/*.metadata.json",
    "a Hudi": ".hoodie/hoodie.properties",
    "a Paimon": "snapshot/LATEST",
}
"""For each table format, with its article, a pattern for metadata files that all its tables have."""
_MAX_TOPS = 32
"""Maximum number of folders in which these files are searched for: each is four requests to an
object store."""
_UUID = re.compile(r"-[0-9A-Fa-f]{4}(-[0-9A-Fa-f]{4}){2}-[0-9A-Fa-f]{12}")
"""Matches the end of a UUID, which the names of all data files of these tables contain. The
beginning is left out so that the expression starts with a literal `-`, for which a search is
fast."""


def list_doubts(
    root: str, patterns: Iterable[str], paths: Collection[str], storage: Storage
) -> list[str]:
    """Return warnings if `paths`, the files that match the patterns of a source, may not be the
    right files."""
    doubts = [describe_mixed_splits(root, paths), describe_cached_copies(paths)]
    # Files that are listed one by one may be the current files of a table
    if any(map(location.has_wildcard, patterns)):
        doubts.append(describe_table(root, paths, storage))
    return list(filter(None, doubts))


def describe_mixed_splits(root: str, paths: Iterable[str]) -> str | None:
    """Return a warning if the names of files and folders suggest that the files of a source belong
    to several splits; otherwise None."""
    first_paths = dict[str, str]()
    for path in sorted(paths):
        match = _SPLIT_WORD.search(location.make_relative(path, root))
        if match is not None:
            first_paths.setdefault(match[1].lower(), path)
    if len(first_paths) < 2:
        return None
    listed = ", ".join(f"{split} ({path})" for split, path in first_paths.items())
    return (
        f"its patterns match files of several splits ({listed}); use the files of only one split "
        "in each source"
    )


def is_cached_copy(path: str) -> bool:
    """Return whether the name of a file suggests that it contains results that Hugging Face's
    datasets cached next to the data."""
    return _CACHE_NAME.fullmatch(location.get_name(path)) is not None


def describe_cached_copies(paths: Collection[str]) -> str | None:
    """Return a warning if some files of a source contain results that were computed from its other
    files; otherwise None."""
    copies = list(filter(is_cached_copy, paths))
    if not copies or len(copies) == len(paths):
        return None
    return (
        f"its patterns match {len(copies):,} cache files of Hugging Face's `map` and `filter` (such as {min(copies)}) "
        "in addition to the original data; use only one of the two, such as `data-*.arrow`"
    )


def describe_mixed_endings(patterns: Iterable[str], paths: Iterable[str]) -> str | None:
    """Return a warning if files end differently, and no pattern ends so: some may not be data. This
    is for raw files, since any file can be read as one. Otherwise return None."""
    first_paths = dict[str, str]()
    for path in sorted(paths):
        first_paths.setdefault(_get_ending(path), path)
    if len(first_paths) < 2 or first_paths.keys() <= set(map(_get_ending, patterns)):
        return None
    first, second, *_ = first_paths.values()
    return (
        f"its patterns match files with different endings (such as {first} and {second}), and all of them are read as "
        "tokens; specify only the files of tokens"
    )


def _get_ending(path: str) -> str:
    """Return the ending of a file's name, such as `.bin`; "" for a number, as in `tokens.0001`."""
    ending = PurePath(path).suffix
    return "" if ending[1:].isdigit() else ending


def describe_table(folder: str, paths: Iterable[str], storage: Storage) -> str | None:
    """If a folder belongs to a table, such as a Delta Lake table, or contains tables, return the
    problem with reading all data files in the folder, `paths`. Return None if it does not, or if
    this cannot be determined."""
    # One path a folder, since there may be millions
    paths_by_folder = {path.rpartition("/")[0]: path for path in paths if _UUID.search(path)}
    if not paths_by_folder:
        return None  # without a request to an object store
    parents = map(location.get_parent, paths_by_folder.values())
    # If a bucket is called `data`, the location above it is only a scheme: do not search other
    # buckets
    tops = dict.fromkeys(filter(location.get_name, chain(*map(_list_tops, [folder, *parents]))))
    tables = dict[str, str]()
    for top, (name, log) in product(islice(tops, _MAX_TOPS), _TABLE_LOGS.items()):
        # A user who may not list the folder may still read the files
        with contextlib.suppress(ConfigError, DataError):
            if storage.find(location.join(location.escape_wildcards(top), log)).files:
                tables.setdefault(top, name)
    if not tables:
        return None
    listed = " and ".join(f"{top} is {name} table" for top, name in tables.items())
    return (
        f"{listed}, whose folder may also contain deleted or replaced rows; list only the table's current files, or "
        "write its rows to new files"
    )


def _list_tops(folder: str) -> Iterator[str]:
    """Yield the folders that would be those of a table with data files in `folder`."""
    # A partition, or a part of one
    while "=" in location.get_name(folder) or location.get_name(folder).startswith("bucket-"):
        folder = location.get_parent(folder)
    yield folder
    if location.get_name(folder) == "data":
        yield location.get_parent(folder)
