"""This version against another release, pass by pass: two processes that stay open take turns, so that other work on the machine
and the temperature of caches concern both alike. CPU time of all threads of a pass; prints medians, least values, and the median
of the ratios of neighbouring passes.

    python tools/bench/paired_releases.py --old PYTHON        # PYTHON: of an environment that has the other release
    python tools/bench/paired_releases.py --old PYTHON --cases open first --rounds 9
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from release_corpus import BLOCK, config_of, read_all, warm, write_corpus

LOCATED = 200_000


def main() -> None:
    """Print the table, or be one of the two processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--old", metavar="PYTHON", help="interpreter that imports the other release"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--mib", type=int, default=64, help="of tokens (default: 64)")
    parser.add_argument(
        "--files", type=int, default=60, help="small files, each a source of `locate` (default: 60)"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(Path(options.serve))
        return
    if options.old is None:
        parser.error("--old is needed")
    with tempfile.TemporaryDirectory() as name:
        write_corpus(Path(name), options.mib, options.files)
        compare(Path(name), options.old, options.cases, options.rounds)


def compare(corpus: Path, old: str, cases: list[str], rounds: int) -> None:
    """Let both take turns, and print a line for each case."""
    servers = {}
    for name, python in (("old", old), ("new", sys.executable)):
        (corpus / name).mkdir()
        command = [python, __file__, "--serve", str(corpus / name)]
        servers[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=corpus
        )
    for case in cases:
        times: dict[str, list[float]] = {"old": [], "new": []}
        for turn in range(rounds + 1):  # the first makes the case, and loads its kernels
            for name in sorted(servers, reverse=turn % 2 == 0):
                seconds = ask(servers[name], case)
                if turn:
                    times[name].append(seconds)
        ratios = [new / before for before, new in zip(times["old"], times["new"], strict=True)]
        middle = {name: statistics.median(values) * 1e3 for name, values in times.items()}
        least = {name: min(values) * 1e3 for name, values in times.items()}
        print(
            f"{case:24} ms, median {middle['old']:8.1f} {middle['new']:8.1f}   least {least['old']:8.1f} {least['new']:8.1f}   "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )
    for server in servers.values():
        server.communicate()


def ask(server: subprocess.Popen[str], case: str) -> float:
    """CPU seconds of a pass."""
    assert server.stdin is not None
    assert server.stdout is not None
    print(case, file=server.stdin, flush=True)
    return float(json.loads(server.stdout.readline()))


def serve(folder: Path) -> None:
    """Make a pass of each case that is read from the standard input; the corpus is in the folder above."""
    warm(folder)
    passes: dict[str, Callable[[], Any]] = {}
    for line in sys.stdin:
        case = line.strip()
        if case not in passes:
            passes[case] = CASES[case](folder)
            passes[case]()
        start = time.process_time()
        passes[case]()
        print(time.process_time() - start, flush=True)


def batches(name: str, samples: int, micro_batch: int, folder: Path) -> Callable[[], Any]:
    """Opening a run, and all its batches."""
    import megablend

    config = built(folder, name, samples)

    def read() -> None:
        loader = megablend.Loader(megablend.open(config), micro_batch_size=micro_batch)
        for _ in loader:
            pass
        loader.close()

    return read


def first_batches(folder: Path) -> Callable[[], Any]:
    """Opening a run and its first batch, three times."""
    import megablend

    config = built(folder, "pair.bin", 15_000)

    def read() -> None:
        for _ in range(3):
            loader = megablend.Loader(megablend.open(config), micro_batch_size=8)
            next(iter(loader))
            loader.close()

    return read


def openings(folder: Path) -> Callable[[], Any]:
    """Opening a run, ten times."""
    import megablend

    config = built(folder, "pair.bin", 15_000)
    return lambda: [megablend.open(config) for _ in range(10)]


def single_samples(folder: Path) -> Callable[[], Any]:
    """300 random samples."""
    import megablend

    dataset = megablend.open(built(folder, "large.parquet", 15_000))
    chosen = np.random.default_rng(0).permutation(len(dataset))[:300].tolist()
    return lambda: [dataset[k] for k in chosen]


def blocks(name: str, folder: Path) -> Callable[[], Any]:
    """All blocks, in random order."""
    import megablend

    store = megablend.open(built(folder, name, 15_000)).run.store
    order = np.random.default_rng(0).permutation(
        (folder.parent / "pair.bin").stat().st_size // BLOCK
    )
    return lambda: read_all(store, order)


def located(sources: int | None, is_random: bool, folder: Path) -> Callable[[], Any]:
    """Where 200,000 samples are: of some small sources, which have many epochs, or of the large one."""
    import megablend

    small = sorted(f"small/{path.name}" for path in (folder.parent / "small").iterdir())
    patterns = ["large.parquet"] if sources is None else small[:sources]
    config = config_of(folder, f"plan-{sources}", *patterns) | {"samples": 10 * LOCATED}
    megablend.build(config)
    plan = megablend.open(config).run.plan
    rng = np.random.default_rng(0)
    ks = rng.integers(0, 10 * LOCATED, LOCATED) if is_random else np.arange(LOCATED)
    return lambda: plan.locate_many(ks)


def builds(pattern: str, is_new: bool, folder: Path) -> Callable[[], Any]:
    """Building a run: into a new cache, or once more into the same one."""
    import megablend

    numbers = itertools.count() if is_new else itertools.repeat(0)
    name = f"built-{pattern.replace('/', '-').replace('*', 'all')}-{is_new}"
    return lambda: megablend.build(config_of(folder, f"{name}-{next(numbers)}", pattern))


def megatron_caches(folder: Path) -> Callable[[], Any]:
    """Megatron's cache of 30 datasets, a new one each time."""
    from megablend.megatron import prepare

    seeds = itertools.count()

    def make() -> None:
        seed = next(seeds)
        config: Any = SimpleNamespace(
            random_seed=seed,
            sequence_length=2048,
            blend=([str(folder.parent / "pair")] * 30, None),
            blend_per_split=None,
            split="95,5,0",
            path_to_cache=str(folder / f"megatron{seed}"),
            tokenizer=SimpleNamespace(unique_identifiers={"class": "T"}),
            mock=False,
            mid_level_dataset_surplus=0.5,
            drop_last_partial_validation_sequence=True,
            add_extra_token_to_sequence=True,
        )
        prepare(config, (200_000, 10_000, 0))

    return make


def built(folder: Path, name: str, samples: int) -> dict[str, Any]:
    """The config of a run of one source, built."""
    import megablend

    config = config_of(folder, f"{name}-{samples}", name, block_bytes=BLOCK, samples=samples)
    megablend.build(config)
    return config


CASES: dict[str, Callable[[Path], Callable[[], Any]]] = {
    "batches-bin-long": partial(batches, "pair.bin", 120_000, 64),
    "batches-parquet-long": partial(batches, "large.parquet", 120_000, 64),
    "batches-bin-short": partial(batches, "pair.bin", 15_000, 8),
    "batches-parquet-short": partial(batches, "large.parquet", 15_000, 8),
    "blocks-bin": partial(blocks, "pair.bin"),
    "blocks-parquet": partial(blocks, "large.parquet"),
    "locate-large": partial(located, None, False),
    "locate-2": partial(located, 2, False),
    "locate-60": partial(located, 60, False),
    "locate-2-random": partial(located, 2, True),
    "locate-60-random": partial(located, 60, True),
    "build-parquet": partial(builds, "large.parquet", True),
    "build-bin": partial(builds, "pair.bin", True),
    "build-small": partial(builds, "small/*.parquet", True),
    "build-small-again": partial(builds, "small/*.parquet", False),
    "megatron": megatron_caches,
    "samples": single_samples,
    "open": openings,
    "first": first_batches,
}


if __name__ == "__main__":
    main()
