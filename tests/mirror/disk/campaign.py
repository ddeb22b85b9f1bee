"""Processes of the campaign in test_punches: an owner that writes and evicts all the time, and readers.

python -m tests.mirror.disk.campaign own FOLDER SEED
python -m tests.mirror.disk.campaign read FOLDER SEED CLASS     until FOLDER.stop exists; prints counts as JSON
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

from megablend.arrays import Int64s
from megablend.mirror.disk.folder import MirrorFolder
from megablend.mirror.disk.mirrored_file import MirroredFile
from megablend.mirror.disk.page_store import PageStore
from megablend.storage.base import Bytes
from tests.mirror.disk.mirrors import key_of, pages_at, put, read, truth

KEYS = [key_of(8 << 20, str(i)) for i in range(3)] + [
    key_of((4 << 20) + 777),
    key_of(20_000, "small"),
]
BLOCK = 256 << 10


class SlowFile(MirroredFile):
    """Leaves the owner time to evict between the look at the map and the read."""

    pauses = random.Random(0)

    def fill(self, offsets: Int64s, sizes: Int64s, begins: Int64s, out: Bytes) -> bool:
        if self.pauses.random() < 0.5:
            time.sleep(self.pauses.random() * 0.01)
        return super().fill(offsets, sizes, begins, out)


class UncheckedFile(SlowFile):
    """Without the check of punches."""

    def load_punches(self) -> int:
        return 0


def own(folder: str, seed: int) -> None:
    """Write random pages, of which about a half fits, and drop some, until killed."""
    rng = random.Random(seed)
    place = MirrorFolder.create(folder)
    with place.lock():
        store = PageStore(place, size=14 << 20, reserve=0)
        print("ready", flush=True)
        for step in range(1 << 60):
            key = rng.choice(KEYS)
            offset = rng.randrange(key.size)
            pages = pages_at(
                (offset, min(rng.choice((1, 10_000, BLOCK, 4 * BLOCK)), key.size - offset))
            )
            if rng.random() < 0.05:
                store.drop(key, pages)
            else:
                put(store, key, store.missing(key, pages), rng.choice((None, 1e9 + step)))
            if step % 50 == 0:
                store.evict_to_reserve()
                store.sync()


def read_all(folder: str, seed: int, kind: type[MirroredFile]) -> None:
    """Compare random ranges with the truth."""
    rng = random.Random(seed)
    kind.pauses = rng  # type: ignore[attr-defined]
    place = MirrorFolder.attach(folder)
    files: dict[str, MirroredFile | None] = {}
    counts = Counter[str]()
    while not Path(f"{folder}.stop").exists():
        for _ in range(50):
            key = rng.choice(KEYS)
            file = files.get(key.digest)
            if file is None or not file.is_current or rng.random() < 0.01:
                file = files[key.digest] = kind.open(place, key)
            if file is None:
                continue
            ranges = []
            for _ in range(rng.choice((1, 1, 4))):
                offset = rng.randrange(key.size)
                ranges.append((offset, min(rng.randrange(1, 100_000), key.size - offset)))
            found = read(file, *ranges)
            right = [truth(key)[offset : offset + size] for offset, size in ranges]
            counts["absent" if found is None else "right" if found == right else "wrong"] += 1
    print(json.dumps(counts))


if __name__ == "__main__":
    if sys.argv[1] == "own":
        own(sys.argv[2], int(sys.argv[3]))
    else:
        read_all(
            sys.argv[2],
            int(sys.argv[3]),
            {"SlowFile": SlowFile, "UncheckedFile": UncheckedFile}[sys.argv[4]],
        )
