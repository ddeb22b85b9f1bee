"""How long a run of many stages over many sources takes to open, and what its samples cost to locate.

For 12 stages over 1,000 sources and 10^12 samples, whose weights all change from stage to stage: CPU time to load the config, of
`megablend.open` after imports and kernels, and of `locate_many` of 64 samples, in order and anywhere in the run; compared with
a run of one stage. Each figure is of a fresh process; medians of --rounds.

    python tools/bench/open_stages.py                   # makes its corpus in a temporary folder
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

import numpy as np
from resident_memory import read_resident_mib

T = TypeVar("T")
LENGTH = 2048
BATCH = 64
CALLS = 200


def make_corpus(folder: Path, num_sources: int, num_stages: int, samples: int) -> dict[str, Path]:
    """Runs over the same small files, built: of one stage, of `num_stages`, and one of two sources; their configs by name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    import megablend

    rng = np.random.default_rng(0)
    sizes = rng.integers(3_000, 30_000, num_sources)
    for i, size in enumerate(sizes.tolist()):
        rows = pa.array([list(range(i, i + 500))] * (size // 500), pa.list_(pa.int32()))
        pq.write_table(
            pa.table({"input_ids": rows}),
            folder / f"{i}.parquet",
            write_batch_size=4,
            data_page_size=8192,
        )
    weights = np.maximum(1, rng.pareto(1, (num_stages, num_sources)) * 1000).astype(int)
    names = [f"source-{i:04}" for i in range(num_sources)]
    shared = {"cache": str(folder / "cache"), "sequence_length": LENGTH, "split": "95,5,0"}
    sources = [
        {
            "name": name,
            "path": str(folder / f"{i}.parquet"),
            "weight": int(weights[0, i]),
            "append_eod": 0,
        }
        for i, name in enumerate(names)
    ]
    stages = [
        {
            "samples": (i + 1) * (samples // num_stages) // 8 * 8
            if i + 1 < num_stages
            else samples,
            "sources": {name: {"weight": int(weights[i, j])} for j, name in enumerate(names)}
            if i
            else {},
        }
        for i in range(num_stages)
    ]
    configs = {
        "one": shared | {"run": "one", "sources": sources, "samples": samples},
        "many": shared | {"run": "many", "sources": sources, "stages": stages},
        "small": shared
        | {"run": "small", "cache": str(folder / "small"), "sources": sources[:2], "samples": 1000},
    }
    paths = dict[str, Path]()
    for name, config in configs.items():
        paths[name] = folder / f"{name}.yaml"
        paths[name].write_text(_dump(config))
        start = time.process_time()
        megablend.build(paths[name])
        print(f"{name}: built in {time.process_time() - start:.2f} s of CPU time")
    return paths


def _dump(config: object) -> str:
    import yaml

    return yaml.dump(config, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False)


def measure(path: Path, profile: str | None) -> dict[str, float]:
    """One round, in this process: milliseconds of CPU time, and mebibytes of memory that opening added."""
    import megablend
    from megablend.config import load_config

    found = dict[str, float]()

    def timed(name: str, run: Callable[[], T]) -> T:
        profiler = cProfile.Profile() if profile == name else None
        start = time.process_time()
        with profiler or nullcontext():
            result = run()
        found[f"{name} ms"] = (time.process_time() - start) * 1e3
        if profiler:
            pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumulative").print_stats(60)
        return result

    load_kernels(path.with_name("small.yaml"))
    config = timed("load", lambda: load_config(path))
    before = read_resident_mib()
    dataset = timed("open", lambda: megablend.open(config))
    found["open MiB"] = read_resident_mib() - before
    plan = dataset.run.plan
    rng = np.random.default_rng(os.getpid())
    timed(
        "enter every stage",
        lambda: plan.locate_many(np.linspace(0, len(dataset) - 1, 1000).astype(np.int64)),
    )
    calls = [rng.integers(0, len(dataset), BATCH) for _ in range(CALLS)]
    timed(f"locate_many({BATCH}) anywhere", lambda: [plan.locate_many(ks) for ks in calls])
    start = int(rng.integers(0, len(dataset) - CALLS * BATCH))
    rows = [np.arange(start + i * BATCH, start + (i + 1) * BATCH) for i in range(CALLS)]
    timed(f"locate_many({BATCH}) in order", lambda: [plan.locate_many(ks) for ks in rows])
    for name in list(found):
        if name.startswith("locate_many"):
            found[name.removesuffix(" ms") + " us"] = found.pop(name) * 1e3 / CALLS
    return found


def load_kernels(path: Path) -> None:
    """Open and locate in a small run, so that imports and kernels are not counted."""
    import megablend
    from megablend.operations.load_kernels import wait_for_kernels

    megablend.open(path).run.plan.locate_many(np.arange(3))
    wait_for_kernels()  # a thread loads those that nothing has called yet; its CPU time would count as that of what follows


def main() -> None:
    """Make the corpus, measure in fresh processes, print medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", type=int, default=1000)
    parser.add_argument("--stages", type=int, default=12)
    parser.add_argument("--samples", type=int, default=10**12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="keep the corpus here; used again if it is there"
    )
    parser.add_argument(
        "--profile", choices=["load", "open"], help="profile the run of many stages instead"
    )
    parser.add_argument("--one", metavar="CONFIG", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(Path(args.one), args.profile)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        configs = {name: folder / f"{name}.yaml" for name in ("one", "many", "small")}
        if not all(path.exists() for path in configs.values()):
            folder.mkdir(parents=True, exist_ok=True)
            configs = make_corpus(folder, args.sources, args.stages, args.samples)
        if args.profile:
            subprocess.run(
                [
                    sys.executable,
                    __file__,
                    "--one",
                    str(configs["many"]),
                    "--profile",
                    args.profile,
                ],
                check=True,
            )
            return
        del configs["small"]
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in configs}
        for _ in range(args.rounds + 1):
            for name, path in configs.items():
                command = [sys.executable, __file__, "--one", str(path)]
                rounds[name].append(
                    json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                )
    for name, found in rounds.items():
        print(f"{name}:")
        for what in found[0]:
            values = [each[what] for each in found[1:]]
            print(
                f"  {what:>32} {statistics.median(values):10.2f}   ({min(values):.2f} to {max(values):.2f})"
            )


if __name__ == "__main__":
    main()
