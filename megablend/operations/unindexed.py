"""Whether the newest index of a cache has what a config requests now:
its sources, their options, and their files.

A run that is not committed would be built on an index of the files as they are now. Until they are
indexed, the newest index may be of another config that has sources of the same names, or of the
same config with fewer files: its numbers are not those of the run.
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

_MOST_LOOKED_UP = 100
"""Files of a source that are not matched, of which one is looked for that exists."""
_MOST_COMPARED = 8
"""Files of a source in another folder than the indexed one that are compared with those of their
names in the index."""
INDEX_REMEDY = "`megablend index CONFIG` indexes the files and commits no run"


class Unindexed(NamedTuple):
    """How the newest index differs from what a config requests."""

    text: str
    only_lacks_files: bool = False
    """It is of this config's files, as far as it goes."""


def open_newest(session: Session) -> Snapshot:
    """The newest index, for a config without a run. Raises: CacheError if there is none, or as
    `find_unindexed` finds."""
    newest = newest_snapshot(session.cache)
    if (problem := find_unindexed(session.config, newest, session.storage)) is not None:
        raise CacheError(f"{problem.text}; {INDEX_REMEDY}")
    return newest


def find_unindexed(
    config: Config, newest: Snapshot, storage: Storage, *, is_kept: bool = False
) -> Unindexed | None:
    """What the config requests and the newest index lacks, or has otherwise;
    None if it has all of it.

    Files are compared by name; those of a source that moved as a whole are the same, if the
    content of some is what was indexed. Whether one is missing or was replaced in its
    folder is left to checks of files.

    Args:
        is_kept: the config's run keeps this index: opening it for the run says which options the
            run cannot have.
    """
    names = [spec.name for spec in list_specs(config)]
    known = newest.sources.numbers
    if missing := [name for name in names if name not in known]:
        first = f"the first: {missing[0]!r}"
        return Unindexed(
            f"the newest index of {config.cache} lacks {len(missing)} of the config's sources ({first})"
        )
    requested = {} if is_kept else {name: config.all_sources[name] for name in names}
    if (misfit := find_misfit(config, newest, requested)) is not None:
        return Unindexed(f"the newest index of {config.cache} is {newest.digest}, {misfit.problem}")
    return _find_other_files(config, newest, storage)


def _find_other_files(config: Config, newest: Snapshot, storage: Storage) -> Unindexed | None:
    """The first source whose path matches other files than the index has, with the first of these;
    None if there is none."""
    known = newest.sources.numbers
    names = newest.file_names()
    try:
        listings = list(list_sources(list_specs(config, storage), storage))
    except CacheError as error:
        return Unindexed(str(error), only_lacks_files=True)
    except (ConfigError, MissingFileError):
        # No file is there: checks of files say which are missing
        return None
    for listing in listings:
        entry = newest.sources[known[listing.name]]
        whose = (
            f"the newest index of {config.cache} has files of source {entry.name!r} other than those that its path "
            "matches"
        )
        if (
            difference := _compare(entry, [names[i] for i in entry.files], listing, storage)
        ) is not None:
            return difference._replace(text=f"{whose} ({difference.text})")
        if (changed := _find_foreign(newest, entry, listing, storage)) is not None:
            return Unindexed(f"{whose} ({changed}, but those of {entry.root} were indexed)")
    return None


def _find_foreign(
    newest: Snapshot, entry: SourceEntry, listing: SourceSpec, storage: Storage
) -> str | None:
    """The first file of a source that has the name of an indexed one of another folder, but not its
    content; None without one."""
    if listing.root == entry.root:
        return None
    checker = FileChecker(newest, {entry.name: listing.root}, storage)
    problems = check_files(checker, entry.files[:_MOST_COMPARED])
    return next(
        (problem.path for problem in problems if isinstance(problem, ChangedFileError)), None
    )


def _compare(
    entry: SourceEntry, names: Sequence[str], listing: SourceSpec, storage: Storage
) -> Unindexed | None:
    """How the files that a source's path matches differ from those indexed, apart from missing
    ones; None if they do not."""
    if set(names) == {file.name for file in listing.files}:
        return None
    found = {file.path for file in listing.files}
    known = {join(entry.root, name) for name in names}
    not_matched = next(
        (path for path in sorted(known - found)[:_MOST_LOOKED_UP] if storage.glob(path)), None
    )
    if not_matched is None and known.isdisjoint(found):  # moved
        known = {join(listing.root, name) for name in names}
    counts = f"{len(known):,} and {len(found):,}; the first that differs"
    if not_matched is not None:
        return Unindexed(f"{counts}: {not_matched}, indexed, but not matched")
    new = found - known
    return Unindexed(f"{counts}: {min(new)}, not indexed", only_lacks_files=True) if new else None
