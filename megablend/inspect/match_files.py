"""Which files of a run's index are meant by a path, or by the end of one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from megablend.errors import ConfigError
from megablend.index.blocks.block_store import BlockStore
from megablend.index.read.joined_snapshot import JoinedSnapshot
from megablend.run.run import Run
from megablend.storage.location import find_scheme

_NAMED_FILES = 5
"""Files that a message names."""


def match_files(run: Run, file: str) -> list[int]:
    """Numbers of the files of the index that a path, or the end of one, means: several if
    sources share the file. A file that was renamed has the paths that it had, too.

    Raises: ConfigError if it means none, or different ones.
    """
    if not file:
        raise ConfigError(
            "found an empty path, expected a data file of the index; `megablend describe` lists the sources"
        )
    # A pair is named by its .bin, and often by its prefix
    spellings = (file, f"{file.removesuffix('.idx')}.bin")
    paths = _list_likely_paths(run, spellings)
    absolute = {each if find_scheme(each) else str(Path(each).absolute()) for each in spellings}
    if exact := [i for i, path in paths.items() if path in absolute]:
        return exact
    found = [i for i, path in paths.items() if path.endswith(tuple(f"/{s}" for s in spellings))]
    if not found:
        # Perhaps written in another way, with `..` or through links. The links are followed only
        # now, since that asks the file system for each file.
        resolved = {i: _resolve_links(path) for i, path in paths.items()}
        real = {_resolve_links(each) for each in absolute}
        if exact := [i for i, path in resolved.items() if path in real]:
            return exact
        endings = tuple(f"/{os.path.normpath(each)}" for each in spellings)
        found = [i for i, path in resolved.items() if path.endswith(endings)]
    snapshot = run.store.snapshot
    if found or not isinstance(snapshot, JoinedSnapshot):
        _check_is_one_path(file, [paths[i] for i in found], snapshot.digest)
        return found
    ends = tuple(f"/{each}" for each in spellings)
    former = snapshot.list_former_paths(run.store.roots).items()
    old = [i for i, path in former if path in absolute or path.endswith(ends)]
    current = [snapshot.path(i, run.store.roots) for i in old]
    _check_is_one_path(file, current, snapshot.digest)
    return match_files(run, current[0])


def locate_file(run: Run, number: int) -> tuple[BlockStore, int]:
    """The blocks of the snapshot that has a file of the run's index, and the file's number
    there."""
    for store in run.store.stores:
        if number < store.snapshot.num_files:
            return store, number
        number -= store.snapshot.num_files
    raise IndexError(f"file {number} is out of range")


def _list_likely_paths(run: Run, spellings: Sequence[str]) -> Mapping[int, str]:
    """The paths of the files of tokens whose names end like one of the spellings, by number. No
    others can match, and names are cheaper to look through than paths are to make."""
    snapshot = run.store.snapshot
    # Extra columns list their files again
    has_tokens = snapshot.files.columns < len(snapshot.sources)
    names = tuple(each.rpartition("/")[2] for each in spellings)
    return {
        i: snapshot.path(i, run.store.roots)
        for i, name in enumerate(snapshot.file_names())
        if name.endswith(names) and has_tokens[i]
    }


def _resolve_links(location: str) -> str:
    """A path without `..` and links; a location with a scheme as it is."""
    return location if find_scheme(location) else os.path.realpath(location)


def _check_is_one_path(file: str, paths: Sequence[str], index: str) -> None:
    """Raises: ConfigError if there are no paths of the index that end like `file`, or different
    ones."""
    distinct = sorted(set(paths))
    if not distinct:
        raise ConfigError(
            f"{file}: the index {index} has no file with this path or ending; `megablend "
            "describe` lists the sources"
        )
    if len(distinct) > 1:
        num_more = len(distinct) - _NAMED_FILES
        more = f" and {num_more} more" if num_more > 0 else ""
        raise ConfigError(
            f"{file}: {len(distinct)} files have this ending ({', '.join(distinct[:_NAMED_FILES])}{more}); give more of the path"
        )
