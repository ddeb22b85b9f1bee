"""How index and reading grow with the number of blocks: the same page under many names, through the real build.

Claims: opening a run takes the same time and memory from 10^3 to 10^8 blocks, and so does its first sample beyond the size at
which the page order goes over to two levels. Opening and reading are measured in fresh processes, medians of --rounds; memory
is what a step adds to the process's (RSS). `merge` takes the fragments of all files, checks and joins them, and commits.

    python tools/bench/read/scaling.py                        # up to 10^6 blocks
    python tools/bench/read/scaling.py --blocks 100000000     # 10 GB of disk, some minutes
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent.parent))


def measure(path: Path) -> dict[str, float]:
    """In this process: milliseconds of each step, and mebibytes of memory that it added."""
    from corpus.linked import one_file

    import megablend

    config = json.loads(path.read_text())
    small = megablend.Loader(megablend.open(one_file(config)), micro_batch_size=8)
    next(iter(small))  # imports are over, and kernels are loaded
    small.dataset[0]
    small.close()
    found: dict[str, float] = {}

    def step(name: str, start: float, before: float) -> None:
        found[f"{name} ms"] = (time.perf_counter() - start) * 1e3
        found[f"{name} MiB"] = memory_mib() - before

    start = time.perf_counter()
    before = memory_mib()
    dataset = megablend.open(config)
    step("open", start, before)
    ks = np.random.default_rng(os.getpid()).integers(0, len(dataset), 50).tolist()
    start = time.perf_counter()
    before = memory_mib()
    dataset[ks[0]]
    step("first sample", start, before)
    start = time.perf_counter()
    before = memory_mib()
    loader = megablend.Loader(dataset, micro_batch_size=8, consumed_samples=ks[1])
    batches = iter(loader)
    next(batches)
    step("first batch", start, before)
    start = time.perf_counter()
    before = memory_mib()
    for _ in range(200):
        next(batches)
    step("200 batches", start, before)
    loader.close()
    return found


def memory_mib() -> float:
    """Of this process, what it shares with others included."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def main() -> None:
    """Make indexes, measure in fresh processes, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", help="where the indexes are made; a temporary folder where absent"
    )
    parser.add_argument("--one", metavar="CONFIG", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(Path(args.one))))
        return
    from corpus.linked import build_linked, linked_corpus

    for num_blocks in args.blocks:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            config = linked_corpus(Path(folder) / "corpus", num_blocks, memory="64MiB")
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config))
            start = time.perf_counter()
            merge = build_linked(config)
            whole = time.perf_counter() - start
            size = sum(
                file.stat().st_size for file in Path(config["cache"]).glob("generations/*/*")
            )
            print(
                f"{num_blocks:,} blocks: index of {size / 1e6:,.1f} MB; merge {merge:.2f} s, all of both builds {whole:.2f} s"
            )
            command = [sys.executable, __file__, "--one", str(path)]
            rounds = [
                json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                for _ in range(args.rounds)
            ]
            for name in rounds[0]:
                values = [one[name] for one in rounds]
                print(
                    f"{name:>24} {statistics.median(values):10.2f}   ({min(values):.2f} to {max(values):.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
