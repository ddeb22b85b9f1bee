"""The blocks of an index, opened for the sources of a config."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megablend.blocks.block_store import BlockStore
from megablend.blocks.extra_check import extra_columns
from megablend.blocks.extra_columns import ExtraColumn
from megablend.blocks.memory_shares import get_extra_bytes
from megablend.config import SPLITS, Config, Source
from megablend.errors import ConfigError, PlanError
from megablend.index.snapshot import Snapshot
from megablend.index.source_entry import SourceEntry
from megablend.storage.base import Storage
from megablend.storage.location import find_root


def open_block_store(config: Config, generation: Snapshot, storage: Storage) -> BlockStore:
    """Open the blocks of an index snapshot with the options and the paths of the config.

    Raises: PlanError where the snapshot lacks a source of the config, or indexed it with other options; ConfigError where a
        source's append_eod does not fit its token dtype.
    """
    named = config.all_sources
    entries = {entry.name: entry for entry in generation.sources}
    for name, source in named.items():
        entry = entries.get(name)
        if entry is None:
            problem = f"which has no source {name!r} (its sources: {', '.join(entries)})"
        elif (difference := entry.read.find_difference(config.read_spec(source))) is not None:
            field, indexed, requested = difference
            problem = f"in which source {name!r} has {field} {indexed!r}; the config has {requested!r}"
        elif missing := [each for each in source.extra_columns if entry.find_extra(each) is None]:
            problem = f"which lacks extra column {missing[0]!r} of source {name!r}"
        elif config.needs_documents(source) and not entry.documents:
            needed_by = "append_eod, split, extra_columns and order: document"
            problem = f"which has no document counts for source {name!r}, needed by {needed_by}"
        else:
            _check_eod(source, generation.token_dtypes(entry))
            continue
        raise PlanError(
            f"run {config.run!r} uses index {generation.digest}, {problem}; "
            "give the run another name (`run:`) and build it, or restore the previous config"
        )
    eods = [named[entry.name].append_eod if entry.name in named else None for entry in generation.sources]
    roots = {name: _root(generation, entries[name], named[name], storage) for name in named}
    plain = BlockStore(generation, eods, roots, storage=storage)
    extra = {name: extra_columns(plain, name, sorted(each.extra_columns)) for name, each in named.items()}
    for split in SPLITS:
        _check_types([(name, extra[name]) for name in config.sources_of(split)])
    return BlockStore(generation, eods, roots, extra, get_extra_bytes(config.memory), storage=storage)


def _check_types(extra: Sequence[tuple[str, Sequence[ExtraColumn]]]) -> None:
    for name, columns in extra:
        for column, first in zip(columns, extra[0][1], strict=True):
            if column.dtype != first.dtype:
                raise ConfigError(
                    f"extra column {column.column!r} has dtype {first.dtype} in source {extra[0][0]!r} and {column.dtype} in "
                    f"{name!r}; write it with the same dtype in all sources of a split"
                )


def _check_eod(source: Source, dtypes: Sequence[str]) -> None:
    for dtype in dtypes:
        if source.append_eod is not None and source.append_eod > np.iinfo(dtype).max:
            raise ConfigError(
                f"{f'{source.place}: ' if source.place else ''}source {source.name!r}: append_eod {source.append_eod} does not "
                f"fit its tokens, which are stored as {dtype} (at most {np.iinfo(dtype).max}); use a smaller token id"
            )


def _root(generation: Snapshot, entry: SourceEntry, source: Source, storage: Storage) -> str:
    """The folder that a source's file names are relative to: the one of the config's paths, since data may have moved.

    Where paths were added to the config after the index was built, the config's root may differ and the names do not resolve
    under it; then the root stored in the index is used.
    """
    root = find_root(source.path)
    if root == entry.root or not entry.files:
        return root
    moved, indexed = (generation.path(entry.files.start, {entry.name: folder}) for folder in (root, entry.root))
    return entry.root if storage.glob(indexed) and not storage.glob(moved) else root
