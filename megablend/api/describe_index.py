"""The indexes of a cache as `describe` reports them."""

from __future__ import annotations

from megablend.api.description import CacheDescription, DamagedIndex, IndexDescription, IndexedSource
from megablend.api.manage_runs import list_runs_of
from megablend.api.runs import newest_snapshot
from megablend.caches.base import DOCUMENTS, CacheStore
from megablend.errors import CacheError, ResourceError
from megablend.index.document_table import table_bytes
from megablend.index.list_snapshots import list_snapshots
from megablend.index.snapshot import Snapshot, open_snapshot
from megablend.system.failures import translating


def describe_cache(cache: CacheStore) -> CacheDescription:
    """Indexes and runs of a cache. Those that cannot be read have only a `problem`."""
    digests = list_snapshots(cache)
    if not digests:
        newest_snapshot(cache)  # raises: says what is missing
    return CacheDescription(
        cache=cache.location,
        indices=tuple(_describe_readable(cache, digest) for digest in digests),
        runs=tuple(list_runs_of(cache)),
    )


def _describe_readable(cache: CacheStore, digest: str) -> IndexDescription | DamagedIndex:
    """An index of a cache, or what is wrong with it."""
    try:
        with translating(cache.location):
            return describe_index(open_snapshot(cache, digest))
    except (CacheError, ResourceError) as error:
        return DamagedIndex(digest=digest, problem=str(error))


def describe_index(snapshot: Snapshot) -> IndexDescription:
    """An index of a cache, with its sources."""
    has_tables = bool(snapshot.store.list_files(DOCUMENTS))  # looking for each costs much where sources are many
    sources = tuple(
        IndexedSource(
            name=entry.name,
            format=entry.format,
            column=entry.column,
            column_taken=entry.column_taken,
            skipped=tuple(entry.skipped),
            files=len(entry.files),
            blocks=len(entry.blocks),
            rows=entry.rows,
            tokens=entry.tokens,
            document_table_bytes=table_bytes(snapshot, number) if has_tables else None,
            extra_columns=tuple(each.column for each in entry.extra_columns),
        )
        for number, entry in enumerate(snapshot.sources)
    )
    return IndexDescription(
        digest=snapshot.digest,
        index_bytes=sum(path.stat().st_size for path in snapshot.folder.iterdir() if path.is_file()),
        files=sum(source.files for source in sources),
        blocks=sum(source.blocks for source in sources),
        rows=sum(source.rows for source in sources),
        tokens=sum(source.tokens for source in sources),
        sources=sources,
    )
