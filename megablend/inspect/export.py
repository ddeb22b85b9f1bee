"""Write the order of a run to Parquet, for audits and for other loaders. Samples are located,
without reading their data."""

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
from megablend.index.read.document_table import table_bytes
from megablend.inspect.output_file import check_output
from megablend.operations.results import Record
from megablend.operations.session import ConfigLike, Session
from megablend.order.base import Spans, by_value, find_blocks
from megablend.run.locator import Reading
from megablend.run.run import Run
from megablend.system.atomic_write import flush_folder, replacing
from megablend.system.failures import translating

CHUNK = 1 << 14
"""Number of samples of a row group. They are located and written together."""
UNKNOWN = -1
"""The number that stands for an unknown row."""
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
"""The columns of the exported file, which has a row for each sample.

`ordinal` is the sample's number within its source, over all epochs; `epoch` is the epoch of its
first token. A piece is tokens [start, stop) of block number `block` of a file; the block begins at
`byte_offset`. The numbers of tokens include end-of-document tokens that are added. `row` is the row
of the file that contains the piece's first token; null if the index has no table of documents
(`order: document` creates one)."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ExportResult(Record):
    """The file that `export` has written."""

    run: str
    split: str
    start: int
    stop: int
    """The file has a row for each of samples [start, stop)."""
    file: str
    """Absolute path of the file."""
    bytes: int
    """Size of the file."""


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
    """Write where the tokens of samples [start, stop) are stored to a Parquet file, in bounded
    memory. The file appears when it is complete.

    Args:
        what: a config, or a cache's folder; `run` is needed with the latter. If the config has been
            edited since the build, the run's ledger applies.
        target: path of the file, which is replaced if it exists.
        stop: the sample after the last one; by default the run's end.
        progress: called with the number of samples written so far, and their total.

    Raises: the errors of `open_dataset`; ConfigError if samples are outside the run, the target is
        not a file, or the target is a file that the run needs; ResourceError if the file cannot be
        written.
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
    """Write the rows of samples [start, stop) to a file that appears when it is complete."""
    with replacing(path) as unfinished:
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
    flush_folder(path.parent)


def _locate(run: Run, ks: np.ndarray[Any, np.dtype[np.int64]]) -> pa.Table:
    """Return a table of SCHEMA with the locations of samples `ks`, int64 [n]; n is at least 1."""
    snapshot = run.store.snapshot
    sources, ordinals = run.plan.locate_many(ks)
    spans = run.locate_spans(sources, ordinals)
    numbers, files = np.unique(snapshot.file_of(spans.blocks), return_inverse=True)
    entries = [snapshot.files.entry(number) for number in numbers.tolist()]
    paths = pa.array(
        [snapshot.path(number, run.store.roots) for number in numbers.tolist()], pa.string()
    )
    first_blocks = np.array([entry.first_block for entry in entries], np.int64)
    rows = find_rows(run, sources[spans.rows], spans)
    piece_columns = [
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
        pa.StructArray.from_arrays(piece_columns, fields=list(_PIECES)),
        type=SCHEMA.field("pieces").type,
    )
    names = pa.array([source.name for source in run.sources], pa.string())
    first_epochs = spans.epochs[offsets[:-1]]
    sample_columns = [
        pa.array(ks),
        pa.DictionaryArray.from_arrays(pa.array(sources), names),
        pa.array(ordinals),
        pa.array(first_epochs),
        pieces,
    ]
    return pa.Table.from_arrays(sample_columns, schema=SCHEMA)


def _describe(run: Run) -> dict[bytes, bytes]:
    """Return the metadata of the file: a description of the run under the key `megablend`."""
    described: dict[str, Any] = {
        "run": run.ledger.run,
        "split": run.split,
        "index": run.ledger.index,
        "plan": run.ledger.digest,
        "sequence_length": run.sequence_length,
        "sample_tokens": run.settings.sample_tokens,
    }
    if len(run.sections) > 1:
        # Pairs of the first sample and the length from there on
        described["sequence_lengths"] = [
            [section.start, section.sequence_length] for section in run.sections
        ]
    return {b"megablend": json.dumps(described).encode()}


def find_rows(run: Run, sources: npt.NDArray[np.int32], spans: Spans) -> Int64s:
    """Return, for each span, the row of the file that contains the span's first token: int64 [m];
    UNKNOWN if there is no table of the source's documents.

    Args:
        sources: int32 [m], the source of each span.

    Raises: CacheError if a table is damaged.
    """
    rows = np.full(len(spans.blocks), UNKNOWN)
    names = run.data.index_names
    for source, positions in by_value(sources):
        readings = run.locator.readings(source)
        firsts = np.array([reading.first_block for reading in readings])
        # Readings need not be in the order of their blocks: an earlier one may read a later
        # snapshot
        ascending = np.argsort(firsts, kind="stable")
        indices = np.searchsorted(firsts[ascending], spans.blocks[positions], side="right") - 1
        for number, members in by_value(ascending[indices]):
            of_reading = positions[members]
            rows[of_reading] = _find_rows_of(readings[number], names[source], spans, of_reading)
    return rows


def _find_rows_of(reading: Reading, name: str, spans: Spans, positions: Int64s) -> Int64s:
    """Return the rows, int64 [n], of the spans at `positions`, int64 [n]; see `find_rows`. The
    blocks of these spans all belong to `reading`, a reading of the source `name`."""
    blocks = reading.blocks
    numbers = spans.blocks[positions] - reading.first_block
    snapshot = blocks.snapshot
    source = snapshot.sources.numbers[name]
    # A table may have been made for another snapshot of the same files
    is_counted = snapshot.sources[source].documents
    if not is_counted or table_bytes(snapshot, source) is None:
        return np.full(len(positions), UNKNOWN)
    first_row = snapshot.running("rows_before", [snapshot.sources[source].blocks.start])
    local = blocks.local_blocks(numbers)
    stored = blocks.before(local) + spans.starts[positions] - blocks.clips(local)
    documents = blocks.documents.index_blocks(find_blocks(blocks.documents, stored))
    first_blocks = np.array(
        [snapshot.files.entry(file).first_block for file in snapshot.file_of(numbers).tolist()],
        np.int64,
    )
    rows: Int64s = documents - (snapshot.running("rows_before", first_blocks) - first_row)
    return rows
