"""The files that releases are compared on, and runs over them, through names that all releases have."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DOCUMENT = 512
"""Tokens of a document."""
BLOCK = 1 << 16
"""Bytes of a block of a `.bin`, and of a page."""


def write_corpus(folder: Path, mib: int, files: int) -> None:
    """A Parquet file of 64 KB pages, the same tokens as `.bin/.idx`, and small Parquet files."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, (mib << 20) // 4 // DOCUMENT * DOCUMENT, dtype=np.int32)
    write_parquet(folder / "large.parquet", tokens)
    for i in range(files):
        write_parquet(folder / "small" / f"{i:05}.parquet", tokens[: DOCUMENT * (2 + i % 7)])
    count = len(tokens) // DOCUMENT
    tokens.astype("<u2").tofile(folder / "pair.bin")
    pointers = 2 * DOCUMENT * np.arange(count, dtype="<i8")
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, count, count + 1)
    lengths = np.full(count, DOCUMENT, "<i4")
    edges = np.arange(count + 1, dtype="<i8")
    (folder / "pair.idx").write_bytes(
        header + lengths.tobytes() + pointers.tobytes() + edges.tobytes()
    )


def write_parquet(path: Path, tokens: np.ndarray[Any, Any]) -> None:
    """Documents of equal length, in pages of 64 KB."""
    path.parent.mkdir(exist_ok=True)
    edges = np.arange(0, len(tokens) + 1, DOCUMENT, dtype=np.int32)
    table = pa.table({"input_ids": pa.ListArray.from_arrays(edges, tokens)})
    options: dict[str, Any] = {
        "data_page_size": BLOCK,
        "write_batch_size": 16,
        "use_dictionary": False,
    }
    pq.write_table(table, path, compression="zstd", write_page_index=True, **options)


def config_of(folder: Path, name: str, *patterns: str, **settings: Any) -> dict[str, Any]:
    """A run of one pass over these files, each a source; the corpus is in the folder above."""
    shares = {} if len(patterns) == 1 else {"weight": 1}
    sources = [
        {"name": f"s{i}", "path": str(folder.parent / each), **shares}
        for i, each in enumerate(patterns)
    ]
    return {
        "cache": str(folder / name),
        "sequence_length": DOCUMENT,
        "samples": 2000,
        "sources": sources,
        **settings,
    }


def warm(folder: Path) -> None:
    """Load the kernels of building and of reading."""
    import megablend

    for name, pattern in (("warm", "small/00000.parquet"), ("warm-pair", "pair.bin")):
        config = config_of(folder, name, pattern) | {"samples": 64}
        megablend.build(config)
        for _ in megablend.Loader(megablend.open(config), micro_batch_size=8):
            pass


def read_all(store: Any, blocks: np.ndarray[Any, Any]) -> None:
    """Read blocks, fifty at a time."""
    for start in range(0, len(blocks), 50):
        store.read(blocks[start : start + 50])
