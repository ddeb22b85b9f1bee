"""What a build of many small files takes, on one rank: new, again, and with one file more.

Claims: an unchanged build of 100,000 files opens none of them, nor a file of its own for each: it takes a small part of what the
first takes. The first is bound by parsing footers and page indexes: a few times what pyarrow takes to read the footers alone.
Files are of ten pages, and of --distinct contents. Wall time and CPU time; the page cache is warm.

    python tools/bench/read/builds.py                  # needs 1 GB in the temporary folder
    python tools/bench/read/builds.py --old PYTHON     # PYTHON of an environment with another release: ratios to it
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

PAGES = 10
STEPS = ("new", "again", "one file more")


def write_files(folder: Path, files: int, distinct: int) -> None:
    """Files in subfolders of a thousand, each written by itself."""
    rng = np.random.default_rng(0)
    contents = []
    for i in range(distinct):
        offsets = np.arange(PAGES + 1, dtype=np.int32) * (50 + i)
        table = pa.table(
            {
                "ids": pa.ListArray.from_arrays(
                    offsets, rng.integers(0, 50_000, offsets[-1], np.int32)
                )
            }
        )
        sink = pa.BufferOutputStream()
        options = {
            "use_dictionary": False,
            "write_page_index": True,
            "data_page_size": 1,
            "write_batch_size": 1,
        }
        pq.write_table(table, sink, **options)
        contents.append(sink.getvalue().to_pybytes())
    for i in range(files):
        path = folder / f"{i // 1000:04}" / f"{i:07}.parquet"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(contents[i % distinct])


def build(folder: Path, cache: Path) -> tuple[float, float]:
    """Seconds of wall and CPU time of a build in this process, imports and kernels left out."""
    from megablend.config.read_spec import ReadSpec
    from megablend.distributed.base import SingleProcess
    from megablend.index.build.build import SourceSpec, build_index
    from megablend.storage.by_scheme import make_storage

    def source(pattern: str) -> SourceSpec:
        return SourceSpec(name="many", patterns=(pattern,), read=ReadSpec())

    with tempfile.TemporaryDirectory() as warm:  # loads the kernels
        build_index(
            warm,
            [source(str(next(folder.rglob("*.parquet"))))],
            launch=SingleProcess(),
            storage=make_storage(),
        )
    cpu = time.process_time()
    wall = time.perf_counter()
    build_index(
        str(cache),
        [source(f"{folder}/**/*.parquet")],
        launch=SingleProcess(),
        storage=make_storage(),
    )
    return time.perf_counter() - wall, time.process_time() - cpu


def footers(folder: Path) -> tuple[float, float]:
    """The same of pyarrow reading all footers."""
    cpu = time.process_time()
    wall = time.perf_counter()
    for path in folder.rglob("*.parquet"):
        pq.read_metadata(path)
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--distinct", type=int, default=20, help="contents of files (default: 20)")
    parser.add_argument(
        "--old", metavar="PYTHON", help="interpreter that imports another release, to compare with"
    )
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "CACHE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(build(*map(Path, args.one))))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        write_files(folder / "data", args.files, args.distinct)
        pythons = {"ours": sys.executable} | ({"old": args.old} if args.old else {})
        wall, cpu = footers(folder / "data")
        print(
            f"{args.files:,} files: pyarrow, footers alone: {wall:.2f} s, CPU {cpu:.2f} s",
            flush=True,
        )
        for step in STEPS:
            if step == "one file more":
                first = folder / "data/0000/0000000.parquet"
                first.with_name("more.parquet").write_bytes(first.read_bytes())
            taken = {}
            for which, python in pythons.items():
                command = [python, __file__, "--one", str(folder / "data"), str(folder / which)]
                taken[which] = json.loads(
                    subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
                )
            ours = taken["ours"]
            line = f"{step:14} {ours[0]:8.2f} s, CPU {ours[1]:8.2f} s, {ours[1] / args.files * 1e6:6.0f} us CPU a file"
            if args.old:
                ratios = (theirs / mine for theirs, mine in zip(taken["old"], ours, strict=True))
                line += "; old / ours: wall {:.1f}, CPU {:.1f}".format(*ratios)
            print(line, flush=True)


if __name__ == "__main__":
    main()
