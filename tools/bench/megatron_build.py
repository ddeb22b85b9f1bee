"""A whole cache of many datasets, from nothing: Megatron's builder, which works on one rank, against one and more ranks of ours.

Claim: the same bytes, on the disk before they are named, in less time: of small datasets mostly files are made, whose cost is the
file system's. Each build has a new folder: for some minutes after files were removed, ext4 takes long to create others.

    python tools/bench/megatron_build.py [--datasets 1000] [--documents 10000] [--unequal] [--samples 1000000] [--ranks 1 2 4]
        [--rounds 2]

Medians, interleaved; processor time is that of all ranks. "build" is without the start of interpreters and MPI, imports and the
loading of kernels; "command" with all of it, as a user waits for it.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

LENGTH = 2048
COLUMNS = ("build CPU s", "build wall s", "command CPU s", "command wall s")
TOKENIZER = SimpleNamespace(unique_identifiers={"class": "Bench"}, vocab_size=50_000)


def main() -> None:
    """Write the data, let the contenders take turns, print a table; or be one rank of a contender."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--datasets", type=int, default=1000)
    parser.add_argument("--documents", type=int, default=10_000, help="of each dataset")
    parser.add_argument(
        "--unequal",
        action="store_true",
        help="half to one and a half times as many documents, by dataset",
    )
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", help="for the data; a temporary one")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        build(Path(options.folder), options.contender, options.datasets, options.samples)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rng = np.random.default_rng(1)
        most = options.documents // 2 if options.unequal else 0
        counts = options.documents + rng.integers(-most, most, options.datasets, endpoint=True)
        write_pairs(Path(folder), counts.tolist())
        race(Path(folder), options)


def race(folder: Path, options: argparse.Namespace) -> None:
    """Let the contenders take turns, and compare what they write."""
    contenders = {
        "Megatron": 0,
        **{f"{ranks} rank{'s' * (ranks > 1)}": ranks for ranks in options.ranks},
    }
    taken: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for turn in range(options.rounds + 1):
        for name, ranks in contenders.items():
            if (
                folder / "cache"
            ).exists():  # not removed: for some minutes ext4 takes long to create files after many were
                (folder / "cache").rename(folder / f"cache-{time.monotonic_ns()}")
            spent = run(folder, ranks, options)
            if turn:
                taken[name].append(spent)
            elif not ranks:
                shutil.copytree(folder / "cache", folder / "expected")
            else:
                subprocess.run(
                    ["diff", "-rq", "-x", ".megablend", folder / "expected", folder / "cache"],
                    check=True,
                )
    peer = [statistics.median(column) for column in zip(*taken["Megatron"], strict=True)]
    print(
        f"{options.datasets:,} datasets of {options.documents:,} documents, {options.samples:,} samples"
    )
    print(f"{'':12}" + "".join(f"{what:>14}{'ratio':>8}" for what in COLUMNS))
    for name, times in taken.items():
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        row = (f"{own:14.2f}{other / own:7.2f}x" for own, other in zip(medians, peer, strict=True))
        print(f"{name:12}" + "".join(row), flush=True)


def run(folder: Path, ranks: int, options: argparse.Namespace) -> list[float]:
    """One build in processes of its own: the COLUMNS, in seconds; the build's wall time is that of the slowest rank."""
    launcher = (
        [str(Path(sys.executable).with_name("mpirun")), "-n", str(ranks)] if ranks > 1 else []
    )
    own = ["--folder", folder, "--datasets", options.datasets, "--samples", options.samples]
    command = [
        *launcher,
        sys.executable,
        __file__,
        "--contender",
        "ours" if ranks else "megatron",
        *map(str, own),
    ]
    before = _children()
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    whole = [_children() - before, time.perf_counter() - start]
    # Launchers run ranks' lines together
    spent = [json.loads(found) for found in re.findall(r"\[.*?\]", done.stdout)]
    return [sum(processor for processor, _ in spent), max(wall for _, wall in spent), *whole]


def _children() -> float:
    """Processor seconds of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def build(folder: Path, contender: str, num_datasets: int, num_samples: int) -> None:
    """Build the cache, and print what it took this rank."""
    prefixes = [str(folder / str(number)) for number in range(num_datasets)]
    weights = (1 / np.arange(1, num_datasets + 1)).tolist()
    make = ours if contender == "ours" else megatron
    work = make(folder, (prefixes, weights), [num_samples, num_samples // 10, 0])
    start = time.process_time(), time.perf_counter()
    work()
    print(json.dumps([time.process_time() - start[0], time.perf_counter() - start[1]]), flush=True)


def ours(folder: Path, blend: tuple[list[str], list[float]], sizes: list[int]) -> Any:
    """Our build, once MPI has started and the kernels are loaded."""
    from megablend.distributed.launch import detect
    from megablend.kernels.exact.length_totals import total_lengths
    from megablend.megatron.cache_builder.build_cache import prepare_cache
    from megablend.megatron.exact.greedy import greedy
    from megablend.megatron.exact.samples import sample_rows
    from megablend.megatron.exact.shuffle import Generator
    from megablend.megatron.request.request import Blend, CacheRequest
    from megablend.storage.by_scheme import make_storage

    launch = detect()
    list(
        sample_rows(
            np.full(9, 9, np.int32), np.arange(9, dtype=np.int32), 9, 8, dtype=np.int32, extra=1
        )
    )
    greedy((1 / np.arange(1, 50)).tolist(), 99).draw(99)
    Generator(1).shuffle(np.arange(9, dtype=np.uint32))
    lengths = np.full(9, 9, np.int32)
    total_lengths(lengths, 0)
    launch.barrier()
    request = CacheRequest(
        path_to_cache=str(folder / "cache"),
        random_seed=1,
        sequence_length=LENGTH,
        tokenizer=TOKENIZER.unique_identifiers,
        sizes=tuple(sizes),
        blend=Blend(prefixes=tuple(blend[0]), weights=tuple(blend[1])),
        split="95,5,0",
        mid_level_dataset_surplus=0.5,
    )
    storage = make_storage()
    return lambda: prepare_cache(request, launch=launch, storage=storage)


def megatron(folder: Path, blend: tuple[list[str], list[float]], sizes: list[int]) -> Any:
    """Megatron's build."""
    import torch
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    store = tempfile.mktemp(dir=folder)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    config = GPTDatasetConfig(
        path_to_cache=str(folder / "cache"),
        random_seed=1,
        sequence_length=LENGTH,
        tokenizer=TOKENIZER,
        blend=blend,
        split="95,5,0",
        mid_level_dataset_surplus=0.5,
        num_dataset_builder_threads=2,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build


def write_pairs(folder: Path, counts: list[int]) -> None:
    """Pairs of so many documents of 500 tokens on average; a `.bin` is a hole, which no builder reads."""
    rng = np.random.default_rng(0)
    for number, num_documents in enumerate(counts):
        lengths = rng.integers(1, 1000, num_documents, dtype=np.int32)
        ends = 2 * np.cumsum(lengths, dtype=np.int64)
        sizes = np.array([num_documents, num_documents + 1], "<u8").tobytes()
        header = b"MMIDIDX\0\0" + np.array([1], "<u8").tobytes() + b"\x08" + sizes
        arrays = [lengths, ends - 2 * lengths, np.arange(num_documents + 1, dtype=np.int64)]
        (folder / f"{number}.idx").write_bytes(
            header + b"".join(array.tobytes() for array in arrays)
        )
        with (folder / f"{number}.bin").open("wb") as file:
            file.truncate(int(ends[-1]))


if __name__ == "__main__":
    main()
