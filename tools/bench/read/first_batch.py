"""Time to the first batch of a run whose index is built: each in a process of its own, in which nothing is warm.

Claims: under 150 ms over 10^6 block rows, at any sample number, after imports and the loading of kernels (a batch of another,
tiny run loads them), which are counted separately.

    python tools/bench/read/first_batch.py --pages 1000000
    python tools/bench/read/first_batch.py --cpu           # CPU time, where the machine does other work
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = 40
"""Of a page."""


def child(path: Path, tiny: Path, place: float, clock: Callable[[], float]) -> None:
    """Print seconds: imports; kernels; open and first batch."""
    start = clock()
    import megablend

    # Torch with it, which megablend leaves for later
    importlib.import_module("megablend.reader.loader")

    imported = clock()
    next(iter(megablend.Loader(megablend.open(tiny), micro_batch_size=8)))
    loaded = clock()
    dataset = megablend.open(path)
    opened = clock()
    loader = megablend.Loader(
        dataset, micro_batch_size=8, consumed_samples=int(place * len(dataset)) // 8 * 8
    )
    batch = next(iter(loader))
    done = clock()
    assert batch["tokens"].shape == (8, 512)
    print(json.dumps([imported - start, loaded - imported, opened - loaded, done - opened]))
    loader.close()


def make(folder: Path, name: str, pages: int) -> Path:
    """A run over a file of so many pages, built; the path of its config."""
    from indexing import write_pages

    import megablend

    data = folder / f"{name}.parquet"
    path = folder / f"{name}.json"
    write_pages(data, pages, TOKENS, write_page_index=True, compression="none")
    config: dict[str, Any] = {
        "cache": str(folder / f"cache-{name}"),
        "sequence_length": 512,
        "samples": max(64, 3 * pages * TOKENS // 512),
        "sources": [{"name": "a", "path": str(data), "weight": 1}],
    }
    path.write_text(json.dumps(config))
    megablend.build(path)
    return path


def main() -> None:
    """Build, measure, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=int, default=10**6)
    parser.add_argument("--rounds", type=int, default=5, help="of which the medians are printed")
    parser.add_argument(
        "--cpu", action="store_true", help="CPU time of the process instead of wall time"
    )
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(
            Path(args.child[0]),
            Path(args.child[1]),
            float(args.child[2]),
            getattr(time, args.child[3]),
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        clock = "process_time" if args.cpu else "perf_counter"
        path = make(Path(folder), "large", args.pages)
        tiny = make(Path(folder), "tiny", 1000)
        print(
            f"{'milliseconds, at':20}{'imports':>9}{'kernels':>9}{'open':>9}{'batch':>9}{'open + batch':>14}"
        )
        for place in (0.0, 0.123, 0.5, 0.999):
            command = [sys.executable, __file__, "--child", str(path), str(tiny), str(place), clock]
            runs = [
                json.loads(
                    subprocess.run(command, check=True, capture_output=True, text=True).stdout
                )
                for _ in range(args.rounds)
            ]
            found = np.median(np.array(runs), axis=0) * 1e3
            print(
                f"{f'{place:.1%} of the run':20}"
                + "".join(f"{value:9.0f}" for value in found)
                + f"{found[2] + found[3]:14.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
