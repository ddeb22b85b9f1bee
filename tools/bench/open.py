"""How long a run takes to open, and what a sample costs at once: no array a sample long is made.

Claims, for a corpus of 100,000 block rows (real Parquet pages in a real index): `megablend.open` takes under 50 ms after imports
and kernel loading, and `dataset[k]` works at once for any k. Each figure is of a fresh process; medians of --rounds.

    python tools/bench/open.py                   # makes its corpus in a temporary folder
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from resident_memory import read_resident_mib

LENGTH = 2048
SAMPLES = 10**9


def make_corpus(folder: Path, num_blocks: int) -> Path:
    """Parquet files of `num_blocks` small pages in all, indexed; the config's path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    import megablend

    rng = np.random.default_rng(0)
    per_file = 10_000
    tokens = rng.integers(0, 50_000, 2_000_000, dtype=np.int32)
    for i in range(-(-num_blocks // per_file)):
        pages = min(per_file, num_blocks - i * per_file)
        offsets = np.arange(pages + 1, dtype=np.int32) * 160
        table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens[: offsets[-1]])})
        # a page holds one write batch of one row: num_blocks pages
        options = {"use_dictionary": False, "compression": "zstd", "write_page_index": True}
        pq.write_table(
            table, folder / f"{i}.parquet", write_batch_size=1, data_page_size=1, **options
        )
    config = {
        "cache": str(folder / "cache"),
        "sequence_length": LENGTH,
        "samples": SAMPLES,
        "split": "95,5,0",
        "sources": [{"name": "pages", "path": f"{folder}/*.parquet", "append_eod": 0}],
    }
    path = folder / "bench.json"
    path.write_text(json.dumps(config))
    start = time.perf_counter()
    built = megablend.build(path)
    print(
        f"index of {num_blocks:,} pages in {built.index.num_files} files built in {time.perf_counter() - start:.2f} s"
    )
    return path


def measure(config: Path) -> dict[str, float]:
    """One round, in this process: milliseconds, and mebibytes of memory that the step added."""
    found: dict[str, float] = {}

    def step(name: str, start: float, before: float) -> None:
        found[f"{name} ms"] = (time.perf_counter() - start) * 1e3
        found[f"{name} MiB"] = read_resident_mib() - before

    start = time.perf_counter()
    before = read_resident_mib()
    import megablend
    from megablend.reader import Dataset

    step("imports", start, before)
    start = time.perf_counter()
    before = read_resident_mib()
    _load_kernels()
    step("kernels", start, before)
    start = time.perf_counter()
    before = read_resident_mib()
    dataset: Dataset = megablend.open(config)
    step("open", start, before)
    order = np.random.default_rng(os.getpid()).integers(0, len(dataset), 200)
    start = time.perf_counter()
    before = read_resident_mib()
    dataset[int(order[0])]
    step("first sample", start, before)
    times = []
    for k in order[1:]:
        start = time.perf_counter()
        dataset[int(k)]
        times.append(time.perf_counter() - start)
    found["random sample ms"] = statistics.median(times) * 1e3
    start = time.perf_counter()
    dataset.run.plan.locate_many(np.arange(100_000))
    found["locate_many ns a sample"] = (time.perf_counter() - start) * 1e4
    found["peak MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def _load_kernels() -> None:
    """Load what opening and reading call, from the node's cache of kernels."""
    from megablend.blend.interleavings.base import StageRequest
    from megablend.blend.interleavings.lanes import LanePlan
    from megablend.order.block import BlockOrder

    class Two:
        num_blocks = 2
        num_tokens = 2

        def before(self, blocks: np.ndarray) -> np.ndarray:
            return blocks

        def group_totals(self, num_groups: int, run: int) -> np.ndarray:
            return np.full(num_groups, 2 // num_groups)

        def keep_group_totals(self, num_groups: int, run: int) -> None:
            pass

    BlockOrder(Two(), 1).spans(np.zeros(1, np.int64), 2)
    zeros = np.zeros(2, np.int64)
    plan = LanePlan(
        StageRequest(
            totals=np.array([2, 1]), first_tokens=zeros, cycles=zeros + 1, shuffle_window=2
        )
    )
    plan.locate(0), plan.locate_many(np.arange(3)), plan.counts(2)


def main() -> None:
    """Make the corpus, measure in fresh processes, print medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", metavar="CONFIG", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(Path(args.one))))
        return
    with tempfile.TemporaryDirectory() as folder:
        config = make_corpus(Path(folder), args.blocks)
        command = [sys.executable, __file__, "--one", str(config)]
        rounds = [
            json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            for _ in range(args.rounds + 1)
        ]
    for name in rounds[0]:
        values = [one[name] for one in rounds[1:]]  # the first fills the caches
        print(
            f"{name:>24} {statistics.median(values):10.2f}   ({min(values):.2f} to {max(values):.2f})"
        )


if __name__ == "__main__":
    main()
