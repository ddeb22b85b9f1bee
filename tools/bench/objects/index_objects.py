"""How long indexing many files of an object store takes, with latency.

Goal: 1,000 files at 30 ms of latency in under 10 s on 2 ranks, Parquet with page indexes. The source shares the CPUs with the
ranks; what they take of them is printed, that of starting interpreters and imports too.

    python tools/bench/objects/index_objects.py
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from source import BUCKET, serving, set_keys


def write_parquet(path: Path, tokens: int, *, page_index: bool) -> None:
    """A file of documents of 1,000 tokens; 20 bits of each token are random."""
    values = np.random.default_rng(0).integers(0, 1 << 20, tokens, dtype=np.int32)
    offsets = np.arange(0, tokens + 1, 1000, dtype=np.int32)
    table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, values)})
    pq.write_table(
        table,
        path,
        use_dictionary=False,
        data_page_size=64 << 10,
        row_group_size=256,
        write_page_index=page_index,
    )


def main() -> None:
    """Build once; print seconds and what was requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--latency", type=float, default=0.03)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=500_000, help="of each file")
    parser.add_argument("--no-page-index", action="store_true")
    options = parser.parse_args()
    set_keys()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "data")
        folder.mkdir()
        write_parquet(folder / "x.parquet", options.tokens, page_index=not options.no_page_index)
        with serving(folder, latency=options.latency, names=options.files) as url:
            source = {"name": "s", "path": f"s3://{BUCKET}/*.parquet", "column": "input_ids"}
            config = {
                "cache": f"{scratch}/cache",
                "sequence_length": 1024,
                "samples": 10,
                "sources": [source | {"weight": 1}],
            }
            config["storage"] = {"s3://": {"endpoint": url}}
            Path(scratch, "config.json").write_text(json.dumps(config))
            command = [
                sys.executable,
                "-m",
                "megablend",
                "index",
                f"{scratch}/config.json",
                "--json",
            ]
            command = ["mpirun", "-n", str(options.ranks), *command]
            begin = time.perf_counter()
            before = _read_cpu_seconds()
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            seconds = time.perf_counter() - begin
            cpu = _read_cpu_seconds() - before
        index = json.loads(done.stdout)["index"]
        took = f"{seconds:.1f} s in all, {index['seconds']:.1f} s indexing; CPU of all ranks {cpu:.1f} s"
        print(f"{options.files} files, {options.latency * 1e3:.0f} ms: {took}")


def _read_cpu_seconds() -> float:
    """CPU time of processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
