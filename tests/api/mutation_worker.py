"""Damage files of a cache, and data files, and read the run: in a process of its own because a crash must not end the tests.

    python mutation_worker.py FOLDER SEED START STOP

Prints each mutation before it is tried, so that the last line names the one that crashed or hangs; the last line of a whole
campaign is a JSON object of counts. Ends with status 1 at the first that does what it must not: raise anything but megablend's
errors, or give other tokens where a checksum stands for them: all files of a cache, and Parquet pages with a CRC.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import megablend
from megablend.errors import MegablendError
from megablend.index import document_table as tables
from tests.formats.writers import write_arrow, write_megatron

EOD, EXTREMES = 0, (b"\0" * 8, b"\xff" * 8, b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\x80" * 9)
UNCHECKED = (".arrow", ".bin")
"""Data files whose tokens have no checksum but the sampled one."""


def make_documents(seed: int, size: int) -> list[list[int] | None]:
    rng = random.Random(seed)
    return [
        None if i % 13 == 3 else [rng.randrange(1, 50_000) for _ in range(rng.choice([0, 1, size, 3 * size]))]
        for i in range(60)
    ]


def make_runs(folder: Path) -> list[dict[str, Any]]:
    """Two runs over three formats, small files and one that is larger than what is sampled of it; built."""
    data = folder / "data"
    data.mkdir(parents=True)
    write_arrow(data / "a.arrow", make_documents(1, 8))
    write_megatron(data / "b.bin", make_documents(2, 8))
    for name, seed, size in (("c", 3, 8), ("d", 4, 500)):
        table = pa.table({"ids": pa.array(make_documents(seed, size), pa.list_(pa.int32()))})
        options = {"data_page_size": 2000, "write_batch_size": 4, "row_group_size": 20, "write_page_checksum": True}
        pq.write_table(table, data / f"{name}.parquet", use_dictionary=False, write_page_index=True, **options)
    sources = [
        {"name": path.stem, "path": str(path), "weight": 1, "append_eod": EOD}
        for path in sorted(data.iterdir())
        if path.suffix != ".idx"
    ]
    shared = {"sequence_length": 32, "lanes": 4, "cycle": 4, "samples": 60, "sources": sources, "split": "80,20,0"}
    runs = [
        {**shared, "cache": str(folder / f"cache-{order}"), "order": order, "block_bytes": 256}
        for order in ("page", "row")
    ]
    for run in runs:
        megablend.build(run)
    return runs


def read(run: dict[str, Any]) -> list[list[int]]:
    """All samples of train and validation, from files opened anew."""
    tables._opened.cache_clear()
    found = []
    for split in ("train", "valid"):
        dataset = megablend.open(run, split)
        found += [dataset[k]["tokens"].tolist() for k in range(len(dataset))]
    return found


def mutate(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """What is done, and what comes of it."""
    at, way = (
        rng.randrange(max(1, len(data))),
        rng.choice(["bit", "bit", "bit", "byte", "word", "zeros", "swap", "cut", "more"]),
    )
    damaged = bytearray(data)
    if way == "bit":
        damaged[at] ^= 1 << rng.randrange(8)
    elif way == "byte":
        damaged[at] = rng.randrange(256)
    elif way == "word":
        word = rng.choice(EXTREMES)
        damaged[at : at + len(word)] = word[: len(data) - at]
    elif way == "zeros":
        damaged[at : at + 64] = bytes(len(damaged[at : at + 64]))
    elif way == "swap":
        size = min(rng.choice([4, 8, 64]), len(data) // 2)
        first, second = sorted((rng.randrange(len(data) - 2 * size + 1), rng.randrange(len(data) - 2 * size + 1)))
        second += size
        damaged[first : first + size], damaged[second : second + size] = (
            data[second : second + size],
            data[first : first + size],
        )
    elif way == "cut":
        del damaged[at:]
    else:
        damaged += bytes(rng.randrange(1, 9))
    return f"{way} at {at}", bytes(damaged)


def main() -> None:
    folder, seed, start, stop = Path(sys.argv[1]), *map(int, sys.argv[2:])
    logging.getLogger("megablend").setLevel(logging.ERROR)
    if not (folder / "runs.json").exists():
        (folder / "runs.json").write_text(json.dumps(make_runs(folder)))
    runs = json.loads((folder / "runs.json").read_text())
    expected = [read(run) for run in runs]
    targets = [
        (number, path)
        for number, run in enumerate(runs)
        for place in (Path(run["cache"]), folder / "data")
        for path in sorted(place.rglob("*"))
        # No run reads the lock, or what builds keep for the next one.
        if path.is_file()
        and path.stat().st_size
        and path.parent.name not in ("fragments", "lengths")
        and path.name != ".lock"
    ]
    counts: Counter[str] = Counter()
    for i in range(start, stop):
        rng = random.Random(f"{seed}-{i}")
        number, path = targets[i % len(targets)]
        data = path.read_bytes()
        told, damaged = mutate(data, rng)
        what = f"{i}: {path}: {told}"
        print(what, flush=True)
        path.write_bytes(damaged)
        try:
            found = read(runs[number])
            outcome = "same" if found == expected[number] else "other"
            if outcome == "other" and path.suffix not in UNCHECKED:
                raise AssertionError("other tokens, and no error")
        except MegablendError as error:
            outcome = "refused"
            if not str(error):
                raise
        except BaseException:
            traceback.print_exc(file=sys.stdout)
            sys.exit(1)
        finally:
            path.write_bytes(data)
        counts[f"{'data' if path.parent.name == 'data' else 'cache'} {outcome}"] += 1
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
