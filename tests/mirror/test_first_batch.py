"""How soon a run through an empty mirror begins, what has left its source by then, and that it waits for nothing later."""

from __future__ import annotations

import statistics
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megablend
from tests.formats.writers import IDX_CODES
from tests.mirror.nodes import get_status, mirror
from tests.runs import make_config
from tests.storage.faulty import Faults, FaultySource

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("obstore")]
LENGTH = 2048
BATCH = 4
FILES = 4
LATENCY = 0.03
RATE = 12.5e6
"""Bytes a second of the source: 100 Mbit/s."""


def write_run(folder: Path, source: FaultySource, megabytes: int) -> dict[str, Any]:
    """A run of one epoch over files of a source, which is built."""
    count = megabytes * 1_000_000 // 4 // LENGTH // FILES
    lengths = np.full(count, LENGTH, "<i4")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, IDX_CODES["int32"], count, count + 1)
    offsets = 4 * LENGTH * np.arange(count, dtype="<i8")
    documents = np.arange(count + 1, dtype="<i8")
    index = head + lengths.tobytes() + offsets.tobytes() + documents.tobytes()
    for number in range(FILES):
        # Zeros, which take no memory
        source.files[f"d/{number}.bin"] = bytes(4 * LENGTH * count)
        source.files[f"d/{number}.idx"] = index
    paths = [f"{source.url}/d/{number}.bin" for number in range(FILES)]
    config = make_config(
        folder,
        [{"name": "s", "path": paths}],
        sequence_length=LENGTH,
        block_bytes=64 << 10,
        lanes=8,
        shuffle_window=4,
        epochs=1,
        memory="64MiB",
    )
    megablend.build(config)
    return config


def begin(config: dict[str, Any]) -> float:
    """Seconds until there is a first batch."""
    started = time.perf_counter()
    loader = megablend.Loader(megablend.open(config), micro_batch_size=BATCH)
    next(iter(loader))
    seconds = time.perf_counter() - started
    loader.close()
    return seconds


def test_a_run_begins_almost_as_soon_as_without_a_mirror(tmp_path: Path) -> None:
    with FaultySource({}) as source:
        config = write_run(tmp_path, source, 1000)
        size = sum(map(len, source.files.values()))
        source.faults = Faults(latency=LATENCY, rate=RATE)
        begin(config)
        plain = [begin(config) for _ in range(5)]
        warm: list[float] = []
        cold: list[float] = []
        shares = []
        for turn in range(10):
            folder = tmp_path / f"mirror{turn}"
            with mirror(folder, source.url) as settings:
                if turn % 2:
                    get_status(settings)  # starts the node process
                before = source.bytes
                (warm if turn % 2 else cold).append(
                    begin(config | {"storage": {"mirror": settings}})
                )
                shares.append((source.bytes - before) / size)
        for name, times in (
            ("no mirror", plain),
            ("node process runs", warm),
            ("it does not", cold),
        ):
            print(
                f"{name}: {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f})"
            )
        print(f"shares of the run's bytes: {[f'{share:.4f}' for share in shares]}")
        assert statistics.median(shares) <= 0.01
        assert statistics.median(warm) <= 1.5 * statistics.median(plain)
        assert statistics.median(cold) <= statistics.median(plain) + 3.0


def test_nothing_is_waited_for_if_the_source_is_a_half_faster_than_the_run(tmp_path: Path) -> None:
    """But for half a second in which the first windows are filled, without a mirror too."""
    with FaultySource({}) as source, mirror(tmp_path / "mirror", source.url) as settings:
        config = write_run(tmp_path, source, 60) | {"storage": {"mirror": settings}}
        size = sum(map(len, source.files.values()))
        rate = RATE / 5
        source.faults = Faults(latency=LATENCY, rate=rate)
        loader = megablend.Loader(megablend.open(config), micro_batch_size=BATCH)
        batches = iter(loader)
        next(batches)
        waits = []
        began = time.perf_counter()
        for step in range(1, len(loader)):
            due = began + step * 1.5 * size / len(loader) / rate
            time.sleep(max(0.0, due - time.perf_counter()))
            asked = time.perf_counter()
            next(batches)
            waits.append(time.perf_counter() - asked)
        print(f"{len(waits)} steps waited {sum(waits):.2f} s, the longest {sorted(waits)[-3:]}")
        assert sum(waits[:100]) < 1.5
        assert max(waits[100:]) < 0.3
