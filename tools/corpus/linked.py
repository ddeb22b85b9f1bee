"""As many blocks as wanted from one small file: the same file under many names, each indexed as a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import megablend

FILE_BLOCKS = 100_000


def linked_corpus(
    folder: Path, num_blocks: int, *, block_tokens: int = 160, **settings: Any
) -> dict[str, Any]:
    """A config of one source of `num_blocks` Parquet pages of `block_tokens` tokens each; nothing is indexed yet.

    Args:
        num_blocks: a multiple of FILE_BLOCKS where it is above; that many pages are in the one file that is written.
        settings: of the config; `cache`, `sequence_length`, `samples` and `sources` have defaults.
    """
    pages = min(num_blocks, FILE_BLOCKS)
    assert num_blocks % pages == 0, f"{num_blocks} blocks are no multiple of {pages}"
    (folder / "links").mkdir(parents=True)
    tokens = np.random.default_rng(0).integers(0, 50_000, pages * block_tokens, dtype=np.int32)
    table = pa.table(
        {
            "ids": pa.ListArray.from_arrays(
                np.arange(pages + 1, dtype=np.int32) * block_tokens, tokens
            )
        }
    )
    options: dict[str, Any] = {
        "use_dictionary": False,
        "compression": "none",
        "write_page_index": True,
    }
    # A page holds one write batch of one row.
    pq.write_table(
        table,
        folder / "pages.parquet",
        write_batch_size=1,
        data_page_size=1,
        row_group_size=pages,
        **options,
    )
    for number in range(num_blocks // pages):
        (folder / "links" / f"{number:06}.parquet").hardlink_to(folder / "pages.parquet")
    source = {"name": "pages", "path": f"{folder}/links/*.parquet", "weight": 1}
    defaults = {
        "cache": str(folder / "cache"),
        "sequence_length": 2048,
        "samples": 10**9,
        "sources": [source],
    }
    return defaults | settings


def one_file(config: dict[str, Any]) -> dict[str, Any]:
    """A run over the first of the names alone."""
    (source,) = config["sources"]
    return config | {
        "sources": [source | {"path": source["path"].replace("*", "000000")}],
        "run": "one",
    }


def build_linked(config: dict[str, Any]) -> float:
    """Build the index and the run; returns the seconds of merging and committing alone.

    The first build indexes one name. Its answer serves all others, since they are one file to the system.
    """
    megablend.build(one_file(config))
    return megablend.build(config).index.seconds
