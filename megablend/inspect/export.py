"""export: the order of a run as Parquet, for audits and for other loaders.
Samples are located, not read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from megablend.arrays import Int64s
from megablend.config.numbers import whole_number
from megablend.errors import ConfigError
from megablend.index.read.document_table import PartDocuments, table_bytes
from megablend.inspect.output_file import check_output
from megablend.operations.results import Record
from megablend.operations.session import ConfigLike, Session
from megablend.order.base import Spans, by_value
from megablend.run.locator import Reading
from megablend.run.run import Run
from megablend.system.atomic_write import flush_folder, temp_sibling
from megablend.system.failures import translating

CHUNK = 1 << 14
"""Samples of a row group, located and written at once."""
UNKNOWN = -1
_NAMES = pa.dictionary(pa.int32(), pa.string())
_PIECES = pa.struct(
    [
        pa.field("file", pa.string(), nullable=False),
        pa.field("block", pa.int64(), nullable=False),
        pa.field("byte_offset", pa.int64(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("stop", pa.int64(), nullable=False),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("row", pa.int64()),
    ]
)
SCHEMA = pa.schema(
    [
        pa.field("sample", pa.int64(), nullable=False),
        pa.field("source", _NAMES, nullable=False),
        pa.field("ordinal", pa.int64(), nullable=False),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("pieces", pa.list_(pa.field("element", _PIECES, nullable=False)), nullable=False),
    ]
)
"""A row a sample. `epoch` is that of its first token; `ordinal` is its number within its source,
over all epochs. A piece is tokens [start, stop) of block number `block` of a file, which begins at
`byte_offset`; end-of-document tokens that are added count. Its first token is in `row` of the file,
null where the index has no table of documents (`order: document` makes one)."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ExportResult(Record):
    """What `export` wrote."""

    run: str
    split: str
    start: int
    stop: int
    """Its rows are samples [start, stop)."""
    file: str
    """Its absolute path."""
    bytes: int
    """Its size."""


@translating("export")
def export(
    what: ConfigLike,
    target: str | Path,
    *,
    start: int = 0,
    stop: int | None = None,
    run: str | None = None,
    split: str = "train",
    cache: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ExportResult:
    """Write where the tokens of samples [start, stop) are to a Parquet file, in bounded memory; it
    appears only once complete.

    Args:
        what: a config, or a cache's folder (then `run` is needed). If a config was edited since,
            the run's ledger decides.
        target: the file, replaced if it exists.
        stop: the run's end if absent.
        progress: called with the samples written and to write.

    Raises: as `open_dataset`; ConfigError for samples outside the run, or a target that is not a
        file or that the run needs; ResourceError if the file cannot be written.
    """
    session = Session(what, cache=cache, run=run)
    opened = session.open(split)
    start = whole_number("start", start, least=0)
    stop = opened.num_samples if stop is None else whole_number("stop", stop)
    if not start <= stop <= opened.num_samples:
        raise ConfigError(
            f"found samples {start:,} to {stop:,}, expected a range within 0 to {opened.num_samples:,}, the samples of {split}"
        )
    path = check_output(target, session)
    with translating(str(path)):
        _write(opened, path, start, stop, progress)
    return ExportResult(
        run=opened.ledger.run,
        split=split,
        start=start,
        stop=stop,
        file=str(path),
        bytes=path.stat().st_size,
    )


def _write(
    run: Run, path: Path, start: int, stop: int, progress: Callable[[int, int], None] | None
) -> None:
    """Write the rows of samples [start, stop) to a file that appears only once complete."""
    unfinished = temp_sibling(path)
    try:
        with pq.ParquetWriter(
            unfinished, SCHEMA.with_metadata(_describe(run)), compression="zstd"
        ) as writer:
            for first in range(start, stop, CHUNK):
                ks = np.arange(first, min(first + CHUNK, stop))
                writer.write_table(_locate(run, ks), row_group_size=CHUNK)
                if progress is not None:
                    progress(int(ks[-1]) + 1 - start, stop - start)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
        flush_folder(path.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _locate(run: Run, ks: np.ndarray[Any, np.dtype[np.int64]]) -> pa.Table:
    """Rows of SCHEMA for samples ks, at least one."""
    snapshot = run.store.snapshot
    sources, ordinals = run.plan.locate_many(ks)
    spans = run.locate_spans(sources, ordinals)
    numbers, files = np.unique(snapshot.file_of(spans.blocks), return_inverse=True)
    entries = [snapshot.file(number) for number in numbers.tolist()]
    paths = pa.array(
        [snapshot.path(number, run.store.roots) for number in numbers.tolist()], pa.string()
    )
    first_blocks = np.array([entry.first_block for entry in entries], np.int64)
    rows = find_rows(run, sources[spans.rows], spans)
    columns = [
        paths.take(pa.array(files)),
        pa.array(spans.blocks - first_blocks[files]),
        pa.array(snapshot.blocks(spans.blocks)["offset"].astype(np.int64)),
        pa.array(spans.starts),
        pa.array(spans.stops),
        pa.array(spans.epochs),
        pa.array(rows, mask=rows == UNKNOWN),
    ]
    offsets = np.searchsorted(spans.rows, np.arange(len(ks) + 1)).astype(np.int32)
    pieces = pa.ListArray.from_arrays(
        pa.array(offsets),
        pa.StructArray.from_arrays(columns, fields=list(_PIECES)),
        type=SCHEMA.field("pieces").type,
    )
    names = pa.array([source.name for source in run.sources], pa.string())
    first_epochs = spans.epochs[offsets[:-1]]
    listed = [
        pa.array(ks),
        pa.DictionaryArray.from_arrays(pa.array(sources), names),
        pa.array(ordinals),
        pa.array(first_epochs),
        pieces,
    ]
    return pa.Table.from_arrays(listed, schema=SCHEMA)


def _list_lengths(run: Run) -> list[list[int]]:
    """The sequence length from each sample on where it changes: pairs of first sample and
    length."""
    return [[section.start, section.sequence_length] for section in run.sections]


def _describe(run: Run) -> dict[bytes, bytes]:
    """What the file's metadata says of the run, under the key `megablend`."""
    described = {
        "run": run.ledger.run,
        "split": run.split,
        "index": run.ledger.index,
        "plan": run.ledger.digest,
        "sequence_length": run.sequence_length,
        "sample_tokens": run.settings.sample_tokens,
        **({} if len(run.sections) == 1 else {"sequence_lengths": _list_lengths(run)}),
    }
    return {b"megablend": json.dumps(described).encode()}


def find_rows(run: Run, sources: npt.NDArray[np.int32], spans: Spans) -> Int64s:
    """The row of its file in which each span's first token is; UNKNOWN if no table has the
    source's documents: int64 [m].

    Args:
        sources: of each span, int32 [m].

    Raises: CacheError if a table is damaged.
    """
    rows = np.full(len(spans.blocks), UNKNOWN)
    names = run.data.index_names
    for source, positions in by_value(sources):
        readings = run.locator.readings(source)
        firsts = np.array([each.first_block for each in readings])
        # An earlier part of the run may read a later snapshot
        order = np.argsort(firsts, kind="stable")
        owners = order[np.searchsorted(firsts[order], spans.blocks[positions], side="right") - 1]
        for number, here in by_value(owners):
            rows[positions[here]] = _find_in(
                readings[number], names[source], spans, positions[here]
            )
    return rows


def _find_in(reading: Reading, name: str, spans: Spans, positions: Int64s) -> Int64s:
    """The rows of spans at `positions` int64 [n], which are of blocks of this reading; UNKNOWN
    without a table: int64 [n]."""
    blocks = reading.blocks
    numbers = spans.blocks[positions] - reading.first_block
    snapshot = blocks.snapshot
    source = next(number for number, entry in enumerate(snapshot.sources) if entry.name == name)
    is_counted = snapshot.sources[
        source
    ].documents  # a table may be of another snapshot of the same files
    if not is_counted or table_bytes(snapshot, source) is None:
        return np.full(len(positions), UNKNOWN)
    first_row = snapshot.running("rows_before", [snapshot.sources[source].blocks.start])
    local = blocks.local_blocks(numbers)
    stored = blocks.before(local) + spans.starts[positions] - blocks.clips(local)
    listed = blocks.documents
    documents = listed.index_blocks(_find_documents(listed, stored))
    first_blocks = np.array(
        [snapshot.file(file).first_block for file in snapshot.file_of(numbers).tolist()], np.int64
    )
    rows: Int64s = documents - (snapshot.running("rows_before", first_blocks) - first_row)
    return rows


def _find_documents(documents: PartDocuments, stored: Int64s) -> Int64s:
    """The document of each stored token, int64 [n]: the last that begins at or before it."""
    low = np.zeros(len(stored), np.int64)
    high = np.full(len(stored), documents.num_blocks)
    while (high - low > 1).any():
        middle = (low + high) // 2
        begins_before = documents.before(middle) <= stored
        low = np.where(begins_before, middle, low)
        high = np.where(begins_before, high, middle)
    return low
