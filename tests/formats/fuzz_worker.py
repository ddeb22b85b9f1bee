"""Read mutated files, in a process of its own because a crash must not end the tests.

    python fuzz_worker.py FOLDER SEED START STOP

Prints each mutation before it is tried, so that the last line names the one that crashed or hangs. Ends with status 1 at the
first that does what it must not: raise anything but megablend's errors, or pass unnoticed where it must be noticed.
"""

from __future__ import annotations

import contextlib
import random
import resource
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megablend.errors import DataError, MegablendError
from megablend.formats import format_of
from megablend.formats.base import FileIndex
from megablend.formats.fetch import read_blocks
from megablend.formats.parquet.metadata.page_header import parse_page_header
from tests.formats.guarded import guard
from tests.formats.writers import (
    index,
    opened,
    write_arrow,
    write_arrow_stream,
    write_megatron,
    write_raw,
)
from tests.pyarrow_versions import INSTALLED
from tests.storages import STORAGE

RNG = random.Random(5)
DOCUMENTS = [
    None if i % 13 == 3 else [RNG.randrange(1, 50_000) for _ in range(RNG.choice([0, 1, 4, 30]))]
    for i in range(60)
]
INT32 = pa.int32()
MEMORY_BYTES = 12 << 30
EXTREMES = (
    b"\0" * 8,
    b"\xff" * 8,
    b"\xff\xff\xff\x7f",
    b"\0\0\0\x80",
    b"\xff" * 7 + b"\x7f",
    b"\0" * 7 + b"\x40",
    b"\x80" * 9,
)

Range = tuple[int, int]


def write_parquet(path: Path, dtype: pa.DataType = INT32, **options: Any) -> None:
    table = pa.table({"ids": pa.array(DOCUMENTS, pa.list_(dtype))})
    pq.write_table(
        table, path, data_page_size=150, write_batch_size=8, row_group_size=40, **options
    )


@dataclass(frozen=True, slots=True)
class Base:
    """A sound file to start from."""

    name: str
    """The file that is mutated, and, of a pair, the one beside it."""
    column: str | None
    write: Callable[[Path], None]
    watched: Callable[[FileIndex, bytes], list[Range]]
    """The bytes whose every change after indexing must be noticed, given the index and the file."""


def nothing(found: FileIndex, data: bytes) -> list[Range]:
    return []


def everything(found: FileIndex, data: bytes) -> list[Range]:
    return [(0, len(data))]


def footer(found: FileIndex, data: bytes, *, tail: int) -> list[Range]:
    """From the footer to the end; its length lies `tail` bytes before the end."""
    length = int.from_bytes(data[-tail:][:4], "little")
    return [(len(data) - tail - length, len(data))]


def start(found: FileIndex, data: bytes, *, name: str) -> list[Range]:
    """As many bytes at the start of the file as the index says by `name`."""
    return [(0, int(found.meta[name]))]


def footer_and_bodies(found: FileIndex, data: bytes) -> list[Range]:
    """Of a Parquet file with page checksums."""
    places = [(int(b["offset"]), int(b["offset"] + b["stored_bytes"])) for b in found.blocks]
    places += [
        (int(c["dictionary_offset"]), int(c["dictionary_offset"] + c["dictionary_bytes"]))
        for c in found.chunks
        if c["dictionary_offset"] >= 0
    ]
    bodies = [
        (start + int(parse_page_header(data[start:stop])["header_bytes"]), stop)
        for start, stop in places
    ]
    return bodies + footer(found, data, tail=8)


PLAIN: dict[str, Any] = {"use_dictionary": False, "write_page_index": True}
DELTA: dict[str, Any] = {
    "use_dictionary": False,
    "column_encoding": {"ids.list.element": "DELTA_BINARY_PACKED"},
}
SPLIT: dict[str, Any] = {
    "use_dictionary": False,
    "column_encoding": {"ids.list.element": "BYTE_STREAM_SPLIT"},
}
V2_LZ4: dict[str, Any] = {"data_page_version": "2.0", "compression": "lz4"}
BASES = [
    Base(
        "v1.parquet",
        "ids",
        partial(write_parquet, **PLAIN, compression="none"),
        partial(footer, tail=8),
    ),
    Base(
        "crc.parquet",
        "ids",
        partial(write_parquet, **PLAIN, write_page_checksum=True),
        footer_and_bodies,
    ),
    Base("plain.arrow", "ids", partial(write_arrow, documents=DOCUMENTS), partial(footer, tail=10)),
    Base("x.idx", None, partial(write_megatron, documents=DOCUMENTS), everything),
    Base(
        "v2.parquet",
        "ids",
        partial(write_parquet, data_page_version="2.0", compression="zstd"),
        partial(footer, tail=8),
    ),
    Base(
        "words.parquet", "ids", partial(write_parquet, write_page_checksum=True), footer_and_bodies
    ),
    Base(
        "lz4.arrow",
        "ids",
        partial(write_arrow, documents=DOCUMENTS, codec="lz4"),
        partial(footer, tail=10),
    ),
    Base("y.bin", None, partial(write_megatron, documents=DOCUMENTS), nothing),
    Base(
        "delta.parquet",
        "ids",
        partial(write_parquet, **DELTA, compression="lz4"),
        partial(footer, tail=8),
    ),
    Base(
        "narrow.parquet",
        "ids",
        partial(write_parquet, dtype=pa.uint16(), compression="zstd"),
        partial(footer, tail=8),
    ),
    Base(
        "zstd.arrow",
        "ids",
        partial(write_arrow, documents=DOCUMENTS, codec="zstd"),
        partial(footer, tail=10),
    ),
    Base(
        "stream.arrow",
        "ids",
        partial(write_arrow_stream, documents=DOCUMENTS),
        partial(start, name="schema_bytes"),
    ),
    Base(
        "raw.npy",
        None,
        partial(write_raw, documents=DOCUMENTS),
        partial(start, name="header_bytes"),
    ),
]
if INSTALLED >= 16:  # before, pyarrow splits floats only
    split = partial(write_parquet, dtype=pa.int64(), **SPLIT, **V2_LZ4)
    BASES.insert(9, Base("split.parquet", "ids", split, partial(footer, tail=8)))


def mutate(data: bytes, rng: random.Random, target: Range) -> bytes:
    """One change that begins within `target`; never none at all."""
    place = rng.randrange(*target)
    size = rng.choice([1, 2, 4, 8, 16, 64])
    head = data[:place]
    tail = data[place:]
    changed = rng.choice(
        [
            head + bytes([tail[0] ^ (1 << rng.randrange(8))]) + tail[1:],
            head + rng.randbytes(1) + tail[1:],
            head + rng.randbytes(size) + tail[size:],
            (head + (extreme := rng.choice(EXTREMES)) + tail[len(extreme) :])[: len(data)],
            head + rng.randbytes(size) + tail,
            head + tail[size:],
            head,
            head + bytes(size) + tail[size:],
            head + data[(other := rng.randrange(len(data))) : other + size] + tail[size:],
        ]
    )
    return changed if changed != data else head + bytes([tail[0] ^ 1]) + tail[1:]


def read_all(path: Path, column: str | None, found: FileIndex, size: int | None = None) -> None:
    read = read_blocks(opened(path, column, found, size), found.blocks, found.chunks, STORAGE)
    for block, tokens in zip(read, found.blocks["tokens"].tolist(), strict=True):
        assert len(block.tokens) == tokens == block.offsets[-1]
        block.tokens.max(initial=0)  # all of them lie in memory that is there


def targets(base: Base, found: FileIndex, data: bytes) -> list[Range]:
    """Where mutations begin: anywhere, at the start, at the end, in what is watched."""
    return [(0, len(data)), (0, 60), (len(data) * 3 // 4, len(data)), *base.watched(found, data)]


@cache
def write_sound(base: Base, path: Path) -> tuple[bytes, FileIndex, int]:
    """Write the sound file. Returns: it, its index, and its size, or that of the file beside it."""
    base.write(path)
    size = Path(format_of(str(path), STORAGE).files(str(path))[0]).stat().st_size
    return path.read_bytes(), index(path, base.column), size


def attempt(base: Base, path: Path, rng: random.Random) -> None:
    """Mutate before indexing, and between indexing and reading."""
    whole, found, size = write_sound(base, path)
    watched = base.watched(found, whole)
    target = rng.choice(targets(base, found, whole))
    path.write_bytes(mutate(whole, rng, target))
    with contextlib.suppress(MegablendError):
        read_all(path, base.column, index(path, base.column))
    changed = mutate(whole, rng, target)
    path.write_bytes(changed)
    must_fail = len(changed) != len(whole) or any(changed[a:b] != whole[a:b] for a, b in watched)
    try:
        read_all(path, base.column, found, size)
    except DataError:
        return
    if must_fail:
        raise AssertionError("a change after indexing passed unnoticed")


def main() -> None:
    folder, seed, start, stop = Path(sys.argv[1]), *map(int, sys.argv[2:])
    guard()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for number in range(start, stop):
        base = BASES[number % len(BASES)]
        print(f"mutation {number} of seed {seed}: {base.name}", flush=True)
        try:
            attempt(base, folder / base.name, random.Random(f"{seed} {number}"))
        except BaseException:
            traceback.print_exc()
            sys.exit(1)
    print("all mutations met", flush=True)


if __name__ == "__main__":
    main()
