"""The CPU time of a Loader whose data are in a bucket, against clients that only fetch the same bytes, in turns.

Goals: with pages of 64 KiB at most 1.5 times bare obstore (256 ranges in flight), with pages of 4 MiB at most 1.5 times s3fs,
which reads them one after the other. Each reading is a process of its own; what importing and opening take is not counted. The
Loader from a local disk tells what everything but fetching takes.

    python tools/bench/objects/load_objects.py --s3fs PYTHON   # an interpreter that has s3fs
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from source import BUCKET, serving, set_keys

LENGTH = 4096
DOCUMENT = 1000

LOADER = """
import json, sys, time, megablend
config = json.loads(sys.argv[1])
megablend.build(config)
loader = megablend.Loader(megablend.open(config), micro_batch_size=8)
batches = iter(loader)
next(batches)
wall, cpu = time.perf_counter(), time.process_time()
for batch in batches: pass
print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]))
"""
OBSTORE = """
import asyncio, json, os, random, sys, time, obstore
from obstore.store import S3Store
given = json.loads(sys.argv[1])
store = S3Store(given["bucket"], endpoint=given["url"], client_options={"allow_http": True})
starts = list(range(0, given["size"] - given["part"] + 1, given["part"]))
random.Random(0).shuffle(starts)
async def read_all():
    slots = asyncio.Semaphore(256)
    async def read(start):
        async with slots:
            await obstore.get_range_async(store, given["key"], start=start, length=given["part"])
    await asyncio.gather(*map(read, starts))
wall, cpu = time.perf_counter(), time.process_time()
asyncio.run(read_all())
print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), flush=True)
os._exit(0)  # its threads may end an interpreter that is ending by an error
"""
S3FS = """
import json, random, sys, time, s3fs
given = json.loads(sys.argv[1])
fs = s3fs.S3FileSystem(endpoint_url=given["url"])
starts = list(range(0, given["size"] - given["part"] + 1, given["part"]))
random.Random(0).shuffle(starts)
file = fs.open(f"{given['bucket']}/{given['key']}", cache_type="none", size=given["size"])
wall, cpu = time.perf_counter(), time.process_time()
for start in starts:
    file.seek(start)
    assert len(file.read(given["part"])) == given["part"]
print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]))
"""


def write_parquet(path: Path, tokens: int, part: int) -> None:
    """A file of documents of one length, in pages of about `part` bytes."""
    values = np.random.default_rng(0).integers(
        0, 1 << 20, tokens // DOCUMENT * DOCUMENT, dtype=np.int32
    )
    offsets = np.arange(0, len(values) + 1, DOCUMENT, dtype=np.int32)
    table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, values)})
    options = {
        "data_page_size": part,
        "write_batch_size": 16,
        "row_group_size": 64_000,
        "write_page_index": True,
    }
    pq.write_table(table, path, use_dictionary=False, compression="none", **options)


def run(python: str, code: str, given: object) -> tuple[float, float]:
    """Wall and CPU seconds that a process prints."""
    done = subprocess.run(
        [python, "-c", code, json.dumps(given)], check=True, stdout=subprocess.PIPE, text=True
    )
    wall, cpu = json.loads(done.stdout.splitlines()[-1])
    return wall, cpu


def main() -> None:
    """Print medians and ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--latency", type=float, default=0.01)
    parser.add_argument("--tokens", type=int, default=256_000_000)
    parser.add_argument(
        "--part", type=int, nargs="+", default=[64 << 10, 4 << 20], help="bytes of a page"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--s3fs", metavar="PYTHON", help="an interpreter that has s3fs")
    options = parser.parse_args()
    set_keys()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "data")
        folder.mkdir()
        for part in options.part:
            write_parquet(folder / f"{part}.parquet", options.tokens, part)
        with serving(folder, latency=options.latency) as url:
            for part in options.part:
                compare(url, folder, part, options)


def compare(url: str, folder: Path, part: int, options: argparse.Namespace) -> None:
    """Read by all, one after the other."""
    key = f"00000-{part}.parquet"
    size = (folder / f"{part}.parquet").stat().st_size
    config = {
        "cache": f"{folder.parent}/cache-{part}",
        "sequence_length": LENGTH,
        "samples": size // 4 // LENGTH // 8 * 8 - 64,
        "storage": {"s3://": {"endpoint": url}},
    }
    source = {"name": "s", "column": "input_ids", "weight": 1}
    bucket = config | {"sources": [source | {"path": f"s3://{BUCKET}/{key}"}]}
    local = config | {
        "sources": [source | {"path": str(folder / f"{part}.parquet")}],
        "cache": f"{folder.parent}/local-{part}",
    }
    given = {"url": url, "bucket": BUCKET, "key": key, "size": size, "part": part}
    contenders = [
        ("Loader, bucket", sys.executable, LOADER, bucket),
        ("Loader, local", sys.executable, LOADER, local),
        ("bare obstore", sys.executable, OBSTORE, given),
    ]
    if options.s3fs and part >= 1 << 20:  # one after the other, small ones take minutes
        contenders.append(("s3fs", options.s3fs, S3FS, given))
    took: dict[str, list[tuple[float, float]]] = {name: [] for name, *_ in contenders}
    for number in range(options.rounds):
        for name, python, code, argument in contenders[:: 1 if number % 2 else -1]:
            took[name].append(run(python, code, argument))
    ours = [cpu for _, cpu in took["Loader, bucket"]]
    print(f"pages of {part >> 10:,} KiB, {options.latency * 1e3:g} ms:")
    for name, measured in took.items():
        wall, cpu = (statistics.median(each) / size * 1e9 for each in zip(*measured, strict=True))
        ratio = statistics.median(mine / cpu for mine, (_, cpu) in zip(ours, measured, strict=True))
        print(
            f"  {name:15} {wall:6.2f} s a GB, {cpu:6.2f} s of CPU; the Loader takes {ratio:.2f} of it"
        )


if __name__ == "__main__":
    main()
