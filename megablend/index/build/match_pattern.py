"""Find the files that match a pattern; if there are none, suggest a better pattern."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from megablend.errors import did_you_mean
from megablend.formats import FORMATS
from megablend.formats.base import Format
from megablend.formats.registry import TEXT_SUFFIXES, find_suffix, list_suffixes
from megablend.index.build.source_spec import SourceSpec
from megablend.index.build.split_names import describe_table, is_cached_copy
from megablend.storage import location
from megablend.storage.base import Storage
from megablend.storage.find import Found

_SHARD = re.compile(r"-\d{5}-of-\d{5}")
"""Matches the number of a shard in a file name, as Hugging Face writes it."""
_OTHER_DATA = {
    "MosaicML MDS shards": (".mds", ".mds.zstd"),
    "Lance files": (".lance",),
    "ORC files": (".orc",),
}
"""File name endings of formats that megablend cannot read, by the name of such files."""
_SETTINGS_ENDINGS = (".yaml", ".yml", ".json")
"""File name endings of files with settings, which are not data."""


def match_pattern(spec: SourceSpec, pattern: str, storage: Storage) -> Found:
    """Find the files that match a pattern. Raises: ConfigError if there are none."""
    listing = storage.find(pattern)
    if listing.files or listing.unreadable:
        return listing
    # Formats are listed only now: an installed format that fails to load must not matter when files
    # are found
    suffixes = list_suffixes()
    if any(find_suffix(folder, suffixes) for folder in listing.folders):
        return listing
    # A Megatron prefix stands for two files
    for candidate in FORMATS.values():
        paths = candidate.files(pattern)
        pair = [storage.find(path) for path in paths]
        if all(half.files for half in pair):
            return pair[0]
        for half in pair:
            if half.unreadable:
                return half
        if any(half.files for half in pair):
            raise spec.complaint(_describe_half(candidate, pattern, paths, pair))
    if storage.is_folder(pattern):
        raise spec.complaint(f"{pattern} is a folder: {advise_on_folder(pattern, storage)}")
    if not location.find_scheme(pattern):
        missing = _find_missing_folder(pattern, storage)
        if missing is not None:
            raise spec.complaint(f"{pattern} matches no file: there is no folder {missing}")
    siblings = location.join(location.escape_wildcards(location.get_parent(pattern)), "*")
    hint = did_you_mean(
        pattern, _possible_data(spec, storage.glob(siblings), suffixes), before="; "
    )
    raise spec.complaint(f"{pattern} matches no file{hint or location.hint_on_bucket(pattern)}")


def advise_on_folder(folder: str, storage: Storage) -> str:
    """Return advice on which pattern to use for a folder. It suggests the pattern for the supported
    suffix that is most common in the folder."""
    suffixes = list_suffixes()
    # First without subfolders, whose files may be many, and other data
    for pattern in ("*", "**/*"):
        below = location.join(location.escape_wildcards(folder), pattern)
        names = storage.glob(below)
        endings = Counter(filter(None, (find_suffix(name, suffixes) for name in names)))
        if endings:
            table = describe_table(folder, names, storage)
            if table is not None:
                return table
            data = [
                name for name in names if find_suffix(name, suffixes) and not is_cached_copy(name)
            ]
            if 0 < len(data) < endings.total():
                # As `data-*.arrow` of `save_to_disk`, or `json-train.arrow` of `load_dataset`
                name = location.escape_wildcards(location.get_name(min(data)))
                return f"specify its files as `{below.removesuffix('*')}{_SHARD.sub('-*', name)}`"
            return f"specify its files as `{below}{endings.most_common(1)[0][0]}`"
        for kind, others in _OTHER_DATA.items():
            if any(name.endswith(others) for name in names):
                return (
                    f"it contains {kind}, which megablend cannot read: write the tokens to Parquet files "
                    "and use these"
                )
    # Only if there is no data, since datasets are accompanied by .json files
    if any(name.lower().endswith(TEXT_SUFFIXES) for name in names):
        return (
            "it contains text, not tokens: set `text` to the key that holds the text, and set a `tokenizer` "
            "(docs/text.md)"
        )
    return f"it contains no files that megablend reads ({', '.join(suffixes)}): specify files in another folder"


def _describe_half(
    pair_format: Format, pattern: str, paths: Sequence[str], pair: Sequence[Found]
) -> str:
    """Describe which of the two files with a Megatron prefix is missing, and how to solve the
    problem."""
    missing = next(path for path, half in zip(paths, pair, strict=True) if not half.files)
    # The remedy may be another format, for which a prefix is not a path
    path_remedy = f" and `path: {paths[0]}`" if pair[0].files else ""
    remedy = pair_format.describe_missing_remedy(missing) or "restore it"
    return f"{pattern} stands for two files, and {missing} does not exist: {remedy}{path_remedy}"


def _possible_data(spec: SourceSpec, paths: Iterable[str], suffixes: Collection[str]) -> list[str]:
    """Return the files whose names suggest that they are data. If the source has a format, these
    are all files except settings; otherwise they are the files with a known ending."""
    if spec.read.format is None:
        return [path for path in paths if find_suffix(path.lower(), suffixes)]
    return [path for path in paths if not path.lower().endswith(_SETTINGS_ENDINGS)]


def _find_missing_folder(pattern: str, storage: Storage) -> str | None:
    """Return the first folder of a pattern that does not exist, or None if all folders before its
    first wildcard exist."""
    folder = location.find_root([pattern])
    missing = None
    while not storage.is_folder(folder) and location.get_parent(folder) != folder:
        missing = folder
        folder = location.get_parent(folder)
    return missing
