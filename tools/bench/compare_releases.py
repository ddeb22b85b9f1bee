"""This version against another release: CPU time of what users do, through names that both have.

Fresh processes, interleaved, imports and the loading of kernels left out except where they are measured. Prints medians of both
and their ratio; CPU time of all threads, since machines are rarely idle.

    python tools/bench/compare_releases.py --old PYTHON       # PYTHON: of an environment that has the other release
    python tools/bench/compare_releases.py --old PYTHON --steps indexing reading --mib 64 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DOCUMENT = 512
"""Tokens of a document."""
LOCATED = 200_000
SAMPLES_READ = 15_000
BLOCK = 1 << 16
"""Bytes of a block of a `.bin`, and of a page."""
Times = dict[str, float]


def main() -> None:
    """Print the table, or be one process that measures a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", metavar="PYTHON", help="interpreter that imports the other release")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--mib", type=int, default=128, help="of tokens (default: 128)")
    parser.add_argument("--files", type=int, default=500, help="small files, each a source in `plan` (default: 500)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("STEP", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        step, folder = options.one
        print(json.dumps(STEPS[step](Path(folder))))
        return
    if options.old is None:
        parser.error("--old is needed")
    with tempfile.TemporaryDirectory() as name:
        write_corpus(Path(name), options.mib, options.files)
        for step in options.steps:
            compare(step, Path(name), options.old, options.rounds)


def compare(step: str, folder: Path, old: str, rounds: int) -> None:
    """Measure a step in turn, and print its lines."""
    taken: dict[str, list[Times]] = {"old": [], "new": []}
    for turn in range(rounds + 1):  # the first compiles kernels, and warms the page cache
        for name, python in (("old", old), ("new", sys.executable)):
            own = folder / name
            own.mkdir(exist_ok=True)
            command = [python, __file__, "--one", step, str(own)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=folder)
            if turn:
                taken[name].append(json.loads(done.stdout.splitlines()[-1]))
    for line in taken["new"][0]:
        before, after = (statistics.median(each[line] for each in taken[name]) for name in ("old", "new"))
        print(f"{line:44}{before:12.4g}{after:12.4g}{before / after:9.2f}x", flush=True)


def write_corpus(folder: Path, mib: int, files: int) -> None:
    """A Parquet file of 64 KB pages, the same tokens as `.bin/.idx`, and small Parquet files."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, (mib << 20) // 4 // DOCUMENT * DOCUMENT, dtype=np.int32)
    write_parquet(folder / "large.parquet", tokens)
    for i in range(files):
        write_parquet(folder / "small" / f"{i:05}.parquet", tokens[: DOCUMENT * (2 + i % 7)])
    count = len(tokens) // DOCUMENT
    tokens.astype("<u2").tofile(folder / "pair.bin")
    pointers = 2 * DOCUMENT * np.arange(count, dtype="<i8")
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, count, count + 1)
    lengths = np.full(count, DOCUMENT, "<i4")
    edges = np.arange(count + 1, dtype="<i8")
    (folder / "pair.idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + edges.tobytes())


def write_parquet(path: Path, tokens: np.ndarray[Any, Any]) -> None:
    """Documents of equal length, in pages of 64 KB."""
    path.parent.mkdir(exist_ok=True)
    edges = np.arange(0, len(tokens) + 1, DOCUMENT, dtype=np.int32)
    table = pa.table({"input_ids": pa.ListArray.from_arrays(edges, tokens)})
    options: dict[str, Any] = {"data_page_size": BLOCK, "write_batch_size": 16, "use_dictionary": False}
    pq.write_table(table, path, compression="zstd", write_page_index=True, **options)


def config_of(folder: Path, name: str, *patterns: str, **settings: Any) -> dict[str, Any]:
    """A run of one pass over these files, each a source; the corpus is in the folder above."""
    shares = {} if len(patterns) == 1 else {"weight": 1}
    sources = [{"name": f"s{i}", "path": str(folder.parent / each), **shares} for i, each in enumerate(patterns)]
    return {"cache": str(folder / name), "sequence_length": DOCUMENT, "samples": 2000, "sources": sources, **settings}


def cpu(work: Callable[..., Any], *arguments: Any) -> float:
    """CPU seconds of this process's threads in a call."""
    start = time.process_time()
    work(*arguments)
    return time.process_time() - start


def warm(folder: Path) -> None:
    """Load the kernels of building and of reading."""
    import megablend

    for name, pattern in (("warm", "small/00000.parquet"), ("warm-pair", "pair.bin")):
        config = config_of(folder, name, pattern) | {"samples": 64}
        megablend.build(config)
        for _ in megablend.Loader(megablend.open(config), micro_batch_size=8):
            pass


def measure_import(folder: Path) -> Times:
    """Importing the package, its Loader, and the first batch."""
    before = len(sys.modules)

    def load() -> None:
        import megablend

        assert megablend.Loader.__name__

    imported, modules = cpu(load), len(sys.modules) - before
    import megablend

    config = config_of(folder, "first", "small/00000.parquet") | {"samples": 64}
    if not (folder / "first").exists():
        megablend.build(config)
    first = cpu(lambda: next(iter(megablend.Loader(megablend.open(config), micro_batch_size=8))))
    return {"import of the Loader, s": imported, "its modules": modules, "open and first batch, cold kernels, s": first}


def measure_indexing(folder: Path) -> Times:
    """New builds."""
    import megablend

    warm(folder)
    times = {}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        own = Path(name) / "caches"
        for what, pattern in (
            ("large.parquet", "large.parquet"),
            ("pair", "pair.bin"),
            ("small files", "small/*.parquet"),
        ):
            config = config_of(folder, what, pattern) | {"cache": str(own / what)}
            times[f"build of {what}, s"] = cpu(megablend.build, config)
            times[f"build of {what} again, s"] = cpu(megablend.build, config)
    return times


def measure_opening(folder: Path) -> Times:
    """Opening a run, and single samples."""
    import megablend

    warm(folder)
    config = config_of(folder, "large", "large.parquet")
    megablend.build(config)
    times = [cpu(lambda: megablend.open(config)) for _ in range(10)]
    dataset = megablend.open(config)
    chosen = np.random.default_rng(0).permutation(len(dataset))[:300].tolist()
    return {
        "open, ms": 1e3 * statistics.median(times),
        "dataset[k], random, ms": 1e3 / 300 * cpu(lambda: [dataset[k] for k in chosen]),
    }


def measure_plan(folder: Path) -> Times:
    """Where samples are, by themselves."""
    import megablend

    warm(folder)
    small = sorted(f"small/{path.name}" for path in (folder.parent / "small").iterdir())
    times = {}
    for count in (2, len(small)):
        config = config_of(folder, f"plan-{count}", *small[:count]) | {"samples": 10 * LOCATED}
        megablend.build(config)
        plan = megablend.open(config).run.plan
        for kind, ks in (
            ("in order", np.arange(LOCATED)),
            ("random", np.random.default_rng(0).integers(0, 10 * LOCATED, LOCATED)),
        ):
            plan.locate_many(ks)
            times[f"locate_many, {count} sources, {kind}, ns"] = 1e9 / LOCATED * cpu(plan.locate_many, ks)
    return times


def measure_reading(folder: Path) -> Times:
    """Batches, and random blocks."""
    import megablend

    warm(folder)
    times = {}
    for name in ("large.parquet", "pair.bin"):
        config = config_of(folder, name, name, block_bytes=BLOCK, samples=SAMPLES_READ)
        megablend.build(config)
        dataset = megablend.open(config)
        loader = megablend.Loader(dataset, micro_batch_size=8)
        seconds = cpu(list, (None for _ in loader))
        times[f"batches of {name}, ns a token"] = 1e9 * seconds / (len(dataset) * DOCUMENT)
        store, count = dataset.run.store, (folder.parent / "pair.bin").stat().st_size // BLOCK
        blocks = np.random.default_rng(0).permutation(count)
        store.read(blocks[:50])
        seconds = cpu(read_all, store, blocks)
        times[f"random blocks of {name}, us"] = 1e6 * seconds / count
    return times


def read_all(store: Any, blocks: np.ndarray[Any, Any]) -> None:
    """Read blocks, fifty at a time."""
    for start in range(0, len(blocks), 50):
        store.read(blocks[start : start + 50])


def measure_megatron(folder: Path) -> Times:
    """Megatron's cache."""
    from megablend.megatron import prepare

    with tempfile.TemporaryDirectory(dir=folder) as name:
        config: Any = SimpleNamespace(
            random_seed=7,
            sequence_length=2048,
            blend=([str(folder.parent / "pair")] * 30, None),
            blend_per_split=None,
            split="95,5,0",
            path_to_cache=name,
            tokenizer=SimpleNamespace(unique_identifiers={"class": "T"}),
            mock=False,
            mid_level_dataset_surplus=0.5,
            drop_last_partial_validation_sequence=True,
            add_extra_token_to_sequence=True,
        )
        prepare(config, (2000, 100, 0))
        config.random_seed = 8  # other files, and kernels are loaded
        return {"Megatron's cache of 30 datasets, s": cpu(lambda: prepare(config, (200_000, 10_000, 0)))}


STEPS: dict[str, Callable[[Path], Times]] = {
    "import": measure_import,
    "indexing": measure_indexing,
    "opening": measure_opening,
    "plan": measure_plan,
    "reading": measure_reading,
    "megatron": measure_megatron,
}


if __name__ == "__main__":
    main()
