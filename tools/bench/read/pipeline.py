"""What it costs to train from pages in random order: loaders over blends, against scans of the same files, warm.

Claims, for 64 KB pages of zstd, 2k-token samples and 8 lanes of 512 slots in one process, per CPU-second: page order gives at
least 0.85 of what the same loader gives in sequential order for one source, 0.75 for 100. `scan` decodes these pages from front
to back and hands over nothing; `pyarrow` is pyarrow's own scan, on one thread. All are measured after each other in each of
--rounds rounds, in CPU time of the whole process; medians. A loader gives GPTDataset's dict: 28 bytes a token. All run on one
core, since threads of a core's two halves slow each other; nothing is measured before the threads of the line before it rest;
and the data should be more than `memory` holds, or nothing is read any more.

    python tools/bench/read/pipeline.py                    # 1, 10 and 100 sources, 500 MiB of tokens each
    python tools/bench/read/pipeline.py --sources 1000 --mib 2000 --memory 1GiB  # blocks of 8 lanes take 740 MiB
    python tools/bench/read/pipeline.py --latency          # time of a batch of 64 x 512 tokens, 4 ms of work between two
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from documents import make_documents, write_parquet

import megablend
from megablend.prefetch.read_amplification import read_amplification
from megablend.prefetch.windows import WINDOW_SAMPLES

PAGE_BYTES = 64 << 10
BATCH_PAGES = 64


def make_corpus(folder: Path, num_sources: int, mib: int, memory: str = "512MiB") -> dict[str, Any]:
    """A config of Parquet files, one a source: documents of 1.1k tokens on average, tokens as frequent as words are."""
    folder.mkdir()
    sources = []
    for number in range(num_sources):
        tokens, offsets = make_documents((mib << 18) // num_sources, seed=number)
        path = folder / f"{number}.parquet"
        write_parquet(path, tokens, offsets, page_bytes=PAGE_BYTES, codec="zstd")
        sources.append({"name": str(number), "path": str(path), "weight": 1})
    return {
        "cache": str(folder / "cache"),
        "memory": memory,
        "sequence_length": 2048,
        "lanes": 8,
        "shuffle_window": 512,
        "sources": sources,
    }


def opened(config: dict[str, Any], **settings: Any) -> megablend.Dataset:
    """A run of its own for these settings."""
    name = "-".join(map(str, settings.values()))
    whole = {"samples": 10**6, "run": f"run-{name}"} | config | settings
    megablend.build(whole)
    return megablend.open(whole)


def pyarrow_scan(paths: list[str]) -> int:
    """Tokens that a scan by pyarrow meets."""
    found = 0
    for path in paths:
        for batch in pq.ParquetFile(path).iter_batches(batch_size=2048, use_threads=False):
            found += len(batch.column(0).values)
    return found


def scan(dataset: megablend.Dataset) -> int:
    """Tokens of all blocks, decoded in the order of the files."""
    store = dataset.run.store
    found = 0
    num_blocks = len(store.snapshot.tokens_before) - 1
    for start in range(0, num_blocks, BATCH_PAGES):
        found += sum(
            len(block.tokens)
            for block in store.read(np.arange(start, min(start + BATCH_PAGES, num_blocks)))
        )
    return found


def steps(loader: megablend.Loader, micro_batch: int) -> Iterator[dict[str, Any]]:
    """Batches without end; the first windows, in which kernels are loaded and memory is touched first, are over."""
    batches = iter(loader)
    for _ in range(2 * WINDOW_SAMPLES // micro_batch):
        next(batches)
    return batches


def rest() -> None:
    """Wait until reading ahead has come as far as it goes."""
    before = -1.0
    while time.process_time() - before > 1e-3:
        before = time.process_time()
        time.sleep(0.1)


def measure(config: dict[str, Any], rounds: int) -> dict[str, float]:
    """Nanoseconds of CPU time a token, by what is measured."""
    paths = [source["path"] for source in config["sources"]]
    datasets = {order: opened(config, order=order) for order in ("sequential", "page")}
    loaders = {
        order: steps(megablend.Loader(dataset, micro_batch_size=8), 8)
        for order, dataset in datasets.items()
    }
    num_tokens = scan(datasets["page"])

    def walk(batches: Iterator[dict[str, Any]]) -> int:
        return sum(next(batches)["tokens"].numel() for _ in range(num_tokens // (8 * 2048)))

    measured: dict[str, Callable[[], int]] = {
        "pyarrow": lambda: pyarrow_scan(paths),
        "scan": lambda: scan(datasets["page"]),
        "sequential": lambda: walk(loaders["sequential"]),
        "page": lambda: walk(loaders["page"]),
    }
    seen: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(rounds):
        for name, run in measured.items():
            rest()
            start = time.process_time()
            tokens = run()
            rest()  # what was read ahead before is made up for
            seen[name].append((time.process_time() - start) / tokens * 1e9)
    found = {name: statistics.median(values) for name, values in seen.items()}
    found["amplification"] = read_amplification(
        datasets["page"].run,
        micro_batch_size=8,
        data_parallel_size=1,
        num_workers=0,
        stop=8 * 512 * 4,
    )
    return found


def latency(config: dict[str, Any], work: float) -> None:
    """Times of batches of 64 x 512 tokens, with `work` seconds of something else between two."""
    start = time.perf_counter()
    dataset = opened(
        config, order="page", sequence_length=512, lanes=64, shuffle_window=256, memory="1GiB"
    )
    loader = megablend.Loader(dataset, micro_batch_size=64)
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - start
    times = []
    for _ in range(1024):
        time.sleep(work)
        start = time.perf_counter()
        next(batches)
        times.append(time.perf_counter() - start)
    p50, p99 = np.percentile(times[256:], [50, 99]) * 1e3
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"first batch {first * 1e3:.0f} ms (build and open included), p50 {p50:.2f} ms, p99 {p99:.2f} ms, peak {peak:.0f} MiB"
    )


def main() -> None:
    """Make corpora, measure, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument(
        "--mib", type=int, default=500, help="of tokens, 4 bytes each, in all sources together"
    )
    parser.add_argument("--memory", default="512MiB", help="as in the config")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency", action="store_true")
    parser.add_argument(
        "--folder", help="where the corpora are made; a temporary folder where absent"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for number in args.sources:
            config = make_corpus(Path(folder) / str(number), number, args.mib, args.memory)
            if args.latency:
                print(f"{number:4} sources:", end=" ")
                latency(config, 4e-3)
                continue
            os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
            found = measure(config, args.rounds)
            nanoseconds = {
                name: round(found[name], 2) for name in ("pyarrow", "scan", "sequential", "page")
            }
            ratios = ", ".join(
                f"{name} x {found[name] / found['page']:.2f}"
                for name in ("pyarrow", "scan", "sequential")
            )
            print(f"{number:4} sources: CPU ns a token {json.dumps(nanoseconds)}")
            print(f"     page order is {ratios}; read amplification {found['amplification']:.3f}")


if __name__ == "__main__":
    main()
