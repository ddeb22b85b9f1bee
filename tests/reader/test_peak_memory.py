"""A process that reads stays within its budget: over a whole epoch and into the next, at any size of index.

Measured is what reading adds to a process that has loaded libraries and kernels. What the allocator keeps at hand is allowed
for, and what a process may keep mapped of a small index.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpus.linked import build_linked, linked_corpus

from megablend.index.tables.mapped_table import MappedTable

MIB = 1 << 20
ALLOCATOR_BYTES = 16 * MIB
ROOT = Path(__file__).parent.parent.parent


def growth(folder: Path, config: dict[str, Any], first: int, num_batches: int) -> dict[str, Any]:
    path = folder / f"{config['memory']}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    command = [
        sys.executable,
        str(Path(__file__).with_name("memory_worker.py")),
        str(path),
        str(first),
        str(num_batches),
    ]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_small_index_over_an_epoch_and_into_the_next(tmp_path: Path) -> None:
    config = linked_corpus(tmp_path / "corpus", 600, block_tokens=16_384, samples=12_000)
    build_linked(config)
    epoch = 600 * 16_384 // 2048 // 8  # batches
    tight = growth(tmp_path, config | {"memory": "20MiB"}, 0, epoch + 100)
    assert tight["epochs"] == [0, 1]
    assert tight["growth"] <= 20 * MIB + ALLOCATOR_BYTES
    roomy = growth(tmp_path, config | {"memory": "256MiB"}, 0, epoch + 100)
    assert tight["growth"] < roomy["growth"] <= 256 * MIB + ALLOCATOR_BYTES


def test_compressed_pages_of_eight_million_narrow_numbers_of_a_dictionary(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "links").mkdir()
    for number, rows in enumerate([1, 4]):  # the first file only loads kernels
        length = 1 << 23 if number else 1 << 15
        tokens = rng.integers(0, 50_000, rows * length).astype(np.uint16)
        table = pa.table(
            {"ids": pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32) * length, tokens)}
        )
        options: dict[str, Any] = {
            "data_page_size": 1,
            "write_batch_size": 1,
            "write_page_index": True,
        }
        pq.write_table(
            table, tmp_path / "links" / f"{number:06}.parquet", compression="zstd", **options
        )
    source = {"name": "pages", "path": f"{tmp_path}/links/*.parquet", "weight": 1}
    config = {
        "cache": str(tmp_path / "cache"),
        "sequence_length": 2048,
        "lanes": 1,
        "memory": "128MiB",
    }
    config |= {"samples": 33_000, "order": "sequential", "sources": [source]}
    build_linked(config)
    assert growth(tmp_path, config, 0, 4000)["growth"] <= 128 * MIB


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_blocks", [10**6, 10**8])
def test_a_large_index_over_ten_thousand_batches(tmp_path: Path, num_blocks: int) -> None:
    config = linked_corpus(tmp_path / "corpus", num_blocks, memory="64MiB")
    build_linked(config)
    epoch = num_blocks * 160 // 2048  # samples
    found = growth(tmp_path, config, epoch - 40_000, 10_000)
    assert found["epochs"] == [0, 1]
    assert found["growth"] <= 64 * MIB + ALLOCATOR_BYTES + (
        MappedTable.mapped_bytes if num_blocks == 10**6 else 0
    )
