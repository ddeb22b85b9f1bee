"""Finding the files of a source: from patterns to files, each with a name relative to the source's
root.

Names are relative so that moved data is recognised as the same data. The root is the folder that
all patterns share before their first wildcard. Files are sorted by name: the order of the patterns
is irrelevant.
"""

from __future__ import annotations

import dataclasses
import errno
import fnmatch
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from megablend.errors import ConfigError, DataError, did_you_mean
from megablend.formats import FORMATS, format_of, get_format
from megablend.formats.base import Format
from megablend.formats.registry import TEXT_SUFFIXES, list_suffixes
from megablend.index.build.source_spec import SourceSpec
from megablend.storage import location
from megablend.storage.base import Storage
from megablend.storage.find import Found, Match
from megablend.storage.parallel_map import parallel_map
from megablend.system.limited_json import parse_json

DATASET_DICT = "dataset_dict.json"
"""The file in the folder of a Hugging Face DatasetDict that names its splits, each of which is a
folder."""
SPLIT_NAMES = frozenset({"train", "validation", "valid", "val", "dev", "eval", "test"})
_SPLIT_WORD = re.compile(
    rf"(?<![a-z0-9])({'|'.join(sorted(SPLIT_NAMES, reverse=True))})(?![a-z])", re.IGNORECASE
)
"""Matches the name of a split within the name of a folder or a file, such as `train_sft`,
`train-00000-of-00002.parquet` or `fineweb_val_000001.bin`."""
_MAX_DICT_BYTES = 1 << 20
"""Largest number of bytes of a DATASET_DICT that are read."""
_SHARD_ENDINGS = (".mds", ".mds.zstd")
"""Endings of MosaicML MDS shards."""
_SETTINGS_ENDINGS = (".yaml", ".yml", ".json")
"""Endings of files that hold settings, not data."""


def list_source(spec: SourceSpec, storage: Storage) -> SourceSpec:
    """Find and stat the files of a source. Raises: the errors of `find_source`;
    MissingFileError."""
    found = spec if spec.paths else find_source(spec, storage)
    return found.with_files(found.stat_files(found.paths, storage))


def list_sources(specs: Sequence[SourceSpec], storage: Storage) -> Iterator[SourceSpec]:
    """Find and stat the files of sources, in order; over a network, of several sources at a time.
    Raises: see `list_source`."""
    threads = max((storage.limits(spec.patterns[0]).max_files for spec in specs), default=1)
    for first in range(0, len(specs), threads):
        yield from parallel_map(
            lambda spec: list_source(spec, storage), specs[first : first + threads], threads
        )


def find_source(spec: SourceSpec, storage: Storage) -> SourceSpec:
    """Find the files of a source, each once, even if several links lead to it.

    Raises: ConfigError if a pattern matches nothing, if files have several formats or an unknown
        one, or if their format does not have these options; DataError if a path that may be, or
        contain, one of the files cannot be read.
    """
    root = _root_of(spec)
    matches = dict[str, Match]()
    unreadable = dict[str, str]()
    folders = dict[str, str]()
    links = set[str]()
    threads = storage.limits(spec.patterns[0]).max_files
    listed = parallel_map(lambda pattern: _find(spec, pattern, storage), spec.patterns, threads)
    for pattern, found in zip(spec.patterns, listed, strict=True):
        unreadable |= found.unreadable
        matches |= {match.path: match for match in found.files}
        folders |= dict.fromkeys(found.folders, pattern)
        links |= {*found.links}
    unreadable |= _leave_out_folders(spec, folders, matches)
    if unreadable and not spec.skip_unreadable:
        raise _unreadable_error(spec, unreadable)
    # Whether an object can be read is not known before it is read
    if spec.skip_unreadable and threads == 1:
        for path in sorted(matches):
            reason = _why_unreadable(spec, path, storage)
            if reason is not None:
                unreadable[path] = reason
                del matches[path]
    if not matches:
        raise spec.complaint(
            f"none of its files can be read: {_first_of(unreadable)}; get permission to read them"
        )
    kind = _single_format(spec, matches, storage)
    paths, duplicates_note = _remove_duplicates(spec, kind, matches.values(), links, storage)
    splits_note = _describe_mixed_splits(spec, root, paths)
    try:
        kind.check_options(dict(spec.read.options))
    except ValueError as error:
        raise spec.complaint(f"format_options of {kind.name}: {error}") from error
    counted = spec.read.count_documents or kind.documents_known
    return dataclasses.replace(
        spec,
        read=dataclasses.replace(spec.read, format=kind.name, count_documents=counted),
        root=root,
        paths=paths,
        skipped=tuple(f"{path}: {reason}" for path, reason in sorted(unreadable.items())),
        note="; ".join(filter(None, (duplicates_note, splits_note))) or None,
    )


def _leave_out_folders(
    spec: SourceSpec, folders: Mapping[str, str], paths: Iterable[str]
) -> dict[str, str]:
    """Find folders that look like data files, as Spark and Dask write them, but whose files no
    pattern matches.

    Args:
        folders: path of a folder -> the pattern that matches it.
        paths: the files that patterns match.

    Returns: the folders, each with the reason why it is skipped.
    Raises: ConfigError if they may not be skipped.
    """
    if not folders:
        return {}
    suffixes = tuple(list_suffixes())
    parents = {location.get_parent(path) for path in paths}
    left_out = {
        path: pattern
        for path, pattern in folders.items()
        if path.endswith(suffixes) and path not in parents
    }
    if left_out and not spec.skip_unreadable:
        path, pattern = min(left_out.items())
        more = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
        inner = f"{pattern}/*{next(suffix for suffix in suffixes if path.endswith(suffix))}"
        raise spec.complaint(
            f"{pattern} matches the folder {path}{more}, whose files would be left out: add a pattern for them, "
            f"`path: [{pattern}, {inner}]`, or set `on_unreadable: skip` to continue without them"
        )
    return dict.fromkeys(left_out, "a folder, whose files no pattern matches")


def _why_unreadable(spec: SourceSpec, path: str, storage: Storage) -> str | None:
    """Return the reason why a file, or another one that belongs to it, cannot be read; None if it
    can be read, or does not exist."""
    is_format_known = spec.read.format is not None or path.endswith(tuple(list_suffixes()))
    files = _format(spec, path, storage).files(path) if is_format_known else [path]
    for file in files:
        found = storage.find(location.escape_wildcards(file))
        reason = next(iter(found.unreadable.values()), None)
        if reason is None and found.files and not storage.is_readable(file):
            reason = os.strerror(errno.EACCES)
        if reason is not None:
            return reason if file == path else f"{file}: {reason}"
    return None


def _single_format(spec: SourceSpec, paths: Iterable[str], storage: Storage) -> Format:
    """Return the format of all files of a source. Of files with the same suffix, only the first is
    looked into. Raises: ConfigError."""
    known_suffixes = [suffix for kind in FORMATS.values() for suffix in kind.suffixes]
    formats: dict[str, str] = {}
    seen: set[str] = set()
    for path in sorted(paths):
        own_suffixes = [suffix for suffix in known_suffixes if path.lower().endswith(suffix)]
        suffix = own_suffixes[0] if own_suffixes else path
        if suffix not in seen:
            seen.add(suffix)
            formats.setdefault(_format(spec, path, storage).name, path)
    if len(formats) > 1:
        listed = ", ".join(f"{name} ({path})" for name, path in sorted(formats.items()))
        raise spec.complaint(f"mixes formats: {listed}; list each format as a separate source")
    return get_format(next(iter(formats)))


def _unreadable_error(spec: SourceSpec, unreadable: Mapping[str, str]) -> DataError:
    (path, reason), *others = sorted(unreadable.items())
    more = ""
    if others:
        more = f" (and {len(others)} more: {', '.join(path for path, _ in others[:5])})"
    skip = ""
    if spec.skip_unreadable is not None:
        skip = "; or set `on_unreadable: skip` to continue without them"
    return DataError(
        path,
        f"cannot be read: {reason}{more}; source {spec.name!r} may be missing files because of this: get "
        f"permission, or remove dangling links{skip}",
    )


def _first_of(unreadable: Mapping[str, str]) -> str:
    path, reason = min(unreadable.items())
    return f"{path}: {reason}"


def _remove_duplicates(
    spec: SourceSpec,
    kind: Format,
    matches: Collection[Match],
    links: Collection[str],
    storage: Storage,
) -> tuple[tuple[str, ...], str | None]:
    """Return the paths of the files, each file once; and a note about other paths, and `links` to
    folders, that lead to the same files, or None."""
    times = Counter(match.real for match in matches)

    def identify(match: Match) -> tuple[str, ...]:
        # If several `.idx` describe one `.bin`, each pair has its own documents
        others = _real_paths(kind, match.path, storage) if times[match.real] > 1 else []
        return (match.real, *others)

    identities = {match.path: identify(match) for match in matches}
    kept: dict[tuple[str, ...], Match] = {}
    # A Match with fewer links in its path sorts first
    for match in sorted(matches):
        kept.setdefault(identities[match.path], match)
    paths = tuple(sorted(match.path for match in kept.values()))
    duplicates = [match for match in matches if kept[identities[match.path]] is not match]
    notes = []
    if duplicates:
        first = min(duplicates, key=lambda match: match.path)
        notes.append(
            f"{len(duplicates):,} paths lead to files that are already listed under another name "
            f"(such as {first.path}, the same file as {kept[identities[first.path]].path})"
        )
    if links:
        notes.append(
            f"{len(links):,} links lead to folders that are already listed (such as {min(links)})"
        )
    if not notes:
        return paths, None
    return paths, f"source {spec.name!r}: {', and '.join(notes)}; each file counts once"


def _real_paths(kind: Format, path: str, storage: Storage) -> list[str]:
    """Return the real paths of a file, and of other files that belong to it."""
    matches = (storage.find(location.escape_wildcards(each)).files for each in kind.files(path))
    return [found[0].real for found in matches if found]


def _root_of(spec: SourceSpec) -> str:
    """Return the folder that names of the source's files are relative to. Raises: ConfigError if
    the patterns have no folder in common."""
    try:
        return location.find_root(spec.patterns)
    except ValueError as error:
        raise spec.complaint(error) from error


def _find(spec: SourceSpec, pattern: str, storage: Storage) -> Found:
    """Find the files of a pattern. Raises: ConfigError if it matches none."""
    found = storage.find(pattern)
    has_data_folders = any(each.endswith(tuple(list_suffixes())) for each in found.folders)
    if found.files or found.unreadable or has_data_folders:
        return found
    # A Megatron prefix stands for two files
    for kind in FORMATS.values():
        paths = kind.files(pattern)
        pair = [storage.find(path) for path in paths]
        if all(half.files for half in pair):
            return pair[0]
        if any(half.files for half in pair):
            raise spec.complaint(_describe_half(kind, pattern, paths, pair))
    if storage.is_folder(pattern):
        raise spec.complaint(f"{pattern} is a folder: {_advice(pattern, storage)}")
    if not location.find_scheme(pattern):
        missing = _find_missing_folder(pattern, storage)
        if missing is not None:
            raise spec.complaint(f"{pattern} matches no file: there is no folder {missing}")
    siblings = location.join(location.escape_wildcards(location.get_parent(pattern)), "*")
    hint = did_you_mean(pattern, _possible_data(spec, storage.glob(siblings)), before="; ")
    raise spec.complaint(f"{pattern} matches no file{hint}")


def _describe_half(kind: Format, pattern: str, paths: Sequence[str], pair: Sequence[Found]) -> str:
    """Describe which of the two files that a Megatron prefix stands for is missing, and the
    remedy."""
    missing = next(path for path, half in zip(paths, pair, strict=True) if not half.files)
    # The remedy may be another format, for which a prefix is not a path
    path_remedy = f" and `path: {paths[0]}`" if pair[0].files else ""
    remedy = kind.describe_missing_remedy(missing) or "restore it"
    return f"{pattern} stands for two files, and {missing} does not exist: {remedy}{path_remedy}"


def _possible_data(spec: SourceSpec, paths: Iterable[str]) -> list[str]:
    """Return the files that may be data according to their names: those with a known ending; or all
    but settings if the source has a format."""
    if spec.read.format is None:
        return [path for path in paths if path.lower().endswith(tuple(list_suffixes()))]
    return [path for path in paths if not path.lower().endswith(_SETTINGS_ENDINGS)]


def _find_missing_folder(pattern: str, storage: Storage) -> str | None:
    """Return the first folder of a pattern that does not exist; None if all folders before its
    first wildcard exist."""
    folder = location.find_root([pattern])
    missing = None
    while not storage.is_folder(folder) and location.get_parent(folder) != folder:
        missing = folder
        folder = location.get_parent(folder)
    return missing


def _advice(folder: str, storage: Storage) -> str:
    """Return advice on the pattern to use for a folder: the pattern of the most common supported
    format."""
    for pattern in ("*", "**/*"):
        below = location.join(location.escape_wildcards(folder), pattern)
        names = storage.glob(below)
        endings = Counter(filter(None, map(_known_ending, names)))
        if endings:
            split_folders = _find_split_folders(folder, names, storage)
            if split_folders:
                by_split = {location.get_name(each): each for each in split_folders}
                chosen = by_split.get("train", split_folders[0])
                return f"it has the splits {', '.join(by_split)}, so give the folder of one: {_advice(chosen, storage)}"
            split_patterns = _find_split_patterns(folder, names)
            if split_patterns:
                split = "train" if "train" in split_patterns else min(split_patterns)
                return (
                    f"it has the splits {', '.join(split_patterns)}, so give the files of one: specify them as "
                    f"`{split_patterns[split]}`"
                )
            return f"specify its files as `{below}{endings.most_common(1)[0][0]}`"
        if any(name.endswith(_SHARD_ENDINGS) for name in names):
            return (
                "it contains MosaicML MDS shards, which megablend does not read: write the tokens to Parquet, and "
                "use those files"
            )
    # Only if no folder below has data, since datasets are accompanied by .json files
    if any(name.lower().endswith(TEXT_SUFFIXES) for name in names):
        return (
            "it contains text, not tokens: set `text` to the key that holds the text, and set a `tokenizer` "
            "(docs/text.md)"
        )
    return f"it contains no files that megablend reads ({', '.join(list_suffixes())}): specify files in another folder"


def _find_split_folders(folder: str, names: Collection[str], storage: Storage) -> list[str]:
    """Find the folders of splits within a folder; only those that contain some of the files
    `names`, and none if it is not divided into splits."""
    dataset_dict = location.join(folder, DATASET_DICT)
    if storage.find(location.escape_wildcards(dataset_dict)).files:
        try:
            size = min(storage.stat(dataset_dict).size, _MAX_DICT_BYTES)
            content = parse_json(storage.read(dataset_dict, 0, size))
            splits = [each for each in content["splits"] if isinstance(each, str)]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{dataset_dict}: is not a list of splits ({error}): restore it, or list the files"
            ) from error
    else:
        below = {location.make_relative(name, folder).partition("/")[0] for name in names}
        splits = sorted(below & SPLIT_NAMES)
        if splits == ["train"]:
            splits = []
    return [
        location.join(folder, split)
        for split in splits
        if any(name.startswith(f"{folder}/{split}/") for name in names)
    ]


def _find_split_patterns(folder: str, names: Iterable[str]) -> dict[str, str]:
    """Return a pattern for the files of each split that occurs in the names of files `names`, or of
    folders below `folder`; none if there are fewer than two splits."""
    patterns = dict[str, str]()
    for name in sorted(names):
        relative = location.make_relative(name, folder)
        ending = _known_ending(name)
        found = _SPLIT_WORD.search(relative)
        if ending is None or found is None:
            continue
        # The folders above the name that has the word, and this name
        above, _, before_word = relative[: found.start()].rpartition("/")
        rest_of_name, _, inside = relative[found.start() :].partition("/")
        if inside:
            split_folder = location.escape_wildcards(before_word + rest_of_name)
            below = f"{split_folder}/**/*{ending}"
        else:
            below = f"*{found[1]}*{ending}"
        pattern = location.join(
            location.escape_wildcards(folder), f"**/{below}" if above else below
        )
        patterns.setdefault(found[1].lower(), pattern)
    return patterns if len(patterns) > 1 else {}


def _describe_mixed_splits(spec: SourceSpec, root: str, paths: Iterable[str]) -> str | None:
    """Return a warning if the files of a source belong to several splits, according to the names of
    the files or of their folders; None otherwise."""
    first_paths = dict[str, str]()
    for path in sorted(paths):
        found = _SPLIT_WORD.search(location.make_relative(path, root))
        if found is not None:
            first_paths.setdefault(found[1].lower(), path)
    if len(first_paths) < 2:
        return None
    listed = ", ".join(f"{split} ({path})" for split, path in first_paths.items())
    return (
        f"source {spec.name!r}: its patterns match files of several splits ({listed}); give each source the files of "
        "one split only"
    )


def _known_ending(path: str) -> str | None:
    """Return the suffix of a path by which a format is recognized; None if it has none."""
    return next((ending for ending in list_suffixes() if path.endswith(ending)), None)


def _format(spec: SourceSpec, path: str, storage: Storage) -> Format:
    """Return the format of a file of a source. Raises: ConfigError."""
    if spec.read.format is not None:
        try:
            return get_format(spec.read.format)
        except ConfigError as error:
            raise spec.complaint(error) from error
    try:
        return format_of(path, storage)
    except ConfigError as error:
        name = location.get_name(path)
        wildcards = filter(location.has_wildcard, spec.patterns)
        is_matched = any(fnmatch.fnmatchcase(name, location.get_name(each)) for each in wildcards)
        advice = f"; {_advice(location.get_parent(path), storage)}" if is_matched else ""
        raise spec.complaint(f"{error}{advice}") from error
