"""Find the files of a run's index that match a path, or the end of a path."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from megablend.errors import ConfigError
from megablend.index.blocks.block_store import BlockStore
from megablend.index.read.joined_snapshot import JoinedSnapshot
from megablend.run.run import Run
from megablend.storage.location import find_scheme
from megablend.text.token_names import group_by_folder

_NAMED_FILES = 5
"""The maximum number of files that a message names."""


def match_files(run: Run, file: str) -> list[int]:
    """Return the numbers of the index's files that match a path, or the end of a path. There are
    several numbers if several sources share the file. A file that was renamed also matches its
    earlier paths.

    Raises: ConfigError if no file matches, or if files with different paths match.
    """
    if not file:
        raise ConfigError(
            "found an empty path, expected a data file of the index; `megablend describe` lists the sources"
        )
    # A pair of .bin and .idx has the path of its .bin; users often give the prefix
    spellings = (file, f"{file.removesuffix('.idx')}.bin")
    paths = _list_likely_paths(run, spellings)
    absolute = {
        spelling if find_scheme(spelling) else str(Path(spelling).absolute())
        for spelling in spellings
    }
    exact = [i for i, path in paths.items() if path in absolute]
    if exact:
        return exact
    endings = tuple(f"/{spelling}" for spelling in spellings)
    by_ending = [i for i, path in paths.items() if path.endswith(endings)]
    if not by_ending:
        # The path may contain `..` or links. Links are followed only now, since that asks the file
        # system for each file
        resolved = {i: _resolve_links(path) for i, path in paths.items()}
        real = {_resolve_links(path) for path in absolute}
        exact = [i for i, path in resolved.items() if path in real]
        if exact:
            return exact
        normal = tuple(f"/{os.path.normpath(spelling)}" for spelling in spellings)
        by_ending = [i for i, path in resolved.items() if path.endswith(normal)]
    snapshot = run.store.snapshot
    if by_ending or not isinstance(snapshot, JoinedSnapshot):
        _check_is_one_path(file, [paths[i] for i in by_ending], run)
        return by_ending
    # The file may have been renamed
    former = snapshot.list_former_paths(run.store.roots).items()
    renamed = [i for i, path in former if path in absolute or path.endswith(endings)]
    current = [snapshot.path(i, run.store.roots) for i in renamed]
    _check_is_one_path(file, current, run)
    return match_files(run, current[0])


def locate_file(run: Run, number: int) -> tuple[BlockStore, int]:
    """Return the blocks of the snapshot that has a file of the run's index, and the file's number
    in that snapshot."""
    for store in run.store.stores:
        if number < store.snapshot.num_files:
            return store, number
        number -= store.snapshot.num_files
    raise IndexError(f"file {number} is out of range")


def _list_likely_paths(run: Run, spellings: Sequence[str]) -> Mapping[int, str]:
    """Return the paths of the token files whose names end with the file name of a spelling, by the
    files' numbers. No other files can match, and comparing names costs less than making paths."""
    snapshot = run.store.snapshot
    # Extra columns list their files again
    has_tokens = snapshot.files.columns < len(snapshot.sources)
    names = tuple(spelling.rpartition("/")[2] for spelling in spellings)
    return {
        i: snapshot.path(i, run.store.roots)
        for i, name in enumerate(snapshot.file_names())
        if name.endswith(names) and has_tokens[i]
    }


def _resolve_links(location: str) -> str:
    """Return a path with links and `..` resolved; a location with a scheme is returned
    unchanged."""
    return location if find_scheme(location) else os.path.realpath(location)


def _check_is_one_path(file: str, paths: Sequence[str], run: Run) -> None:
    """Check that `paths`, the paths that match `file`, are all the same. Raises: ConfigError if
    they differ, or if there are no paths."""
    distinct = sorted(set(paths))
    if not distinct:
        snapshot = run.store.snapshot
        indexed = (snapshot.path(i, run.store.roots) for i in range(snapshot.num_files))
        if any(
            f"/{file}".endswith(f"/{texts[0].text}") for texts in group_by_folder(indexed).values()
        ):
            raise ConfigError(
                f"{file}: is a text file, which can only be searched by document; give --line, --byte or --key of one of "
                "its documents"
            )
        raise ConfigError(
            f"{file}: index {snapshot.digest} has no file with this path, or with a path that ends in it; `megablend describe` "
            "lists the sources"
        )
    if len(distinct) > 1:
        num_more = len(distinct) - _NAMED_FILES
        more = f" and {num_more} more" if num_more > 0 else ""
        raise ConfigError(
            f"{file}: {len(distinct)} files have this ending ({', '.join(distinct[:_NAMED_FILES])}{more}); give more of the path"
        )
