"""What leaves the source, of files of which a run needs a part: in all, and before its first batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megablend
from tests.mirror.nodes import get_status, mirror
from tests.mirror.test_runs import digest_batches
from tests.runs import make_config
from tests.storage.faulty import FaultySource

pytestmark = pytest.mark.usefixtures("obstore")
LENGTH = 1024


def write_texts(path: Path, num_documents: int, rows: int) -> None:
    """Documents of about a thousand tokens, each with a text; a text's chunk is between those of tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(500, 1500, num_documents)
    tokens = pa.array(rng.integers(0, 1 << 15, int(lengths.sum()), np.int32))
    ids = pa.ListArray.from_arrays(np.append(0, lengths.cumsum()).astype(np.int32), tokens)
    texts = [rng.bytes(1000).hex() for _ in range(num_documents)]
    pq.write_table(
        pa.table({"text": texts, "ids": ids}),
        path,
        row_group_size=rows,
        compression="zstd",
        use_dictionary=False,
        data_page_size=64 << 10,
        write_page_index=True,
    )


def needed_bytes(path: Path) -> int:
    """Of a Parquet file, what a reader of its tokens cannot do without: their chunks, and what is behind all chunks."""
    metadata = pq.ParquetFile(path).metadata
    chunks = [
        metadata.row_group(group).column(column)
        for group in range(metadata.num_row_groups)
        for column in range(metadata.num_columns)
    ]
    end = max(each.data_page_offset + each.total_compressed_size for each in chunks)
    tokens = sum(each.total_compressed_size for each in chunks if "ids" in each.path_in_schema)
    return int(tokens + path.stat().st_size - end)


def make_runs(
    folder: Path, source: FaultySource, settings: dict[str, Any], **options: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run over the Parquet files of a folder, and one that reads them from the source through a mirror."""
    data = folder / "data"
    source.files = {f"d/{path.name}": path.read_bytes() for path in data.iterdir()}
    configs = []
    for name, where in (("plain", str(data)), ("remote", f"{source.url}/d")):
        paths = [f"{where}/{path.name}" for path in sorted(data.iterdir())]
        listed = [{"name": "s", "path": paths, "column": "ids"}]
        config = {"sequence_length": LENGTH, "block_bytes": 64 << 10, "epochs": 1, **options}
        configs.append(make_config(folder, listed, cache=str(folder / name), **config))
    return configs[0], configs[1] | {"storage": {"mirror": settings}}


@pytest.mark.parametrize(
    ("rows", "num_documents"),
    [(200, 5_000), (1_000, 5_000), pytest.param(10_000, 20_000, marks=pytest.mark.slow)],
)
def test_texts_between_tokens_are_not_fetched(
    rows: int, num_documents: int, tmp_path: Path
) -> None:
    """But for a part of the 128 KiB in 16 places by which an index knows a file."""
    with FaultySource({}) as source, mirror(tmp_path / "mirror", source.url) as settings:
        (tmp_path / "data").mkdir()
        path = tmp_path / "data" / "x.parquet"
        write_texts(path, num_documents, rows)
        plain, remote = make_runs(tmp_path, source, settings)
        megablend.build(plain)
        megablend.build(remote)
        assert digest_batches(remote) == digest_batches(plain)
        print(
            f"row groups of {rows}: source / needed {source.bytes / needed_bytes(path):.4f}, "
            f"file / needed {path.stat().st_size / needed_bytes(path):.2f}"
        )
        assert path.stat().st_size > 1.3 * needed_bytes(path)
        assert source.bytes <= 1.02 * needed_bytes(path)
        assert get_status(settings)["source_bytes"] <= source.bytes
