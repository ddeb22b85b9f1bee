"""Page order on files that are not in memory, against what else reads them: seconds of the clock, megabytes of tokens a second.

Claims, for 64 KB pages of zstd, 2k-token samples and 8 lanes of 512 slots in one process: with reading ahead at least as fast as
pyarrow's scan from front to back, and 15 times as fast as random rows of a memory-mapped Arrow file. Before each line the files'
pages are dropped from the page cache, and it is checked that less than 1 % of them are left there; what lies beneath the system
(a disk's own memory, a hypervisor's) is not in our hands.

    python tools/bench/read/cold.py --mib 500
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pipeline import make_corpus, opened, pyarrow_scan, scan
from residency import drop, resident

import megablend


def forget(paths: list[str]) -> None:
    """Let the system forget files, and check that it did."""
    drop(map(Path, paths))
    if (left := resident(map(Path, paths))) > 0.01:
        raise SystemExit(
            f"{left:.0%} of the files stay in the page cache: nothing here can be measured cold"
        )


def page_order(config: dict[str, Any], num_tokens: int, **settings: Any) -> int:
    """Tokens of batches from a loader's beginning on, about as many as there are in the files."""
    loader = megablend.Loader(opened(config, order="page", **settings), micro_batch_size=8)
    found = 0
    for batch in loader:
        found += batch["tokens"].numel()
        if found >= num_tokens:
            break
    loader.close()
    return found


def write_arrow(paths: list[str], path: str) -> None:
    """The same rows as one Arrow file."""
    with pa.OSFile(path, "wb") as sink:
        writer = None
        for source in paths:
            for batch in pq.ParquetFile(source).iter_batches(batch_size=1000):
                writer = writer or pa.ipc.new_file(sink, batch.schema)
                writer.write_batch(batch)
        if writer is not None:
            writer.close()


def random_rows(path: str, number: int) -> int:
    """Tokens of random rows of a memory-mapped Arrow file."""
    with pa.memory_map(path) as source:
        column = pa.ipc.open_file(source).read_all().column(0)
        found = 0
        for row in np.random.default_rng(1).integers(0, len(column), number).tolist():
            found += int(np.asarray(column[row].values).astype(np.int64).size)
        return found


def main() -> None:
    """Make corpora, measure, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument(
        "--mib", type=int, default=256, help="of tokens, 4 bytes each, in all sources together"
    )
    parser.add_argument("--rows", type=int, default=2000, help="random rows of the Arrow file")
    parser.add_argument("--rounds", type=int, default=3, help="of which the medians are printed")
    parser.add_argument(
        "--folder", help="where the corpora are made: on the disk that is to be measured"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for number in args.sources:
            config = make_corpus(Path(folder) / str(number), number, args.mib)
            paths = [source["path"] for source in config["sources"]]
            arrow = f"{folder}/{number}/rows.arrow"
            write_arrow(paths, arrow)
            dataset = opened(config, order="page")
            opened(config, order="page", direct_io=True)
            num_tokens = scan(dataset)  # kernels are loaded, too
            page_order(config, 8 * 2048)
            lines: dict[str, tuple[list[str], Callable[[], int]]] = {
                "pyarrow, front to back": (paths, partial(pyarrow_scan, paths)),
                "blocks, front to back": (paths, partial(scan, dataset)),
                "page order": (paths, partial(page_order, config, num_tokens)),
                "page order, direct_io": (
                    paths,
                    partial(page_order, config, num_tokens, direct_io=True),
                ),
                "Arrow, mapped, random rows": ([arrow], partial(random_rows, arrow, args.rows)),
            }
            rates: dict[str, list[float]] = {name: [] for name in lines}
            for _ in range(args.rounds):
                for name, (files, run) in lines.items():
                    forget(files)
                    start = time.perf_counter()
                    tokens = run()
                    rates[name].append(tokens * 4 / 1e6 / (time.perf_counter() - start))
            found = {name: float(np.median(values)) for name, values in rates.items()}
            print(f"{number} sources, MB of tokens a second (times page order's)")
            for name, rate in found.items():
                print(f"  {name:30}{rate:10.1f}{found['page order'] / rate:8.2f}", flush=True)


if __name__ == "__main__":
    main()
