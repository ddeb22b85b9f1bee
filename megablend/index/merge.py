"""Fragments of all files, in source and file order, become one generation; a commit gives it its name."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from megablend.errors import CacheError
from megablend.formats.base import BLOCK_DTYPE
from megablend.index.cache import arrival, generations
from megablend.index.disk import (
    checksum,
    finished,
    flush_folder,
    replace_file,
    temporary_beside,
    write_flushed,
    writing,
)
from megablend.index.fragments import Fragment
from megablend.index.manifest import (
    BLOCKS,
    CHUNKS,
    FILES,
    FORMAT_VERSION,
    MANIFEST,
    ROOTS,
    TABLES,
    damaged_tables,
    read_manifest,
    sealed,
)
from megablend.index.sources import SourceFile, SourceListing
from megablend.index.tables import BLOCK_COLUMNS, CHUNK_COLUMNS, FILE_SCHEMA, TableWriter, write_batch

Load = Callable[[int, SourceFile], Fragment]
"""The fragment of a file of a source (by the source's index)."""


def write_generation(
    cache: Path, listings: Sequence[SourceListing], load: Load, columns: Mapping[str, str | None]
) -> tuple[str, bool]:
    """Merge the fragments of all files into a generation and commit it.

    One fragment is held at a time; all but the table of files goes to the disk as it comes.

    Args:
        columns: token column of each source's files, as far as known once all of them are loaded; kept beside the roots.

    Returns: its digest, and whether it is new.
    Raises: CacheError where the cache cannot be written; as `load` does.
    """
    folder = temporary_beside(generations(cache) / "generation")
    with writing(folder):
        folder.mkdir()
        try:
            manifest = _write_tables(folder, listings, load)
            write_flushed(folder / MANIFEST, [sealed(manifest)])
            found = {
                "roots": {listing.spec.name: listing.root for listing in listings},
                "columns": dict(columns),
                "skipped": {listing.spec.name: listing.skipped for listing in listings if listing.skipped},
            }
            return manifest["digest"], _commit(folder, generations(cache) / manifest["digest"], found)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _write_tables(folder: Path, listings: Sequence[SourceListing], load: Load) -> dict[str, Any]:
    """Write the three tables; returns the manifest."""
    totals = _Totals()
    files: list[dict[str, Any]] = []
    sources: list[dict[str, Any]] = []
    with TableWriter(folder / BLOCKS, BLOCK_COLUMNS) as blocks, TableWriter(folder / CHUNKS, CHUNK_COLUMNS) as chunks:
        for source, listing in enumerate(listings):
            first_file = len(files)
            for file in listing.files:
                fragment = load(source, file)
                files.append(_file_row(source, file, fragment, totals))
                chunks.append(
                    _columns(fragment.index.chunks) | {"file": _filled(fragment.index.chunks, len(files) - 1)}
                )
                blocks.append(totals.block_columns(fragment.index.blocks, documents=listing.spec.documents))
                totals.chunks += len(fragment.index.chunks)
            extra = {} if listing.spec.extra_of is None else {"extra_of": listing.spec.extra_of}
            sources.append(
                {
                    **extra,
                    "name": listing.spec.name,
                    "format": listing.format,
                    "column": listing.spec.column,
                    "documents": listing.spec.documents,
                    "first_file": first_file,
                    "num_files": len(listing.files),
                    "rows": sum(file["rows"] for file in files[first_file:]),
                }
            )
        blocks.append(totals.last_row())
        values = {BLOCKS: blocks.finish(), CHUNKS: chunks.finish()}
    write_batch(folder / FILES, pa.RecordBatch.from_pylist(files, schema=FILE_SCHEMA))
    content = {"format_version": FORMAT_VERSION, "sources": sources, "values": values}
    return {
        **content,
        "digest": _digest({**content, "files": files}),
        "written_by": f"megablend {_version()}",
        "num_files": len(files),
        "num_blocks": totals.blocks,
        "num_chunks": totals.chunks,
        "tables": {
            name: {"bytes": (folder / name).stat().st_size, "blake2b": checksum(folder / name)} for name in TABLES
        },
    }


class _Totals:
    """Running counts over the generation."""

    def __init__(self) -> None:
        self.blocks = self.chunks = self.tokens = self.rows = self.ends = 0

    def block_columns(self, blocks: np.ndarray[Any, Any], *, documents: bool) -> dict[str, Any]:
        """Columns of one file's blocks (BLOCK_DTYPE [n]), counted on.

        Where documents are not asked for, some formats know them and some fragments have them all the same; they are
        left out, and blocks without tokens with them, so that a generation does not depend on what the cache held.
        """
        if not documents:
            blocks = blocks[blocks["tokens"] > 0].copy()
            blocks["rows"] = blocks["ends"] = blocks["flags"] = 0
        columns = _columns(blocks)
        columns["chunk"] = blocks["chunk"] + self.chunks
        for name, before in (("tokens", self.tokens), ("rows", self.rows), ("ends", self.ends)):
            columns[f"{name}_before"] = before + np.cumsum(blocks[name]) - blocks[name]
        self.blocks += len(blocks)
        self.tokens += int(blocks["tokens"].sum())
        self.rows += int(blocks["rows"].sum())
        self.ends += int(blocks["ends"].sum())
        return columns

    def last_row(self) -> dict[str, Any]:
        """The row after the last block: the totals, and zeros."""
        row = _columns(np.zeros(1, BLOCK_DTYPE))
        for name, total in (("tokens", self.tokens), ("rows", self.rows), ("ends", self.ends)):
            row[f"{name}_before"] = np.array([total])
        return row


def _file_row(source: int, file: SourceFile, fragment: Fragment, totals: _Totals) -> dict[str, Any]:
    index = fragment.index
    return {
        "source": source,
        "name": file.name,
        "size": file.size,
        "rows": index.rows,
        "tokens": index.tokens,
        "token_dtype": index.token_dtype,
        "first_block": totals.blocks,
        "first_chunk": totals.chunks,
        "structure": index.structure,
        "body": fragment.body,
        "meta": json.dumps(index.meta, sort_keys=True, separators=(",", ":")),
    }


def _columns(rows: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {name: rows[name] for name in rows.dtype.names or ()}


def _filled(rows: np.ndarray[Any, Any], value: int) -> np.ndarray[Any, Any]:
    return np.full(len(rows), value, np.int32)


def _commit(folder: Path, final: Path, found: Mapping[str, Any]) -> bool:
    """Give a written generation its name; True where it is new (or takes the place of a damaged one).

    Args:
        found: what this build found that is not part of the generation, for ROOTS.
    """
    arrivals = [arrival(final.parent / name) for name in finished(final.parent)]
    text = json.dumps({"arrival": 1 + max(arrivals, default=0), **found}, sort_keys=True, indent=1).encode()
    if final.exists() and _is_whole(final):
        replace_file(final / ROOTS, text)
        return False
    write_flushed(folder / ROOTS, [text])
    flush_folder(folder)
    if final.exists():
        aside = temporary_beside(final)
        final.rename(aside)
        folder.rename(final)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        folder.rename(final)
    flush_folder(final.parent)
    return True


def _is_whole(folder: Path) -> bool:
    try:
        return not damaged_tables(folder, read_manifest(folder))
    except CacheError:
        return False


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _version() -> str:
    try:
        return metadata.version("megablend")
    except metadata.PackageNotFoundError:
        return "(not installed)"
