"""A cache directory, and the generations of the index that were committed to it.

    <cache>/.lock                       held by the build that runs
    <cache>/fragments/<place>-<version> what indexing found in one file
    <cache>/generations/<digest>/       immutable: blocks.arrow, chunks.arrow, files.arrow, manifest.json
                          roots.json    where each source's files lay at the last build of it; replaced atomically
    <cache>/documents/, lengths/        tables of single documents, where an order needs them: see documents.py, tabulate.py
    <cache>/splits/<digest>-<what>      where the splits of a generation begin and end; tokens of groups of their blocks
    <cache>/runs/<run>.json             the run's ledger

Names that begin with a dot are work under way. A generation is whole once it has its name, since it gets it last;
opening checks the manifest, the table of files and the tables' sizes, and takes the same time for any number of blocks. All that
is in a generation, but for its roots, is the same for the same data, options and version, wherever and by however many
processes it was made.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.errors import CacheError
from megablend.formats.as_numpy import as_numpy
from megablend.formats.base import BLOCK_DTYPE, CHUNK_DTYPE, OpenedFile
from megablend.index.disk import checksum, finished
from megablend.index.manifest import BLOCKS, CHUNKS, FILES, MANIFEST, ROOTS, read_manifest, read_roots
from megablend.index.mapped import MappedTable
from megablend.index.tables import BLOCK_COLUMNS, CHUNK_COLUMNS, FILE_SCHEMA, read_batch

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


class Generation:
    """An opened index. Picklable: it is opened again where it arrives.

    Attributes:
        digest: its name.
        sources: in the order of the build.
        num_files: of all sources.
        tokens_before, rows_before, ends_before: int64 [num_blocks + 1], running counts over the blocks, memory-mapped.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any], roots: Mapping[str, str]) -> None:
        self.folder = folder
        self.digest = folder.name
        self._blocks = MappedTable(folder / BLOCKS, BLOCK_COLUMNS)
        self._files = read_batch(folder / FILES, FILE_SCHEMA)
        self.num_files: int = self._files.num_rows
        self.tokens_before: Int64Array = self._blocks["tokens_before"]
        self.rows_before: Int64Array = self._blocks["rows_before"]
        self.ends_before: Int64Array = self._blocks["ends_before"]
        self._num_chunks: int = manifest["num_chunks"]
        self._first_block = self._offsets("first_block", len(self.tokens_before) - 1)
        self._first_chunk = self._offsets("first_chunk", self._num_chunks)
        self._chunk_counts = np.diff(self._first_chunk)
        self.sources = tuple(self._source(entry, roots) for entry in manifest["sources"])

    def __reduce__(self) -> tuple[Callable[..., Generation], tuple[str, str]]:
        return open_generation, (str(self.cache), self.digest)

    @property
    def cache(self) -> Path:
        """The cache that holds it."""
        return self.folder.parent.parent

    def chunks(self, file: FileEntry) -> npt.NDArray[np.void]:
        """CHUNK_DTYPE [file.num_chunks]: the column chunks of a file; `file` in them is its number."""
        rows = np.arange(file.first_chunk, file.first_chunk + file.num_chunks)
        chunks = np.empty(len(rows), CHUNK_DTYPE)
        for name in CHUNK_DTYPE.names or ():
            chunks[name] = self._chunks.take(name, rows)
        chunks.flags.writeable = False
        return chunks

    def chunks_of(self, ids: npt.ArrayLike, column: str) -> tuple[Int64Array, npt.NDArray[Any]]:
        """Column chunks that blocks `ids` int64 [n] lie in: their numbers in the index, int64 [n], and what `column` says."""
        ids = np.asarray(ids, np.int64)
        numbers = self._blocks.take("chunk", ids).astype(np.int64)
        return numbers, self._chunks.take(column, numbers)

    @cached_property
    def _chunks(self) -> MappedTable:
        return MappedTable(self.folder / CHUNKS, CHUNK_COLUMNS)

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
                meta=json.loads(row["meta"]),
            ),
        )

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
        return sorted(dtypes.unique().to_pylist())

    def path(self, i: int, roots: Mapping[str, str] | None = None) -> str:
        """Where file i lies; `roots` (source name -> folder) overrides what the last build recorded."""
        entry = self.file(i)
        source = self.sources[entry.source]
        return str(Path((roots or {}).get(source.name, source.root)) / entry.name)

    def file_of(self, ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """File numbers of blocks. int32 [n]."""
        # Files without blocks begin where the next one does: the last of those that begin at a block has it.
        return (np.searchsorted(self._first_block, np.asarray(ids), side="right") - 1).astype(np.int32)

    def blocks(self, ids: npt.ArrayLike) -> npt.NDArray[np.void]:
        """Rows of the block table as the files' formats know them.

        Args:
            ids: int64 [n], block numbers of the generation.

        Returns: BLOCK_DTYPE [n]; `chunk` counts the file's own chunks; rows and ends are -1 where not counted.
        Raises: CacheError where the table is damaged, and that is seen.
        """
        ids = np.asarray(ids, np.int64)
        files = self.file_of(ids)
        counted = self._counted[files]
        rows, take = np.empty(len(ids), BLOCK_DTYPE), self._blocks.take
        for name in ("offset", "stored_bytes", "decoded_bytes", "encoding", "flags", "chunk"):
            rows[name] = take(name, ids)
        rows["first_token"] = before = take("tokens_before", ids)
        rows["tokens"] = take("tokens_before", ids + 1) - before
        for name in ("rows", "ends"):
            rows[name] = np.where(counted, take(f"{name}_before", ids + 1) - take(f"{name}_before", ids), -1)
        rows["chunk"] -= self._first_chunk[files].astype(np.int32)
        if ((rows["chunk"] < 0) | (rows["chunk"] >= self._chunk_counts[files])).any():
            raise CacheError(
                f"{self.folder / BLOCKS}: damaged table: a block's chunk is none of its file's; build again to mend it"
            )
        rows["first_token"] -= self._first_token[files]
        return rows

    def running(self, name: str, ids: Int64Array) -> Int64Array:
        """One of tokens_before, rows_before and ends_before at `ids` int64 [n], for many ids of a large index: int64 [n]."""
        return self._blocks.take(name, ids)

    @cached_property
    def _first_token(self) -> Int64Array:
        """int64 [num_files + 1]: tokens before each file."""
        return self._blocks.take("tokens_before", self._first_block)

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
            raise CacheError(
                f"{self.folder / FILES}: damaged table: its {column} does not rise from 0 to {total}; build again to mend it"
            )
        return offsets

    def _source(self, entry: Mapping[str, Any], roots: Mapping[str, str]) -> SourceEntry:
        files = range(entry["first_file"], entry["first_file"] + entry["num_files"])
        blocks = range(int(self._first_block[files.start]), int(self._first_block[files.stop]))
        ends = int(self.ends_before[blocks.stop] - self.ends_before[blocks.start]) if entry["documents"] else -1
        return SourceEntry(
            name=entry["name"],
            format=entry["format"],
            column=entry["column"],
            documents=entry["documents"],
            files=files,
            blocks=blocks,
            tokens=int(self.tokens_before[blocks.stop] - self.tokens_before[blocks.start]),
            rows=entry["rows"],
            ends=ends,
            extra_of=entry.get("extra_of"),
            root=roots[entry["name"]],
        )


def open_generation(cache: str | Path, digest: str) -> Generation:
    """Open a generation by its digest.

    Raises: CacheError where there is none of that name, it is not whole, or a newer version wrote it.
    """
    folder = generations(cache) / digest
    if not (folder / MANIFEST).is_file():
        known = ", ".join(list_generations(cache)) or "none"
        raise CacheError(f"{folder}: there is no such generation of the index (those there are: {known}); build it")
    manifest = read_manifest(folder)
    for name, entry in manifest["tables"].items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size != entry["bytes"]:
            raise CacheError(f"{path}: has {size} bytes, {entry['bytes']} were committed; build again to mend it")
    # The table of files is read whole anyway, and what it says is believed; the larger ones would take too long here.
    if checksum(folder / FILES) != manifest["tables"][FILES]["blake2b"]:
        raise CacheError(f"{folder / FILES}: damaged table: its checksum is wrong; build again to mend it")
    roots = read_roots(folder)["roots"]
    for entry in manifest["sources"]:
        if not isinstance(roots.get(entry["name"]), str):
            raise CacheError(
                f"{folder / ROOTS}: does not say where source {entry['name']!r} lies; build again to mend it"
            )
    return Generation(folder, manifest, roots)


def list_generations(cache: str | Path) -> list[str]:
    """Digests of a cache's generations, the last one built (or built again) last; none where there is no cache."""
    folder = generations(cache)
    names = [name for name in finished(folder) if (folder / name / MANIFEST).is_file()]
    return sorted(names, key=lambda name: (arrival(folder / name), name))


def arrival(folder: Path) -> int:
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


def pins(cache: str | Path) -> Path:
    """The folder beside a cache where others than runs say which generations they need: in `*.json`, as `index`."""
    return Path(f"{Path(cache).absolute()}-documents")


def folders(cache: str | Path) -> list[Path]:
    """The folders of a cache that builds write to."""
    return [
        Path(cache).absolute() / name for name in ("fragments", "generations", "lengths", "documents", "splits", "runs")
    ]
