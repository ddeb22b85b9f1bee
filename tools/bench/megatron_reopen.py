"""Opening a whole cache again, which every rank does at every restart: Megatron's builder against ours.

Claim: at 1,000 datasets at least 5 times less processor time than Megatron's builder, and less memory.

    python tools/bench/megatron_reopen.py [--datasets 1000] [--rounds 3]

Fresh processes, interleaved; imports are left out, and the checks of the installed version, of which a process makes one. Medians
and ranges. Memory is what the process' own pages (not those of files) grew by.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_build
import numpy as np

CONTENDERS = ("megatron", "megablend")
COLUMNS = ("CPU ms", "wall ms", "own memory MiB")


def main() -> None:
    """Build a cache, let both open it in turn, print a table; or be one process that opens it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--datasets", type=int, default=1000)
    parser.add_argument("--documents", type=int, default=200, help="of each dataset")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="for the data; a temporary one")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        reopen(Path(options.folder), options)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        megatron_build.write_pairs(folder, [options.documents] * options.datasets)
        blend = blend_of(folder, options.datasets)
        megatron_build.ours(folder, blend, sizes_of(options.samples))()
        race(folder, options)


def race(folder: Path, options: argparse.Namespace) -> None:
    """Print what each contender takes."""
    own = ["--folder", folder, "--datasets", options.datasets, "--samples", options.samples]
    taken: dict[str, list[list[float]]] = {name: [] for name in CONTENDERS}
    for turn in range(options.rounds + 1):  # the first warms the page cache
        for name in CONTENDERS:
            command = [
                sys.executable,
                "-W",
                "ignore",
                __file__,
                "--contender",
                name,
                *map(str, own),
            ]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found = re.findall(r"^\[.*\]$", done.stdout, re.MULTILINE)
            if turn:
                taken[name].append(json.loads(found[-1]))
    print(
        f"{options.datasets:,} datasets, opened again; median (least to most) of {options.rounds}"
    )
    print(f"{'':12}" + "".join(f"{column:>30}" for column in COLUMNS))
    for name in CONTENDERS:
        columns = list(zip(*taken[name], strict=True))
        cells = (
            f"{statistics.median(each):.1f} ({min(each):.1f} to {max(each):.1f})"
            for each in columns
        )
        print(f"{name:12}" + "".join(f"{text:>30}" for text in cells), flush=True)


def reopen(folder: Path, options: argparse.Namespace) -> None:
    """Open the cache in this process, and print the COLUMNS."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Megatron keeps some files of each dataset open
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    build: Callable[[], Any]
    build = megatron_build.megatron(
        folder, blend_of(folder, options.datasets), sizes_of(options.samples)
    )
    if options.contender == "megablend":
        from megatron.core.datasets.gpt_dataset import GPTDataset

        from megablend.megatron import MegablendDatasetBuilder
        from megablend.megatron.plugin.probe import known_misfit

        theirs = build.__self__  # type: ignore[attr-defined]
        builder = MegablendDatasetBuilder(
            GPTDataset, sizes_of(options.samples), lambda: True, theirs.config
        )
        known_misfit(MegablendDatasetBuilder)
        build = builder.build
    before = {path.name for path in (folder / "cache").iterdir()}
    memory = own_memory()
    start = (time.process_time(), time.perf_counter())
    build()
    spent = [1e3 * (time.process_time() - start[0]), 1e3 * (time.perf_counter() - start[1])]
    print("\n" + json.dumps([*spent, (own_memory() - memory) / 2**20]), flush=True)
    assert {path.name for path in (folder / "cache").iterdir()} == before, "something was built"


def own_memory() -> int:
    """Bytes of this process that are not of files."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * sum(int(size) for size in re.findall(r"^Anonymous:\s+(\d+)", text, re.MULTILINE))


def blend_of(folder: Path, num_datasets: int) -> tuple[list[str], list[float]]:
    """All datasets, with weights that fall like 1 / rank."""
    return [str(folder / str(number)) for number in range(num_datasets)], (
        1 / np.arange(1, num_datasets + 1)
    ).tolist()


def sizes_of(num_samples: int) -> list[int]:
    """Of train, valid and test."""
    return [num_samples, num_samples // 10, 0]


if __name__ == "__main__":
    main()
