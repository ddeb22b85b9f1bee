"""The work of a build for each file. If the file has a fragment, the fragment is reused. Otherwise
the file is indexed, as a whole or in parts, and a fragment is stored.

Large files are indexed in parts (`file_parts`), so that several ranks can index one file together,
and progress is reported before the whole file is done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass

from megablend.caches.base import CacheStore
from megablend.errors import NOT_ONE_FILE, CacheError, ChangedFileError, ConfigError, DataError
from megablend.formats.base import is_divisible
from megablend.formats.flat import DOCUMENTS
from megablend.index.build.file_parts import join, num_parts, part_span
from megablend.index.build.fragments import (
    Fragment,
    fragment_answer,
    fragment_name,
    fragment_place,
    is_part,
    part_name,
    publish_fragment,
    read_fragment,
    split_name,
)
from megablend.index.build.packs import AnswerNames, Pack, Packed, PackWriter
from megablend.index.build.source_spec import SourceFile, SourceSpec, stat_file
from megablend.index.tables.file_versions import (
    request_samples,
    sampled_content_digest,
    versions_of,
)
from megablend.storage.base import Storage
from megablend.storage.local import without_inodes
from megablend.storage.parallel_map import parallel_map
from megablend.storage.prefetched import request_ranges

_FILE_COST = 1 << 20
"""Cost of opening a file, as the number of bytes that can be read in the same time."""
_WHOLE_BYTES = 512 << 10
"""Over a network, a file of up to this size is read by one request."""
_FRAGMENT_COST = 1 << 14
"""Cost of reading a fragment, as the number of bytes of a data file that can be read in the same
time."""
_CHANGED = f"changed while it was being indexed, {NOT_ONE_FILE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTask:
    """The work of a build for one file of a column."""

    column: SourceSpec
    file: SourceFile
    documents: bool
    """Whether the fragment counts documents. A fragment with counts can also be used for a column
    that does not request them."""
    fragment: str
    """Name of the fragment."""
    known: bool
    """Whether the fragment exists (it may still be damaged)."""
    packed: bool
    """Whether the fragment is in an undamaged pack, so that there is nothing to do."""
    changed: bool
    """Whether only a fragment of another version of the file exists."""
    num_parts: int
    """Number of parts in which the file is indexed; 1 for the whole file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPart:
    """A unit of work of one rank: a file, or a part of a large one."""

    number: int
    """Index of the file's task in the list of all tasks."""
    part: int
    """Number of the part; 0 for a whole file."""
    size: int
    """Bytes of the file, or of the part."""
    cost: int
    """Estimated cost of the work, as the number of bytes that can be read in the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """The result of one unit of work."""

    read: bool
    """Whether this build indexed the file or part; False if a fragment was reused."""
    scanned_bytes: int
    """Bytes of the file's body that had to be read for counting."""
    note: str | None
    """A problem with the existing fragment or the file that does not stop the build; None if there
    is none."""


def plan_work(
    columns: Sequence[SourceSpec], singles: Sequence[str], packed: Packed | None = None
) -> list[FileTask]:
    """Plan the tasks of all files, in the order of columns and files.

    Args:
        singles: names of the single fragments in the cache.
        packed: the fragments in the packs of the cache.
    """
    packed = packed or Packed()
    single_names = set[str]()
    singles_by_answer = AnswerNames()
    known_places = set(packed.places)
    for name in singles:
        if not is_part(name):
            place, answer = split_name(name)
            single_names.add(name)
            singles_by_answer.add(answer, name)
            known_places.add(place)
    shared_versions = _find_shared_versions(columns)
    work = []
    for column in columns:
        # The document boundaries of a flat column can be found only by reading the whole file
        divisible = is_divisible(column.kind) and column.read.option(DOCUMENTS) is None
        for file in column.files:
            in_pack = _find_fragment(column, file, packed, packed.by_answer, shared_versions)
            stored = in_pack or _find_fragment(
                column, file, single_names, singles_by_answer, shared_versions
            )
            documents = stored[1] if stored else column.read.count_documents
            name = stored[0] if stored else fragment_name(column, file, documents=documents)
            work.append(
                FileTask(
                    column=column,
                    file=file,
                    documents=documents,
                    fragment=name,
                    known=bool(stored),
                    packed=bool(in_pack),
                    changed=not stored and split_name(name)[0] in known_places,
                    num_parts=1 if stored or not divisible else num_parts(file.size),
                )
            )
    return work


def _find_shared_versions(columns: Sequence[SourceSpec]) -> set[str]:
    """Return the versions that several files have: local files of equal size whose times are the
    same, as those that were unpacked from one archive, or written within a tick of the clock."""
    path_of = dict[str, str]()
    shared = set[str]()
    for column in columns:
        for file in column.files:
            for version in versions_of(file.etag):
                if path_of.setdefault(version, file.path) != file.path:
                    shared.add(version)
    return shared


def _find_fragment(
    column: SourceSpec,
    file: SourceFile,
    names: Container[str],
    by_answer: AnswerNames,
    shared_versions: Collection[str],
) -> tuple[str, bool] | None:
    """Return the name of a file's fragment, and whether the fragment counts documents; None if
    there is none. The fragment may be of another place if no other file can be meant.

    Args:
        names: names of the fragments that are stored.
    """
    # A fragment that counts documents also serves a column that does not request it
    serving = [True] if column.read.count_documents else [True, False]
    for version in versions_of(file.etag):
        for documents in serving:
            answer = fragment_answer(column, file, version, documents=documents)
            own = f"{fragment_place(column, file)}-{answer}"
            if own in names:
                return own, documents
            other = None if version in shared_versions else by_answer.find(answer)
            if other is not None:
                return other, documents
    return None


def items_of(work: Sequence[FileTask]) -> list[TaskPart]:
    """Return the units of work of all files that are not in a pack, in order."""
    items = []
    for number, task in enumerate(work):
        if task.packed:
            continue
        for part in range(task.num_parts):
            start, stop = part_span(task.file.size, part, task.num_parts)
            cost = _FRAGMENT_COST if task.known else _FILE_COST + stop - start
            items.append(TaskPart(number=number, part=part, size=stop - start, cost=cost))
    return items


def ensure_fragment(
    work: FileTask, part: int, store: CacheStore, packs: PackWriter, storage: Storage
) -> TaskResult:
    """Make sure that the result of indexing a file, or a part of it, is stored. The result for a
    whole file is added to `packs`; the result for a part becomes a fragment in the cache.

    Raises: DataError, ConfigError from the file's format; ChangedFileError if the file changes
        during indexing; CacheError.
    """
    name = _fragment_name(work, part)
    note = None
    if work.known or work.num_parts > 1:
        path = store.fetch_file("fragments", name)
        try:
            fragment = read_fragment(path)
        except FileNotFoundError:
            if work.known:
                note = f"{path}: removed by another process during the build; the file was indexed again"
        except CacheError as error:
            note = str(error)
        else:
            if work.num_parts == 1:
                packs.add(work.fragment, fragment, is_single=True)
            return TaskResult(read=False, scanned_bytes=0, note=None)
    fragment = index_part(work, part, storage)
    if work.num_parts == 1:
        packs.add(work.fragment, fragment, is_single=False)
    else:
        publish_fragment(store, name, fragment)
    if fragment.note:
        note = "; ".join(filter(None, [note, f"{work.file.path}: {fragment.note}"]))
    return TaskResult(read=True, scanned_bytes=fragment.scanned_bytes, note=note)


def index_part(work: FileTask, part: int, storage: Storage) -> Fragment:
    """Index a file, or a part of it. If the file is new, first check that its content agrees with
    the options with which it is read. Raises: see `ensure_fragment`."""
    column = work.column
    if part == 0 and not _is_known(work):
        problem = _describe_contradiction(work, storage)
        if problem:
            raise column.complaint(problem)
    file = work.file
    source_format = column.kind
    if file.size <= _WHOLE_BYTES:
        request_ranges(storage, file.path, [0], [file.size])
    request_samples(file.path, file.size, storage)
    read = dataclasses.replace(column.read, count_documents=work.documents)
    try:
        if work.num_parts > 1:
            assert is_divisible(source_format)
            span = part_span(file.size, part, work.num_parts)
            index = source_format.index_part(file.path, read, span=span, storage=storage)
        else:
            index = source_format.index(file.path, read, storage=storage)
        body = sampled_content_digest(file.path, file.size, storage)
    except ConfigError as error:
        raise column.complaint(error) from error
    except DataError:
        _check_unchanged(work, storage)  # a file that was replaced may look damaged
        raise
    _check_unchanged(work, storage)
    return Fragment.of(index, body)


def _check_unchanged(work: FileTask, storage: Storage) -> None:
    """Check that the file is still the one that was listed, perhaps by another rank. Raises:
    ChangedFileError, MissingFileError."""
    paths = work.column.kind.files(work.file.path)
    etag = stat_file(paths, work.column.root, storage).etag
    if without_inodes(etag) != without_inodes(work.file.etag):
        raise ChangedFileError(work.file.path, _CHANGED)


def describe_contradictions(work: Sequence[FileTask], storage: Storage) -> list[str]:
    """Return warnings about files whose content does not agree with the options with which they are
    read. Only files that existing runs may read are included. Raises: see Storage.read."""
    known = [task for task in work if _is_known(task)]
    threads = storage.limits(known[0].file.path).max_files if known else 1
    problems = parallel_map(lambda task: _describe_contradiction(task, storage), known, threads)
    return [problem for problem in problems if problem is not None]


def _is_known(work: FileTask) -> bool:
    """Return whether an existing run may read the file. This is the case if the cache has an index
    of any version of the file, or if an index that contains the file is being repaired."""
    return work.known or work.changed or not work.column.patterns


def _describe_contradiction(work: FileTask, storage: Storage) -> str | None:
    column = work.column
    problem = column.kind.describe_contradiction(work.file.path, column.read, storage=storage)
    return None if problem is None else f"{work.file.path}: {problem}"


def join_parts(work: FileTask, store: CacheStore) -> None:
    """Join the fragments of a file's parts into a fragment of the whole file, and remove the
    fragments of the parts.

    Raises: ChangedFileError if the parts belong to different versions of the file; the errors of
        `await_fragment`; CacheError.
    """
    names = [_fragment_name(work, part) for part in range(work.num_parts)]
    parts = [await_fragment(store, name) for name in names]
    if len({(part.structure, part.body) for part in parts}) > 1:
        for name in names:
            store.remove("fragments", name)
        raise ChangedFileError(work.file.path, _CHANGED)
    joined = Fragment.of(join([part.make_index() for part in parts]), parts[0].body)
    publish_fragment(store, work.fragment, joined)
    for name in names:
        store.remove("fragments", name)


def await_fragment(store: CacheStore, name: str) -> Fragment:
    """Wait for a fragment that another rank has written, and read it. Raises: CacheError if it does
    not appear, or is damaged."""
    return read_fragment(store.fetch_file("fragments", name, is_written=True))


def await_pack(store: CacheStore, name: str) -> Pack:
    """Wait for a pack that another rank has written, and open it. Raises: see `await_fragment`."""
    return Pack(store.fetch_file("packs", name, is_written=True))


def _fragment_name(work: FileTask, part: int) -> str:
    if work.num_parts == 1:
        return work.fragment
    return part_name(work.fragment, part, work.num_parts)
