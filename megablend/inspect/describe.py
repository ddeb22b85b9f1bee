"""Describe what a run will read, before it runs, or what a cache contains."""

from __future__ import annotations

from megablend.caches.base import CacheStore
from megablend.caches.find import is_remote
from megablend.config import Source
from megablend.config.numbers import whole_number
from megablend.errors import CacheError, ConfigError, ResourceError
from megablend.index.build.sources import list_sources
from megablend.index.read.snapshot import open_snapshot
from megablend.index.tables.list_snapshots import list_snapshots
from megablend.inspect.describe_run import describe_index, describe_planned
from megablend.inspect.description import (
    CacheDescription,
    DamagedIndex,
    Description,
    FilesDescription,
    IndexDescription,
    SourceFiles,
)
from megablend.inspect.what_if import foresee_run
from megablend.operations.manage_runs import list_runs_of
from megablend.operations.runs import newest_snapshot
from megablend.operations.session import ConfigLike, Session
from megablend.operations.source_specs import list_specs
from megablend.operations.token_documents import refuse_token_documents
from megablend.prefetch.memory_need import Loaders
from megablend.storage.base import Storage
from megablend.storage.mirror_values import parse_mirror_size
from megablend.system.failures import translating


@translating("describe")
def describe(
    what: ConfigLike,
    *,
    cache: str | None = None,
    micro_batch_size: int | None = None,
    data_parallel_size: int = 1,
    num_workers: int = 0,
    num_nodes: int | None = None,
    mirror_size: int | str | None = None,
    storage: Storage | None = None,
) -> Description:
    """Describe what a run reads (for a config), or what a cache contains (for its folder or URL).

    Nothing needs to be built: a run that is not committed is described as `build` would commit it,
    with `committed` False and a `note`. If the config's files are not indexed, they are listed.

    Args:
        cache: cache folder, instead of the config's `cache`.
        micro_batch_size, data_parallel_size, num_workers: the loaders whose steps, memory and read
            amplification are estimated.
        num_nodes, mirror_size: the number of nodes among which the ranks are divided (1 by
            default), and the size of each node's mirror, such as 2TB (by default the size in the
            config). If either is given, the transfers of the mirrors are estimated; see
            docs/mirror.md.
        storage: the storage that finds and reads files, instead of the config's storage.

    Returns: a RunDescription; a FilesDescription if the config's files are not indexed; a
        CacheDescription for a cache.
    Raises: the errors of `build` if the config cannot be planned; CacheError if a cache has no
        index; ConfigError if a number is out of range, or `memory` is too small for the loaders.
    """
    loaders = _check_loaders(micro_batch_size, data_parallel_size, num_workers)
    num_nodes, mirror_bytes = _check_mirrors(num_nodes, mirror_size, loaders)
    session = Session(what, cache=cache, storage=storage)
    if session.is_cache:
        if loaders is not None:
            raise ConfigError(
                f"micro_batch_size (`--micro-batch`): {what} is a cache, but estimates need a config; give a config"
            )
        return describe_cache(session.cache)
    config = session.config
    planned = foresee_run(session)
    if isinstance(planned, str):
        return FilesDescription(
            cache=config.cache,
            run=config.run,
            order=config.order,
            sequence_length=config.sequence_length,
            committed=False,
            note=planned,
            files=_list_files(session),
        )
    if not planned.committed:  # `build` would also refuse them
        refuse_token_documents(config, planned.compiled.store.snapshot, session.ledger)
    return describe_planned(
        config,
        planned,
        loaders,
        num_nodes=num_nodes,
        mirror_size=mirror_bytes,
    )


def _check_loaders(
    micro_batch_size: int | None, data_parallel_size: int, num_workers: int
) -> Loaders | None:
    """Return the loaders to estimate; None if no micro batch size is given. Raises: ConfigError if
    a number is out of range."""
    whole_number("data_parallel_size", data_parallel_size, least=1)
    whole_number("num_workers", num_workers, least=0)
    if micro_batch_size is None:
        return None
    whole_number("micro_batch_size", micro_batch_size, least=1)
    return Loaders(
        micro_batch_size=micro_batch_size,
        data_parallel_size=data_parallel_size,
        num_workers=num_workers,
    )


def _check_mirrors(
    num_nodes: int | None, size: int | str | None, loaders: Loaders | None
) -> tuple[int | None, int | None]:
    """Return the number of nodes whose mirrors are estimated, and the size of each mirror in bytes;
    None if neither number is given. Raises: ConfigError."""
    if num_nodes is None and size is None:
        return None, None
    num_nodes = 1 if num_nodes is None else num_nodes
    whole_number("num_nodes", num_nodes, least=1)
    try:
        num_bytes = None if size is None else parse_mirror_size(size)
    except ValueError as error:
        raise ConfigError(f"mirror_size: {error}") from None
    if loaders is None:
        raise ConfigError(
            "num_nodes and mirror_size need micro_batch_size, which decides what each rank reads\n"
            "set it (--micro-batch)"
        )
    if loaders.data_parallel_size % num_nodes:
        raise ConfigError(
            f"num_nodes: {loaders.data_parallel_size} data-parallel ranks cannot be divided equally among "
            f"{num_nodes} nodes\n"
            "set the number of ranks (--ranks) to a multiple of the number of nodes"
        )
    return num_nodes, num_bytes


def describe_cache(cache: CacheStore) -> CacheDescription:
    """Describe the indexes and runs of a cache. Indexes and runs that cannot be read have only a
    `problem`."""
    digests = list_snapshots(cache)
    if not digests:
        newest_snapshot(cache)  # raises the error for a cache without an index
    return CacheDescription(
        cache=cache.location,
        indices=tuple(_describe_readable(cache, digest) for digest in digests),
        runs=tuple(list_runs_of(cache)),
    )


def _describe_readable(cache: CacheStore, digest: str) -> IndexDescription | DamagedIndex:
    """Describe an index of a cache, or the reason why it cannot be read."""
    try:
        with translating(cache.location):
            return describe_index(open_snapshot(cache, digest))
    except (CacheError, ResourceError) as error:
        if is_remote(cache.location) and isinstance(error.__cause__, OSError):
            raise  # of this node's disk, not of the index
        return DamagedIndex(digest=digest, problem=str(error))


def _list_files(session: Session) -> tuple[SourceFiles, ...]:
    """List the files of each source. No index is needed.

    Raises: ConfigError if a path matches no file; MissingFileError.
    """
    configured = session.config.all_sources
    listed = []
    for listing in list_sources(list_specs(session.config, session.storage), session.storage):
        source = configured[listing.name]
        listed.append(
            SourceFiles(
                name=source.name,
                format=listing.read.format,
                files=len(listing.files),
                bytes=sum(file.size for file in listing.files),
                share=_share(source),
            )
        )
    return tuple(listed)


def _share(source: Source) -> dict[str, float | str] | None:
    """Return the value of `SourceFiles.share` for a source."""
    if source.unit is None:
        return None
    number = getattr(source, source.unit)
    return {source.unit: number if isinstance(number, str) else float(number)}
