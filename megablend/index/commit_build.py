"""The end of a build: the results of all ranks are merged and committed, and changes are reported."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

from megablend.caches.base import CacheStore
from megablend.errors import CacheError
from megablend.index.build_report import BuildReport
from megablend.index.columns import ColumnsTaken
from megablend.index.complete_snapshots import complete_snapshots
from megablend.index.file_tasks import FileTask, TaskPart, TaskResult, await_fragment
from megablend.index.list_snapshots import list_snapshots
from megablend.index.merge import write_snapshot
from megablend.index.packs import FileFacts, Packed, facts_of
from megablend.index.snapshot import Snapshot, open_snapshot
from megablend.index.source_spec import SourceColumn


def commit_build(
    store: CacheStore,
    columns: Sequence[SourceColumn],
    work: Sequence[FileTask],
    items: Sequence[TaskPart],
    results: Mapping[int, TaskResult],
    packed: Packed,
    notes: Sequence[str],
    *,
    start: float,
) -> BuildReport:
    """Merge the results of all files into a snapshot, commit it and report.

    Args:
        results: of each item, by its number.
        notes: warnings so far.
        start: `time.monotonic()` when the build began.

    Raises: ConfigError if the files of a source have their tokens in different columns; CacheError.
    """
    newest = _newest(store)
    taken, unused = ColumnsTaken(), list[str]()
    digest, created = write_snapshot(
        store, columns, _load_facts(store, columns, work, packed, taken, unused), taken.by_name
    )
    late_notes = complete_snapshots(store, digest)
    sources = [each.source for each in columns if not each.is_extra]
    here = {(listing.spec.name, file.name) for listing in sources for file in listing.files}
    names = {listing.spec.name for listing in sources}
    before = {(source, name) for source, name in _files(newest) if source in names}
    read = {items[number].number for number, result in results.items() if result.read}
    return BuildReport(
        digest=digest,
        created=created,
        num_files=len(work),
        read=len(read),
        reused=len(work) - len(read),
        changed=tuple(f"{columns[item.column].name}/{item.file.name}" for item in work if item.changed),
        added=len(here - before),
        removed=len(before - here),
        scanned_bytes=sum(result.scanned_bytes for result in results.values()),
        seconds=time.monotonic() - start,
        notes=(*notes, *late_notes, *unused, *(note for _, result in sorted(results.items()) if (note := result.note))),
        skipped=tuple(f"source {listing.spec.name!r}: {path}" for listing in sources for path in listing.skipped),
        columns={name: taken.by_name.get(name) for name in (listing.spec.name for listing in sources)},
    )


def _load_facts(
    store: CacheStore,
    columns: Sequence[SourceColumn],
    work: Sequence[FileTask],
    packed: Packed,
    taken: ColumnsTaken,
    unused: list[str],
) -> Iterator[FileFacts]:
    """The indexing result of each file, in order; fills `taken`, and `unused` with warnings about unused bytes of files."""
    for task in work:
        name, column = task.fragment, columns[task.column]
        facts = packed.facts(name.answer) if name.answer in packed else facts_of(await_fragment(store, str(name)))
        taken.add(column, task.file, facts.column)
        warning = column.source.kind.describe_unused_bytes(task.file.path, facts.blocks, task.file.size)
        if warning is not None:
            unused.append(warning)
        yield facts


def _newest(store: CacheStore) -> Snapshot | None:
    """The newest snapshot that can be opened."""
    for digest in reversed(list_snapshots(store)):
        with contextlib.suppress(CacheError):
            return open_snapshot(store, digest)
    return None


def _files(snapshot: Snapshot | None) -> list[tuple[str, str]]:
    """(source name, file name) of all files."""
    if snapshot is None:
        return []
    names = snapshot.file_names()
    return [(source.name, names[i]) for source in snapshot.sources for i in source.files]
