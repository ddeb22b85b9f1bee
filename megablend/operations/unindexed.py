"""Check whether the newest index of a cache has the sources of a config, with the same options and
files.

A run that is not committed yet would be built on an index of the files as they are now. The newest
index may be different: it may have been made for another config with the same source names, or have
fewer files than the config's paths match now. Its numbers would then be wrong for the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megablend.config import Config
from megablend.errors import CacheError, ChangedFileError, ConfigError, MissingFileError
from megablend.index.build.source_spec import SourceSpec
from megablend.index.build.sources import list_sources
from megablend.index.read.snapshot import Snapshot
from megablend.index.tables.source_entry import SourceEntry
from megablend.index.verify.check_files import FileChecker, check_files
from megablend.operations.runs import newest_snapshot
from megablend.operations.session import Session
from megablend.operations.source_specs import list_specs
from megablend.run.open_store import find_misfit
from megablend.storage.base import Storage
from megablend.storage.location import join

_MAX_LOOKED_UP = 100
"""Maximum number of indexed files of a source that are looked up to find one that still exists, but
no longer matches the source's path."""
_MAX_COMPARED = 8
"""Maximum number of files of a source whose content is compared with the index if the source is in
another folder than when it was indexed."""
INDEX_REMEDY = "run `megablend index CONFIG`, which indexes the files without committing a run"


class Unindexed(NamedTuple):
    """A difference between the newest index and a config."""

    text: str
    """A description of the difference."""
    only_lacks_files: bool = False
    """Whether the only difference is that some files are missing in the index."""


def open_newest(session: Session) -> Snapshot:
    """Open the newest index, for a config without a run. Raises: CacheError if there is no index,
    or it was not made for this config."""
    newest = newest_snapshot(session.cache)
    problem = find_unindexed(session.config, newest, session.storage)
    if problem is not None:
        raise CacheError(f"{problem.text}; {INDEX_REMEDY}")
    return newest


def find_unindexed(
    config: Config, newest: Snapshot, storage: Storage, *, is_kept: bool = False
) -> Unindexed | None:
    """Return the difference between the newest index and a config; None if there is none.

    Files are compared by name. If all files of a source are in another folder now, the content of a
    few of them is compared, too. Files that are missing, or that were replaced in the same folder,
    are not detected here, but by the checks of files.

    Args:
        is_kept: whether the config's run already uses this index. Options are then not compared
            here, but when the index is opened for the run.
    """
    names = [spec.name for spec in list_specs(config)]
    known = newest.sources.numbers
    missing = [name for name in names if name not in known]
    if missing:
        first = f"the first: {missing[0]!r}"
        return Unindexed(
            f"the newest index of {config.cache} lacks {len(missing)} of the config's sources ({first})"
        )
    configured = config.all_sources
    requested = {} if is_kept else {name: configured[name] for name in names}
    misfit = find_misfit(config, newest, requested)
    if misfit is not None:
        return Unindexed(f"the newest index of {config.cache} is {newest.digest}, {misfit.problem}")
    return _find_other_files(config, newest, storage)


def _find_other_files(config: Config, newest: Snapshot, storage: Storage) -> Unindexed | None:
    """Return the first source whose path does not match the index's files, with the first file that
    differs; None if there is none."""
    known = newest.sources.numbers
    names = newest.file_names()
    try:
        listings = list(list_sources(list_specs(config, storage), storage))
    except CacheError as error:
        return Unindexed(str(error), only_lacks_files=True)
    except (ConfigError, MissingFileError):
        # The files of a source are missing, which checks of files report
        return None
    for listing in listings:
        entry = newest.sources[known[listing.name]]
        whose = f"the newest index of {config.cache} has other files of source {entry.name!r} than the source's path matches"
        difference = _compare_names(entry, [names[i] for i in entry.files], listing, storage)
        if difference is not None:
            return difference._replace(text=f"{whose} ({difference.text})")
        changed = _find_changed(newest, entry, listing, storage)
        if changed is not None:
            return Unindexed(f"{whose} ({changed}, but those of {entry.root} were indexed)")
    return None


def _find_changed(
    newest: Snapshot, entry: SourceEntry, listing: SourceSpec, storage: Storage
) -> str | None:
    """Return the path of a file whose content has changed, if the source was moved to another
    folder; None if no compared file has changed, or the source was not moved."""
    if listing.root == entry.root:
        return None
    checker = FileChecker(newest, {entry.name: listing.root}, storage)
    for problem in check_files(checker, entry.files[:_MAX_COMPARED]):
        if isinstance(problem, ChangedFileError):
            return problem.path
    return None


def _compare_names(
    entry: SourceEntry, names: Sequence[str], listing: SourceSpec, storage: Storage
) -> Unindexed | None:
    """Return the difference between the file names that a source's path matches and those in the
    index; None if there is none. Missing files do not count as a difference."""
    if set(names) == {file.name for file in listing.files}:
        return None
    matched = {file.path for file in listing.files}
    indexed = {join(entry.root, name) for name in names}
    not_matched = next(
        (path for path in sorted(indexed - matched)[:_MAX_LOOKED_UP] if storage.glob(path)), None
    )
    if not_matched is None and indexed.isdisjoint(matched):  # the files are in another folder now
        indexed = {join(listing.root, name) for name in names}
    counts = f"{len(indexed):,} indexed, {len(matched):,} matched; the first difference"
    if not_matched is not None:
        return Unindexed(f"{counts}: {not_matched} is indexed, but not matched")
    new = matched - indexed
    return Unindexed(f"{counts}: {min(new)} is not indexed", only_lacks_files=True) if new else None
