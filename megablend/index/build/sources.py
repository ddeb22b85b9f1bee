"""Find the files of a source that match its patterns, and name each file relative to the root of
the source.

The names are relative, so that data is recognised after it has been moved. The root is the folder
that all patterns share before their first wildcard. Files are sorted by name: the order of the
patterns is irrelevant.
"""

from __future__ import annotations

import dataclasses
import errno
import fnmatch
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from megablend.errors import ConfigError, DataError
from megablend.formats import FORMATS, format_of, get_format
from megablend.formats.base import Format
from megablend.formats.registry import find_suffix, list_suffixes
from megablend.index.build.match_pattern import advise_on_folder, match_pattern
from megablend.index.build.source_spec import SourceSpec
from megablend.index.build.split_names import describe_mixed_endings, list_doubts
from megablend.storage import location
from megablend.storage.base import Storage
from megablend.storage.find import Match
from megablend.storage.parallel_map import parallel_map


def list_source(spec: SourceSpec, storage: Storage) -> SourceSpec:
    """Find the files of a source, with their sizes and versions. Raises: the errors of
    `find_source`; MissingFileError."""
    listed = spec if spec.paths else find_source(spec, storage)
    return listed.with_files(listed.stat_files(listed.paths, storage))


def list_sources(specs: Sequence[SourceSpec], storage: Storage) -> Iterator[SourceSpec]:
    """Find the files of sources, with their sizes and versions, and yield the sources in order.
    Over a network, several sources are searched at a time. Raises: see `list_source`."""
    threads = max((storage.limits(spec.patterns[0]).max_files for spec in specs), default=1)
    for first in range(0, len(specs), threads):
        yield from parallel_map(
            lambda spec: list_source(spec, storage), specs[first : first + threads], threads
        )


def find_source(spec: SourceSpec, storage: Storage) -> SourceSpec:
    """Find the files of a source. A file is listed only once, even if several links lead to it.

    Raises: ConfigError if a pattern matches nothing, if files have several formats or an unknown
        format, or if their format does not support the source's options; DataError if a path that
        cannot be read may be one of the files, or a folder that contains one.
    """
    root = _root_of(spec)
    matches = dict[str, Match]()
    unreadable = dict[str, str]()
    folders = dict[str, str]()
    links = set[str]()
    threads = storage.limits(spec.patterns[0]).max_files
    listed = parallel_map(
        lambda pattern: match_pattern(spec, pattern, storage), spec.patterns, threads
    )
    for pattern, listing in zip(spec.patterns, listed, strict=True):
        unreadable |= listing.unreadable
        matches |= {match.path: match for match in listing.files}
        folders |= dict.fromkeys(listing.folders, pattern)
        links |= {*listing.links}
    unreadable |= _leave_out_folders(spec, folders, matches)
    if unreadable and not spec.skip_unreadable:
        raise _unreadable_error(spec, unreadable)
    # It is not known whether an object can be read before it is read
    if spec.skip_unreadable and threads == 1:
        for path in sorted(matches):
            reason = _why_unreadable(spec, path, storage)
            if reason is not None:
                unreadable[path] = reason
                del matches[path]
    if not matches:
        raise spec.complaint(
            f"none of its files can be read: {_first_of(unreadable)}; make them readable, or replace them "
            "by regular files"
        )
    source_format = _single_format(spec, matches, storage)
    paths, duplicates_note = _remove_duplicates(source_format, matches.values(), links, storage)
    notes = [duplicates_note, *list_doubts(root, spec.patterns, paths, storage)]
    if source_format.name == "raw":
        notes.append(describe_mixed_endings(spec.patterns, paths))
    try:
        source_format.check_options(dict(spec.read.options))
    except ValueError as error:
        raise spec.complaint(f"format_options of {source_format.name}: {error}") from error
    counted = spec.read.count_documents or source_format.documents_known
    return dataclasses.replace(
        spec,
        read=dataclasses.replace(spec.read, format=source_format.name, count_documents=counted),
        root=root,
        paths=paths,
        skipped=tuple(f"{path}: {reason}" for path, reason in sorted(unreadable.items())),
        note="; ".join(f"source {spec.name!r}: {note}" for note in notes if note) or None,
    )


def _leave_out_folders(
    spec: SourceSpec, folders: Mapping[str, str], paths: Iterable[str]
) -> dict[str, str]:
    """Find folders that match a pattern because they are named like data files, as Spark and Dask
    write them, but whose files match no pattern.

    Args:
        folders: path of a folder -> the pattern that matches it.
        paths: the files that patterns match.

    Returns: the path of each such folder -> the reason why it is skipped.
    Raises: ConfigError if such folders may not be skipped.
    """
    if not folders:
        return {}
    suffixes = list_suffixes()
    parents = {location.get_parent(path) for path in paths}
    left_out = {
        path: pattern
        for path, pattern in folders.items()
        if find_suffix(path, suffixes) and path not in parents
    }
    if left_out and not spec.skip_unreadable:
        path, pattern = min(left_out.items())
        more = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
        inner = f"{pattern}/*{find_suffix(path, suffixes)}"
        raise spec.complaint(
            f"{pattern} matches the folder {path}{more}, whose files would be left out: add a pattern for them, "
            f"`path: [{pattern}, {inner}]`, or set `on_unreadable: skip` to continue without them"
        )
    return dict.fromkeys(left_out, "a folder, whose files no pattern matches")


def _why_unreadable(spec: SourceSpec, path: str, storage: Storage) -> str | None:
    """Return the reason why a file, or another file that belongs to it, cannot be read; None if it
    can be read or does not exist."""
    is_format_known = spec.read.format is not None or find_suffix(path, list_suffixes())
    files = _format(spec, path, storage).files(path) if is_format_known else [path]
    for file in files:
        listing = storage.find(location.escape_wildcards(file))
        reason = next(iter(listing.unreadable.values()), None)
        if reason is None and listing.files and not storage.is_readable(file):
            reason = os.strerror(errno.EACCES)
        if reason is not None:
            return reason if file == path else f"{file}: {reason}"
    return None


def _single_format(spec: SourceSpec, paths: Iterable[str], storage: Storage) -> Format:
    """Return the format of a source's files, which must be the same for all files. Only the first
    file with each suffix is read. Raises: ConfigError."""
    known_suffixes = [suffix for registered in FORMATS.values() for suffix in registered.suffixes]
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
        f"cannot be read: {reason}{more}, so source {spec.name!r} may be missing files; make them readable, or remove "
        f"broken links and special files{skip}",
    )


def _first_of(unreadable: Mapping[str, str]) -> str:
    path, reason = min(unreadable.items())
    return f"{path}: {reason}"


def _remove_duplicates(
    source_format: Format,
    matches: Collection[Match],
    links: Collection[str],
    storage: Storage,
) -> tuple[tuple[str, ...], str | None]:
    """Return one path for each file, and a note. The note is None unless other paths lead to the
    same files, or there are `links` to folders."""
    times = Counter(match.real for match in matches)

    def identify(match: Match) -> tuple[str, ...]:
        # If several `.idx` describe one `.bin`, each pair has its own documents
        others = _real_paths(source_format, match.path, storage) if times[match.real] > 1 else []
        return (match.real, *others)

    identities = {match.path: identify(match) for match in matches}
    kept: dict[tuple[str, ...], Match] = {}
    # The Match whose path has the fewest links sorts first
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
    return paths, f"{', and '.join(notes)}; each file counts once"


def _real_paths(source_format: Format, path: str, storage: Storage) -> list[str]:
    """Return the real paths of a file and of the files that belong to it."""
    matches = (
        storage.find(location.escape_wildcards(pattern)).files
        for pattern in source_format.files(path)
    )
    return [files[0].real for files in matches if files]


def _root_of(spec: SourceSpec) -> str:
    """Return the folder to which the names of the source's files are relative. Raises: ConfigError
    if the patterns have no folder in common."""
    try:
        return location.find_root(spec.patterns)
    except ValueError as error:
        raise spec.complaint(error) from error


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
        is_matched = any(
            fnmatch.fnmatchcase(name, location.get_name(wildcard)) for wildcard in wildcards
        )
        advice = f"; {advise_on_folder(location.get_parent(path), storage)}" if is_matched else ""
        raise spec.complaint(f"{error}{advice}") from error
