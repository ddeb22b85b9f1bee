"""Four ways in which tokenised documents lie on disk, each written as its users write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from corpus.megatron import MegatronWriter

Tokens = npt.NDArray[np.int32]

SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("path", pa.string())])
FILE_TOKENS = 1 << 20
"""Tokens after which a source begins a new file."""
BATCH_ROWS = 64
"""Documents of one Arrow record batch."""


class Writer(Protocol):
    """Takes documents a batch at a time and leaves files."""

    files: list[Path]

    def write(self, paths: Sequence[str], documents: Sequence[Tokens]) -> None:
        """Append documents; `paths` says where each is from."""
        ...

    def close(self) -> None:
        """Finish the last file."""
        ...


class TableWriter:
    """Documents as rows of files `part-00000<suffix>`; a new one is begun when the one before is full."""

    def __init__(
        self,
        folder: Path,
        suffix: str,
        open_file: Callable[[str], Any],
        batch_rows: int | None = None,
    ) -> None:
        folder.mkdir(parents=True)
        self.files: list[Path] = []
        self._folder = folder
        self._suffix = suffix
        self._open_file = open_file
        self._batch_rows = batch_rows
        self._stack = ExitStack()
        self._sink: Any = None
        self._tokens = FILE_TOKENS

    def write(self, paths: Sequence[str], documents: Sequence[Tokens]) -> None:
        """Append one table of documents: a Parquet row group, or some Arrow record batches."""
        if self._tokens >= FILE_TOKENS:
            self.close()
            self.files.append(self._folder / f"part-{len(self.files):05d}{self._suffix}")
            self._sink = self._stack.enter_context(self._open_file(str(self.files[-1])))
            self._tokens = 0
        offsets = np.cumsum([0, *map(len, documents)], dtype=np.int32)
        column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(documents)))
        self._sink.write_table(pa.table([column, pa.array(paths)], schema=SCHEMA), self._batch_rows)
        self._tokens += int(offsets[-1])

    def close(self) -> None:
        """Finish the file that is open, if any."""
        self._stack.close()


def parquet_pages(path: str) -> pq.ParquetWriter:
    """Parquet made for reading single pages: small ones, index, checksums, no dictionary."""
    return pq.ParquetWriter(
        path,
        SCHEMA,
        compression="zstd",
        data_page_size=64 * 1024,
        use_dictionary=["path"],
        write_page_index=True,
        write_page_checksum=True,
    )


def parquet_default(path: str) -> pq.ParquetWriter:
    """Parquet as pyarrow writes it by default."""
    return pq.ParquetWriter(path, SCHEMA)


def arrow(path: str) -> pa.RecordBatchFileWriter:
    """Arrow IPC, the file format."""
    return pa.ipc.new_file(path, SCHEMA)


WRITERS: dict[str, tuple[str, Callable[[Path], Writer]]] = {
    "stdlib": (
        "Parquet, page index",
        lambda out: TableWriter(out / "stdlib", ".parquet", parquet_pages),
    ),
    "packages": (
        "Parquet, defaults",
        lambda out: TableWriter(out / "packages", ".parquet", parquet_default),
    ),
    "docs": ("Arrow IPC", lambda out: TableWriter(out / "docs", ".arrow", arrow, BATCH_ROWS)),
    "licences": (
        ".bin/.idx",
        lambda out: MegatronWriter(out / "licences_text_document", end_of_document=0),
    ),
}
"""source -> (what its format is called, how to open its writer in the corpus' folder)."""
