"""Open the blocks of the snapshots that a run reads, and check that these snapshots fit the
config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from megablend.config import Config, Source
from megablend.config.runtime import Runtime
from megablend.errors import ConfigError, PlanError
from megablend.index.blocks.block_sizes import EXTRA_PART
from megablend.index.blocks.block_store import BlockStore, JoinedStore
from megablend.index.blocks.extra_check import extra_columns
from megablend.index.blocks.extra_columns import ExtraColumn
from megablend.index.read.joined_snapshot import name_source
from megablend.index.read.snapshot import Snapshot, choose_root, open_snapshot
from megablend.index.tables.source_entry import SourceEntry
from megablend.storage.base import Storage
from megablend.storage.location import find_root

_ORDER_REMEDY = (
    "; let the stage with that order read an index that has them (`new_data: true` in the stage, then `megablend index "
    "CONFIG`)"
)


class Misfit(NamedTuple):
    """A description of why a snapshot does not fit a config."""

    problem: str
    """How the snapshot differs: a relative clause for a message."""
    remedy: str = ""
    """What to do if the run keeps the snapshot. This is the end of a message, and begins with a
    semicolon."""


def open_stores(config: Config, digests: Sequence[str], storage: Storage) -> BlockStore:
    """Open the blocks of all snapshots of a run, in order, with the options and the paths of the
    config.

    Args:
        digests: the digests of the snapshots.

    Raises: the errors of `open_block_store`; PlanError if no snapshot has a source of the config,
        or if a source that the config does not withdraw is missing in a snapshot but not in an
        earlier one; CacheError if a snapshot cannot be opened.
    """
    snapshots = [open_snapshot(config.cache_store, digest) for digest in digests]
    is_only = len(snapshots) == 1 and not any(stage.changes_index for stage in config.stages)
    if not is_only:
        _check_sources(config, snapshots)
    for number, snapshot in enumerate(snapshots):
        _check_fit(config, snapshot, None if is_only else number)
    return join_stores(config.run, snapshots, list_eods(config), Runtime.of(config), storage)


def open_block_store(
    config: Config, snapshot: Snapshot, storage: Storage, *, number: int | None = None
) -> BlockStore:
    """Open the blocks of an index snapshot with the options and the paths of the config.

    Args:
        number: the snapshot's number, if the run has several. The snapshot then need not have all
            sources of the config, nor document counts for the orders of stages that read other
            snapshots.

    Raises: PlanError if the snapshot lacks a source of the config, or indexed it with other
        options; ConfigError if a source's append_eod does not fit its token dtype.
    """
    _check_fit(config, snapshot, number)
    return join_stores(config.run, [snapshot], list_eods(config), Runtime.of(config), storage)


def join_stores(
    run: str,
    snapshots: Sequence[Snapshot],
    eods: Mapping[str, int | None],
    runtime: Runtime,
    storage: Storage,
) -> BlockStore:
    """Open the blocks of the snapshots of a run, in order.

    Args:
        eods: the token that follows each document, by the source's name in the index.

    Raises: PlanError if a snapshot lacks an extra column; ConfigError if an extra column has
        different types in sources of a split.
    """
    stores = [_open_store(run, snapshot, eods, runtime, storage) for snapshot in snapshots]
    if len(stores) == 1:
        return stores[0]
    extra = dict[str, tuple[ExtraColumn, ...]]()
    roots = dict[str, str]()
    later_names = set[str]()  # names of sources in later snapshots
    for number, store in reversed(list(enumerate(stores))):
        names = {entry.name for entry in store.snapshot.sources}
        for name in names:
            joined_name = name_source(name, number, later_names)
            if name in store.extra:
                extra[joined_name] = store.extra[name]
            if name in store.roots:
                roots[joined_name] = store.roots[name]
        later_names |= names
    return JoinedStore(stores, extra, roots, storage=stores[-1].storage)


def _open_store(
    run: str, snapshot: Snapshot, eods: Mapping[str, int | None], runtime: Runtime, storage: Storage
) -> BlockStore:
    """Open the blocks of a snapshot; see `join_stores` for the arguments and errors."""
    names = snapshot.sources.names
    append_eod = list(map(eods.get, names))
    roots = dict[str, str]()
    for name in names:
        paths = runtime.paths.get(name)
        if paths is not None:
            roots[name] = snapshot.roots[name]
            # Most sources have one path, whose files are where they were indexed
            if len(paths) > 1 or paths[0].rpartition("/")[0] != roots[name]:
                roots[name] = choose_root(snapshot, name, find_root(paths), storage)
    extra_bytes = runtime.memory // EXTRA_PART
    plain = BlockStore(snapshot, append_eod, roots, extra_bytes=extra_bytes, storage=storage)
    extra = dict[str, tuple[ExtraColumn, ...]]()
    for name, columns in runtime.extra_columns.items():
        entry = snapshot.sources.find(name)
        if entry is not None:
            misfit = _find_missing_column(entry, columns)
            if misfit is not None:
                raise _refuse(run, snapshot, misfit)
            extra[name] = extra_columns(plain, name, sorted(columns))
    if not extra:
        return plain
    _check_types(extra)
    return BlockStore(snapshot, append_eod, roots, extra, extra_bytes, storage=storage)


def list_eods(config: Config) -> dict[str, int | None]:
    """List the token that follows each document, by the source's name in the index."""
    return {name: source.append_eod for name, source in config.all_sources.items()}


def _check_fit(config: Config, snapshot: Snapshot, number: int | None) -> None:
    """Check that a snapshot is what the config requests. Raises: see `open_block_store`."""
    named = config.all_sources
    if number is not None:
        numbers = snapshot.sources.numbers
        named = {name: source for name, source in named.items() if name in numbers}
    misfit = find_misfit(config, snapshot, named, number)
    if misfit is not None:
        raise _refuse(config.run, snapshot, misfit)


def _refuse(run: str, snapshot: Snapshot, misfit: Misfit) -> PlanError:
    """Return the error for a run whose config does not fit a snapshot."""
    return PlanError(
        f"run {run!r} uses index {snapshot.digest}, {misfit.problem}{misfit.remedy}; "
        "give the run another name (`run:`) and build it, or restore the previous config"
    )


def find_misfit(
    config: Config, snapshot: Snapshot, named: Mapping[str, Source], number: int | None = None
) -> Misfit | None:
    """Find the first of the named sources that does not fit a snapshot, and return why: the
    snapshot lacks it, or indexed it with other options. Return None if all sources fit.

    Of sources that are requested and indexed in the same way, only one is checked, since there may
    be thousands of them.

    Args:
        number: as for `open_block_store`.

    Raises: ConfigError if a source's append_eod does not fit its token dtype.
    """
    sources = snapshot.sources
    checked = set[object]()
    largest = 0
    reads = dict(zip(sources.names, sources.reads, strict=True))
    if sources and any(source.append_eod is not None for source in named.values()):
        files = range(sources[-1].files.stop)  # the files of extra columns come after these
        largest = min(map(_find_largest, snapshot.files.token_dtypes(files)), default=0)
    for name, source in named.items():
        eod = source.append_eod
        read = reads.get(name)
        options = tuple(source.options.items())
        written = source.format, source.column, options, source.text is None
        request = id(read), written, eod is None
        if request not in checked or source.extra_columns or (eod is not None and eod > largest):
            misfit = _find_source_misfit(config, snapshot, name, source, number)
            if misfit is not None:
                return misfit
            checked.add(request)
    return None


def _find_source_misfit(
    config: Config, snapshot: Snapshot, name: str, source: Source, number: int | None
) -> Misfit | None:
    """Describe why one source is not what the config requests; see `find_misfit`."""
    entry = snapshot.sources.find(name)
    if entry is None:
        return Misfit(
            f"which has no source {name!r} (its sources: {', '.join(snapshot.sources.names)})"
        )
    difference = entry.read.find_difference(config.read_spec(source))
    if difference is not None:
        field, indexed, requested = difference
        return Misfit(
            f"in which source {name!r} has {field} {indexed!r}; the config has {requested!r}"
        )
    misfit = _find_missing_column(entry, source.extra_columns)
    if misfit is not None:
        return misfit
    if config.needs_documents(source, number) and not entry.documents:
        needed_by = "append_eod, split, extra_columns and order: document"
        is_for_stage = config.needs_lengths and not config.top_level_needs_lengths
        remedy = _ORDER_REMEDY if is_for_stage else ""
        return Misfit(
            f"which has no document counts for source {name!r}, needed by {needed_by}", remedy
        )
    _check_eod(source, snapshot.files.token_dtypes(entry.files))
    return None


def _find_missing_column(entry: SourceEntry, columns: Sequence[str]) -> Misfit | None:
    """Describe the first extra column that is missing in a source's index; None if none is
    missing."""
    for column in columns:
        if entry.find_extra(column) is None:
            return Misfit(f"which lacks extra column {column!r} of source {entry.name!r}")
    return None


def _check_sources(config: Config, snapshots: Sequence[Snapshot]) -> None:
    """Refuse sources that no snapshot has, or that a later one lacks although the config does not
    withdraw them. Raises: PlanError."""
    for name in config.all_sources:
        has_source = [name in snapshot.sources.numbers for snapshot in snapshots]
        if not any(has_source):
            raise PlanError(
                f"run {config.run!r} reads {len(snapshots)} versions of the index, none of which has source {name!r}; index the "
                "files as they are (`megablend index CONFIG`), and add a stage that reads them (`new_data`, `megablend amend`)"
            )
        first = has_source.index(True)
        if not all(has_source[first:]) and name not in config.withdrawn:
            lacking = snapshots[has_source.index(False, first)]
            raise PlanError(
                f"run {config.run!r}: index {lacking.digest} lacks source {name!r}, which the run has read before; "
                f"list it in `withdraw` of the stage, or index its files again (`megablend index CONFIG`)"
            )


def _check_types(extra: Mapping[str, Sequence[ExtraColumn]]) -> None:
    """Refuse extra columns of different types in the sources of a split. Raises: ConfigError."""
    first: dict[str, str] = {}
    for name, columns in extra.items():
        other = first.setdefault(name.rpartition("/")[0], name)
        for column, expected in zip(columns, extra[other], strict=True):
            if column.dtype != expected.dtype:
                raise ConfigError(
                    f"extra column {column.column!r} has dtype {expected.dtype} in source {other!r} and {column.dtype} in "
                    f"{name!r}; write it with the same dtype in all sources of a split"
                )


def _check_eod(source: Source, dtypes: Sequence[str]) -> None:
    """Check that the end-of-document token of a source fits the types of its tokens. Raises:
    ConfigError."""
    for dtype in dtypes:
        if source.append_eod is not None and source.append_eod > _find_largest(dtype):
            raise ConfigError(
                f"{f'{source.place}: ' if source.place else ''}source {source.name!r}: append_eod {source.append_eod} does not "
                f"fit its tokens, which are stored as {dtype} (at most {_find_largest(dtype)}); use a smaller token id"
            )


@cache
def _find_largest(dtype: str) -> int:
    """Return the largest token that a type can store."""
    return int(np.iinfo(dtype).max)
