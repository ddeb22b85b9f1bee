"""Documents for benchmarks: 1.1k tokens on average, tokens as frequent as words are; and the Parquet that holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

VOCABULARY = 50_001
CODECS = {
    "none": ("none", False),
    "zstd": ("zstd", False),
    "lz4": ("lz4", False),
    "dictionary": ("zstd", True),
}
"""Kind -> (codec, whether values are kept in a dictionary)."""
GROUP_TOKENS = 1 << 24
"""Tokens of a row group."""


def make_documents(
    num_tokens: int, seed: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Tokens int32 [num_tokens], and offsets of documents int64 [num_documents + 1]."""
    rng = np.random.default_rng(seed)
    tokens = np.minimum(rng.zipf(1.2, num_tokens), VOCABULARY - 1).astype(np.int32)
    ends = np.cumsum(rng.lognormal(6.5, 1.0, num_tokens // 200 + 1).astype(np.int64) + 1)
    return tokens, np.concatenate(([0], ends[ends < num_tokens], [num_tokens]))


def write_parquet(
    path: Path,
    tokens: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    *,
    page_bytes: int,
    codec: str,
    crc: bool = False,
) -> None:
    """A list of tokens a row, in row groups of about GROUP_TOKENS.

    Args:
        tokens: int32, of which the documents are a part.
        offsets: int64 [num_documents + 1], into `tokens`.
        page_bytes: size of a page before compression.
        codec: of CODECS.
    """
    compression, dictionary = CODECS[codec]
    schema = pa.schema([("tokens", pa.list_(pa.int32()))])
    options: dict[str, Any] = {"write_page_index": True, "write_page_checksum": crc}
    if int(pa.__version__.partition(".")[0]) >= 21:  # before, pages had any number of rows
        options["max_rows_per_page"] = 1 << 30
    with pq.ParquetWriter(
        path,
        schema,
        compression=compression,
        use_dictionary=dictionary,
        dictionary_pagesize_limit=4 << 20,
        data_page_size=page_bytes,
        write_batch_size=max(1, page_bytes // 8192),
        **options,
    ) as writer:
        starts = np.searchsorted(offsets, np.arange(offsets[0], offsets[-1], GROUP_TOKENS))
        for start, stop in zip(starts, [*starts[1:], len(offsets) - 1], strict=True):
            part = offsets[start : stop + 1]
            values = pa.array(tokens[part[0] : part[-1]])
            rows = pa.ListArray.from_arrays(pa.array((part - part[0]).astype(np.int32)), values)
            writer.write_table(pa.table([rows], schema=schema), row_group_size=1 << 30)
