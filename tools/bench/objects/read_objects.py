"""How fast ranges of an object are read with latency, against bare obstore with 256 requests in flight; and the first batch.

Goals: at least 0.8 of bare obstore at 30 ms of latency, interleaved in one process; the first batch of 100 sources
under 5 s after `open`. Medians of --rounds. The source is a Python server on the same CPUs.

    python tools/bench/objects/read_objects.py
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import obstore
from index_objects import write_parquet
from source import BUCKET, serving, serving_ceph, set_keys

import megablend.reader  # torch, whose import is not measured
from megablend.config import load_config
from megablend.storage.by_scheme import make_storage
from megablend.storage.objects.address import parse_location
from megablend.storage.objects.clients import get_client
from megablend.storage.store_options import find_options, parse_options

IN_FLIGHT = 256


class Seconds(NamedTuple):
    """What reading took."""

    wall: float
    cpu: float
    """Of all threads of this process."""


def read_ours(url: str, path: str, offsets: np.ndarray, size: int) -> Seconds:
    """Read by `read_ranges`, into memory that is used again, as a loader's is."""
    storage = make_storage(objects=parse_options({"s3://": {"endpoint": url}}))
    storage.stat(path)
    memory = np.ones(len(offsets) * size, np.uint8)
    sizes = np.full(len(offsets), size)
    return measure(lambda: storage.read_ranges(path, offsets, sizes, lambda total: memory[:total]))


def read_bare(url: str, path: str, offsets: np.ndarray, size: int) -> Seconds:
    """Read the same by obstore, with a semaphore."""
    address = parse_location(path)
    store = get_client(
        address, find_options(parse_options({"s3://": {"endpoint": url}}), path), ""
    ).store

    async def read_all() -> None:
        slots = asyncio.Semaphore(IN_FLIGHT)

        async def read(offset: int) -> None:
            async with slots:
                result = await obstore.get_async(
                    store, address.key, options={"range": (offset, offset + size)}
                )
                await result.bytes_async()

        await asyncio.gather(*map(read, offsets.tolist()))

    return measure(lambda: asyncio.run(read_all()))


def measure(read: Callable[[], object]) -> Seconds:
    """Wall and CPU time of a call."""
    wall = time.perf_counter()
    cpu = time.process_time()
    read()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def read_first(url: str, scratch: str, num_sources: int) -> tuple[float, float]:
    """Seconds that `open` takes, and the first batch of a blend after it."""
    sources = [
        {
            "name": f"s{i}",
            "path": f"s3://{BUCKET}/{i:05d}-*.parquet",
            "column": "input_ids",
            "weight": 1,
        }
        for i in range(num_sources)
    ]
    config = load_config(
        {
            "cache": f"{scratch}/cache",
            "sequence_length": 1024,
            "samples": 10_000,
            "memory": "2GiB",
            "sources": sources,
            "storage": {"s3://": {"endpoint": url}},
        }
    )
    megablend.build(config)
    begin = time.perf_counter()
    dataset = megablend.open(config)
    opened = time.perf_counter()
    next(iter(megablend.Loader(dataset, micro_batch_size=8)))
    return opened - begin, time.perf_counter() - opened


def main() -> None:
    """Print medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--latency", type=float, default=0.03)
    parser.add_argument("--size", type=int, default=16 << 10, help="bytes of a range")
    parser.add_argument("--ranges", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sources", type=int, default=100)
    parser.add_argument(
        "--ceph", action="store_true", help="from Ceph, without latency; no first batch"
    )
    options = parser.parse_args()
    set_keys()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "data")
        folder.mkdir()
        write_parquet(folder / "x.parquet", 2_000_000, page_index=True)
        path = f"s3://{BUCKET}/00000-x.parquet"
        size = (folder / "x.parquet").stat().st_size
        offsets = np.random.default_rng(0).integers(0, size - options.size, options.ranges)
        if options.ceph:
            with serving_ceph(folder) as url:
                compare_rates(url, path, offsets, options)
            return
        with serving(folder, latency=options.latency, names=options.sources) as url:
            compare_rates(url, path, offsets, options)
            opened, first = read_first(url, scratch, options.sources)
            print(f"{options.sources} sources: open {opened:.2f} s, first batch {first:.2f} s")


def compare_rates(url: str, path: str, offsets: np.ndarray, options: argparse.Namespace) -> None:
    """Read by both, one after the other; print medians."""
    took: dict[str, list[Seconds]] = {"megablend": [], "bare obstore": []}
    both = [("megablend", read_ours), ("bare obstore", read_bare)]
    for number in range(options.rounds):
        for name, read in both[:: 1 if number % 2 else -1]:
            took[name].append(read(url, path, offsets, options.size))
    for name, measured in took.items():
        rate = options.ranges / statistics.median(each.wall for each in measured)
        print(f"{name}: {rate:,.0f} ranges/s of {options.size:,} bytes")
    pairs = list(zip(*took.values(), strict=True))
    for kind, ratios in (
        ("speed", [b.wall / a.wall for a, b in pairs]),
        ("CPU", [a.cpu / b.cpu for a, b in pairs]),
    ):
        low = min(ratios)
        high = max(ratios)
        print(
            f"{kind}, megablend / bare obstore: median {statistics.median(ratios):.2f}, {low:.2f} to {high:.2f}"
        )


if __name__ == "__main__":
    main()
