"""What it costs to decode single pages: random pages against two scans of the same file, in CPU time of one thread, warm.

Claims, for lists of 1.1k tokens: random 64 KB pages cost about what reading the file from front to back costs, and less than
pyarrow's scan. Each round measures the three after each other; medians of --rounds. `us/page` is of a random page, its read
included.

    python tools/bench/read/decode.py                  # pages of 8 KB, 64 KB and 1 MB; none, zstd, lz4, dictionary + zstd
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from documents import CODECS, make_documents, write_parquet

from megablend.config.read_spec import ReadSpec
from megablend.formats import format_of
from megablend.formats.base import BlockReader, FileIndex, OpenedFile
from megablend.formats.decoded import DecodedBlocks
from megablend.formats.fetch import read_blocks
from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage

PAGES = {"8 KB": 8 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20}
BATCH_BYTES = 4 << 20
"""Of pages asked for together."""


def open_file(path: Path, storage: Storage) -> tuple[FileIndex, BlockReader]:
    """Our index of a file, and a reader of it."""
    kind = format_of(str(path), storage=storage)
    found = kind.index(str(path), ReadSpec(column="tokens"), storage=storage)
    size = storage.stat(str(path)).size
    file = OpenedFile(
        size=size, token_dtype=found.token_dtype, structure=found.structure, meta=found.meta
    )
    return found, kind.open(str(path), "tokens", file, storage=storage)


def cpu_seconds(function: Callable[[], int]) -> tuple[float, int]:
    """CPU seconds of this process, and what the function counted."""
    start = time.process_time()
    count = function()
    return time.process_time() - start, count


def measure(path: Path, rounds: int) -> list[str]:
    """A row of the table."""
    storage = make_storage()
    found, reader = open_file(path, storage)
    order = np.random.default_rng(1).permutation(len(found.blocks))

    def decoded(ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> DecodedBlocks:
        return read_blocks(reader, found.blocks[ids], found.chunks, storage, pieces=False)

    def read(ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
        batch = max(1, int(BATCH_BYTES * len(found.blocks) / 4 / found.tokens))
        parts = np.split(ids, range(batch, len(ids), batch))
        return sum(int(decoded(part).sizes.sum()) for part in parts)

    def scan() -> int:
        with pq.ParquetFile(path) as file:
            return sum(
                len(b.column(0).values)
                for b in file.iter_batches(batch_size=1024, use_threads=False)
            )

    rates: dict[str, list[float]] = {"random": [], "ours": [], "pyarrow": []}
    for round_ in range(rounds + 1):
        for name, work in {
            "random": lambda: read(order),
            "ours": lambda: read(np.arange(len(order))),
            "pyarrow": scan,
        }.items():
            seconds, tokens = cpu_seconds(work)
            if round_:  # the first one warms up
                rates[name].append(tokens / seconds)
    random, ours, theirs = (statistics.median(rates[name]) for name in rates)
    return [
        f"{found.tokens / len(order) / 1e3:.1f} k",
        f"{found.tokens / len(order) / random * 1e6:.0f}",
        *(f"{rate / 1e6:.0f}" for rate in (random, ours, theirs)),
        f"{random / ours:.2f}",
        f"{random / theirs:.2f}",
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=32, help="MiB of tokens a file (default: 32)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds of which medians are taken (default: 5)"
    )
    parser.add_argument("--pages", nargs="+", choices=PAGES, default=list(PAGES))
    parser.add_argument("--kinds", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument(
        "--crc", action="store_true", help="write, and therefore check, checksums of pages"
    )
    args = parser.parse_args()
    pa.set_cpu_count(1)
    print("Millions of tokens per CPU-second")
    print(
        f"{'pages':22}{'tokens':>9}{'us/page':>9}{'random':>9}{'scan':>9}{'pyarrow':>9}{'/scan':>8}{'/pyarrow':>9}"
    )
    documents = make_documents(args.mib << 18, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        for page in args.pages:
            for kind in args.kinds:
                path = Path(folder) / "x.parquet"
                write_parquet(path, *documents, page_bytes=PAGES[page], codec=kind, crc=args.crc)
                cells = measure(path, args.rounds)
                print(
                    f"{page + ' ' + kind:22}"
                    + "".join(f"{c:>{w}}" for c, w in zip(cells, [9] * 5 + [8, 9], strict=True))
                )


if __name__ == "__main__":
    main()
