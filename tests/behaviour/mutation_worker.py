"""Damage files of a cache, and data files, and read the run: in a process of its own because a crash must not end the tests.

    python mutation_worker.py FOLDER SEED START STOP

Something else may also be in a file's place, such as a pipe, or the ledger of a run whose name leads elsewhere. The last line of
a whole campaign is a JSON object of counts. Ends with status 1 at the first mutation that does what it must not: raise anything
but megablend's errors, name another file than the damaged one, run out of memory, or give other tokens, or other samples to skip,
where a checksum covers them: all files of a cache, and Parquet pages with a CRC; or at a command that ends with status 70, or
prints control characters. In FOLDER, `current-START` names the mutation under way, for one that crashes; one that hangs is ended
by a signal. Two processes need a FOLDER each.
"""

from __future__ import annotations

import json
import logging
import random
import resource
import signal
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import megablend
from megablend.errors import MegablendError, ResourceError
from megablend.index.read import document_table as tables
from megablend.index.tables.file_versions import (
    NUM_RANGES,
    RANGE_BYTES,
    join_etags,
    numbers_of,
    seen_bytes,
)
from megablend.index.tables.manifest import SEEN
from megablend.prefetch.samples import read_samples
from megablend.run.ledger_file import parse_ledger
from megablend.run.ledger_format import dump_ledger, open_seal, seal_ledger
from megablend.system.failures import translating
from tests.behaviour.test_hostile_names import NAMES
from tests.behaviour.test_special_files import PUT
from tests.cli.commands import run as run_command
from tests.formats.writers import write_arrow, write_megatron
from tests.storages import STORAGE

EOD = 0
EXTREMES = (
    b"\0" * 8,
    b"\xff" * 8,
    b"\xff\xff\xff\x7f",
    b"\0\0\0\x80",
    b"\x80" * 9,
    b"../../x",
    b"\x1b[2J",
)
SPLITS = ("train", "valid")
DATA_FOLDERS = ("data", "large")
UNCHECKED = ("data .arrow", "data .bin")
"""Files whose tokens have no checksum but the sampled one."""
SAMPLES_AT_ONCE = 16
COMMAND_EVERY = 10
"""Mutations."""
SECONDS = 100
"""After which a read has hung."""
MEMORY_BYTES = 8 << 30
"""Of address space: no damaged number may ask for more."""


def make_documents(seed: int, size: int) -> list[list[int] | None]:
    rng = random.Random(seed)
    return [
        None
        if i % 13 == 3
        else [rng.randrange(1, 50_000) for _ in range(rng.choice([0, 1, size, 3 * size]))]
        for i in range(60)
    ]


def make_runs(folder: Path) -> list[dict[str, Any]]:
    """Two runs over small files of three formats, and one that reads all of a file larger than what is sampled of it; built."""
    (folder / "data").mkdir(parents=True)
    (folder / "large").mkdir()
    write_arrow(folder / "data" / "a.arrow", make_documents(1, 8))
    write_megatron(folder / "data" / "b.bin", make_documents(2, 8))
    for path, seed, size in (
        (folder / "data" / "c.parquet", 3, 8),
        (folder / "large" / "d.parquet", 4, 2000),
    ):
        table = pa.table({"ids": pa.array(make_documents(seed, size), pa.list_(pa.int32()))})
        options = {
            "data_page_size": 2000,
            "write_batch_size": 4,
            "row_group_size": 20,
            "write_page_checksum": True,
        }
        pq.write_table(table, path, use_dictionary=False, write_page_index=True, **options)
    assert (folder / "large" / "d.parquet").stat().st_size > 4 * NUM_RANGES * RANGE_BYTES
    shared = {
        "run": "demo",
        "lanes": 4,
        "shuffle_window": 4,
        "block_bytes": 256,
        "split": "80,20,0",
    }
    small = sources_of(folder / "data")
    large = sources_of(folder / "large")
    short: dict[str, Any] = {**shared, "sources": small, "sequence_length": 32, "samples": 60}
    runs = [
        {**short, "cache": str(folder / "cache-page"), "order": "page"},
        {**short, "cache": str(folder / "cache-row"), "order": "row"},
        {
            **shared,
            "sources": large,
            "sequence_length": 2048,
            "epochs": 1,
            "cache": str(folder / "cache-large"),
        },
    ]
    for number, run in enumerate(runs):
        megablend.build(run)
        megablend.skip(run, 8, 16, batch_size=4)
        (folder / f"run-{number}.json").write_text(json.dumps(run))
    return runs


def sources_of(folder: Path) -> list[dict[str, Any]]:
    return [
        {"name": path.stem, "path": str(path), "weight": 1, "append_eod": EOD}
        for path in sorted(folder.iterdir())
        if path.suffix != ".idx"
    ]


def targets_of(folder: Path, runs: list[dict[str, Any]]) -> list[tuple[int, Path]]:
    """Which run reads which file, as (number of the run, path): all that one can read."""
    data = [folder / "data", folder / "data", folder / "large"]
    return [
        (number, path)
        for number, run in enumerate(runs)
        for place in (Path(run["cache"]), data[number])
        for path in sorted(place.rglob("*"))
        # No run reads the lock, or what builds keep for the next one.
        if path.is_file()
        and path.stat().st_size
        and path.parent.name not in ("fragments", "lengths")
        and path.name != ".lock"
    ]


def read(run: dict[str, Any], split: str) -> list[list[int]]:
    """All samples of a split, from files opened anew, and which are skipped."""
    tables._open_once.cache_clear()
    dataset = megablend.open(run, split)
    found = [list(each) for each in dataset.skips.ranges]
    for first in range(0, len(dataset), SAMPLES_AT_ONCE):
        ks = range(first, min(first + SAMPLES_AT_ONCE, len(dataset)))
        with translating(f"samples {ks}"):
            samples = read_samples(dataset.run, dataset.block_cache, list(ks))
        found += np.concatenate([samples.tokens, samples.labels[:, -1:]], axis=1).tolist()
    return found


def record_as_seen(run: dict[str, Any]) -> None:
    """Write that the build saw the files as they are now: of damage that leaves sizes and times, only checksums can tell."""
    (folder,) = (Path(run["cache"]) / "generations").iterdir()
    numbers = []
    for source in run["sources"]:
        path = Path(source["path"])
        parts = (path, path.with_suffix(".idx")) if path.suffix == ".bin" else (path,)
        numbers.append(numbers_of(join_etags([STORAGE.stat(str(part)) for part in parts]))[0])
    (folder / SEEN).write_bytes(seen_bytes(folder.name, np.array(numbers, np.uint64)))


def mutate(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """What is done, and what comes of it."""
    at = rng.randrange(max(1, len(data)))
    way = rng.choice(["bit", "bit", "bit", "byte", "word", "zeros", "swap", "cut", "more"])
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
        first, second = sorted(
            (rng.randrange(len(data) - 2 * size + 1), rng.randrange(len(data) - 2 * size + 1))
        )
        second += size
        damaged[first : first + size] = data[second : second + size]
        damaged[second : second + size] = data[first : first + size]
    elif way == "cut":
        del damaged[at:]
    else:
        damaged += bytes(rng.randrange(1, 9))
    return f"{way} at {at}", bytes(damaged)


def replace(path: Path, rng: random.Random) -> str | None:
    """Put something else in place of a file, at times. Returns: what; None where it is left as it is."""
    if path.parent.name == "runs" and rng.random() < 0.2:
        text, skips = open_seal(path.read_text(encoding="utf-8"))
        name = rng.choice(NAMES)
        path.write_text(
            seal_ledger(dump_ledger(name, parse_ledger(json.loads(text)).stages), skips or 0),
            encoding="utf-8",
        )
        return f"run {name!r}"
    if rng.random() < 0.06:
        kind = rng.choice(list(PUT))
        path.unlink()
        PUT[kind](path)
        return kind
    return None


def restore(path: Path, data: bytes) -> None:
    """Put a file back."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        path.rmdir()
    path.write_bytes(data)


def check_command(config: str, cache: str, rng: random.Random) -> str | None:
    """What is wrong with how a command ends, drawn at random."""
    commands: list[list[str]] = [
        *([name, config] for name in ("describe", "check", "skip")),
        *(
            [*words.split(), cache]
            for words in ("describe", "verify", "verify --data", "runs list", "gc --dry-run")
        ),
        ["show", config, "-k", "3"],
        ["runs", "show", cache, "demo"],
    ]
    command = rng.choice(commands)
    done = run_command(*command)
    printed = done.stdout + done.stderr
    is_clean = all(letter.isprintable() or letter == "\n" for letter in printed)
    return (
        None
        if done.returncode in (0, 1, 2, 3) and is_clean
        else f"{command} ended with {done.returncode}: {printed!r}"
    )


def kind_of(path: Path) -> str:
    """What is counted: "cache", or "data" with the file's suffix."""
    return f"data {path.suffix}" if path.parent.name in DATA_FOLDERS else "cache"


def is_named(path: Path, message: str) -> bool:
    """Whether an error names a damaged file: its folder in a cache; of data the file, or the other one of its pair."""
    return str(path.parent if kind_of(path) == "cache" else path.with_suffix("")) in message


def outcome_of(
    run: dict[str, Any], split: str, expected: list[list[int]], path: Path, what: str
) -> str:
    """How the read of a run ends whose file at `path` is damaged: same, other, refused. Exits where that must not be."""
    problem = "other tokens, and no error"
    signal.alarm(SECONDS)
    try:
        same = read(run, split) == expected
        if same or kind_of(path) in UNCHECKED:
            return "same" if same else "other"
    except MegablendError as error:
        if is_named(path, str(error)) and not isinstance(error, ResourceError):
            return "refused"
        problem = f"names another file, or out of memory: {error!r}"
    except BaseException:
        problem = traceback.format_exc()
    finally:
        signal.alarm(0)
    return fail(what, problem)


def fail(what: str, problem: str) -> NoReturn:
    """End the campaign."""
    print(f"{what}\n{problem}")
    sys.exit(1)


def main() -> None:
    folder, seed, start, stop = Path(sys.argv[1]), *map(int, sys.argv[2:])
    logging.getLogger("megablend").setLevel(logging.ERROR)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    if not (folder / "runs.json").exists():
        (folder / "runs.json").write_text(json.dumps(make_runs(folder)))
    runs = json.loads((folder / "runs.json").read_text())
    expected = {
        (number, split): read(run, split) for number, run in enumerate(runs) for split in SPLITS
    }
    targets = targets_of(folder, runs)
    cached, data_files = (
        [each for each in targets if (kind_of(each[1]) == "cache") == want]
        for want in (True, False)
    )
    counts: Counter[str] = Counter()
    for i in range(start, stop):
        rng = random.Random(f"{seed}-{i}")
        pool = cached if i % 3 else data_files
        number, path = pool[i // 3 % len(pool)]
        kind = kind_of(path)
        split = SPLITS[rng.random() < 0.25]
        quiet = kind != "cache" and rng.random() < 0.7
        data = path.read_bytes()
        change = replace(path, rng)
        if change is None:
            change, damaged = mutate(data, rng)
            path.write_bytes(damaged)
            if quiet:
                record_as_seen(runs[number])
        what = f"{i}: {split} {path}: {change}{' as seen' if quiet else ''}"
        (folder / f"current-{start}").write_text(what)
        counts[
            f"{kind} {outcome_of(runs[number], split, expected[number, split], path, what)}"
        ] += 1
        if i % COMMAND_EVERY == 0:
            signal.alarm(SECONDS)
            problem = check_command(f"{folder}/run-{number}.json", runs[number]["cache"], rng)
            signal.alarm(0)
            if problem is not None:
                fail(what, problem)
        restore(path, data)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
