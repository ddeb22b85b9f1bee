"""A cache directory, and the generations of the index that were committed to it.

    <cache>/.lock                       held by the build that runs
    <cache>/fragments/<place>-<version> what indexing found in one file
    <cache>/packs/<digest>              the same of many files: see packs.py
    <cache>/generations/<digest>/       immutable: blocks.arrow, chunks.arrow, files.arrow, manifest.json, and *.check.arrow
                          roots.json    what the last build of it found: where each source's files lay, which column holds
                                        the tokens, what could not be read and was skipped; replaced atomically
                          seen          sizes and times that the last build of it saw; likewise
                          token_ranges  smallest and largest tokens of its files, as far as that build knew them; likewise
    <cache>/documents/, lengths/        tables of single documents, where an order needs them: see document_table.py
    <cache>/splits/<digest>-<what>      where the splits of a generation begin and end; tokens of groups of their blocks
    <cache>/idx/                        digests of parts of long `.idx` files: see idx_digests.py
    <cache>/runs/<run>.json             the run's ledger

Names that begin with a dot are work under way. A generation is whole once it has its name, since it gets it last;
opening checks the manifest, the table of files and the tables' sizes, and takes the same time for any number of blocks; rows of
the larger tables are verified as they are taken (`checked`). All that is in a generation, but for its roots, is the same for the
same data, options and version, wherever and by however many processes it was made.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.errors import REPAIR_REMEDY, CacheError
from megablend.formats import FORMATS
from megablend.formats.as_numpy import as_numpy
from megablend.formats.base import CHUNK_DTYPE, PLACED_BLOCK_DTYPE, OpenedFile
from megablend.fs.atomic_write import checksum, list_committed, reading
from megablend.index.checked_table import (
    BLOCK_LAYOUT,
    CHUNK_LAYOUT,
    PLACE,
    RUNNING,
    CheckedTable,
    has_checks,
    warn_unchecked,
)
from megablend.index.file_versions import read_seen, tell_unknown
from megablend.index.manifest import BLOCKS, CHUNKS, FILES, MANIFEST, ROOTS, read_generation_manifest, read_roots
from megablend.index.tables import CHUNK_COLUMNS, FILE_SCHEMA, read_batch
from megablend.index.token_ranges import read_ranges
from megablend.storage.location import join
from megablend.system.limited_json import parse_json

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEntry:
    """A source of a generation."""

    name: str
    format: str
    column: str | None
    documents: bool
    """Documents were counted: rows, ends and flags of its blocks are exact."""
    files: range
    """File numbers of the generation."""
    blocks: range
    """Block numbers of the generation."""
    tokens: int
    rows: int
    """Documents, empty and null ones included."""
    ends: int
    """Documents with tokens; -1 where documents were not counted."""
    extra_of: str | None
    """Name of the source whose tokens its numbers belong to; None where it holds tokens itself."""
    root: str
    """Folder that its files' names are relative to, as of the last build."""
    column_taken: str | None
    """The column that holds its tokens, as far as the index knows: the one asked for, or the one that was found."""
    skipped: tuple[str, ...]
    """Paths that the last build left out because they could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of a generation."""

    name: str
    """Relative to the source's root."""
    source: int
    """Index into the generation's sources."""
    rows: int
    tokens: int
    first_block: int
    num_blocks: int
    first_chunk: int
    num_chunks: int
    body: str
    """Hex digest of sampled ranges of its body."""
    opened: OpenedFile
    """What its format needs to open it."""


class Snapshot:
    """An opened index. Picklable: it is opened again where it arrives.

    Attributes:
        digest: its name.
        sources: in the order of the build.
        num_files, num_blocks: of all sources.
        tokens_before, rows_before, ends_before: int64 [num_blocks + 1], running counts over the blocks, memory-mapped and not
            verified; `running`, `count_tokens_before` and `find_blocks` verify what they give.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        self.folder = folder
        self.digest = folder.name
        self._has_checks = has_checks(manifest)
        if not self._has_checks:
            warn_unchecked(folder)
        self._blocks = CheckedTable(folder, BLOCK_LAYOUT, checks=self._has_checks)
        self._files = read_batch(folder / FILES, FILE_SCHEMA)
        self.num_files: int = self._files.num_rows
        columns = self._blocks.mapped
        self.tokens_before, self.rows_before, self.ends_before = (columns[name] for name in RUNNING)
        self.num_blocks = self._blocks.num_rows - 1
        if self.num_blocks != manifest["num_blocks"]:
            raise CacheError(
                f"{folder / BLOCKS}: damaged table: {self.num_blocks} blocks, {manifest['num_blocks']} were committed; "
                f"{REPAIR_REMEDY}"
            )
        self._num_chunks: int = manifest["num_chunks"]
        places = self.file_sources
        if self.num_files != manifest["num_files"] or (
            self.num_files and not 0 <= places.min() <= places.max() < len(manifest["sources"])
        ):
            raise self._damaged_files(f"it does not hold the {manifest['num_files']} files of the sources")
        self._first_block = self._offsets("first_block", self.num_blocks)
        self._first_chunk = self._offsets("first_chunk", self._num_chunks)
        self.sources = self._sources(manifest["sources"], found)

    def __reduce__(self) -> tuple[Callable[..., Snapshot], tuple[str, str]]:
        return open_snapshot, (str(self.cache), self.digest)

    @property
    def cache(self) -> Path:
        """The cache that holds it."""
        return self.folder.parent.parent

    def chunks(self, file: FileEntry) -> npt.NDArray[np.void]:
        """CHUNK_DTYPE [file.num_chunks]: the column chunks of a file; `file` in them is its number."""
        rows = np.arange(file.first_chunk, file.first_chunk + file.num_chunks)
        chunks = np.empty(len(rows), CHUNK_DTYPE)
        for name, values in zip(CHUNK_COLUMNS.names or (), self._chunks.take("row", rows), strict=True):
            chunks[name] = values
        chunks.flags.writeable = False
        return chunks

    def chunks_of(self, ids: npt.ArrayLike, column: str) -> tuple[Int64Array, npt.NDArray[Any]]:
        """Column chunks that blocks `ids` int64 [n] lie in: their numbers in the index, int64 [n], and what `column` says."""
        numbers = self._blocks.take("place", np.asarray(ids, np.int64))[PLACE.index("chunk")]
        distinct, places = np.unique(numbers, return_inverse=True)
        self._check_chunks(distinct, 0, self._num_chunks)
        return numbers, self._chunks.take("row", distinct)[(CHUNK_COLUMNS.names or ()).index(column)][places]

    def _check_chunks(self, chunks: Int64Array, low: int | Int64Array, high: int | Int64Array) -> None:
        """Refuse numbers of chunks outside [low, high)."""
        if ((chunks < low) | (chunks >= high)).any():
            raise CacheError(
                f"{self.folder / BLOCKS}: damaged table: a block's chunk is none of its file's; {REPAIR_REMEDY}"
            )

    @cached_property
    def _chunks(self) -> CheckedTable:
        table = CheckedTable(self.folder, CHUNK_LAYOUT, checks=self._has_checks)
        if table.num_rows != self._num_chunks:
            raise CacheError(
                f"{self.folder / CHUNKS}: damaged table: {table.num_rows} rows, {self._num_chunks} were committed; "
                f"{REPAIR_REMEDY}"
            )
        return table

    def file(self, i: int) -> FileEntry:
        """File number i. Raises: IndexError."""
        i = operator.index(i)
        if not 0 <= i < self.num_files:
            raise IndexError(f"file {i} is out of range: the index has {self.num_files} files")
        row = {name: self._files.column(name)[i].as_py() for name in self._files.schema.names}
        return FileEntry(
            name=row["name"],
            source=row["source"],
            rows=row["rows"],
            tokens=row["tokens"],
            first_block=row["first_block"],
            num_blocks=int(self._first_block[i + 1]) - row["first_block"],
            first_chunk=row["first_chunk"],
            num_chunks=int(self._first_chunk[i + 1]) - row["first_chunk"],
            body=row["body"],
            opened=OpenedFile(
                size=row["size"],
                token_dtype=row["token_dtype"],
                structure=row["structure"],
                meta=self._meta(row["meta"]),
            ),
        )

    @cached_property
    def seen(self) -> npt.NDArray[np.uint64]:
        """uint64 [num_files]: the version of each file that the last build saw, see `file_versions`; 0 where unknown.

        Raises: CacheError.
        """
        found = read_seen(self.folder, self.num_files)
        if found is None:
            tell_unknown(self.folder)
            return np.zeros(self.num_files, np.uint64)
        return found

    @property
    def token_ranges(self) -> Int64Array:
        """int64 [num_files, 2]: smallest and largest token of each file; smallest > largest where unknown. Raises: CacheError."""
        return read_ranges(self.folder, self.num_files)

    def _meta(self, text: str) -> dict[str, Any]:
        try:
            meta = parse_json(text)
        except ValueError as error:
            raise self._damaged_files(f"what it keeps of a file is not JSON ({error})") from error
        if not isinstance(meta, dict):
            raise self._damaged_files("what it keeps of a file is not an object")
        return meta

    def file_names(self) -> list[str]:
        """Names of all files, relative to their sources' roots."""
        names: list[str] = self._files.column("name").to_pylist()
        return names

    def file_keys(self, source: SourceEntry) -> list[str]:
        """For each file of a source, a name for what it holds: the same in other generations, and wherever it lies."""
        files = self._files.slice(source.files.start, len(source.files))
        columns = [files.column(name).to_pylist() for name in ("size", "rows", "tokens", "structure", "body")]
        asked = [source.format, source.column]
        texts = (json.dumps([*asked, *row]).encode() for row in zip(*columns, strict=True))
        return [hashlib.blake2b(text, digest_size=16).hexdigest() for text in texts]

    def file_contents(self) -> list[tuple[str, str]]:
        """What tells each file's content from others': digests of its structure, and of its body."""
        structures, bodies = (self._files.column(name).to_pylist() for name in ("structure", "body"))
        return list(zip(structures, bodies, strict=True))

    def token_dtypes(self, source: SourceEntry) -> list[str]:
        """numpy names of the tokens in a source's files, as stored; sorted, each once."""
        dtypes = self._files.column("token_dtype").slice(source.files.start, len(source.files))
        return sorted(set(dtypes.to_pylist()))  # pyarrow's `unique` would import pyarrow.compute

    def path(self, i: int, roots: Mapping[str, str] | None = None) -> str:
        """Where file i lies; `roots` (source name -> folder) overrides what the last build recorded."""
        entry = self.file(i)
        source = self.sources[entry.source]
        return join((roots or {}).get(source.name, source.root), entry.name)

    def file_of(self, ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """File numbers of blocks. int32 [n]."""
        # Files without blocks begin where the next one does: the last of those that begin at a block has it.
        return (np.searchsorted(self._first_block, np.asarray(ids), side="right") - 1).astype(np.int32)

    def blocks(self, ids: npt.ArrayLike) -> npt.NDArray[np.void]:
        """Rows of the block table as the files' formats know them.

        Args:
            ids: int64 [n], block numbers of the generation.

        Returns: PLACED_BLOCK_DTYPE [n]; `chunk` counts the file's own chunks; rows, first_row and ends are -1 where not counted.
        Raises: CacheError where the table is damaged, and that is seen.
        """
        ids = np.asarray(ids, np.int64)
        files = self.file_of(ids)
        rows = np.empty(len(ids), PLACED_BLOCK_DTYPE)
        for name, values in zip(PLACE, self._blocks.take("place", ids), strict=True):
            rows[name] = values
        chunks, first_chunk = rows["chunk"], self._first_chunk[files]
        self._check_chunks(chunks, first_chunk, self._first_chunk[files + 1])
        rows["chunk"] = chunks - first_chunk
        running = self._blocks.take("running", np.concatenate((ids, ids + 1)))
        before, counts = running[:, : len(ids)], running[:, len(ids) :] - running[:, : len(ids)]
        rows["tokens"], counted = counts[0], self._counted[files]
        rows["first_token"] = before[0] - self._first_token[files]
        rows["first_row"] = np.where(counted, before[1] - self._first_row[files], -1)
        for name, values in zip(("rows", "ends"), counts[1:], strict=True):
            rows[name] = np.where(counted, values, -1)
        return rows

    def running(self, name: str, ids: npt.ArrayLike) -> Int64Array:
        """One of tokens_before, rows_before and ends_before at `ids` int64 [n], verified: int64 [n]. Raises: CacheError."""
        counts: Int64Array = self._blocks.take("running", np.asarray(ids, np.int64))[RUNNING.index(name)]
        return counts

    def count_tokens_before(self, ids: npt.ArrayLike, *, eod: bool) -> Int64Array:
        """Tokens before blocks `ids` int64 [n], with an end-of-document token a document or without: int64 [n].

        Raises: CacheError.
        """
        counts = self._blocks.take("running", np.asarray(ids, np.int64))
        tokens: Int64Array = counts[0] + counts[2] if eod else counts[0]
        return tokens

    def find_blocks(self, name: str, span: range, values: Int64Array) -> Int64Array:
        """The last blocks of `span` before which a running count is at most `values` int64 [n]: int64 [n].

        Args:
            values: at least the count before the span's first block, and less than the count after its last one.

        Raises: CacheError.
        """
        return self._blocks.find_last("running", name, span, values)

    @cached_property
    def _first_token(self) -> Int64Array:
        """int64 [num_files + 1]: tokens before each file."""
        return self.running("tokens_before", self._first_block)

    @cached_property
    def _first_row(self) -> Int64Array:
        """int64 [num_files + 1]: counted documents before each file."""
        return self.running("rows_before", self._first_block)

    @cached_property
    def file_sources(self) -> npt.NDArray[np.int32]:
        """int32 [num_files]: index of each file's source."""
        sources: npt.NDArray[np.int32] = as_numpy(self._files.column("source"))
        return sources

    @cached_property
    def file_token_bytes(self) -> Int64Array:
        """int64 [num_files]: bytes of a token of each file, decoded."""
        names = self._files.column("token_dtype").dictionary_encode()
        sizes = np.array([np.dtype(name).itemsize for name in names.dictionary.to_pylist()], np.int64)
        found: Int64Array = sizes[as_numpy(names.indices)]
        return found

    @cached_property
    def _counted(self) -> npt.NDArray[np.bool_]:
        """bool [num_files]: the file's documents were counted."""
        counted = np.zeros(self.num_files, bool)
        for source in self.sources:
            counted[source.files.start : source.files.stop] = source.documents
        return counted

    def _offsets(self, column: str, total: int) -> Int64Array:
        offsets = np.append(as_numpy(self._files.column(column)), total)
        if offsets[0] or (np.diff(offsets) < 0).any():
            raise self._damaged_files(f"its {column} does not rise from 0 to {total}")
        return offsets

    def _damaged_files(self, problem: str) -> CacheError:
        return CacheError(f"{self.folder / FILES}: damaged table: {problem}; {REPAIR_REMEDY}")

    def _sources(self, entries: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> tuple[SourceEntry, ...]:
        files = [range(entry["first_file"], entry["first_file"] + entry["num_files"]) for entry in entries]
        borders = self._first_block[np.array([[each.start, each.stop] for each in files], np.int64).reshape(-1)]
        counts = self._blocks.take("running", borders, plainly=True).reshape(len(RUNNING), -1, 2)
        tokens, _, ends = (counts[..., 1] - counts[..., 0]).tolist()
        return tuple(
            SourceEntry(
                name=entry["name"],
                format=entry["format"],
                column=entry["column"],
                documents=entry["documents"],
                files=files[i],
                blocks=range(int(borders[2 * i]), int(borders[2 * i + 1])),
                tokens=tokens[i],
                rows=entry["rows"],
                ends=ends[i] if entry["documents"] else -1,
                extra_of=entry.get("extra_of"),
                root=found["roots"][entry["name"]],
                column_taken=entry["column"] or found.get("columns", {}).get(entry["name"]),
                skipped=tuple(found.get("skipped", {}).get(entry["name"], ())),
            )
            for i, entry in enumerate(entries)
        )


def open_snapshot(cache: str | Path, digest: str) -> Snapshot:
    """Open a generation by its digest.

    Raises: CacheError where there is none of that name, it is not whole, or a newer version wrote it.
    """
    folder = generations(cache) / digest
    if not _is_committed(folder):
        known = ", ".join(list_snapshots(cache)) or "none"
        raise CacheError(
            f"{folder}: there is no such generation of the index (those there are: {known}); "
            "`megablend build CONFIG` makes it again if the data is as it was; otherwise give the run another name (`run:`), or "
            "reset it (`megablend runs reset CONFIG`), and build"
        )
    manifest = read_generation_manifest(folder)
    for name, entry in manifest["tables"].items():
        path = folder / name
        with reading(path):
            size = path.stat().st_size if path.is_file() else 0
        if size != entry["bytes"]:
            raise CacheError(f"{path}: has {size} bytes, {entry['bytes']} were committed; {REPAIR_REMEDY}")
    # The table of files is read whole anyway, and what it says is believed; the larger ones would take too long here.
    if checksum(folder / FILES) != manifest["tables"][FILES]["blake2b"]:
        raise CacheError(f"{folder / FILES}: damaged table: its checksum is wrong; {REPAIR_REMEDY}")
    found = read_roots(folder)
    for entry in manifest["sources"]:
        if not isinstance(found["roots"].get(entry["name"]), str):
            raise CacheError(f"{folder / ROOTS}: does not say where source {entry['name']!r} lies; {REPAIR_REMEDY}")
        if entry["format"] not in FORMATS:
            raise CacheError(
                f"{folder / MANIFEST}: source {entry['name']!r} is of a format, {entry['format']!r}, that this "
                "megablend does not know; use the one that wrote it, or build again"
            )
    with reading(folder):
        return Snapshot(folder, manifest, found)


def list_snapshots(cache: str | Path) -> list[str]:
    """Digests of a cache's generations, the last one built (or built again) last; none where there is no cache."""
    folder = generations(cache)
    names = [name for name in list_committed(folder) if _is_committed(folder / name)]
    return sorted(names, key=lambda name: (build_sequence(folder / name), name))


def _is_committed(folder: Path) -> bool:
    """Whether there is a generation; one that cannot be looked at is there, too."""
    try:
        return (folder / MANIFEST).is_file()
    except OSError:
        return True


def build_sequence(folder: Path) -> int:
    """Number of the build that last arrived at a generation; -1 where that is not known."""
    try:
        return int(read_roots(folder)["arrival"])
    except CacheError:
        return -1


def generations(cache: str | Path) -> Path:
    """The folder of a cache's generations."""
    return Path(cache).absolute() / "generations"


def fragments(cache: str | Path) -> Path:
    """The folder of a cache's fragments."""
    return Path(cache).absolute() / "fragments"


def splits(cache: str | Path) -> Path:
    """The folder of what was computed of a cache's generations."""
    return Path(cache).absolute() / "splits"


def external_references_dir(cache: str | Path) -> Path:
    """The folder beside a cache where others than runs say which generations they need: in `*.json`, as `index`."""
    return Path(f"{Path(cache).absolute()}-documents")


def folders(cache: str | Path) -> list[Path]:
    """The folders of a cache that builds write to."""
    return [
        Path(cache).absolute() / name
        for name in ("fragments", "packs", "generations", "lengths", "documents", "splits", "idx", "runs")
    ]
