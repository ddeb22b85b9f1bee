"""How `.bin/.idx` pairs of many documents and many blocks are opened and read, in fresh processes, warm.

Claims: a block costs at most a few times as much to read in a file of 10^7 blocks as in one of 10^5 (rows of an index of more
than 64 MiB are read from its file, not from memory); the first batch of 40 million documents takes less than a second of CPU and
adds some 50 MiB of memory of the process's own with `memory: 64MiB`, since readers never parse the `.idx`. Documents are of 1 to
15 tokens of 2 bytes; the `.bin` is a sparse file of zeros. Where Megatron-core is installed, its IndexedDataset reads as many
documents as ours reads blocks.

    python tools/bench/read/bin.py                    # needs 1 GB in the temporary folder
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import numpy as np


def write_pair(path: Path, documents: int) -> None:
    """A pair of so many documents, written in parts."""
    rng = np.random.default_rng(0)
    part = 1 << 20
    with path.with_suffix(".idx").open("wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, documents, documents + 1))
        lengths = rng.integers(1, 16, documents, dtype=np.uint8)
        for start in range(0, documents, part):
            file.write(lengths[start : start + part].astype("<i4").tobytes())
        total = 0
        for start in range(0, documents, part):
            sizes = 2 * lengths[start : start + part].astype("<i8")
            file.write((total + np.cumsum(sizes) - sizes).tobytes())
            total += int(sizes.sum())
        for start in range(0, documents + 1, part):
            file.write(np.arange(start, min(start + part, documents + 1), dtype="<i8").tobytes())
    with path.open("wb") as file:
        file.truncate(total)


def make(folder: Path, documents: int, block_bytes: int) -> Path:
    """A corpus with its index; the config's path."""
    import megablend

    write_pair(folder / "x.bin", documents)
    config = {
        "cache": str(folder / "cache"),
        "sequence_length": 2048,
        "samples": 10_000,
        "memory": "64MiB",
        "shuffle_window": 8,  # blocks of 16 bytes take 1 KiB each in memory
        "block_bytes": block_bytes,
        "sources": [{"name": "pairs", "path": str(folder / "x.bin")}],
    }
    path = folder / "bench.json"
    path.write_text(json.dumps(config))
    megablend.build(path)
    return path


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class Peak:
    """The most anonymous memory while the context lasts, looked at every few ms."""

    def __enter__(self) -> Peak:
        self.bytes = self.before = anonymous_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.bytes = max(self.bytes, anonymous_bytes())


def measure(config: Path, reads: int) -> dict[str, float]:
    """One round, in this process."""
    import megablend
    from megablend.index.blocks.block_store import BlockStore
    from megablend.index.read.snapshot import open_snapshot
    from megablend.index.tables.list_snapshots import list_snapshots
    from megablend.storage.by_scheme import make_storage

    _ = megablend.Loader  # imports torch
    start = time.perf_counter()
    cpu = time.process_time()
    with Peak() as peak:
        dataset = megablend.open(config)
        next(
            iter(
                megablend.Loader(
                    dataset, micro_batch_size=8, data_parallel_rank=0, data_parallel_size=1
                )
            )
        )
    found = {"first batch s": time.perf_counter() - start, "CPU s": time.process_time() - cpu}
    found["peak MiB"] = (peak.bytes - peak.before) / 2**20
    cache = json.loads(config.read_text())["cache"]
    store = BlockStore(open_snapshot(cache, list_snapshots(cache)[-1]), storage=make_storage())
    num_blocks = len(store.snapshot.tokens_before) - 1
    store.read([0])
    ids = np.random.default_rng(1).integers(0, num_blocks, reads)
    cpu = time.process_time()
    for i in range(0, reads, 100):
        store.read(ids[i : i + 100])
    found |= {"blocks": num_blocks, "us CPU a block": (time.process_time() - cpu) / reads * 1e6}
    return found | {"us CPU a document, Megatron-core": theirs(config.parent / "x", reads)}


def theirs(prefix: Path, reads: int) -> float:
    """Microseconds of CPU time that Megatron-core takes to read a document; not a number where it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dataset = importlib.import_module(
                "megatron.core.datasets.indexed_dataset"
            ).IndexedDataset(str(prefix))
    except ImportError:
        return float("nan")
    ids = np.random.default_rng(1).integers(0, len(dataset), reads).tolist()
    cpu = time.process_time()
    for i in ids:
        dataset.get(i)
    return (time.process_time() - cpu) / reads * 1e6


def main() -> None:
    """Print a row for each corpus."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--corpora",
        default="160000x16,160000x1024,10000000x16,40000000x65536",
        help="documents x block_bytes (default: %(default)s)",
    )
    parser.add_argument("--reads", type=int, default=20_000)
    parser.add_argument(
        "--rounds", type=int, default=3, help="fresh processes of which medians are taken"
    )
    parser.add_argument("--one", metavar="CONFIG", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(Path(args.one), args.reads)))
        return
    for documents, block_bytes in (
        tuple(map(int, each.split("x"))) for each in args.corpora.split(",")
    ):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            config = make(Path(folder), documents, block_bytes)
            made = time.perf_counter() - start
            command = [sys.executable, __file__, "--reads", str(args.reads), "--one", str(config)]
            rounds = [
                json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
                for _ in range(args.rounds)
            ]
        medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        figures = ", ".join(f"{name} {value:,.2f}" for name, value in medians.items())
        print(
            f"{documents:,} documents, block_bytes {block_bytes:,}: made and built in {made:.1f} s; {figures}",
            flush=True,
        )


if __name__ == "__main__":
    main()
