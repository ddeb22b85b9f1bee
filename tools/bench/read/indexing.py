"""How fast the pages of Parquet files are found and counted, on one core, warm. Whole builds: see builds.py.

Claims: by OffsetIndex and ColumnIndex, about 10 M pages/s are found and counted, all that is around it included; a walk from
header to header passes over 300 k pages/s; whole files of thousands of columns, or of row groups, cost at most a few times what
pyarrow takes to read their footers alone. CPU time of this process, so that threads count; medians of --rounds.

    python tools/bench/read/indexing.py
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

from megablend.config.read_spec import ReadSpec
from megablend.formats import format_of
from megablend.formats.base import FileIndex
from megablend.formats.parquet.indexing.by_page_index import read_page_indexes
from megablend.formats.parquet.indexing.chunk_pages import PageScanContext
from megablend.formats.parquet.metadata.column_chunk import column_chunks
from megablend.formats.parquet.metadata.footer import read_footer
from megablend.formats.parquet.metadata.schema import find_column
from megablend.formats.parquet.metadata.source import FileBytes
from megablend.storage.by_scheme import make_storage


def write_pages(path: Path, pages: int, tokens: int, **options: object) -> None:
    """A file of `pages` pages, each of one row of `tokens` tokens."""
    offsets = np.arange(pages + 1, dtype=np.int32) * tokens
    values = np.random.default_rng(0).integers(0, 50_000, offsets[-1], dtype=np.int32)
    table = pa.table({"ids": pa.ListArray.from_arrays(offsets, values)})
    pq.write_table(
        table,
        path,
        use_dictionary=False,
        data_page_size=1,
        write_batch_size=1,
        row_group_size=pages,
        **options,
    )


def write_columns(path: Path, columns: int, groups: int, *, page_index: bool) -> None:
    """A file whose footer has columns * groups chunks."""
    ids = pa.array([[1, 2, 3]] * groups, pa.list_(pa.int32()))
    others = {f"c{i}": pa.array(np.zeros(groups)) for i in range(columns - 1)}
    pq.write_table(
        pa.table({"ids": ids, **others}), path, row_group_size=1, write_page_index=page_index
    )


def index(path: Path, *, documents: bool) -> FileIndex:
    """As `build` does it."""
    read = ReadSpec(column="ids", count_documents=documents)
    return format_of(str(path), storage=make_storage()).index(
        str(path), read, storage=make_storage()
    )


def parse_page_index(path: Path) -> Callable[[], int]:
    """Reads and parses OffsetIndex and ColumnIndex."""
    storage = make_storage()
    source = FileBytes(str(path), storage, storage.stat(str(path)).size)
    footer = read_footer(source)
    column, num_leaves = find_column(footer.schema, "ids", str(path))
    chunks = column_chunks(footer, column, num_leaves)
    search = PageScanContext(
        source=source, column=column, limit=footer.offset, documents=True, in_flight=1
    )

    def parse() -> int:
        places, _ = read_page_indexes(search, chunks)
        return len(places.offsets)

    return parse


def rate(work: Callable[[], int], rounds: int) -> float:
    """What `work` counts per CPU-second: the median."""
    work()
    rates = []
    for _ in range(rounds):
        start = time.process_time()
        count = work()
        rates.append(count / (time.process_time() - start))
    return statistics.median(rates)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=int, default=50_000, help="pages a file (default: 50000)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds of which medians are taken (default: 5)"
    )
    parser.add_argument(
        "--footers",
        default="1x1,10x10,1000x10,5000x10,2x10000",
        help="columns x row groups of files whose footers are read (default: %(default)s)",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.parquet"
        print(f"{'pages found and counted by':40}{'k pages/s':>12}{'MB/s':>8}")

        def row(name: str, work: Callable[[], int]) -> None:
            found = rate(work, args.rounds)
            print(
                f"{name:40}{found / 1e3:12,.0f}{found * path.stat().st_size / args.pages / 1e6:8,.0f}"
            )

        write_pages(path, args.pages, 20, write_page_index=True)
        row("OffsetIndex + ColumnIndex, read and parsed", parse_page_index(path))
        row("OffsetIndex + ColumnIndex", lambda: len(index(path, documents=True).blocks))
        for tokens in (20, 2000):
            write_pages(path, args.pages, tokens, compression="none")
            row(
                f"headers, pages of {tokens} tokens",
                lambda: len(index(path, documents=False).blocks),
            )
            for codec in ("none", "zstd"):
                write_pages(path, args.pages, tokens, compression=codec)
                row(
                    f"V1 levels, {codec}, pages of {tokens} tokens",
                    lambda: len(index(path, documents=True).blocks),
                )

        print(
            f"\n{'whole files: columns x row groups':40}{'ms, headers':>12}{'page indices':>14}{'pyarrow, footer alone':>23}"
        )
        for columns, groups in (
            tuple(map(int, each.split("x"))) for each in args.footers.split(",")
        ):
            rates = []
            for page_index in (False, True):
                write_columns(path, columns, groups, page_index=page_index)
                rates.append(rate(lambda: bool(index(path, documents=True)), args.rounds))
            rates.append(rate(lambda: bool(pq.read_metadata(path)), args.rounds))
            headers, indices, theirs = (1e3 / each for each in rates)
            print(f"{f'{columns} x {groups}':40}{headers:12.2f}{indices:14.2f}{theirs:23.2f}")


if __name__ == "__main__":
    main()
